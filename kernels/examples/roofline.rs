//! Prints the roofline table: `cargo run --release -p plugfold-kernels --example roofline`.

fn main() {
    let result = plugfold_kernels::cpu::roofline::roofline(|row| {
        println!(
            "{:36} {:3} rows {:10.3} ms {:7.1} GB/s of {:5.1} {:7.1} GFLOP/s of {:6.1} {:7} {:5.1} %",
            row.name,
            row.rows,
            row.seconds * 1e3,
            row.bytes / row.seconds / 1e9,
            row.bandwidth / 1e9,
            row.flops / row.seconds / 1e9,
            row.rate / 1e9,
            row.bound,
            row.fraction * 100.0
        );
    });
    println!(
        "{} threads, {:.1} GB/s, {:.1} GFLOP/s",
        result.threads,
        result.bandwidth / 1e9,
        result.rate / 1e9
    );
}
