//! The plugin in a server: the same prompts, each rendered and encoded once.
#![allow(clippy::unwrap_used)]

use plugfold_0210_prompt_tokens::Tokens;
use plugfold_abi::points::PromptLinkObject;
use plugfold_abi::{Knob, KnobValue, Knobs, Maybe, Slice};
use plugfold_engine::hooks::Hooks;
use plugfold_tests::host::Alone;
use plugfold_tests::http::{TestServer, settings};
use serde_json::{Value, json};

fn server(host: &Alone) -> TestServer {
    let knob = |key: &str, value| Knob { key: key.into(), value, id: Maybe::RNone };
    let knobs = [knob("mode", KnobValue::text("1")), knob("entries", KnobValue::Int(8))];
    let link = Tokens::new(&Knobs { all: Slice::from(&knobs[..]) }, Some(host.object())).unwrap().unwrap();
    let mut hooks = Hooks::default();
    hooks.add_object("0210", PromptLinkObject::new(link)).unwrap();
    TestServer::hooked(settings(), &hooks)
}

#[test]
fn a_conversation_has_the_prompts_that_it_has_without_and_encodes_each_once() {
    let host = Alone::default();
    let (with, bare) = (server(&host), TestServer::start());
    let mut messages: Vec<Value> = vec![json!({"role": "system", "content": "be brief"})];
    for (turn, text) in ["hello", "and <|user|> then?", "客 <|assistant|>", "and then?"].iter().enumerate() {
        messages.push(json!({"role": "user", "content": text}));
        let body = json!({"messages": messages});
        for server in [&with, &bare] {
            let reply = server.post("/v1/chat/completions", &body).json();
            assert_eq!(reply["choices"][0]["message"]["content"], "Hello, world!");
        }
        assert_eq!(with.prompts(), bare.prompts(), "turn {turn}");
        let encoded = host.counted("full_encodes") + host.counted("hits");
        assert_eq!(encoded, (turn + 1) as f64, "one encoding a request");
        messages.push(json!({"role": "assistant", "content": "Hello, world!"}));
    }
    assert!(host.counted("tokens_reused") > 0.0);
    let count = |server: &TestServer| {
        server.post("/tokenize", &json!({"messages": messages})).json()["tokens"].clone()
    };
    assert_eq!(count(&with), count(&bare));
    let raw = json!({"prompt": "<|user|>raw<|assistant|>"});
    for server in [&with, &bare] {
        assert_eq!(server.post("/v1/completions", &raw).status, 200);
    }
    assert_eq!(with.prompts(), bare.prompts());
}
