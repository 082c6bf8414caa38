//! The token ends a reply, by its text and mark in the checkpoint's tokenizer.
#![allow(clippy::unwrap_used)]

use plugfold::text::testing::{text_model, tokenizer_json};
use plugfold::text::{TextModel, Tokenizer};
use plugfold_0680_assistant_ends::Ends;
use plugfold_abi::points::PromptLinkObject;
use plugfold_abi::{Knob, KnobValue, Knobs, Maybe, Slice};
use plugfold_engine::hooks::Hooks;
use plugfold_tests::http::{TestServer, say, settings};
use serde_json::{Value, json};

fn link(value: KnobValue) -> Option<Ends> {
    let knobs = [Knob { key: "enabled".into(), value, id: Maybe::RNone }];
    Ends::new(&Knobs { all: Slice::from(&knobs[..]) }).unwrap()
}

fn hooks() -> Hooks {
    let mut hooks = Hooks::default();
    hooks.add_object("0680", PromptLinkObject::new(link(KnobValue::Bool(true)).unwrap())).unwrap();
    hooks
}

/// A server whose tokenizer has the token as its fields say; `None`: it has none of that text.
fn server(fields: Option<Value>, hooks: &Hooks) -> TestServer {
    let mut json = tokenizer_json();
    let tokens = json["added_tokens"].as_array_mut().unwrap();
    let token = tokens.iter_mut().find(|token| token["content"] == "<|assistant|>").unwrap();
    match fields {
        Some(Value::Object(fields)) => token.as_object_mut().unwrap().extend(fields),
        _ => token["content"] = json!("<|helper|>"),
    }
    let whole = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
    let template = text_model("x{{ messages[0].content }}").unwrap().template;
    TestServer::with_hooks_and_text(settings(), hooks, TextModel::new(whole, template, &[260]))
}

/// The reply and the number of its tokens.
fn reply(server: &TestServer) -> (String, u64, Value) {
    server.scripts.set("please", say("one<|assistant|>two<|endoftext|>"));
    let reply = server.chat("please", json!({"chat_template_kwargs": {"enable_thinking": false}})).json();
    let choice = &reply["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap().to_owned();
    (text, reply["usage"]["completion_tokens"].as_u64().unwrap(), choice["finish_reason"].clone())
}

#[test]
fn a_reply_ends_at_the_token_where_it_is_a_special_one() {
    let whole = ("onetwo".to_owned(), 8, json!("stop"));
    let cut = ("one".to_owned(), 4, json!("stop"));
    assert_eq!(reply(&server(Some(json!({})), &hooks())), cut);
    assert_eq!(reply(&server(Some(json!({})), &Hooks::default())), whole, "without the plugin");
    let plain = reply(&server(Some(json!({"special": false})), &hooks()));
    assert_eq!((plain.0.as_str(), plain.1), ("one<|assistant|>two", 8), "not special: text as any other");
    let absent = reply(&server(None, &hooks()));
    assert_eq!(absent.1, 8, "another token in its place ends nothing");
}

#[test]
fn replies_without_the_token_are_the_same() {
    let (with, bare) = (TestServer::hooked(settings(), &hooks()), TestServer::start());
    let ask = |server: &TestServer| {
        let reply = server.chat("an ordinary question", json!({})).json();
        (reply["choices"].clone(), reply["usage"].clone())
    };
    assert_eq!(ask(&with), ask(&bare));
    let stops = |server: &TestServer| server.requests()[0].stop_ids.clone();
    let token = plugfold::text::testing::tokenizer().control_id("<|assistant|>").unwrap();
    assert!(stops(&with).contains(&token) && !stops(&bare).contains(&token));
    assert!(stops(&bare).iter().all(|id| stops(&with).contains(id)));
}

#[test]
fn the_knob_turns_it_off() {
    assert!(link(KnobValue::Bool(false)).is_none());
    assert!(link(KnobValue::text("empty")).is_some() && link(KnobValue::text("")).is_some());
}
