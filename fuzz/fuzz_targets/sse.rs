//! `fuzz/run 60 sse`; see `plugfold_fuzz::sse`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    plugfold_fuzz::sse::run(data);
});
