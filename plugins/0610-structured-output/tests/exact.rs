//! The gate of exactness: under a grammar, drafted replies are the serial ones, those in company are those alone, resumed ones
//! are the fresh ones; and a request without a grammar says with the plugin what it says without, beside held ones too.
//!
//! `plugfold exact` does not turn the plugin off, since its masks are an arithmetic of their own; this is its trial. The yard is
//! always a server of its own with one slot, no drafts and no thread for masks, where the request is the first.
#![allow(clippy::unwrap_used)]

#[path = "support/live.rs"]
mod server;
mod support;

use plugfold_0610_structured_output::Settings;
use serde_json::{Value, json};
use server::{How, Live};

fn threads(threads: usize) -> Settings {
    Settings { threads, ..support::patient() }
}

fn serial(grammar: Option<Settings>) -> Live {
    Live::start(&How { slots: 1, drafts: false, grammar, ..How::default() })
}

/// A request, and what it was said, token by token.
struct Said {
    body: Value,
    ids: Value,
    cached: u64,
    drafted: u64,
    content: Value,
}

fn ask(server: &Live, body: &Value) -> Said {
    let reply = server.post("/v1/chat/completions", body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    let reply = reply.json();
    let block = &reply["tensorfold"];
    assert!(block["token_ids"].is_array(), "{reply}");
    assert_eq!(block["grammar"].is_object(), body.get("guided_json").or(body.get("guided_regex")).is_some());
    Said {
        body: body.clone(),
        ids: block["token_ids"].clone(),
        cached: reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default(),
        drafted: block["drafted"].as_u64().unwrap_or_default(),
        content: reply["choices"][0]["message"]["content"].clone(),
    }
}

fn body(messages: &Value, fields: &[&Value]) -> Value {
    let mut body =
        json!({"messages": messages, "max_tokens": 48, "return_token_ids": true, "reasoning_effort": "none"});
    for fields in fields {
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    }
    body
}

/// A conversation of so many turns, long enough that the next turn finds a prompt to resume.
fn turns(count: usize) -> Value {
    let mut turns = vec![
        json!({"role": "user", "content": "Describe Ada, who is 36 and likes maths, as JSON with a name and an age, please."}),
    ];
    for _ in 1..count {
        turns.push(json!({"role": "assistant", "content": "{\"name\": \"Ada\", \"age\": 36}"}));
        turns.push(json!({"role": "user", "content": "And now Bob, who is 7 and likes cats, in the same way as before, please."}));
    }
    json!(turns)
}

/// A schema and a regex, the likeliest tokens and drawn ones, one turn and two; and the same without a grammar.
fn requests() -> (Vec<Value>, Vec<Value>) {
    let person = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"]});
    let forms = [json!({"guided_json": person}), json!({"guided_regex": "[a-z]{3,8}( [a-z]{3,8}){2}"})];
    let draws = [json!({"temperature": 0}), json!({"temperature": 0.9, "seed": 11})];
    let mut held = Vec::new();
    let mut free = Vec::new();
    for count in [1, 2] {
        for draw in &draws {
            held.extend(forms.iter().map(|form| body(&turns(count), &[form, draw])));
            free.push(body(&turns(count), &[draw]));
        }
    }
    (held, free)
}

fn same(what: &str, got: &Said, want: &Said) {
    assert_eq!(got.ids, want.ids, "{what}: {:?}, not {:?}, for {}", got.content, want.content, want.body);
}

#[test]
fn drafted_batched_and_resumed_replies_are_the_serial_ones() {
    let (held, free) = requests();
    let held: Vec<Said> = held.iter().map(|body| ask(&serial(Some(threads(0))), body)).collect();
    // Without the plugin.
    let free: Vec<Said> = free.iter().map(|body| ask(&serial(None), body)).collect();
    // Else it would hold for a plugin that does nothing.
    let regexes = held.iter().filter(|held| held.body["guided_regex"].is_string());
    assert!(
        regexes.clone().count() > 0 && regexes.clone().all(|held| free.iter().all(|f| f.ids != held.ids))
    );

    let server = Live::start(&How { grammar: Some(threads(3)), ..How::default() });
    let mut drafted = 0;
    for want in held.iter().chain(&free) {
        let got = ask(&server, &want.body);
        same("drafted", &got, want);
        drafted += got.drafted;
        same("drafted, again", &ask(&server, &want.body), want);
    }
    assert!(drafted > 0, "nothing was drafted");

    // Four at once: three held and one free, in changing company.
    let company: Vec<&Said> =
        held.iter().zip(free.iter().cycle()).flat_map(|(held, free)| [held, free]).collect();
    std::thread::scope(|scope| {
        for lane in 0..4 {
            let (company, server) = (&company, &server);
            scope.spawn(move || {
                for turn in 0..company.len() {
                    let want = company[(turn * 3 + lane * 5) % company.len()];
                    same("in company", &ask(server, &want.body), want);
                }
            });
        }
    });

    // The second turn goes on from the first one's rows.
    let server = serial(Some(threads(2)));
    for want in held.iter().chain(&free).filter(|want| want.body["messages"] == turns(2)) {
        let mut first = want.body.clone();
        first["messages"] = turns(1);
        ask(&server, &first);
        let got = ask(&server, &want.body);
        assert!(got.cached > 0, "nothing was resumed: {}", want.body);
        same("resumed", &got, want);
    }
}
