use plugfold_abi::points::{DocumentObject, ReplyLink};
use plugfold_abi::{Maybe, OpError};
use plugfold_engine::hooks::Hooks;
use serde_json::json;

use super::*;
use crate::chains::Chains;
use crate::reply::ChatParser;
use crate::reply::stop::StopStrings;
use crate::reply::tools::ToolSpec;

/// Links made of functions.
#[derive(Default)]
struct Made {
    repair: Option<fn(&mut Reply)>,
    parse: Option<fn(&mut Reply)>,
    finish: Option<fn(&mut Reply)>,
}

impl ReplyLink for Made {
    fn repair(&self, _: &DocumentObject, reply: &mut Reply) -> Result<(), OpError> {
        self.repair.map_or(Ok(()), |f| {
            f(reply);
            Ok(())
        })
    }
    fn parse(&self, _: &DocumentObject, reply: &mut Reply) -> Result<(), OpError> {
        self.parse.map_or(Ok(()), |f| {
            f(reply);
            Ok(())
        })
    }
    fn finish(&self, _: &DocumentObject, reply: &mut Reply) -> Result<(), OpError> {
        self.finish.map_or(Ok(()), |f| {
            f(reply);
            Ok(())
        })
    }
}

/// Runs a reply of a model through a link; `sent` of its bytes went out before it was complete.
fn run(link: Made, streamed: bool, sent: usize, raw: &str, ended: &str) -> Result<Outcome, HookError> {
    let mut hooks = Hooks::default();
    hooks.add_object("made", ReplyLinkObject::new(link)).unwrap();
    let tools = || vec![ToolSpec { name: "look".into(), parameters: json!({}) }];
    let reader = move |patient: bool| {
        let parser = ChatParser::new(true, tools());
        let parser = if patient { parser.patient() } else { parser };
        ReplyReader::new(Box::new(parser), StopStrings::default())
    };
    let mut reading = reader(true);
    let (mut out, mut rest) = (Vec::new(), Vec::new());
    reading.push(&raw.as_bytes()[..sent], &mut out);
    reading.push(&raw.as_bytes()[sent..], &mut rest);
    reading.finish(&mut rest);
    if !streamed {
        rest = [std::mem::take(&mut out), rest].concat();
    }
    let links = ReplyLinks {
        links: Chains::new(&hooks).replies().unwrap(),
        body: Arc::default(),
        streamed,
        thinking: true,
        reader: Box::new(move || Ok(reader(false))),
    };
    links.finish(&out, rest, End { raw: raw.as_bytes(), ended, last: Some(7) })
}

/// Pieces without their random ids.
fn shown(pieces: &[Piece]) -> Vec<String> {
    let one = |piece: &Piece| match piece {
        Piece::Content(text) => format!("text {text}"),
        Piece::Reasoning(text) => format!("reasoning {text}"),
        Piece::Call(call) => {
            assert_eq!((&call.id[..5], call.id.len()), ("call_", 29));
            format!("call {} {}", call.name, call.arguments)
        }
    };
    pieces.iter().map(one).collect()
}

const CALL: &str = "<tool_call>look</tool_call>";

#[test]
fn links_that_change_nothing_keep_the_order() {
    let raw = format!("why</think>a{CALL}b");
    let outcome = run(Made::default(), false, 0, &raw, "token").unwrap();
    assert_eq!(shown(&outcome.pieces), ["reasoning why", "text a", "call look {}", "text b"]);
    assert_eq!((outcome.reason, outcome.fields.len()), ("tool_calls", 0));
    let outcome = run(Made::default(), true, 12, &raw, "token").unwrap();
    assert_eq!(shown(&outcome.pieces), ["call look {}", "text b"], "the rest of a stream");
    assert_eq!(run(Made::default(), false, 0, "why</think>a", "length").unwrap().reason, "length");
}

#[test]
fn a_mended_text_is_read_again() {
    let close = || Made {
        repair: Some(|reply| {
            assert_eq!((reply.ended.as_str(), reply.last, reply.thinking), ("token", Maybe::RSome(7), true));
            reply.raw.push_str("</tool_call>");
        }),
        ..Made::default()
    };
    for (streamed, sent) in [(false, 0), (true, 0), (true, 12), (true, 17)] {
        let outcome = run(close(), streamed, sent, "why</think>a<tool_call>look", "token").unwrap();
        let all = ["reasoning why", "text a", "call look {}"];
        let left = if sent > 0 { &all[2..] } else { &all[..] };
        assert_eq!(shown(&outcome.pieces), left, "{streamed} {sent}");
        assert_eq!(outcome.reason, "tool_calls");
    }
}

#[test]
fn a_stream_takes_nothing_back() {
    let calls = || Made {
        parse: Some(|reply| {
            reply.reasoning = "less".into();
            reply.text.push_str(" more");
            let (id, name, arguments) = ("".into(), "look".into(), "{\"at\":1}".into());
            reply.calls.push(Told { id, name, arguments });
        }),
        ..Made::default()
    };
    let raw = "why</think>a";
    let whole = run(calls(), false, 0, raw, "token").unwrap();
    assert_eq!(shown(&whole.pieces), ["reasoning less", "text a more", "call look {\"at\":1}"]);
    let stream = run(calls(), true, raw.len(), raw, "token").unwrap();
    assert_eq!(shown(&stream.pieces), ["text  more", "call look {\"at\":1}"]);
}

#[test]
fn the_last_word_and_fields() {
    let finish = Made {
        finish: Some(|reply| {
            assert_eq!(reply.finish.as_str(), "stop");
            reply.finish = "length".into();
            reply.fields = "{\"x\":[1]}".into();
        }),
        ..Made::default()
    };
    let outcome = run(finish, false, 0, "why</think>a", "token").unwrap();
    assert_eq!((outcome.reason, Value::Object(outcome.fields)), ("length", json!({"x": [1]})));
}

#[test]
fn what_is_no_reply_names_the_plugin() {
    fn call(reply: &mut Reply, name: &str, arguments: &str) {
        reply.calls.push(Told { id: "i".into(), name: name.into(), arguments: arguments.into() });
    }
    let parse = |f: fn(&mut Reply)| Made { parse: Some(f), ..Made::default() };
    let finish = |f: fn(&mut Reply)| Made { finish: Some(f), ..Made::default() };
    for (link, told) in [
        (parse(|r| call(r, "look", "[1]")), "no JSON object"),
        (parse(|r| call(r, "look", "{")), "no JSON object"),
        (parse(|r| call(r, "", "{}")), "a call of \"\""),
        (parse(|r| (0..=CALLS).for_each(|_| call(r, "look", "{}"))), "4097 calls"),
        (parse(|_| panic!("planted")), "panicked in reply.parse: planted"),
        (finish(|r| r.fields = "[]".into()), "fields that are no JSON object"),
        (finish(|r| r.fields = " ".repeat(FIELD_BYTES + 1).into()), "65537 bytes of fields"),
        (finish(|r| r.finish = "why not".into()), "the reason \"why not\""),
        (finish(|r| r.finish = "tool_calls".into()), "the reason \"tool_calls\""),
    ] {
        let error = run(link, false, 0, "why</think>a", "token").unwrap_err();
        assert!(error.owner == "made" && error.to_string().contains(told), "{error}");
    }
}
