use std::sync::{Mutex, PoisonError};

use plugfold_abi::OpError;
use plugfold_abi::points::{DocumentObject, StreamLink};
use plugfold_engine::hooks::Hooks;
use proptest::prelude::*;

use super::*;
use crate::chains::Chains;
use crate::http::Limits;
use crate::reply::stop::StopStrings;
use crate::reply::{ReplyReader, Verbatim};

/// Puts one text in the place of another.
struct Replace {
    from: &'static str,
    to: &'static str,
    /// Waits where the text may go on into `from`.
    holds: bool,
}

impl StreamLink for Replace {
    fn piece(&self, _: u64, piece: &mut StreamPiece) -> Result<(), OpError> {
        let text = piece.text.replace(self.from, self.to);
        if self.holds {
            let held = (1..self.from.len()).rev().find(|n| text.ends_with(&self.from[..*n]));
            piece.hold = held.unwrap_or(0) as u32;
        }
        piece.text = text.into();
        Ok(())
    }
}

/// Does what its field says with text that holds a mark.
struct Deed(&'static str);

impl StreamLink for Deed {
    fn piece(&self, _: u64, piece: &mut StreamPiece) -> Result<(), OpError> {
        match self.0 {
            "panic" => panic!("planted"),
            "error" => return Err(OpError::new("planted")),
            "blame" => return Err(OpError::invalid("planted")),
            "hold too much" => piece.hold = piece.text.len() as u32 + 1,
            "hold half" => piece.hold = 1,
            "grow" => piece.text = "x".repeat(Limits::default().stream_bytes + 1).into(),
            "reason" => piece.reasoning = std::mem::take(&mut piece.text),
            "stop" => {
                if let Some(at) = piece.text.find('#') {
                    piece.text = piece.text[..at].into();
                    piece.stop = true;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Writes down what it is told.
#[derive(Default)]
struct Diary(Arc<Mutex<Vec<String>>>);

impl StreamLink for Diary {
    fn begin(&self, request: u64, _: &DocumentObject) -> Result<(), OpError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(format!("begin {request}"));
        Ok(())
    }
    fn piece(&self, request: u64, piece: &mut StreamPiece) -> Result<(), OpError> {
        let text = format!("{request}: {}|{}", piece.reasoning, piece.text);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        Ok(())
    }
    fn end(&self, request: u64) -> Result<(), OpError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(format!("end {request}"));
        Ok(())
    }
}

fn chains(links: Vec<StreamLinkObject>) -> Chains {
    let mut hooks = Hooks::default();
    for (number, link) in links.into_iter().enumerate() {
        hooks.add_object(&format!("link-{number}"), link).unwrap();
    }
    Chains::new(&hooks)
}

fn begun(chains: &Chains) -> Box<dyn PieceLinks> {
    Box::new(chains.stream(&Map::new(), &Limits::default()).unwrap().unwrap())
}

fn replace(from: &'static str, to: &'static str, holds: bool) -> StreamLinkObject {
    StreamLinkObject::new(Replace { from, to, holds })
}

/// The visible text of a reply that is cut at these places.
fn read(chains: &Chains, text: &str, cuts: &[usize], stops: &[&str]) -> String {
    let stops = StopStrings::new(stops.iter().map(|s| (*s).to_owned()).collect()).unwrap();
    let mut reader = ReplyReader::new(Box::new(Verbatim), stops).with_links(Some(begun(chains)));
    let (mut out, mut start, mut stopped) = (Vec::new(), 0, false);
    for cut in cuts.iter().chain([&text.len()]) {
        stopped |= !stopped && reader.push(&text.as_bytes()[start..*cut], &mut out);
        start = *cut;
    }
    reader.finish(&mut out);
    assert_eq!(reader.failure(), None);
    let content = |piece: Piece| match piece {
        Piece::Content(text) => text,
        other => panic!("{other:?}"),
    };
    out.into_iter().map(content).collect()
}

fn part() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["secret", "sec", "[x", "]", "ret", "s", "END", "EN", "é", " "])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    /// Links that hold back what may go on give the same text for any cutting, also before stop strings.
    #[test]
    fn any_cutting_gives_the_same_text(
        parts in prop::collection::vec(part(), 0..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let text = parts.concat();
        let chains = chains(vec![replace("secret", "[x]", true), replace("[x]s", "END", true)]);
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(text.len() + 1)).collect();
        cuts.sort_unstable();
        let whole = text.replace("secret", "[x]").replace("[x]s", "END");
        prop_assert_eq!(read(&chains, &text, &cuts, &[]), &*whole);
        let every: Vec<usize> = (0..text.len()).collect();
        prop_assert_eq!(read(&chains, &text, &every, &[]), &*whole);
        let cut = whole.split("END").next().unwrap();
        prop_assert_eq!(read(&chains, &text, &cuts, &["END"]), cut);
        prop_assert_eq!(read(&chains, &text, &every, &["END"]), cut);
    }
}

#[test]
fn a_link_that_does_not_hold_back_is_caught_by_that() {
    let chains = chains(vec![replace("secret", "[x]", false)]);
    assert_eq!(read(&chains, "a secret", &[], &[]), "a [x]");
    assert_eq!(read(&chains, "a secret", &[4], &[]), "a secret", "a cutting that shows the fault");
}

fn passed(chains: &Chains, pieces: Vec<Piece>) -> (Result<bool, HookError>, Vec<Piece>) {
    let (mut links, mut out) = (begun(chains), Vec::new());
    for piece in pieces {
        match links.pass(piece, &mut out) {
            Ok(false) => {}
            done => return (done, out),
        }
    }
    let done = links.finish(&mut out);
    (done, out)
}

#[test]
fn what_a_link_does_wrong_names_it() {
    for (deed, kind, told) in [
        ("panic", plugfold_abi::ErrorKind::Panicked, "planted"),
        ("error", plugfold_abi::ErrorKind::Failed, "planted"),
        ("blame", plugfold_abi::ErrorKind::Invalid, "planted"),
        ("hold too much", plugfold_abi::ErrorKind::Failed, "holds 3 bytes of a text of 2"),
        ("hold half", plugfold_abi::ErrorKind::Failed, "part of a character"),
        ("grow", plugfold_abi::ErrorKind::Failed, "the limit is 1048576"),
    ] {
        let links = vec![replace("a", "b", true), StreamLinkObject::new(Deed(deed))];
        let (done, _) = passed(&chains(links), vec![Piece::Content("é".into())]);
        let error = done.unwrap_err();
        assert_eq!((error.owner.as_str(), error.error.kind), ("link-1", kind), "{deed}: {error}");
        assert!(error.to_string().contains(told), "{deed}: {error}");
    }
}

#[test]
fn a_link_may_end_a_reply_and_turn_text_into_reasoning() {
    let content = |text: &str| Piece::Content(text.into());
    let stop = || StreamLinkObject::new(Deed("stop"));
    let (done, out) = passed(
        &chains(vec![stop(), replace("secret", "[x]", true)]),
        vec![content("a se"), content("cr#et"), content("never")],
    );
    assert_eq!((done, out), (Ok(true), vec![content("a "), content("secr")]));
    let (done, out) = passed(&chains(vec![StreamLinkObject::new(Deed("reason"))]), vec![content("why")]);
    assert_eq!((done, out), (Ok(false), vec![Piece::Reasoning("why".into())]));
    let stops = StopStrings::new(vec!["secret".into()]).unwrap();
    let chains = chains(vec![stop()]);
    let mut reader = ReplyReader::new(Box::new(Verbatim), stops).with_links(Some(begun(&chains)));
    let mut out = Vec::new();
    assert!(reader.push(b"a sec#ret", &mut out) && reader.finish(&mut out));
    assert_eq!(out, [content("a sec")], "a stop string that cannot come any more holds nothing back");
    assert_eq!(reader.stop(), None);
}

#[test]
fn what_is_held_goes_out_before_a_call() {
    let call = || {
        Piece::Call(crate::reply::tools::ToolCall {
            id: "1".into(),
            name: "f".into(),
            arguments: "{}".into(),
        })
    };
    let links = vec![replace("secret", "[x]", true)];
    let (_, out) =
        passed(&chains(links), vec![Piece::Content("a se".into()), call(), Piece::Content("cret".into())]);
    let content = |text: &str| Piece::Content(text.into());
    assert_eq!(out, [content("a "), content("se"), call(), content("cret")]);
}

#[test]
fn every_beginning_has_its_end() {
    let diary = Diary::default();
    let lines = diary.0.clone();
    let chains = chains(vec![StreamLinkObject::new(diary), StreamLinkObject::new(Deed("panic"))]);
    let (one, two) = (begun(&chains), begun(&chains));
    drop(two);
    drop(one);
    passed(&chains, vec![Piece::Reasoning("r".into())]).0.unwrap_err();
    let lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
    let expected = ["begin 1", "begin 2", "end 2", "end 1", "begin 3", "3: r|", "end 3"];
    assert_eq!(lines[..], expected.map(str::to_owned));
}
