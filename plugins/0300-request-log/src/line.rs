//! The line of a request.

use blake2::Blake2bMac;
use blake2::digest::consts::U8;
use blake2::digest::{FixedOutput as _, Mac as _};
use plugfold_abi::OpError;
use plugfold_abi::points::Ended;
use serde_json::{Map, Value, json};

use crate::prefixes::Shared;

/// Ids that the head's hash covers.
const HEAD: usize = 4096;

/// 64-bit BLAKE2b over the ids as little-endian 32-bit words, keyed with the salt.
fn hash(ids: &[u32], salt: &[u8]) -> u64 {
    // An empty key is BLAKE2b without one.
    let Ok(mut hash) =
        Blake2bMac::<U8>::new_with_salt_and_personal(Some(salt).filter(|s| !s.is_empty()), &[], &[])
    else {
        return 0;
    };
    for id in ids {
        hash.update(&id.to_le_bytes());
    }
    u64::from_le_bytes(hash.finalize_fixed().into())
}

/// What the front end and the engine say of a request.
pub(crate) fn facts(ended: &Ended<'_>) -> Result<Value, OpError> {
    serde_json::from_str(&ended.facts).map_err(|e| OpError::new(format!("facts of a request: {e}")))
}

/// The beginning of a prompt that is the same for all turns of its conversation: through the first token that opens an
/// assistant's turn, else the first ids.
pub(crate) fn conversation<'i>(ids: &'i [u32], facts: &Value) -> &'i [u32] {
    let told = facts["front"]["conv_len"].as_u64().map(|n| n as usize);
    &ids[..told.unwrap_or(HEAD).min(ids.len())]
}

/// The line, without its end.
pub(crate) fn line(ended: &Ended<'_>, facts: &Value, salt: &[u8], shared: &Shared, now: f64) -> String {
    let (engine, front) = (&facts["engine"], &facts["front"]);
    let number = |v: &Value| v.as_f64().unwrap_or(0.0);
    let (prompt, cached) = (ended.ids.len() as f64, number(&engine["cached_tokens"]));
    let (prefill_s, decode_s, queue_s) =
        (number(&engine["prefill_s"]), number(&engine["decode_s"]), number(&engine["queued_s"]));
    let decoded = ended.reply.len().saturating_sub(1) as f64;
    let rate = |n: f64, s: f64| if s > 0.0 { json!(n / s) } else { Value::Null };
    let rounds = number(&engine["rounds"]);
    let source = match engine["cache_source"].as_str() {
        Some(source) => source.to_owned(),
        None if cached > 0.0 => "slot".into(),
        None => "none".into(),
    };
    let head = ended.ids.len().min(HEAD);
    let hex = |n: u64| json!(format!("{n:016x}"));
    let took = queue_s + prefill_s + decode_s;
    // What the front end knows and the engine does not; null where it says nothing.
    let said = |key: &str| front.get(key).cloned().unwrap_or(Value::Null);
    let mut all = Map::new();
    let mut put = |key: &str, value: Value| {
        all.insert(key.into(), value);
    };
    put("ts", json!(now));
    put("start", json!(now - took));
    put("n", json!(ended.request));
    put("kind", said("kind"));
    put("prompt", json!(ended.ids.len()));
    put("cached", engine["cached_tokens"].clone());
    put("cache_src", json!(source));
    put("prefill_s", json!(prefill_s));
    put("prefill_tps", rate(prompt - cached, prefill_s));
    put("queue_s", json!(queue_s));
    put("first_s", json!(queue_s + prefill_s));
    put("decode_tokens", json!(ended.reply.len()));
    put("decode_s", json!(decode_s));
    put("decode_tps", rate(decoded, decode_s));
    put("tokens_per_round", if rounds > 0.0 { json!(decoded / rounds) } else { Value::Null });
    for key in ["rounds", "pieces", "slot"] {
        put(key, engine[key].clone());
    }
    for key in ["kv_pages", "kv_free", "marks"] {
        put(key, engine.get(key).cloned().unwrap_or(Value::Null));
    }
    for key in ["thinking", "effort", "effort_asked"] {
        put(key, said(key));
    }
    put("max_tokens", said("max_tokens"));
    put("max_tokens_eff", engine["max_tokens"].clone());
    // The model ends its calls with a token of their own; what stands before it is only read after this line is written.
    let call_end = front["call_end"].as_u64().filter(|_| &*ended.reason == "stop");
    let called = call_end.is_some() && call_end == ended.reply.last().copied().map(u64::from);
    let finish = if called { "tool_calls" } else { &*ended.reason };
    put("finish", json!(finish));
    put("error", if finish == "error" { json!("engine") } else { Value::Null });
    for key in ["tools", "messages"] {
        put(key, said(key));
    }
    put("policy", engine["policy"].clone());
    put("fast_prefill", said("fast_prefill"));
    put("head_hash", hex(hash(&ended.ids[..head], salt)));
    put("head_len", json!(head));
    let system = front.get("sys_len").and_then(Value::as_u64).map(|n| (n as usize).min(ended.ids.len()));
    put("sys_len", json!(system));
    put("sys_hash", system.map_or(Value::Null, |n| hex(hash(&ended.ids[..n], salt))));
    put("conv", hex(hash(conversation(&ended.ids, facts), salt)));
    put("lcp", json!(shared.any));
    put("lcp_same", json!(shared.same));
    put("lcp_other", json!(shared.other));
    Value::Object(all).to_string()
}
