//! Scripts through the whole engine: on one rank and on two, alone and together, greedy and sampled, with stores, drafts and
//! faults.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::path::Path;
use std::sync::Arc;

use plugfold_abi::life::Plugin as _;
use plugfold_abi::points::Limits;
use plugfold_base_scripted::script::Scripts;
use plugfold_base_scripted::stage::Stage;
use plugfold_base_scripted::{Scripted, offers};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{EngineError, Event, Finish, Request, Sampling, Service as _};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{engine, options, reply, reply_with_stats};

const END: u32 = 508;

fn scripts(text: &str) -> Scripts {
    Scripts::parse(&format!("end = {END}\n{text}"), Path::new(".")).unwrap()
}

/// An engine that plays a file of scripts.
fn playing(text: &str, slots: usize, ranks: usize) -> Engine {
    let scripts = scripts(text);
    engine(&options(&tiny_dir(), slots, 64), ranks, |rank| {
        let mut hooks = Hooks::default();
        for offer in offers(&Arc::new(Stage::new(scripts.clone())), rank as u32) {
            hooks.add("base-scripted", &[], offer).unwrap();
        }
        CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
    })
}

/// A prompt of ids that are bytes.
fn ask(prompt: &str, sampling: Sampling) -> Request {
    let ids = prompt.bytes().map(u32::from).collect();
    Request { ids, sampling, max_tokens: 200, stop_ids: vec![END], ..Request::default() }
}

const HOT: Sampling = Sampling { temperature: 2.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: Some(3) };

fn said(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).chain([END]).collect()
}

/// Tokens of each round, the first one the prompt's.
fn rounds(engine: &Engine, request: Request) -> Vec<usize> {
    let handle = engine.submit(request).unwrap();
    let sizes = |event| match event {
        Event::Tokens(tokens) => Some(tokens.len()),
        Event::Error(error) => panic!("{error}"),
        _ => None,
    };
    handle.events.iter().filter_map(sizes).collect()
}

#[test]
fn what_is_written_is_said_on_any_rank_at_any_temperature() {
    let text = "[[script]]\nwhen = \"#a\"\nsteps = [{ text = \"hello \" }, { bytes = [255, 254], chunk = 2 }, { text = \"!\" }]";
    for ranks in [1, 2, 3] {
        let engine = playing(text, 1, ranks);
        for sampling in [Sampling::GREEDY, HOT] {
            for draft in [true, false] {
                let asked = Request { draft, ..ask("x #a y", sampling) };
                let (tokens, finish) = reply(&engine.submit(asked).unwrap()).unwrap();
                let want: Vec<u32> = b"hello \xff\xfe!".iter().map(|b| u32::from(*b)).chain([END]).collect();
                assert_eq!((tokens, finish), (want, Finish::Stop), "{ranks} ranks, drafts {draft}");
            }
        }
    }
}

#[test]
fn chunks_leave_in_rounds_of_their_own() {
    let text = "[[script]]\nsteps = [{ text = \"abcde\", chunk = 3 }, { text = \"12345678\", chunk = 8 }, { text = \"xyz\" }]";
    let engine = playing(text, 1, 1);
    // The first token is the prompt's own; the rest of its chunk follows, then each chunk whole.
    assert_eq!(rounds(&engine, ask("q", Sampling::GREEDY)), [1, 2, 2, 8, 1, 1, 1, 1]);
    let serial = Request { draft: false, ..ask("q", Sampling::GREEDY) };
    assert_eq!(rounds(&engine, serial), [1; 17], "without drafts a round is a token");
    let (_, _, stats) = reply_with_stats(&engine.submit(ask("q", HOT)).unwrap()).unwrap();
    assert_eq!((stats.drafted, stats.accepted), (9, 9));
    let cut = Request { max_tokens: 6, ..ask("q", Sampling::GREEDY) };
    let (tokens, finish) = reply(&engine.submit(cut).unwrap()).unwrap();
    assert_eq!((tokens.len(), finish), (6, Finish::Length));
    let goes_on = Request { stop_ids: Vec::new(), max_tokens: 20, ..ask("q", Sampling::GREEDY) };
    let (tokens, _) = reply(&engine.submit(goes_on).unwrap()).unwrap();
    assert_eq!(tokens[16..], [END; 4], "past its end a script ends again");
}

#[test]
fn many_at_once_each_get_their_own_script() {
    let one = |i: usize| {
        format!(
            "[[script]]\nwhen = \"#{i}.\"\nsteps = [{{ text = \"reply number {i}; \", times = {}, chunk = {} }}]\n",
            1 + i % 4,
            1 + i % 8
        )
    };
    let text: String = (0..24).map(one).collect();
    for ranks in [1, 2] {
        let engine = playing(&text, 8, ranks);
        let all: Vec<_> = (0..24)
            .map(|i| {
                engine
                    .submit(ask(&format!("please #{i}."), if i % 2 == 0 { HOT } else { Sampling::GREEDY }))
                    .unwrap()
            })
            .collect();
        for (i, handle) in all.iter().enumerate() {
            let want = said(&format!("reply number {i}; ").repeat(1 + i % 4));
            assert_eq!(reply(handle).unwrap(), (want, Finish::Stop), "request {i}");
        }
        assert_eq!(engine.stats().errors, 0);
    }
}

#[test]
fn a_resumed_turn_says_its_own_script_from_the_beginning() {
    let text = "[[script]]\nwhen = \"second\"\nsteps = [{ text = \"two\" }]\n[[script]]\nsteps = [{ text = \"one\" }]";
    let engine = playing(text, 1, 1);
    let first = "a rather long first turn";
    assert_eq!(reply(&engine.submit(ask(first, Sampling::GREEDY)).unwrap()).unwrap().0, said("one"));
    let next = ask(&format!("{first}one; second"), Sampling::GREEDY);
    let (tokens, _, stats) = reply_with_stats(&engine.submit(next).unwrap()).unwrap();
    assert_eq!(tokens, said("two"));
    assert!(stats.cached_tokens >= first.len(), "{}", stats.cached_tokens);
}

#[test]
fn pauses_are_taken_before_their_chunk() {
    let text = "[[script]]\nsteps = [{ text = \"ab\" }, { text = \"cd\", chunk = 2, delay_ms = 120 }]";
    let engine = playing(text, 1, 2);
    let (_, _, stats) = reply_with_stats(&engine.submit(ask("q", Sampling::GREEDY)).unwrap()).unwrap();
    assert!(stats.decode_s >= 0.12, "{}", stats.decode_s);
}

#[test]
fn faults_end_their_request_on_all_ranks_and_no_other() {
    for ranks in [1, 2] {
        for (fault, rank, word) in [
            ("error", 0, "the script says that this fails"),
            ("error", ranks as u32 - 1, "the script says that this fails"),
            ("panic", ranks as u32 - 1, "the script says that this panics"),
            ("nan", 0, "is a number"),
        ] {
            let text = format!(
                "[[script]]\nwhen = \"bad\"\nsteps = [{{ text = \"ok\" }}, {{ fault = \"{fault}\", rank = {rank} }}]\n\
                 [[script]]\nsteps = [{{ text = \"steady words \", times = 4 }}]"
            );
            let engine = playing(&text, 2, ranks);
            let steady = engine.submit(ask("good", Sampling::GREEDY)).unwrap();
            let bad = engine.submit(ask("bad", Sampling::GREEDY)).unwrap();
            let mut tokens = Vec::new();
            let error = loop {
                match bad.events.recv().unwrap() {
                    Event::Tokens(new) => tokens.extend(new),
                    Event::Error(error) => break error,
                    Event::Done { .. } => panic!("{fault} on rank {rank} ended well"),
                    _ => {}
                }
            };
            assert_eq!(tokens, said("ok")[..2], "what came before the fault");
            assert!(error.to_string().contains(word), "{fault} on rank {rank} of {ranks}: {error}");
            assert_eq!(reply(&steady).unwrap().0, said(&"steady words ".repeat(4)));
            assert_eq!(
                reply(&engine.submit(ask("again", HOT)).unwrap()).unwrap().0,
                said(&"steady words ".repeat(4))
            );
        }
    }
}

#[test]
fn a_fatal_fault_ends_the_engine_with_its_words() {
    for ranks in [1, 2] {
        let text = format!(
            "[[script]]\nsteps = [{{ text = \"a\" }}, {{ fault = \"fatal\", rank = {} }}]",
            ranks - 1
        );
        let engine = playing(&text, 1, ranks);
        let error = reply(&engine.submit(ask("q", Sampling::GREEDY)).unwrap()).unwrap_err();
        assert!(
            matches!(&error, EngineError::Unavailable(m) if m.contains("this ends the engine")),
            "{error:?}"
        );
        assert!(engine.stats().fatal.is_some());
    }
}

#[test]
fn prompts_without_a_script_and_ids_that_do_not_exist_are_refused_in_words() {
    let engine = playing("[[script]]\nwhen = \"known\"\nsteps = [{ ids = [1, 512] }]", 1, 2);
    let told =
        |prompt| reply(&engine.submit(ask(prompt, Sampling::GREEDY)).unwrap()).unwrap_err().to_string();
    assert!(told("unheard of").contains("no script is for this prompt"));
    assert!(told("known").contains("id 512, outside the vocabulary of 512 ids"));
    assert_eq!(engine.stats().fatal, None);
}

#[test]
fn nothing_of_the_model_is_computed() {
    // Prompts of any length take no step but the rows, the head and the candidates.
    let stage = Arc::new(Stage::new(scripts("[[script]]\nsteps = []")));
    let mut hooks = Hooks::default();
    for offer in offers(&stage, 0) {
        hooks.add("base-scripted", &[], offer).unwrap();
    }
    let options = CoreOptions { hooks: Arc::new(hooks), context: Some(256), ..CoreOptions::default() };
    let mut core =
        plugfold_engine::core::Core::load(&tiny_dir(), &options, plugfold_engine::split::Split::WHOLE, None)
            .unwrap();
    for phase in [plugfold_abi::Phase::Window, plugfold_abi::Phase::Prefill] {
        let steps = core.described(phase).unwrap();
        let ops: Vec<&str> = steps.iter().map(|s| &*s.op).collect();
        assert_eq!(ops, ["scripted.rows", "rows.pick", "head"], "{phase:?}");
    }
    let tag = core.tag(&[]).unwrap();
    assert!(tag.window && tag.grid == 1);
    let bare = CoreOptions { context: Some(256), ..CoreOptions::default() };
    let mut bare =
        plugfold_engine::core::Core::load(&tiny_dir(), &bare, plugfold_engine::split::Split::WHOLE, None)
            .unwrap();
    assert_ne!(bare.tag(&[]).unwrap().id, tag.id, "states of the model are never resumed by a script");
}

#[test]
fn chunks_over_a_window_refuse_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("scripts.toml");
    std::fs::write(&file, "end = 1\n[[script]]\nsteps = [{ text = \"abcdefghi\", chunk = 9 }]").unwrap();
    let plugin = Scripted::default();
    let all = [plugfold_abi::Knob {
        key: "file".into(),
        value: plugfold_abi::KnobValue::text(file.to_str().unwrap()),
        id: plugfold_abi::Maybe::RNone,
    }];
    let knobs = plugfold_abi::Knobs { all: plugfold_abi::Slice::from(&all[..]) };
    let host = plugfold_tests::host::Alone::default();
    let setup = plugfold_abi::life::Setup {
        knobs,
        host: host.object(),
        device_class: plugfold_abi::Text::from("cpu"),
    };
    assert_eq!(plugin.configure(&setup).unwrap().len(), 6);
    assert!(host.lines().join("\n").contains("not the model's"), "whoever serves a script is told");
    let limits = |window_rows| Limits {
        context: 1,
        slots: 1,
        window_rows,
        prefill_rows: 1,
        prefill_rows_max: 1,
        piece: 1,
    };
    assert!(plugin.prepare(&limits(9)).is_ok());
    let told = plugin.prepare(&limits(8)).unwrap_err().to_string();
    assert!(told.contains("chunks of 9 tokens") && told.contains("8 rows"), "{told}");
    assert_eq!(plugin.digest().unwrap().len(), 1);
}

#[test]
fn the_manifest_is_sound() {
    let text = include_str!("../plugin.toml");
    let manifest = plugfold_manifest::Manifest::parse(text, "plugin.toml").unwrap();
    assert_eq!((manifest.label().as_str(), manifest.off_by.as_deref()), ("base-scripted", Some("file")));
}
