//! Case 41: three plugins around one hook. Each is called once, in the order that is documented and printed whatever the order
//! of the list; a cycle is refused by its members; an error or a panic of one ends its own request and nothing else.
#![allow(clippy::unwrap_used)]

use plugfold::plugins::Listed;
use plugfold::plugins::order::{Member, order};
use plugfold::text::testing::tokenizer;
use plugfold_abi::points::{
    Document as _, DocumentObject, PromptLink, PromptLinkObject, RequestLink, RequestLinkObject, StreamLink,
    StreamLinkObject, StreamPiece,
};
use plugfold_abi::{OpError, TextBuf};
use plugfold_engine::hooks::Hooks;
use plugfold_manifest::Manifest;
use plugfold_tests::http::{Aftercheck, Said, TestServer, say, settings};
use serde_json::json;

/// Appends its letter wherever it is called, and fails where a prompt asks it to.
#[derive(Clone)]
struct Letter(&'static str);

impl RequestLink for Letter {
    fn rewrite(&self, body: &DocumentObject) -> Result<(), OpError> {
        let letters: Option<TextBuf> = body.get("/letters".into())?.into();
        let letters = letters.map(|text| text.replace('"', "")).unwrap_or_default();
        body.set("/letters".into(), json!(letters + self.0).to_string().as_str().into())
    }
}

impl PromptLink for Letter {
    fn text(&self, body: &DocumentObject, text: &mut TextBuf) -> Result<(), OpError> {
        let letters: Option<TextBuf> = body.get("/letters".into())?.into();
        let asked: Option<TextBuf> = body.get("/messages".into())?.into();
        let asked = asked.map(|text| text.to_string()).unwrap_or_default();
        assert!(!asked.contains(&format!("panic in {}", self.0)), "planted in {}", self.0);
        if asked.contains(&format!("error in {}", self.0)) {
            return Err(OpError::new(format!("planted in {}", self.0)));
        }
        assert!(letters.is_some_and(|l| l.len() == 5), "every link has seen the request once");
        text.push_str(self.0);
        Ok(())
    }
}

impl StreamLink for Letter {
    fn piece(&self, _: u64, piece: &mut StreamPiece) -> Result<(), OpError> {
        piece.text = piece.text.replace('.', &format!("{}.", self.0)).into();
        Ok(())
    }
}

/// The plugins of a list, as they come: a letter, with the letters that it is over.
fn sorted(list: &[(&'static str, &str)]) -> Result<Vec<&'static str>, String> {
    let manifest = |(letter, over): &(&str, &str)| Manifest {
        id: (*letter).into(),
        name: "letter".into(),
        over: over.chars().map(String::from).collect(),
        ..Manifest::default()
    };
    let manifests: Vec<Manifest> = list.iter().map(manifest).collect();
    let listed = |(at, (letter, _)): (usize, &(&str, &str))| Listed {
        name: (*letter).into(),
        place: format!("list:{}", at + 1),
    };
    let listed: Vec<Listed> = list.iter().enumerate().map(listed).collect();
    let members: Vec<Member<'_>> =
        manifests.iter().zip(&listed).map(|(manifest, listed)| Member { listed, manifest }).collect();
    let places = order(&members, "cpu").map_err(|e| e.to_string())?;
    Ok(places.iter().map(|place| list[*place].0).collect())
}

fn server(letters: &[&'static str]) -> TestServer {
    let mut hooks = Hooks::default();
    for letter in letters {
        hooks.add_object(letter, RequestLinkObject::new(Letter(letter))).unwrap();
        hooks.add_object(letter, PromptLinkObject::new(Letter(letter))).unwrap();
        hooks.add_object(letter, StreamLinkObject::new(Letter(letter))).unwrap();
    }
    let server = TestServer::hooked(settings(), &hooks);
    server.scripts.set("#letters", say("</think>Said.<|endoftext|>"));
    server
}

#[test]
fn case_41_each_is_called_once_and_in_order() {
    let bare = ["a", "b", "c"].map(|letter| (letter, ""));
    for (list, want) in [
        ([bare[0], bare[1], bare[2]], "abc"),
        ([bare[0], bare[2], bare[1]], "acb"),
        ([bare[1], bare[0], bare[2]], "bac"),
        ([bare[1], bare[2], bare[0]], "bca"),
        ([bare[2], bare[0], bare[1]], "cab"),
        ([bare[2], bare[1], bare[0]], "cba"),
        // One that is over another comes after it, wherever it stands in the list.
        ([("a", "c"), bare[1], bare[2]], "bca"),
        ([("a", "c"), bare[2], bare[1]], "cab"),
        ([bare[2], ("a", "c"), bare[1]], "cab"),
    ] {
        let letters = sorted(&list).unwrap();
        assert_eq!(letters.concat(), want, "{list:?}");
        let server = server(&letters);
        for stream in [false, true] {
            let said = Said::read(&server.chat("#letters", json!({"stream": stream})));
            assert_eq!(said.content, format!("Said{want}."), "stream {stream}");
            let prompt = tokenizer().decode(&server.prompts().pop().unwrap());
            assert!(prompt.ends_with(want), "{prompt}");
        }
    }
}

#[test]
fn case_41_a_cycle_is_refused_with_its_members() {
    let told = sorted(&[("a", "b"), ("b", "c"), ("c", "a")]).unwrap_err();
    for member in ["a-letter is over", "b-letter is over", "c-letter is over", "waits for itself"] {
        assert!(told.contains(member), "{told}");
    }
    let told = sorted(&[("a", ""), ("b", "c"), ("c", "b")]).unwrap_err();
    assert!(told.contains("b-letter") && !told.contains("a-letter"), "{told}");
}

#[test]
fn case_41_an_error_or_a_panic_ends_its_request_alone() {
    let server = server(&["a", "b", "c"]);
    server.scripts.set("#greedy", say("</think>always the same<|endoftext|>"));
    for letter in ["a", "b", "c"] {
        for deed in ["error", "panic"] {
            for stream in [false, true] {
                let reply = server.chat(&format!("{deed} in {letter}"), json!({"stream": stream}));
                let error = &reply.json()["error"];
                assert_eq!((reply.status, &error["type"]), (500, &json!("server_error")), "{error}");
                let message = error["message"].as_str().unwrap();
                assert!(message.contains(&format!("plugin {letter}")), "{message}");
                assert!(message.contains(&format!("planted in {letter}")), "{message}");
                let after = Said::read(&server.chat("#letters", json!({})));
                assert_eq!(after.content, "Saidabc.", "after {deed} in {letter}");
            }
        }
    }
    let after = Aftercheck::begin(&server);
    assert_eq!(server.chat("panic in b", json!({})).status, 500);
    after.finish();
}
