//! What a grammar costs in tokens a second: replies of the demo model held to a JSON schema, and the same replies free.
//!
//! `cargo run --release -p plugfold-0610-structured-output --example cost -- [ROUNDS] [THREADS] [FILE]` measures; the report goes into
//! FILE as JSON. ROUNDS (20) is how often all tasks are gone through, THREADS (4) fill masks. From another folder than the
//! repository's, give the model's in `PLUGFOLD_DEMO_MODEL`.
//!
//! The tasks are those of the held-out set that ask for JSON, and the schema is that of the right answer. Where the model gives by
//! itself what the schema allows, both replies are the same tokens, so that both ran the same forwards on the same experts: all
//! that differs is the grammar. (A schema that makes the model say something else changes what is read from memory, and by more
//! than a mask costs.) Tasks with other replies are left out, and counted.
//!
//! Replies run on one engine, one at a time, without drafts, in fours of free, held, held, free, the next four the other way
//! round, so that a drift of the machine meets both alike.
#![allow(clippy::unwrap_used)] // a measurement that fails is of no use

use std::path::{Path, PathBuf};
use std::sync::Arc;

use plugfold::text::{ChatRequest, TextModel};
use plugfold_0610_structured_output::asked::wanted;
use plugfold_0610_structured_output::seats::{ATTACHMENT, Order};
use plugfold_0610_structured_output::tokens::Tokens;
use plugfold_0610_structured_output::{Settings, Structured};
use plugfold_abi::points::Attachment;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{Request, Sampling, Service as _};
use plugfold_tests::model::{engine, options, reply_with_stats};
use serde_json::{Map, Value, json};

/// What a grammar may take of the tokens a second.
const BOUND: f64 = 0.01;
/// Tokens that a reply must have to be measured.
const SHORTEST: usize = 12;
/// Most tokens of a reply.
const LONGEST: usize = 100;
const TASKS: &str = include_str!("../../../tests/demo-model/eval/json.jsonl");

/// The folder of the model: as it is said, in the current folder, or where this was built.
fn folder() -> PathBuf {
    let inside = "host/assets/demo-model";
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(inside);
    let said = std::env::var_os("PLUGFOLD_DEMO_MODEL").map(PathBuf::from);
    said.unwrap_or_else(|| if Path::new(inside).is_dir() { inside.into() } else { built })
}

/// The schema of a value: its keys in its order, and the kinds of its parts.
fn schema(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let properties: Map<String, Value> = map.iter().map(|(k, v)| (k.clone(), schema(v))).collect();
            let required: Vec<&String> = map.keys().collect();
            json!({"type": "object", "properties": properties, "required": required})
        }
        Value::Array(items) => json!({"type": "array", "items": items.first().map_or(json!({}), schema)}),
        Value::String(_) => json!({"type": "string"}),
        Value::Bool(_) => json!({"type": "boolean"}),
        Value::Number(_) => json!({"type": "number"}),
        Value::Null => json!({"type": "null"}),
    }
}

/// The same request free and held.
struct Task {
    name: String,
    both: [Request; 2],
}

/// Reads the tasks, and compiles their schemas.
fn tasks(feature: &Structured, text: &TextModel, ends: &[u32]) -> Vec<Task> {
    let task = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        let answer: Value = serde_json::from_str(line["turns"][0]["text"].as_str().unwrap()).unwrap();
        let chat = ChatRequest {
            messages: line["request"]["messages"].as_array().unwrap().clone(),
            thinking: false,
            ..ChatRequest::default()
        };
        let ids = text.encode_chat(chat).unwrap().ids;
        let asked = wanted(&json!({"guided_json": schema(&answer)}), true, false);
        let asked = asked.unwrap_or_else(|e| panic!("{}", e.what)).unwrap();
        feature.compiler().unwrap().within(&asked).unwrap_or_else(|e| panic!("{e}"));
        let order = Order { asked, ends: ends.to_vec(), think_end: None, prompt: ids.len() as u32 };
        let bytes = serde_json::to_vec(&order).unwrap();
        let free = Request {
            ids,
            sampling: Sampling::GREEDY,
            max_tokens: LONGEST,
            stop_ids: ends.to_vec(),
            draft: false,
            ..Request::default()
        };
        let blobs = vec![Attachment { name: ATTACHMENT.into(), bytes: bytes.into() }];
        let held = Request { blobs, ..free.clone() };
        Task { name: line["id"].as_str().unwrap().to_owned(), both: [free, held] }
    };
    TASKS.lines().map(task).collect()
}

/// A reply, and the seconds that each of its tokens took after the first.
fn run(engine: &Engine, request: &Request) -> (Vec<u32>, f64) {
    let handle = engine.submit(request.clone()).unwrap();
    let (said, _, stats) = reply_with_stats(&handle).unwrap_or_else(|e| panic!("{e}"));
    let steps = said.len().saturating_sub(1).max(1);
    (said, stats.decode_s / steps as f64)
}

/// The median, and the bounds between which medians of so many values lie in 95 of 100 cases, by order alone.
fn median(values: &[f64]) -> (f64, f64, f64) {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let n = values.len();
    let skip = (n as f64 / 2.0 - 0.98 * (n as f64).sqrt()).floor().max(0.0) as usize;
    (f64::midpoint(values[(n - 1) / 2], values[n / 2]), values[skip], values[n - 1 - skip])
}

fn main() {
    let argument = |n: usize| std::env::args().nth(n);
    let number = |n: usize, or: usize| argument(n).map_or(or, |text| text.parse().unwrap());
    let (rounds, threads) = (number(1, 20), number(2, 4));
    let folder = folder();
    let feature = Structured::new(Settings { threads, ..Settings::default() }, None);
    feature.serve(Ok(Tokens::of_folder(&folder).unwrap()));
    let mut hooks = Hooks::default();
    for offer in feature.offers() {
        hooks.add("0610", &[], offer).unwrap_or_else(|e| panic!("{e}"));
    }
    let core = |_| CoreOptions { hooks: Arc::new(hooks.clone()), ..CoreOptions::default() };
    let engine = engine(&options(&folder, 1, 64), 1, core);
    let ends = engine.info().eos_ids.clone();
    let all = tasks(&feature, &TextModel::load(&folder, &ends).unwrap(), &ends);
    let asked = all.len();
    let same = |task: &Task| {
        let [free, held] = task.both.each_ref().map(|request| run(&engine, request).0);
        free == held && (SHORTEST..LONGEST).contains(&free.len())
    };
    let tasks: Vec<Task> = all.into_iter().filter(same).collect();
    assert!(!tasks.is_empty(), "no task has the same reply with its schema and without");
    // Seconds a token: free and held of each four.
    let mut fours = Vec::new();
    for round in 0..rounds {
        for (at, task) in tasks.iter().enumerate() {
            let turned = usize::from((round + at) % 2 == 1);
            // The prompt is in its slot after this one, so all four resume it alike.
            let (want, _) = run(&engine, &task.both[0]);
            let mut sums = [0.0; 2];
            for place in [0, 1, 1, 0] {
                let held = place ^ turned;
                let (said, seconds) = run(&engine, &task.both[held]);
                assert_eq!(said, want, "{}: the reply changes", task.name);
                sums[held] += seconds / 2.0;
            }
            fours.push(sums);
        }
    }
    let costs: Vec<f64> = fours.iter().map(|[free, held]| 1.0 - free / held).collect();
    let (cost, low, high) = median(&costs);
    let rate = |held: usize| 1.0 / median(&fours.iter().map(|four| four[held]).collect::<Vec<_>>()).0;
    let (without, with) = (rate(0), rate(1));
    let verdict = match () {
        () if high <= BOUND => "within",
        () if low > BOUND => "over",
        () => "too noisy to decide on",
    };
    println!(
        "a JSON schema costs {:.2}% of tokens/s [{:.2} to {:.2}], {verdict} the bound of {:.0}%: {with:.1} with, {without:.1} \
         without; {} fours of {} tasks ({} others give another reply with their schema), masks on {threads} threads",
        cost * 100.0,
        low * 100.0,
        high * 100.0,
        BOUND * 100.0,
        fours.len(),
        tasks.len(),
        asked - tasks.len(),
    );
    if let Some(file) = argument(3) {
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let report = json!({
            "what": "share of decode tokens/s that a JSON schema costs: one request of the demo model, no drafts, same tokens",
            "cost": {"median": cost, "bounds_95": [low, high], "bound": BOUND, "verdict": verdict},
            "tokens_per_s": {"without": without, "with": with},
            "mask_threads": threads, "kernel_threads": std::env::var("RAYON_NUM_THREADS").ok(),
            "cores": std::thread::available_parallelism().map_or(1, usize::from), "load": load.trim(),
            "build": if cfg!(debug_assertions) { "debug" } else { "release" },
            "rounds": rounds, "tasks": tasks.len(), "left_out": asked - tasks.len(), "seconds_a_token": fours,
        });
        std::fs::write(file, format!("{report}\n")).unwrap();
    }
}
