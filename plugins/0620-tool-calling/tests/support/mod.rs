//! A server with the repairs.
#![allow(dead_code)] // each test program uses its part
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use plugfold_0620_tool_calling::Fixes;
use plugfold_abi::points::{PromptLinkObject, ReplyLinkObject, RequestLinkObject};
use plugfold_abi::{Knob, KnobValue, Knobs, Maybe, OpError, Slice};
use plugfold_engine::hooks::Hooks;
use plugfold_tests::http::{TestServer, settings};

/// The repairs of these names.
pub fn fixes(names: &[&str], entries: i64, mb: i64) -> Result<Option<Fixes>, OpError> {
    let knob = |key: &str, value| Knob { key: key.into(), value, id: Maybe::RNone };
    let list = KnobValue::List(names.iter().map(|name| (*name).into()).collect());
    let knobs = [
        knob("fixes", list),
        knob("keep_entries", KnobValue::Int(entries)),
        knob("keep_mb", KnobValue::Int(mb)),
    ];
    Fixes::new(&Knobs { all: Slice::from(&knobs[..]) })
}

/// A server with them.
pub fn with(names: &[&str], entries: i64, mb: i64) -> TestServer {
    let fixes = fixes(names, entries, mb).unwrap().unwrap();
    let mut hooks = Hooks::default();
    hooks.add_object("0620", RequestLinkObject::new(fixes.clone())).unwrap();
    hooks.add_object("0620", PromptLinkObject::new(fixes.clone())).unwrap();
    hooks.add_object("0620", ReplyLinkObject::new(fixes)).unwrap();
    TestServer::hooked(settings(), &hooks)
}

/// A server with all repairs.
pub fn all() -> TestServer {
    with(&["history", "reasoning", "choice", "args", "thinkcalls"], 1024, 32)
}

/// An argument in the model's markup.
pub fn pair(key: &str, value: &str) -> String {
    format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>")
}
