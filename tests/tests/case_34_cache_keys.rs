//! Case 34: what was computed for one prompt is used for another only as far as both are the same. Rows of images do not
//! show in the ids: requests with other rows, or none, at the same ids must get the replies of an engine of their own. Options of a chat
//! do.
#![allow(clippy::unwrap_used)]

use plugfold::text::{ChatRequest, TextModel};
use plugfold_engine::service::{Attachment, Request, Sampling, Service as _};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{engine, ids, options, plain, reply_with_stats};
use serde_json::json;

/// Position and number of the rows that stand for an image.
const AT: usize = 40;
const ROWS: usize = 24;

fn asked(prompt: &[u32], rows: Option<f32>, hidden: usize) -> Request {
    let row = |seed: f32| {
        (0..ROWS * hidden).map(|i| seed * ((i * 37 % 101) as f32 / 50.0 - 1.0)).collect::<Vec<_>>()
    };
    let attachments = rows.map(|seed| Attachment { at: AT, rows: row(seed).into() });
    Request {
        ids: prompt.to_vec(),
        attachments: attachments.into_iter().collect(),
        sampling: Sampling::GREEDY,
        max_tokens: 8,
        ..Request::default()
    }
}

#[test]
fn equal_ids_with_other_images_share_nothing() {
    for ranks in [1, 2] {
        let one = engine(&options(&tiny_dir(), 1, 32), ranks, plain);
        let hidden = one.info().hidden_size;
        let prompt = ids(7, 100, 480);
        let longer = [prompt.clone(), ids(8, 20, 480)].concat();
        let kinds: [(&[u32], Option<f32>); 6] = [
            (&prompt, None),
            (&prompt, Some(1.0)),
            (&prompt, Some(-1.0)),
            (&longer, None),
            (&longer, Some(1.0)),
            (&longer, Some(-1.0)),
        ];
        let alone = kinds.map(|(prompt, rows)| {
            let fresh = engine(&options(&tiny_dir(), 1, 32), ranks, plain);
            reply_with_stats(&fresh.submit(asked(prompt, rows, hidden)).unwrap()).unwrap().0
        });
        // The rows do matter, or nothing would be shown here.
        assert!(alone[0] != alone[1] && alone[1] != alone[2]);
        // Every one after every other one.
        for first in 0..kinds.len() {
            for then in 0..kinds.len() {
                for kind in [first, then] {
                    let (prompt, rows) = kinds[kind];
                    let (said, _, stats) =
                        reply_with_stats(&one.submit(asked(prompt, rows, hidden)).unwrap()).unwrap();
                    assert_eq!(said, alone[kind], "{kind} after {first}, on {ranks} ranks");
                    assert!(rows.is_none() || stats.cached_tokens <= AT, "{kind} after {first}: {stats:?}");
                }
            }
        }
    }
}

#[test]
fn the_same_text_with_other_options_shares_its_common_prefix_alone() {
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/assets/demo-model");
    let one = engine(&options(&demo, 1, 64), 1, plain);
    let text = TextModel::load(&demo, &one.info().eos_ids).unwrap();
    // Thinking, effort, a tool, and more of the same conversation.
    let tool = json!({"type": "function", "function": {"name": "add", "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}});
    let user = json!({"role": "user", "content": "Add 17 and 25, and say the sum only. Then add 3 to it."});
    let kinds: Vec<Vec<u32>> = [
        (true, None, false, false),
        (false, None, false, false),
        (true, Some("low"), false, false),
        (true, Some("high"), false, false),
        (true, None, true, false),
        (true, None, false, true),
    ]
    .into_iter()
    .map(|(thinking, effort, tools, more)| {
        let mut messages = vec![user.clone()];
        if more {
            messages.push(json!({"role": "assistant", "content": "42"}));
            messages.push(json!({"role": "user", "content": "And the sum with 3?"}));
        }
        let variables = effort.map(|effort: &str| ("reasoning_effort".to_owned(), json!(effort)));
        let chat = ChatRequest {
            messages,
            tools: if tools { vec![tool.clone()] } else { Vec::new() },
            variables: variables.into_iter().collect(),
            thinking,
            ..ChatRequest::default()
        };
        text.encode_chat(chat).unwrap().ids
    })
    .collect();
    let request = |ids: &[u32]| Request {
        ids: ids.to_vec(),
        sampling: Sampling::GREEDY,
        max_tokens: 12,
        ..Request::default()
    };
    let alone: Vec<Vec<u32>> = kinds
        .iter()
        .map(|ids| {
            let fresh = engine(&options(&demo, 1, 64), 1, plain);
            reply_with_stats(&fresh.submit(request(ids)).unwrap()).unwrap().0
        })
        .collect();
    let mut seen: Vec<Vec<u32>> = Vec::new();
    for first in 0..kinds.len() {
        for then in 0..kinds.len() {
            for kind in [first, then] {
                let (said, _, stats) = reply_with_stats(&one.submit(request(&kinds[kind])).unwrap()).unwrap();
                assert_eq!(said, alone[kind], "{kind} of {then} after {first}");
                let shared =
                    |ids: &Vec<u32>| ids.iter().zip(&kinds[kind]).take_while(|(a, b)| a == b).count();
                let common = seen.iter().map(shared).max().unwrap_or(0);
                assert!(stats.cached_tokens <= common, "{kind}: {} of {common}", stats.cached_tokens);
                seen.push([kinds[kind].as_slice(), &said].concat());
            }
        }
    }
    // The options do show, or nothing would be shown here.
    assert!(kinds.iter().enumerate().all(|(i, ids)| kinds[..i].iter().all(|other| other != ids)));
}
