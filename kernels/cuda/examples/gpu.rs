//! Checks the kernels on a GPU: what `tests/gpu/run.sh` runs, beside `plugfold bench roofline --device cuda`, which times them.
//!
//! `gpu compile ARCH FOLDER` fills a cache of compiled kernels (needs NVRTC, no GPU); `gpu facts` says what the device is;
//! `gpu list` names the cases; `gpu case NAME` compares one with the CPU's reference, bit by bit, and rows alone with rows in
//! company; `gpu encode` compares and times the encoder of EXL3; `gpu times WORD..` times operations whose names have one of the words, as
//! `plugfold bench roofline --device cuda` does all of them.
//! Each prints one line of JSON a result.

#[path = "../tests/cases/mod.rs"]
mod cases;
#[path = "../tests/timing/encoder.rs"]
mod encoder;

use std::process::ExitCode;
use std::sync::Arc;

use cases::Kernels;
use plugfold_cuda::cache::{Cache, Origin};
use plugfold_cuda::roofline::{Effort, Sizes, roofline};
use plugfold_cuda::{CudaError, Gpu, Machine, source};

fn open() -> Result<Arc<Gpu>, CudaError> {
    let told = |source: &str, origin: &Origin| {
        if *origin != Origin::Disk {
            eprintln!("{source}.cu: {origin:?}");
        }
    };
    Gpu::open(0, &Cache::of_user()?, told).map(Arc::new)
}

fn run(args: &[&str]) -> Result<bool, String> {
    let said = |e: CudaError| e.to_string();
    match args {
        ["compile", arch, folder] => {
            let cache = Cache::at(*folder);
            for source in source::SOURCES {
                let (code, origin) = cache.code(source, arch).map_err(said)?;
                println!("{}.cu for {arch}: {} bytes, {origin:?}", source.name, code.len());
            }
            Ok(true)
        }
        ["facts"] => {
            let gpu = open().map_err(said)?;
            let facts = gpu.facts();
            println!(
                "{{\"device\": \"{}\", \"capability\": \"{}.{}\", \"multiprocessors\": {}, \"memory\": {}, \"free\": {}}}",
                facts.name,
                facts.capability.0,
                facts.capability.1,
                facts.multiprocessors,
                facts.memory,
                gpu.free_bytes().map_err(said)?
            );
            Ok(true)
        }
        ["list"] => {
            for case in cases::all() {
                println!("{}", case.name);
            }
            Ok(true)
        }
        ["case", name] => {
            let kernels = Kernels::new(open().map_err(said)?);
            let case = cases::all().into_iter().find(|c| c.name == *name).ok_or("no such case")?;
            let mut good = true;
            for (i, setup) in (case.setups)().iter().enumerate() {
                let outcome = kernels.compare(setup).and_then(|_| kernels.compare_alone(setup));
                let outcome = outcome.err().unwrap_or_else(|| "equal".into());
                good &= outcome == "equal";
                println!(
                    "{{\"case\": \"{name}\", \"call\": {i}, \"dims\": {:?}, \"outcome\": {outcome:?}}}",
                    setup.dims
                );
            }
            Ok(good)
        }
        ["times", words @ ..] => {
            let gpu = open().map_err(said)?;
            let machine: Arc<dyn Machine> = gpu.clone();
            let wanted = |name: &str| words.iter().any(|word| name.contains(word));
            roofline(&machine, &*gpu, &Sizes::published(), &Effort::FULL, &wanted, |_, row| {
                let Some(r) = row else { return };
                println!(
                    "{{\"operation\": \"{}\", \"us\": {:.2}, \"recorded_us\": {:.2}, \"bound_us\": {:.2}, \"reached\": {:.3}}}",
                    r.name,
                    r.queued * 1e6,
                    r.recorded * 1e6,
                    r.bound.1 * 1e6,
                    r.fraction()
                );
            })
            .map_err(|e| e.to_string())?;
            Ok(true)
        }
        ["encode"] => encoder::run(&open().map_err(said)?),
        _ => Err("gpu compile ARCH FOLDER | facts | list | case NAME | times WORD.. | encode".into()),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}
