//! Schemas, regexes, choices, grammars and tools of a request: refused by a readable sentence, or compiled into a grammar whose
//! every allowed token is accepted, that can be taken back, and whose ended replies are valid.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use plugfold_0610_structured_output::Settings;
use plugfold_0610_structured_output::asked::{Kind, wanted};
use plugfold_0610_structured_output::compiler::Compiler;
use plugfold_0610_structured_output::matcher::{Stand, Tracker};
use plugfold_0610_structured_output::tokens::Tokens;
use serde_json::Value;

/// What mutations put in.
pub static WORDS: [&str; 32] = [
    "{\"guided_json\":",
    "{\"guided_regex\":\"",
    "{\"guided_choice\":[\"",
    "{\"guided_grammar\":\"root ::= ",
    "\"type\":\"object\"",
    "\"type\":\"string\"",
    "\"type\":\"integer\"",
    "\"type\":\"array\"",
    "\"properties\":{\"a\":",
    "\"required\":[\"a\"]",
    "\"items\":",
    "\"enum\":[1,\"a\"]",
    "\"const\":",
    "\"$ref\":\"#\"",
    "\"$defs\":{\"a\":",
    "\"anyOf\":[{}]",
    "\"allOf\":[{}]",
    "\"oneOf\":[{}]",
    "\"pattern\":\"^a|b$\"",
    "\"maxLength\":9",
    "\"minItems\":2",
    "\"additionalProperties\":false",
    "\"minimum\":3",
    "\"multipleOf\":0.1",
    "\"format\":\"date\"",
    "\"not\":{}",
    "[a-f]",
    "(a|b)*",
    "{1,9}",
    "\\\\d",
    "\\\\u00e9",
    "}",
];

/// Ends a reply.
const END: u32 = 256;

/// A compiler with a token a byte, the markup of calls, and little room.
fn compiler() -> &'static Arc<Compiler> {
    static COMPILER: OnceLock<Arc<Compiler>> = OnceLock::new();
    COMPILER.get_or_init(|| {
        let mut bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        let tags = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"];
        let added: Vec<(u32, String)> = ["<|endoftext|>"]
            .iter()
            .chain(&tags)
            .zip(END..)
            .map(|(text, id)| (id, (*text).to_owned()))
            .collect();
        bytes.resize(bytes.len() + added.len(), Vec::new());
        for word in ["\":", "\",\"", "true", " \"", "ab", "}}"] {
            bytes.push(word.into());
        }
        let width = bytes.len() as u32;
        let tokens = Tokens::new(bytes, &added, width).unwrap_or_else(|e| panic!("{e}"));
        let mut bounds = Settings::default().bounds;
        (bounds.mib, bounds.bytes, bounds.time) = (8, 16 << 10, Duration::from_secs(20));
        Arc::new(Compiler::new(tokens, bounds).unwrap_or_else(|e| panic!("{e}")))
    })
}

/// A request body in JSON; its last bytes decide what is said.
///
/// `true`: it was compiled.
///
/// # Panics
/// When an invariant does not hold.
pub fn run(data: &[u8]) -> bool {
    let Ok(body) = serde_json::from_slice::<Value>(data) else { return false };
    let asked = match wanted(&body, true, false) {
        Ok(Some(asked)) => asked,
        Ok(None) => return false,
        Err(wrong) => {
            assert!(
                !wrong.field.is_empty() && !wrong.what.is_empty() && !wrong.what.contains('\n'),
                "{wrong:?}"
            );
            return false;
        }
    };
    let compiler = compiler();
    let compiled = match compiler.within(&asked) {
        Ok(compiled) => compiled,
        Err(problem) => {
            assert!(problem.at.starts_with('/') && !problem.what.is_empty(), "{problem:?}");
            // A keyword of that name may be told.
            let own = data.windows(5).any(|word| word == b"panic");
            assert!(problem.what.len() < 2000 && (own || !problem.what.contains("panic")), "{problem:?}");
            return false;
        }
    };
    let mut tracker = Tracker::new(compiled.matcher(), Arc::from([END]), None, compiler.tokens.width);
    let mut mask = vec![0u32; compiler.tokens.words()];
    let mut text = Vec::new();
    let mut dice = data.iter().fold(7u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)));
    for _ in 0..48 {
        // A grammar may be too complex to go on, and may have led to where nothing can follow; both are told.
        if tracker.mask(&mut mask).is_err() {
            return true;
        }
        let open: Vec<u32> =
            (0..compiler.tokens.width).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let id = if open.contains(&END) { END } else { open[(dice >> 8) as usize % open.len()] };
        // What is taken back leaves nothing behind.
        for _ in 0..2 {
            match tracker.accept(id) {
                Ok(taken) => assert!(taken, "{id} is allowed and not accepted"),
                Err(_) => return true,
            }
            if tracker.rollback(1).is_err() {
                return true;
            }
        }
        let mut again = vec![0u32; mask.len()];
        if tracker.mask(&mut again).is_err() {
            return true;
        }
        assert_eq!(again, mask, "a step that was taken back changes the mask");
        if !matches!(tracker.accept(id), Ok(true)) {
            return true;
        }
        if tracker.stand() == Stand::Over {
            break;
        }
        text.extend_from_slice(compiler.tokens.env.tok_trie().token(id));
    }
    if tracker.stand() == Stand::Over && matches!(asked.kind, Kind::Json | Kind::Schema) {
        // A number may be larger than a double, and is JSON all the same.
        let read = serde_json::from_slice::<Value>(&text).map_err(|e| e.to_string());
        let good = read.as_ref().map_or_else(|e| e.contains("number out of range"), |_| true);
        assert!(good, "{:?} is no JSON: {read:?}", String::from_utf8_lossy(&text));
    }
    true
}
