//! Case 34: what was computed for one prompt is used for another only as far as both are the same. Rows of images do not
//! show in the ids: requests with other rows, or none, at the same ids must get the replies of an engine of their own.
#![allow(clippy::unwrap_used)]

use plugfold_engine::service::{Attachment, Request, Sampling, Service as _};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{engine, ids, options, plain, reply_with_stats};

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
