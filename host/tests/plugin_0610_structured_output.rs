//! Plugin 0610 as users load it: beside drafters, shared rounds and kept conversations, on one rank and two.
#![allow(clippy::unwrap_used)]

mod plugins;

use plugins::{Place, Served};
use serde_json::{Value, json};

const PLUGINS: [&str; 7] = [
    "base-mtp",
    "base-auto",
    "0020-suffix-drafter",
    "0110-session-cache",
    "0120-batch-v2",
    "0610-structured-output",
    "0620-tool-calling",
];
const SMALL: [&str; 12] = [
    "--set",
    "0110.gib=0.25",
    "--set",
    "0110.reserve_gib=0.5",
    "--set",
    "0120.reserve_gib=0.5",
    "--set",
    "0120.admit_gib=0.25",
    "--set",
    "0610.compile_s=60",
    "--slots",
    "4",
];

fn serve(place: &Place, more: &[&str]) -> Served {
    let all: Vec<&str> = SMALL.iter().chain(more).copied().collect();
    place.serve(&PLUGINS, "", &all)
}

fn person() -> Value {
    json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"]})
}

fn ask(served: &Served, messages: &Value, more: &Value) -> Value {
    let mut body =
        json!({"messages": messages, "max_tokens": 60, "return_token_ids": true, "reasoning_effort": "none"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (status, reply) = served.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{more}: {reply}");
    reply
}

fn turns(count: usize) -> Value {
    let mut turns = vec![
        json!({"role": "user", "content": "Describe Ada, who is 36, as JSON with a name and an age, please."}),
    ];
    for _ in 1..count {
        turns.push(json!({"role": "assistant", "content": "{\"name\": \"Ada\", \"age\": 36}"}));
        turns.push(json!({"role": "user", "content": "And now Bob, who is 7, in the same way as before, with both of them."}));
    }
    json!(turns)
}

#[test]
fn replies_keep_to_their_form_on_ranks_and_in_resumed_conversations() {
    let format =
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": person()}}});
    let sampled = json!({"guided_regex": "[a-z]{3,8}( [a-z]{3,8}){2}", "temperature": 0.8, "seed": 3});
    let place = Place::new();
    let mut said: Vec<Vec<Value>> = Vec::new();
    for ranks in ["1", "2"] {
        let served = serve(&place, &["--set", "0610.enabled=true", "--ranks", ranks]);
        let mut all = Vec::new();
        let mut cached = 0;
        for fields in [&format, &sampled] {
            for count in [1, 2, 3] {
                let reply = ask(&served, &turns(count), fields);
                let content = reply["choices"][0]["message"]["content"].as_str().unwrap();
                if fields == &format && reply["choices"][0]["finish_reason"] == "stop" {
                    let value: Value =
                        serde_json::from_str(content).unwrap_or_else(|e| panic!("{e}: {content}"));
                    assert!(value["name"].is_string() && value["age"].is_u64(), "{content}");
                }
                assert!(reply["tensorfold"]["grammar"]["rows"].as_u64().unwrap() > 0, "{reply}");
                cached +=
                    reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
                // A prompt that is there already is resumed, and says the same.
                let again = ask(&served, &turns(count), fields);
                assert_eq!(again["tensorfold"]["token_ids"], reply["tensorfold"]["token_ids"], "{fields}");
                all.push(reply["tensorfold"]["token_ids"].clone());
            }
        }
        assert!(cached > 0, "no conversation was resumed");
        // Both kinds and a free one at once.
        std::thread::scope(|scope| {
            let free = scope.spawn(|| ask(&served, &turns(1), &json!({"temperature": 0})));
            let lanes = [&format, &sampled].map(|fields| scope.spawn(|| ask(&served, &turns(2), fields)));
            for (lane, want) in lanes.into_iter().zip([&all[1], &all[4]]) {
                assert_eq!(&lane.join().unwrap()["tensorfold"]["token_ids"], want);
            }
            assert!(free.join().unwrap()["tensorfold"]["grammar"].is_null());
        });
        let (status, refused) = served.post(
            "/v1/chat/completions",
            &json!({"messages": turns(1), "guided_json": {"type": "array", "uniqueItems": true}}),
        );
        assert!(
            status == 400
                && refused["error"]["message"].as_str().unwrap().contains("/guided_json/uniqueItems"),
            "{refused}"
        );
        assert!(served.end("-TERM").success());
        said.push(all);
    }
    assert_eq!(said[0], said[1], "one rank and two");
}

#[test]
fn off_it_is_not_there_and_tools_can_be_held_strictly_for_all() {
    let place = Place::new();
    let tools = json!([{"type": "function", "function": {"name": "get_weather", "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]);
    let question = json!([{"role": "user", "content": "What is the weather in Oslo?"}]);
    let off = serve(&place, &[]);
    let reply = ask(&off, &turns(1), &json!({"guided_choice": ["x"], "max_tokens": 4}));
    assert_eq!(reply["tensorfold"]["ignored"], json!(["guided_choice"]));
    assert!(off.end("-TERM").success());
    let on = serve(&place, &["--set", "0610.enabled=true", "--set", "0620.fixes=args,grammar"]);
    let reply = ask(&on, &question, &json!({"tools": tools, "temperature": 0}));
    assert!(reply["tensorfold"]["grammar"]["windows"].as_u64().unwrap() > 0, "{reply}");
    let (_, plain) = on.post("/v1/chat/completions", &json!({"messages": question, "max_tokens": 4}));
    assert!(plain["tensorfold"]["grammar"].is_null(), "{plain}");
    assert!(on.end("-TERM").success());
    // It is wanted and not on.
    let profile = place.profile(&PLUGINS);
    let mut command = place.plugfold(&[
        "generate",
        "--profile",
        profile.to_str().unwrap(),
        "--ids",
        "1,2",
        "--max-tokens",
        "2",
    ]);
    let output = command.args(SMALL).args(["--set", "0620.fixes=grammar"]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && told.contains("0610"), "{told}");
}
