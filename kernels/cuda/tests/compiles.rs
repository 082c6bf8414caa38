//! Every source compiles for the architectures that are shipped for, without a GPU, and keeps its numbers in registers.
//!
//! NVRTC is looked for as at run time, and in `target/venv` where .ci/run installs it.

use std::path::{Path, PathBuf};

use object::{Object, ObjectSection};
use plugfold_cuda::cache::{Cache, Origin};
use plugfold_cuda::compile::{NVRTC_VARIABLE, Nvrtc};
use plugfold_cuda::source::{SOURCES, Source};

/// Data-center cards, and GB10.
const ARCHITECTURES: [&str; 2] = ["sm_90a", "sm_121a"];

/// Bytes of local memory that a source's kernels may have: registers that were spilled, and arrays that did not fit.
/// Everything that is not listed has none.
const LOCAL: &[(&str, u32)] = &[];

/// The folder of NVRTC in the virtual environment of the tests.
fn in_venv() -> Option<PathBuf> {
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/venv/lib");
    let python = std::fs::read_dir(lib).ok()?.flatten().map(|e| e.path());
    python.map(|p| p.join("site-packages/nvidia/cu13/lib")).find(|p| p.is_dir())
}

fn nvrtc() -> &'static Nvrtc {
    if std::env::var_os(NVRTC_VARIABLE).is_none()
        && let Some(folder) = in_venv()
    {
        // SAFETY: tests run in processes of their own, and this is the first thing that each does.
        unsafe { std::env::set_var(NVRTC_VARIABLE, folder) };
    }
    Nvrtc::get()
        .expect("NVRTC: pip install -r tests/python/requirements.txt into target/venv, or set PLUGFOLD_NVRTC")
}

/// Bytes of local memory of each kernel: the frames in a cubin's `.nv.info` sections.
fn frames(cubin: &[u8]) -> Vec<u32> {
    const FRAME_SIZE: u8 = 0x11;
    let file = object::File::parse(cubin).expect("a cubin is an ELF file");
    let Some(info) = file.section_by_name(".nv.info") else { panic!("a cubin has .nv.info") };
    let mut rest = info.data().expect("its bytes");
    let mut found = Vec::new();
    // Entries: format, attribute, then 16 bits of value or, in format 4, of size with the value behind.
    while let [format, attribute, low, high, tail @ ..] = rest {
        let size = usize::from(u16::from_le_bytes([*low, *high]));
        let (value, after) = if *format == 4 { tail.split_at(size) } else { (&tail[..0], tail) };
        if *attribute == FRAME_SIZE {
            // Symbol, then bytes.
            found.push(u32::from_le_bytes(value[4..8].try_into().expect("four bytes")));
        }
        rest = after;
    }
    found
}

fn compile(source: &Source) {
    let nvrtc = nvrtc();
    let most = LOCAL.iter().find(|l| l.0 == source.name).map_or(0, |l| l.1);
    for arch in ARCHITECTURES {
        let compiled = nvrtc.compile(source, arch).unwrap_or_else(|e| panic!("{e}"));
        let frames = frames(&compiled.cubin);
        assert!(!frames.is_empty(), "{}.cu for {arch}: no frames in the cubin", source.name);
        let worst = frames.iter().max().copied().unwrap_or(0);
        assert!(
            worst <= most,
            "{}.cu for {arch}: a kernel has {worst} bytes of local memory, {most} are allowed\n{}",
            source.name,
            compiled.log
        );
    }
}

/// A test for each source, so that they are compiled side by side.
macro_rules! sources {
    ($($test:ident: $name:literal;)+) => {
        $(
            #[test]
            fn $test() {
                compile(SOURCES.iter().find(|s| s.name == $name).expect("a source"));
            }
        )+

        #[test]
        fn every_source_is_compiled() {
            let tested = [$($name),+];
            assert!(SOURCES.iter().all(|s| tested.contains(&s.name)));
        }
    };
}

sources! {
    act_compiles: "act";
    attend_compiles: "attend";
    embed_compiles: "embed";
    exl3_compiles: "exl3";
    exl3_tile_compiles: "exl3_tile";
    final_compiles: "final";
    hc_compiles: "hc";
    idx_compiles: "idx";
    kda_compiles: "kda";
    mla_compiles: "mla";
    moe_compiles: "moe";
    norm_compiles: "norm";
    panels_compile: "panels";
    probe_compiles: "probe";
    quantize_compiles: "quantize";
    rows_compile: "rows";
    sample_compiles: "sample";
    vision_compiles: "vision";
}

#[test]
fn a_source_that_does_not_compile_is_named_with_its_line() {
    let bad = Source { name: "bad", shared: &[], text: "\nint x = ;\n" };
    let said = nvrtc().compile(&bad, "sm_90a").err().expect("an error").to_string();
    assert!(said.starts_with("kernel file bad.cu does not compile for sm_90a (NVRTC 1"), "{said}");
    assert!(said.contains("bad.cu(2): error"), "{said}");
}

#[test]
fn local_memory_is_found() {
    // An array whose places are known at run time only cannot lie in registers.
    let text = "extern \"C\" __global__ void f(int* x) { int a[64]; for (int j = 0; j < 64; j++) a[j] = j; \
                for (int j = 0; j < 256; j++) a[x[j] & 63] += a[x[j + 256] & 63]; \
                for (int j = 0; j < 64; j++) x[j] = a[j]; }";
    let spilled = Source { name: "spilled", shared: &[], text };
    let cubin = nvrtc().compile(&spilled, "sm_90a").expect("code").cubin;
    assert!(frames(&cubin).iter().any(|f| *f >= 256), "{:?}", frames(&cubin));
}

#[test]
fn the_cache_gives_what_was_compiled_and_makes_broken_files_anew() {
    nvrtc();
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::at(folder.path());
    let source = SOURCES.iter().find(|s| s.name == "act").expect("a source");
    let (first, origin) = cache.code(source, "sm_90a").expect("code");
    assert_eq!(origin, Origin::Compiled(None));
    assert_eq!(cache.code(source, "sm_90a").expect("code"), (first.clone(), Origin::Disk));
    let file = std::fs::read_dir(folder.path()).expect("files").next().expect("one").expect("one").path();
    let whole = std::fs::read(&file).expect("a file");
    std::fs::write(&file, &whole[..whole.len() / 2]).expect("a file cut short");
    let (again, origin) = cache.code(source, "sm_90a").expect("code");
    assert!(
        matches!(&origin, Origin::Compiled(Some(why)) if why.contains("its digest is another")),
        "{origin:?}"
    );
    assert_eq!(again, first);
    assert_eq!(std::fs::read(&file).expect("a file"), whole, "the file was made anew");
}
