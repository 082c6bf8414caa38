use plugfold::text::testing::tokenizer;
use plugfold_abi::points::ControlToken;
use plugfold_abi::{Knob, KnobValue, Slice};
use plugfold_tests::host::Alone;
use proptest::prelude::*;

use super::*;

/// The test tokenizer behind the face that links get.
struct Whole(plugfold::text::Tokenizer);

impl Tokenizer for Whole {
    fn encode(&self, text: Text<'_>, guard: u32) -> Result<List<u32>, OpError> {
        let ids = match char::from_u32(guard).filter(|c| *c != '\0') {
            Some(guard) => self.0.encode_guarded(text.get_str(), guard),
            None => self.0.encode(text.get_str()),
        };
        Ok(ids.unwrap().into())
    }
    fn controls(&self) -> Result<List<ControlToken>, OpError> {
        let one = |c: &plugfold::text::tokenizer::ControlToken| ControlToken {
            text: c.text.as_str().into(),
            id: c.id,
            special: c.special,
            verbatim: c.verbatim,
        };
        Ok(self.0.controls().iter().map(one).collect())
    }
    fn uncut(&self) -> Result<TextBuf, OpError> {
        Ok(self.0.uncut().into())
    }
}

fn knobs(mode: &str, entries: i64) -> [Knob; 2] {
    let knob = |key: &str, value| Knob { key: key.into(), value, id: Maybe::RNone };
    [knob("mode", KnobValue::text(mode)), knob("entries", KnobValue::Int(entries))]
}

fn made(mode: &str, entries: i64) -> Result<Option<Tokens>, OpError> {
    Tokens::new(&Knobs { all: Slice::from(&knobs(mode, entries)[..]) }, None)
}

/// A started link, the tokenizer, and the host that it tells things.
fn started(mode: &str, entries: i64) -> (Tokens, TokenizerObject, Alone) {
    let host = Alone::default();
    let mut link = made(mode, entries).unwrap().unwrap();
    link.host = Some(host.object());
    let with = TokenizerObject::new(Whole(tokenizer()));
    link.start(&with).unwrap();
    (link, with, host)
}

fn ids(link: &Tokens, with: &TokenizerObject, text: &str, guard: u32) -> Vec<u32> {
    let Maybe::RSome(ids) = link.encode(text.into(), guard, with).unwrap() else { panic!("not encoded") };
    ids.into()
}

fn full(with: &TokenizerObject, text: &str, guard: u32) -> Vec<u32> {
    with.encode(text.into(), guard).unwrap().into()
}

const GUARD: char = '\u{e000}';

fn turn() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "the ", "then", "hello", "客", "<", "|user|>", "<|us", "er|>", "<|user|>", "</think>", "<think", ">",
        "\n", "\u{e000}",
    ]);
    let role =
        prop::sample::select(vec!["<|user|>", "<|assistant|><think>", "<|observation|>", "<|system|>", ""]);
    (role, prop::collection::vec(word, 0..8)).prop_map(|(role, words)| role.to_owned() + &words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    /// Conversations that grow, branch and come back: always the tokens of a full encoding.
    #[test]
    fn tokens_are_those_of_a_full_encoding(
        turns in prop::collection::vec(turn(), 1..8),
        branch in turn(),
        guarded in any::<bool>(),
        mode in prop::sample::select(vec!["1", "verify"]),
    ) {
        let (link, with, host) = started(mode, 4);
        let guard = if guarded { u32::from(GUARD) } else { 0 };
        let mut texts: Vec<String> = (1..=turns.len()).map(|n| turns[..n].concat()).collect();
        texts.push(turns[..turns.len() / 2].concat() + &branch);
        texts.push(turns.concat());
        for text in texts {
            prop_assert_eq!(ids(&link, &with, &text, guard), full(&with, &text, guard), "{:?}", text);
        }
        prop_assert_eq!(host.counted("mismatches"), 0.0);
    }
}

#[test]
fn a_turn_encodes_what_comes_after_the_last_shared_control_token() {
    let (link, with, host) = started("1", 32);
    let first = "[gMASK]<sop><|user|>a long question<|assistant|><think>";
    let second = format!("{first}because</think>an answer<|user|>and then?<|assistant|><think>");
    ids(&link, &with, first, 0);
    assert_eq!((host.counted("full_encodes"), host.counted("encoded_bytes")), (1.0, first.len() as f64));
    ids(&link, &with, &second, 0);
    assert_eq!(host.counted("encoded_bytes"), second.len() as f64, "nothing twice");
    ids(&link, &with, &second, 0);
    assert_eq!((host.counted("encoded_bytes"), host.counted("hits")), (second.len() as f64, 2.0));
    let other = second.replace("and then?", "and now?");
    ids(&link, &with, &other, 0);
    let tail = other.len() - other.find("and now?").unwrap();
    assert_eq!(host.counted("encoded_bytes"), (second.len() + tail) as f64, "after <|user|>");
    assert_eq!((host.counted("full_encodes"), host.counted("hits")), (1.0, 3.0));
}

#[test]
fn verify_tells_of_a_wrong_use_and_takes_the_full_encoding() {
    let (link, with, host) = started("verify", 32);
    let (first, second) = ("<|user|>one two<|assistant|>", "<|user|>one two<|assistant|>three");
    ids(&link, &with, first, 0);
    link.cache().corrupt();
    assert_eq!(ids(&link, &with, second, 0), full(&with, second, 0));
    assert_eq!(host.counted("mismatches"), 1.0);
    let told = host.lines().join("\n");
    assert!(told.contains("first difference at token 1") && told.contains("of 28 shared bytes"), "{told}");
    assert_eq!(ids(&link, &with, second, 0), full(&with, second, 0), "what was kept is right again");
    assert_eq!(host.counted("mismatches"), 1.0);
    link.cache().corrupt();
    assert_eq!(ids(&link, &with, second, 0), full(&with, second, 0));
    assert_eq!(host.counted("mismatches"), 2.0, "also of a whole prompt");
}

#[test]
fn without_verify_a_planted_fault_shows() {
    let (link, with, _) = started("1", 32);
    ids(&link, &with, "<|user|>one two<|assistant|>", 0);
    link.cache().corrupt();
    let text = "<|user|>one two<|assistant|>three";
    assert_ne!(ids(&link, &with, text, 0), full(&with, text, 0), "the comparison sees faults");
}

#[test]
fn two_entries_keep_two_prompts() {
    let (link, with, host) = started("1", 2);
    for text in ["<|user|>a", "<|system|>b", "<|observation|>c"] {
        ids(&link, &with, text, 0);
    }
    ids(&link, &with, "<|user|>a", 0);
    assert_eq!(host.counted("hits"), 0.0, "the first is gone");
    ids(&link, &with, "<|observation|>c", 0);
    assert_eq!(host.counted("hits"), 1.0);
}

#[test]
fn bad_values_stop_the_start() {
    assert!(made("0", 32).unwrap().is_none());
    for (mode, entries, told) in
        [("maybe", 32, "1, 0 or verify"), ("1", 0, "at least 1"), ("0", -1, "at least 1")]
    {
        let error = made(mode, entries).err().unwrap().to_string();
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn a_tokenizer_that_looks_around_turns_it_off_with_one_line() {
    let mut json = plugfold::text::testing::tokenizer_json();
    json["normalizer"] = serde_json::json!({"type": "NFC"});
    let whole = plugfold::text::Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
    let with = TokenizerObject::new(Whole(whole));
    let (link, _, host) = started("1", 32);
    let link = Tokens { cuts: OnceLock::new(), ..link };
    link.start(&with).unwrap();
    assert!(matches!(link.encode("x".into(), 0, &with), Ok(Maybe::RNone)));
    let log = host.lines();
    assert!(log.len() == 1 && log[0].contains("normalizer"), "{log:?}");
}
