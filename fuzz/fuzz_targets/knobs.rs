//! `fuzz/run 60 knobs`; see `plugfold_fuzz::knobs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    plugfold_fuzz::knobs::run(data);
});
