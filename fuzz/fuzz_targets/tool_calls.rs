//! `fuzz/run 60 tool_calls`; see `plugfold_fuzz::tool_calls`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    plugfold_fuzz::tool_calls::run(data);
});
