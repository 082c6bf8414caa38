//! `plugfold bench roofline`: what the machine, or a GPU, can do at most, and how near the kernels come.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use plugfold::config::Device;
use plugfold::device;
use plugfold_cuda::Machine;
use plugfold_cuda::roofline as gpu;
use plugfold_kernels::cpu::roofline::{RooflineRow, roofline};
use serde_json::{Value, json};

use super::bench::save;
use super::model;

/// How to measure kernels.
#[derive(Args)]
pub struct RooflineArgs {
    /// Whose kernels: the CPU's, or with cuda those of the first GPU.
    #[arg(long, default_value_t, value_enum, value_name = "DEVICE")]
    device: Device,
    /// Threads of the CPU's kernels; one a core without it.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Write all numbers to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl RooflineArgs {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<()> {
        let report = match self.device {
            Device::Cuda if self.threads.is_some() => bail!("--threads is for --device cpu: leave it out"),
            Device::Cuda => on_gpu()?,
            Device::Cpu => on_cpu(self.threads)?,
        };
        self.json.as_deref().map_or(Ok(()), |path| save(path, &report))
    }
}

fn on_cpu(threads: Option<usize>) -> anyhow::Result<Value> {
    model::threads(threads, 1)?;
    println!("{:<34} {:>5} {:>11} {:>9} {:>9}  bound", "kernel", "rows", "time", "GB/s", "GFLOP/s");
    let measured = roofline(|row: &RooflineRow| {
        println!(
            "{:<34} {:>5} {:>8.1} us {:>9.2} {:>9.1}  {:.0}% of {}",
            row.name,
            row.rows,
            row.seconds * 1e6,
            row.bytes / row.seconds / 1e9,
            row.flops / row.seconds / 1e9,
            row.fraction * 100.0,
            row.bound
        );
    });
    let (bandwidth, rate) = (measured.bandwidth / 1e9, measured.rate / 1e9);
    println!("this machine, {} threads: {bandwidth:.2} GB/s read, {rate:.1} GFLOP/s", measured.threads);
    let kernels: Vec<Value> = measured
        .rows
        .iter()
        .map(|row| {
            json!({"name": row.name, "rows": row.rows, "seconds": row.seconds, "bytes": row.bytes, "flops": row.flops,
                   "bandwidth": row.bandwidth, "rate": row.rate, "bound": row.bound,
                   "bound_seconds": row.bound_seconds, "fraction": row.fraction,
                   "repetitions": row.repetitions})
        })
        .collect();
    Ok(json!({"bench": "roofline", "threads": measured.threads, "bandwidth": measured.bandwidth,
              "rate": measured.rate, "kernels": kernels}))
}

fn on_gpu() -> anyhow::Result<Value> {
    let opened = device::gpu(0)?;
    let machine: std::sync::Arc<dyn Machine> = opened.clone();
    println!("{}", machine.name());
    let sizes = gpu::Sizes::published();
    let measured =
        gpu::roofline(&machine, &*opened, &sizes, &gpu::Effort::FULL, &|_| true, |limits, row| match row {
            None => print_limits(limits),
            Some(row) => print_row(row),
        })?;
    let far: Vec<&gpu::Row> =
        measured.rows.iter().filter(|r| r.rows == 1 && r.fraction() < 1.0 / 3.0).collect();
    match far.len() {
        0 => println!("every operation reaches a third of its bound at one row"),
        count => {
            println!("{count} below a third of their bound at one row:");
            for r in far {
                println!("  {} ({:.0}%)", r.name, r.fraction() * 100.0);
            }
        }
    }
    let micro = |seconds: f64| seconds * 1e6;
    let rows: Vec<Value> = measured
        .rows
        .iter()
        .map(|r| {
            let costs: Vec<Value> = r.costs.iter().map(cost).collect();
            json!({"operation": r.op, "name": r.name, "rows": r.rows, "microseconds": micro(r.queued),
                   "recorded_microseconds": micro(r.recorded), "host_microseconds": micro(r.host),
                   "bound": r.bound.0.name(), "bound_microseconds": micro(r.bound.1), "fraction": r.fraction(),
                   "recorded_bound": r.recorded_bound.0.name(),
                   "recorded_bound_microseconds": micro(r.recorded_bound.1),
                   "recorded_fraction": r.recorded_fraction(), "memory_fraction": r.memory_fraction(),
                   "costs": costs})
        })
        .collect();
    let l = measured.limits;
    Ok(json!({"bench": "roofline", "device": machine.name(),
              "limits": {"bandwidth": l.bandwidth, "multiply_adds": l.rate, "decoding": l.decoding,
                         "launch": l.launch, "recorded_launch": l.recorded_launch, "step": l.step,
                         "division": l.division, "fetch": l.fetch, "far": l.far},
              "operations": rows}))
}

fn cost(c: &gpu::Cost) -> Value {
    json!({"bytes": c.bytes, "multiply_adds": c.fmas, "decoded": c.decoded, "launches": c.launches, "steps": c.steps,
           "divisions": c.divisions, "fetches": c.fetches, "far": c.far})
}

fn print_limits(l: &gpu::Limits) {
    println!(
        "memory {:.2} TB/s read; {:.1}e12 multiply-adds/s; {:.2}e12 weights of EXL3 at 4 bits decoded/s",
        l.bandwidth / 1e12,
        l.rate / 1e12,
        l.decoding / 1e12
    );
    println!(
        "a launch {:.2} us, recorded {:.2} us; one after the other: multiply-add {:.2} ns, division {:.1} ns, fetch {:.0} ns, \
         from memory {:.0} ns",
        l.launch * 1e6,
        l.recorded_launch * 1e6,
        l.step * 1e9,
        l.division * 1e9,
        l.fetch * 1e9,
        l.far * 1e9
    );
    println!(
        "{:<42} {:>9} {:>9} {:>7} {:>9} {:>9} {:>9} {:>9}  bound",
        "operation", "us", "graph us", "host us", "of bound", "in graph", "of memory", "bound us"
    );
}

fn print_row(r: &gpu::Row) {
    println!(
        "{:<42} {:>9.1} {:>9.1} {:>7.1} {:>8.0}% {:>8.0}% {:>8.0}% {:>9.2}  {}",
        r.name,
        r.queued * 1e6,
        r.recorded * 1e6,
        r.host * 1e6,
        r.fraction() * 100.0,
        r.recorded_fraction() * 100.0,
        r.memory_fraction() * 100.0,
        r.bound.1 * 1e6,
        r.bound.0.name()
    );
}
