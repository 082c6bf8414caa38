//! `fuzz/run 60 chat`; see `plugfold_fuzz::chat`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    plugfold_fuzz::chat::run(data);
});
