//! What a grammar costs: tokens a second of the demo model with one and without, in interleaved pairs of one engine.
//!
//! `cargo run --release -p plugfold-0610-structured-output --example cost -- [PAIRS] [THREADS] [TOKENS]` prints a JSON report. Both
//! halves of a pair have the same prompt, run the same number of tokens without drafts, and go on past the end of a reply, so
//! they run the same forwards. The grammar is a JSON schema of a list of objects, too long to end within the tokens.
#![allow(clippy::unwrap_used)] // a measurement that fails is of no use

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use plugfold_0610_structured_output::asked::wanted;
use plugfold_0610_structured_output::seats::{ATTACHMENT, Order};
use plugfold_0610_structured_output::tokens::Tokens;
use plugfold_0610_structured_output::{Settings, Structured};
use plugfold_abi::points::Attachment;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{Request, Sampling, Service as _};
use plugfold_tests::model::{engine, options, reply_with_stats};
use serde_json::json;

fn median(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
    (at(0.5), at(0.25), at(0.75))
}

fn main() {
    let number = |n: usize, or: usize| std::env::args().nth(n).map_or(or, |text| text.parse().unwrap());
    let (pairs, threads, tokens) = (number(1, 20), number(2, 4), number(3, 200));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../host/assets/demo-model");
    let vocabulary = Tokens::of_folder(&folder).unwrap();
    let feature = Structured::new(Settings { threads, ..Settings::default() }, None);
    feature.serve(Ok(vocabulary.clone()));
    let mut hooks = Hooks::default();
    for offer in feature.offers() {
        hooks.add("0610", &[], offer).unwrap_or_else(|e| panic!("{e}"));
    }
    let core = |_| CoreOptions { hooks: Arc::new(hooks.clone()), ..CoreOptions::default() };
    let engine = engine(&options(&folder, 1, 64), 1, core);
    let schema = json!({"type": "array", "minItems": 50, "maxItems": 50, "items": {"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}, "member": {"type": "boolean"}},
        "required": ["name", "age", "tags", "member"]}});
    let asked = wanted(&json!({"guided_json": schema}), true, false)
        .unwrap_or_else(|e| panic!("{}", e.what))
        .unwrap();
    let began = Instant::now();
    feature.compiler().unwrap().within(&asked).unwrap_or_else(|e| panic!("{e}"));
    let compile_ms = began.elapsed().as_secs_f64() * 1e3;
    let ids: Vec<u32> = (0..64).map(|i| 300 + i * 37 % 3000).collect();
    let order = Order { asked, ends: vec![4064], think_end: None, prompt: ids.len() as u32 };
    let bytes = serde_json::to_vec(&order).unwrap();
    let free =
        Request { ids, sampling: Sampling::GREEDY, max_tokens: tokens, draft: false, ..Request::default() };
    let held =
        Request { blobs: vec![Attachment { name: ATTACHMENT.into(), bytes: bytes.into() }], ..free.clone() };
    let rate = |request: &Request| {
        let handle = engine.submit(request.clone()).unwrap();
        let (said, _, stats) = reply_with_stats(&handle).unwrap_or_else(|e| panic!("{e}"));
        (said.len() - 1) as f64 / stats.decode_s
    };
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for pair in 0..=pairs {
        // Every other pair backwards; the first is not counted.
        let (a, b) = if pair % 2 == 0 {
            let a = rate(&free);
            (a, rate(&held))
        } else {
            let b = rate(&held);
            (rate(&free), b)
        };
        if pair > 0 {
            without.push(a);
            with.push(b);
        }
    }
    let gains: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with / without).collect();
    let (gain, low, high) = median(gains);
    let report = json!({
        "what": "decode tokens/s of the demo model with a JSON schema over those without, no drafts, one request",
        "pairs": pairs, "mask_threads": threads, "tokens": tokens, "compile_ms": compile_ms,
        "gain": {"median": gain, "quartiles": [low, high]},
        "tokens_per_s": {"without": median(without.clone()).0, "with": median(with.clone()).0},
        "raw": {"without": without, "with": with},
    });
    println!("{report}");
}
