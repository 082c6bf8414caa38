//! `fuzz/run 60 request`; see `plugfold_fuzz::request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    plugfold_fuzz::request::run(data);
});
