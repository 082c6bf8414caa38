//! `fuzz/run 60 schema`; see `plugfold_fuzz::schema`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    plugfold_fuzz::schema::run(data);
});
