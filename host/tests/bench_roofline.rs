//! `plugfold bench roofline --device cuda` on a machine without a GPU. What it times is tested in `kernels/cuda/tests/roofline.rs`.
#![allow(clippy::unwrap_used)]

use std::process::Command;

fn told(args: &[&str]) -> (bool, String) {
    let program =
        Command::new(env!("CARGO_BIN_EXE_plugfold")).args(["bench", "roofline"]).args(args).output();
    let out = program.unwrap();
    (out.status.success(), String::from_utf8_lossy(&out.stderr).into())
}

#[test]
fn without_a_gpu_the_mend_is_named() {
    if plugfold_cuda::devices().is_ok_and(|count| count > 0) {
        return;
    }
    let (good, text) = told(&["--device", "cuda"]);
    assert!(!good && text.contains("--device cuda"), "{text}");
    assert!(text.contains("choose --device cpu") || text.contains("no CUDA device 0"), "{text}");
}

#[test]
fn threads_are_the_cpus() {
    let (good, text) = told(&["--device", "cuda", "--threads", "2"]);
    assert!(!good && text.contains("--threads is for --device cpu"), "{text}");
}
