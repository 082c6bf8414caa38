//! Requests, prompts, streams and replies pass the chains of plugins, in every dialect; what a link does wrong ends its
//! own request, with the plugin's name, and nothing else.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use plugfold_abi::points::{
    Attachment, Document, DocumentObject, Observer, ObserverObject, PromptLink, PromptLinkObject, Refusal,
    Reply as Told, ReplyLink, ReplyLinkObject, RequestLink, RequestLinkObject, SequenceEvent, StreamLink,
    StreamLinkObject, StreamPiece, Tokenizer, TokenizerObject, interest,
};
use plugfold_abi::{KnobValue, List, Maybe, OpError, Slice, Text, TextBuf};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{Request, Sampling, Service as _};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::http::{Reply, TestServer, chat, say, settings};
use plugfold_tests::model::{engine, options, reply, request as job};
use serde_json::{Value, json};

/// Paths of the dialects.
const DIALECTS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"];

/// A request of one user text in a dialect's words.
fn request(path: &str, text: &str, more: &Value) -> Value {
    let mut body = match path {
        "/v1/completions" => json!({"prompt": text}),
        "/v1/responses" => json!({"input": text}),
        "/v1/messages" => json!({"messages": [{"role": "user", "content": text}], "max_tokens": 64}),
        _ => chat(text, json!({})),
    };
    if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
        body.extend(more.clone());
    }
    body
}

/// What a server answers on all dialects, whole and streamed, must hold.
fn everywhere(server: &TestServer, text: &str, holds: impl Fn(&Reply, &str)) {
    for path in DIALECTS {
        for stream in [false, true] {
            let reply = server.post(path, &request(path, text, &json!({"stream": stream})));
            holds(&reply, &format!("{path}, stream {stream}: {}", reply.text()));
        }
    }
}

fn serves(server: &TestServer) {
    let reply = server.chat("an ordinary question", json!({})).json();
    assert_eq!(reply["choices"][0]["message"]["content"], "Hello, world!");
    server.wait_idle();
}

fn said(body: &DocumentObject, path: &str) -> Result<String, OpError> {
    Ok(body.get(path.into())?.into_option().map(String::from).unwrap_or_default())
}

/// The text that a request asks with, in the words of a chat completion or a completion.
fn asked(body: &DocumentObject) -> Result<String, OpError> {
    Ok(said(body, "/prompt")? + &said(body, "/messages")?)
}

/// One link at every chain, which does what the text of a request asks for by `STEP-DEED`.
struct Obliging;

impl Obliging {
    fn step(body: &DocumentObject, step: &str) -> Result<Option<&'static str>, OpError> {
        let asked = asked(body)?;
        let deed = ["panic", "error", "blame", "garbage", "status"]
            .into_iter()
            .find(|deed| asked.contains(&format!("{step}-{deed}")));
        match deed {
            Some("panic") => panic!("planted in {step}"),
            Some("error") => Err(OpError::new(format!("planted in {step}"))),
            Some("blame") => Err(OpError::invalid(format!("planted in {step}"))),
            deed => Ok(deed),
        }
    }
}

impl RequestLink for Obliging {
    fn rewrite(&self, body: &DocumentObject) -> Result<(), OpError> {
        match Self::step(body, "rewrite")? {
            Some(_) => body.set("/messages".into(), "{not JSON".into()),
            None => Ok(()),
        }
    }
    fn check(&self, body: &DocumentObject, _: Slice<'_, KnobValue>) -> Result<Maybe<Refusal>, OpError> {
        let refusal = |status| Refusal {
            status,
            message: "come back tomorrow".into(),
            code: "not_today".into(),
            param: "messages".into(),
        };
        Ok(match Self::step(body, "check")? {
            Some("status") => Maybe::RSome(refusal(429)),
            Some(_) => Maybe::RSome(refusal(200)),
            None => Maybe::RNone,
        })
    }
    fn prepare(&self, body: &DocumentObject, _: Slice<'_, u32>) -> Result<List<Attachment>, OpError> {
        let attachment = || Attachment { name: "twice".into(), bytes: List::new() };
        Ok(match Self::step(body, "prepare")? {
            Some(_) => List::from(vec![attachment(), attachment()]),
            None => List::new(),
        })
    }
}

impl PromptLink for Obliging {
    fn variables(&self, body: &DocumentObject, variables: &mut TextBuf) -> Result<(), OpError> {
        if Self::step(body, "variables")?.is_some() {
            variables.push_str(",");
        }
        Ok(())
    }
    fn text(&self, body: &DocumentObject, text: &mut TextBuf) -> Result<(), OpError> {
        if Self::step(body, "text")?.is_some() {
            *text = "x".repeat(20 << 20).into();
        }
        Ok(())
    }
    fn ids(&self, body: &DocumentObject, ids: &mut List<u32>) -> Result<(), OpError> {
        if Self::step(body, "ids")?.is_some() {
            ids.push(1 << 30);
        }
        Ok(())
    }
}

impl StreamLink for Obliging {
    fn begin(&self, _: u64, body: &DocumentObject) -> Result<(), OpError> {
        Self::step(body, "begin").map(|_| ())
    }
    fn piece(&self, _: u64, piece: &mut StreamPiece) -> Result<(), OpError> {
        let text = format!("{}{}", piece.reasoning, piece.text);
        assert!(!text.contains('%'), "planted in piece");
        if text.contains('#') {
            piece.hold = u32::MAX;
        }
        Ok(())
    }
}

impl ReplyLink for Obliging {
    fn repair(&self, body: &DocumentObject, _: &mut Told) -> Result<(), OpError> {
        Self::step(body, "repair").map(|_| ())
    }
    fn parse(&self, body: &DocumentObject, reply: &mut Told) -> Result<(), OpError> {
        if Self::step(body, "parse")?.is_some() {
            let (id, name, arguments) = ("".into(), "f".into(), "[".into());
            reply.calls.push(plugfold_abi::points::ToolCall { id, name, arguments });
        }
        Ok(())
    }
    fn finish(&self, body: &DocumentObject, reply: &mut Told) -> Result<(), OpError> {
        if Self::step(body, "finish")?.is_some() {
            reply.fields = "{".into();
        }
        Ok(())
    }
}

fn obliging() -> TestServer {
    let mut hooks = Hooks::default();
    hooks.add_object("obliging", RequestLinkObject::new(Obliging)).unwrap();
    hooks.add_object("obliging", PromptLinkObject::new(Obliging)).unwrap();
    hooks.add_object("obliging", StreamLinkObject::new(Obliging)).unwrap();
    hooks.add_object("obliging", ReplyLinkObject::new(Obliging)).unwrap();
    TestServer::hooked(settings(), &hooks)
}

#[test]
fn what_fails_before_a_reply_is_a_refusal_with_the_plugins_name() {
    let server = obliging();
    for step in ["rewrite", "check", "variables", "text", "ids", "prepare", "begin"] {
        for (deed, status) in [("panic", 500), ("error", 500), ("blame", 400), ("garbage", 500)] {
            if (step, deed) == ("begin", "garbage") {
                continue;
            }
            everywhere(&server, &format!("please {step}-{deed}"), |reply, told| {
                // A raw prompt has no template.
                let chat_only = ["variables", "text"].contains(&step);
                if chat_only && told.starts_with("/v1/completions") {
                    assert_eq!(reply.status, 200, "{step}-{deed} {told}");
                    return;
                }
                assert_eq!(reply.status, status, "{step}-{deed} {told}");
                assert!(told.contains("plugin obliging: "), "{step}-{deed} {told}");
                assert!(deed == "garbage" || told.contains(&format!("planted in {step}")), "{told}");
            });
        }
        serves(&server);
    }
}

#[test]
fn what_fails_in_a_reply_ends_that_reply_alone() {
    let server = obliging();
    for (mark, script) in [("piece-panic", "so</think>far %"), ("piece-garbage", "#</think>")] {
        server.scripts.set(mark, say(&format!("{script} and more")));
    }
    for (mark, status) in [
        ("piece-panic", 500),
        ("piece-garbage", 500),
        ("repair-panic", 500),
        ("repair-blame", 400),
        ("parse-garbage", 500),
        ("parse-error", 500),
        ("finish-garbage", 500),
    ] {
        everywhere(&server, &format!("please {mark}"), |reply, told| {
            let streamed = told.contains("stream true");
            assert_eq!(reply.status, if streamed { 200 } else { status }, "{mark} {told}");
            assert!(told.contains("plugin obliging: "), "{mark} {told}");
            if streamed && told.starts_with("/v1/chat") {
                let events = reply.events();
                assert!(events.last().unwrap()["error"]["message"].is_string(), "{mark} {told}");
            }
        });
        serves(&server);
    }
}

#[test]
fn a_refusal_reaches_the_client_as_it_is() {
    let server = obliging();
    let body = chat("please check-status", json!({"stream": true}));
    let reply = server.post("/v1/chat/completions", &body);
    let error = json!({"message": "come back tomorrow", "type": "invalid_request_error", "param": "messages",
                       "code": "not_today"});
    assert_eq!((reply.status, &reply.json()["error"]), (429, &error));
    let reply = server.post("/v1/responses", &json!({"input": "please check-status"}));
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (429, &json!("input")));
    let reply = server.post("/v1/messages", &request("/v1/messages", "please check-status", &json!({})));
    assert_eq!((reply.status, &reply.json()["error"]["message"]), (429, &json!("come back tomorrow")));
    serves(&server);
}

/// Changes what its fields say.
#[derive(Clone, Default)]
struct Helpful {
    closed: Arc<AtomicBool>,
}

impl RequestLink for Helpful {
    fn rewrite(&self, body: &DocumentObject) -> Result<(), OpError> {
        if body.kind("/limit".into())?.as_str() == "number" {
            body.set("/max_tokens".into(), Text::from(said(body, "/limit")?.as_str()))?;
        }
        Ok(())
    }
    fn prepare(&self, _: &DocumentObject, ids: Slice<'_, u32>) -> Result<List<Attachment>, OpError> {
        let bytes = (ids.len() as u32).to_le_bytes().to_vec();
        Ok(List::from(vec![Attachment { name: "length".into(), bytes: bytes.into() }]))
    }
    fn gate(&self) -> Result<Maybe<Refusal>, OpError> {
        let (message, empty) = ("not now".into(), TextBuf::new());
        let refusal = Refusal { status: 503, message, code: empty.clone(), param: empty };
        Ok(if self.closed.load(Ordering::Acquire) { Maybe::RSome(refusal) } else { Maybe::RNone })
    }
}

impl PromptLink for Helpful {
    fn start(&self, tokenizer: &TokenizerObject) -> Result<List<u32>, OpError> {
        assert!(tokenizer.controls()?.iter().any(|c| c.text == "<|user|>" && c.verbatim));
        assert_eq!(tokenizer.uncut()?.as_str(), "");
        Ok(List::new())
    }
    fn variables(&self, body: &DocumentObject, variables: &mut TextBuf) -> Result<(), OpError> {
        if body.kind("/quiet".into())?.as_str() == "bool" {
            assert_eq!(variables.as_str(), "{}");
            *variables = "{\"enable_thinking\":false}".into();
        }
        Ok(())
    }
    fn text(&self, _: &DocumentObject, text: &mut TextBuf) -> Result<(), OpError> {
        *text = text.replace("colour", "color").into();
        Ok(())
    }
    fn encode(
        &self,
        text: Text<'_>,
        guard: u32,
        with: &TokenizerObject,
    ) -> Result<Maybe<List<u32>>, OpError> {
        let ids = with.encode(text, guard)?;
        Ok(if text.contains("shout") { Maybe::RSome(ids) } else { Maybe::RNone })
    }
    fn ids(&self, body: &DocumentObject, ids: &mut List<u32>) -> Result<(), OpError> {
        if asked(body)?.contains("longer") {
            ids.push(u32::from(b'!'));
        }
        Ok(())
    }
}

#[test]
fn requests_and_prompts_are_changed_on_their_way() {
    let helpful = Helpful::default();
    let mut hooks = Hooks::default();
    hooks.add_object("helpful", RequestLinkObject::new(helpful.clone())).unwrap();
    hooks.add_object("helpful", PromptLinkObject::new(helpful.clone())).unwrap();
    let server = TestServer::hooked(settings(), &hooks);
    let bare = TestServer::start();
    everywhere(&server, "a colour to shout", |reply, told| assert_eq!(reply.status, 200, "{told}"));
    everywhere(&bare, "a color to shout", |reply, told| assert_eq!(reply.status, 200, "{told}"));
    let raw = |path: &str| path == "/v1/completions";
    for (place, (mine, plain)) in server.requests().iter().zip(bare.requests()).enumerate() {
        if !raw(DIALECTS[place / 2]) {
            assert_eq!(mine.ids, plain.ids, "{}", DIALECTS[place / 2]);
        }
        assert_eq!(mine.blobs[0].name.as_str(), "length");
        assert_eq!(mine.blobs[0].bytes[..], (mine.ids.len() as u32).to_le_bytes());
        assert_eq!(plain.blobs, []);
    }
    let last = || server.requests().pop().unwrap();
    server.chat("x", json!({"limit": 3}));
    assert_eq!(last().max_tokens, 3);
    server.chat("x", json!({"quiet": true}));
    let quiet = last().ids;
    bare.chat("x", json!({"chat_template_kwargs": {"enable_thinking": false}}));
    assert_eq!(quiet, bare.prompts().pop().unwrap());
    // What is counted is what would run.
    for text in ["a colour", "longer", "<|user|> shout"] {
        let count = server.post("/tokenize", &chat(text, json!({}))).json()["count"].clone();
        let usage = server.chat(text, json!({})).json()["usage"]["prompt_tokens"].clone();
        assert_eq!(count, usage, "{text}");
    }
    let user = plugfold::text::testing::tokenizer().control_id("<|user|>").unwrap();
    assert_eq!(last().ids.iter().filter(|id| **id == user).count(), 1, "a client's control token stays text");
    let ids: Vec<u32> = b"longer".iter().copied().map(u32::from).collect();
    server.post("/v1/completions", &json!({"prompt": "longer"}));
    assert_eq!(last().ids.len(), plugfold::text::testing::tokenizer().encode("longer").unwrap().len() + 1);
    server.post("/v1/completions", &json!({"prompt": ids}));
    assert_eq!(last().ids, ids);
    helpful.closed.store(true, Ordering::Release);
    everywhere(&server, "anything", |reply, told| {
        assert_eq!(reply.status, 503, "{told}");
        assert!(told.contains("not now"), "{told}");
    });
    assert_eq!(server.post("/tokenize", &chat("x", json!({}))).status, 200, "counting needs no engine");
    helpful.closed.store(false, Ordering::Release);
    serves(&server);
}

/// Whispers, and says at the end how long the reply was.
struct Whisper;

impl StreamLink for Whisper {
    fn piece(&self, _: u64, piece: &mut StreamPiece) -> Result<(), OpError> {
        piece.text = piece.text.to_lowercase().into();
        if let Some(at) = piece.text.find("stop here") {
            piece.text = piece.text[..at].into();
            piece.stop = true;
        } else {
            let held = (1..9).rev().find(|n| piece.text.ends_with(&"stop here"[..*n]));
            piece.hold = held.unwrap_or(0) as u32;
        }
        Ok(())
    }
}

impl ReplyLink for Whisper {
    fn repair(&self, _: &DocumentObject, reply: &mut Told) -> Result<(), OpError> {
        if reply.ended == "token" && reply.raw.ends_with("<tool_call>bash") {
            reply.raw.push_str("</tool_call>");
        }
        Ok(())
    }
    fn finish(&self, _: &DocumentObject, reply: &mut Told) -> Result<(), OpError> {
        reply.fields =
            json!({"whisper": {"bytes": reply.raw.len(), "ended": reply.ended.as_str()}}).to_string().into();
        Ok(())
    }
}

#[test]
fn streams_and_replies_are_changed_on_their_way() {
    let mut hooks = Hooks::default();
    hooks.add_object("whisper", StreamLinkObject::new(Whisper)).unwrap();
    hooks.add_object("whisper", ReplyLinkObject::new(Whisper)).unwrap();
    let server = TestServer::hooked(settings(), &hooks);
    server.scripts.set("shout", say("Why</think>HELLO There, STOP at once<|endoftext|>"));
    server.scripts.set("cut", say("Why</think>HELLO STOP HERE and never more<|endoftext|>"));
    server.scripts.set("open", say("Why</think>Now <tool_call>bash<|endoftext|>"));
    let tools = json!([{"type": "function", "function": {"name": "bash", "parameters": {}}}]);
    for (mark, content, ended, calls) in [
        ("shout", "hello there, stop at once", "token", false),
        ("cut", "hello ", "stop", false),
        ("open", "now ", "token", true),
    ] {
        let whole = server.chat(mark, json!({"tools": tools})).json();
        let choice = &whole["choices"][0];
        assert_eq!(choice["message"]["reasoning"], "Why", "{mark}");
        assert_eq!(choice["message"]["content"], content, "{mark}");
        assert_eq!(choice["finish_reason"], if calls { "tool_calls" } else { "stop" }, "{mark}");
        assert_eq!(choice["message"]["tool_calls"].as_array().map_or(0, Vec::len), usize::from(calls));
        assert_eq!(whole["tensorfold"]["whisper"]["ended"], ended, "{mark}");
        let events = server.chat(mark, json!({"tools": tools, "stream": true})).events();
        let deltas = || events.iter().map(|e| &e["choices"][0]["delta"]);
        let text: String = deltas().filter_map(|d| d["content"].as_str()).collect();
        assert_eq!(text, content, "{mark}");
        let streamed: Vec<&Value> = deltas().filter(|d| d["tool_calls"].is_array()).collect();
        assert_eq!(streamed.len(), usize::from(calls), "{mark}");
        let last = events.last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], choice["finish_reason"], "{mark}");
        assert_eq!(last["tensorfold"]["whisper"], whole["tensorfold"]["whisper"], "{mark}");
    }
    for path in ["/v1/responses", "/v1/messages"] {
        let body = request(path, "shout", &json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}));
        let reply = server.post(path, &body);
        assert!(reply.text().contains("hello there, stop at once"), "{path}: {}", reply.text());
    }
    serves_quietly(&server);
}

fn serves_quietly(server: &TestServer) {
    let reply = server.chat("an ordinary question", json!({})).json();
    assert_eq!(reply["choices"][0]["message"]["content"], "hello, world!");
    server.wait_idle();
}

/// Keeps what sequences begin with.
struct Begun(Seen);

/// Requests with their attachments.
type Seen = Arc<Mutex<Vec<(u64, Vec<Attachment>)>>>;

impl Observer for Begun {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::SEQUENCE)
    }
    fn sequence(&self, _: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        if let SequenceEvent::Begun { request, attachments, .. } = event {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push((*request, attachments.to_vec()));
        }
        Ok(())
    }
}

#[test]
fn attachments_reach_every_rank_with_their_request() {
    let attachment = |bytes: &[u8]| Attachment { name: "own".into(), bytes: bytes.to_vec().into() };
    for ranks in [1, 2] {
        let seen: Vec<Arc<Mutex<Vec<_>>>> = (0..ranks).map(|_| Arc::default()).collect();
        let engine = engine(&options(&tiny_dir(), 2, 16), ranks, |rank| {
            let mut hooks = Hooks::default();
            hooks.add_object("begun", ObserverObject::new(Begun(seen[rank].clone()))).unwrap();
            CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
        });
        for blobs in [vec![attachment(b"one"), attachment(&[0, 255])], vec![]] {
            let asked = Request { blobs, ..job(1, 8, 2, Sampling::GREEDY) };
            reply(&engine.submit(asked).unwrap()).unwrap();
        }
        drop(engine);
        for seen in &seen {
            let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            let blobs: Vec<_> = seen.iter().map(|(_, blobs)| blobs.clone()).collect();
            assert_eq!(blobs, [vec![attachment(b"one"), attachment(&[0, 255])], vec![]], "{ranks} ranks");
            assert_ne!(seen[0].0, seen[1].0);
        }
    }
}
