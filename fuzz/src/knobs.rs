//! Knobs: a request's `tf_knobs` against a table, and manifests with their schemas.

use std::sync::OnceLock;

use plugfold::knobs::KnobTable;
use plugfold_manifest::{Manifest, Raw};
use plugfold_tests::catalogue::resolve;
use serde_json::Value;

/// What mutations put in.
pub static WORDS: [&str; 36] = [
    "{\"lookup\":1}",
    "\"lookup_min\":",
    "\"prefill_rows\":",
    "64",
    "-1",
    "0.5",
    "true",
    "null",
    "\"all\"",
    "[1,2]",
    "\"0003\"",
    "[[knob]]\n",
    "key = \"x\"\n",
    "type = \"int\"\n",
    "type = \"tuple\"\n",
    "type = \"list\"\n",
    "type = \"custom\"\n",
    "scope = \"load\"\n",
    "scope = \"request\"\n",
    "range = \"1..64\"\n",
    "range = \"(0..1]\"\n",
    "range = \"1,2;3,4\"\n",
    "default = \"2\"\n",
    "default = \"context / 2\"\n",
    "choices = [\"a\", \"b[:X]\"]\n",
    "words = [\"off\"]\n",
    "request_key = \"x\"\n",
    "fold = \"min\"\n",
    "effect = \"bits\"\n",
    "where = \"lead\"\n",
    "step = 4\n",
    "id = \"9999\"\n",
    "name = \"x\"\n",
    "version = \"1.0.0\"\n",
    "points = [\"program\"]\n",
    "places = [\"a\", \"b?\"]\n",
];

fn table() -> &'static KnobTable {
    static TABLE: OnceLock<KnobTable> = OnceLock::new();
    TABLE.get_or_init(|| {
        let resolved = resolve(&["0001", "0003", "0020", "0050", "0070", "0090"], "", &[], &[]);
        resolved.unwrap_or_else(|e| panic!("{e}")).table()
    })
}

/// A JSON object is a request's `tf_knobs`; anything else is the text of a manifest.
///
/// `true`: it was taken.
///
/// # Panics
/// When an invariant does not hold.
pub fn run(data: &[u8]) -> bool {
    if data.first() == Some(&b'{') {
        matches!(serde_json::from_slice(data), Ok(Value::Object(asked)) if request(&asked))
    } else {
        std::str::from_utf8(data).is_ok_and(manifest)
    }
}

/// What a reply shows can be asked for again, and gives the same values.
fn request(asked: &serde_json::Map<String, Value>) -> bool {
    match table().resolve_request(asked) {
        Ok(values) => {
            let shown = table().echo(&values);
            let again = table().resolve_request(&shown);
            assert_eq!(again.as_ref(), Ok(&values), "{asked:?} is shown as {shown:?}");
            true
        }
        Err(error) => {
            // A long key is told by its start.
            let named = asked.keys().any(|key| key.starts_with(&error.key));
            assert!(!error.message.is_empty() && named, "{error:?}");
            false
        }
    }
}

/// What is read can be printed and read again; what has a default can be given it.
fn manifest(text: &str) -> bool {
    match Manifest::parse(text, "any.toml") {
        Ok(manifest) => {
            let printed = manifest.print().unwrap_or_else(|e| panic!("{e}: {manifest:?}"));
            assert_eq!(Manifest::parse(&printed, "printed").as_ref(), Ok(&manifest), "{printed}");
            for knob in &manifest.knobs {
                let _ = (knob.allowed(&|_: &str| None), knob.parse(&Raw::Plain("1".into())));
            }
            true
        }
        Err(error) => {
            assert!(!error.problems.is_empty() && error.to_string().contains("any.toml"));
            false
        }
    }
}
