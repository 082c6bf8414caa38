//! Many requests of different lengths, samplings and drafts over four slots, joining and leaving, some aborted: each
//! equals its solo run.
#![allow(clippy::unwrap_used)]

use plugfold_engine::service::{Event, Finish, Request, Sampling, Service};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::guess::{Guess, guessing};
use plugfold_tests::model::{engine, options, plain, reply, request};

/// Guesses that the text repeats: what followed the last occurrence of the last token. Sometimes right, often wrong.
struct Repeats;

impl Guess for Repeats {
    fn guess(&self, ids: &[u32], budget: usize) -> Vec<u32> {
        let Some((last, before)) = ids.split_last() else { return Vec::new() };
        let found = before.iter().rposition(|id| id == last);
        found.map_or_else(Vec::new, |at| ids[at + 1..].iter().take(budget.min(1 + at % 7)).copied().collect())
    }
}

fn jobs() -> Vec<Request> {
    (0..40u64)
        .map(|i| {
            let sampling = match i % 3 {
                0 => Sampling::GREEDY,
                1 => Sampling { temperature: 0.3, top_k: 5, top_p: 0.9, min_p: 0.0, seed: Some(i) },
                _ => Sampling { temperature: 1.5, top_k: 0, top_p: 1.0, min_p: 0.02, seed: None },
            };
            let mut job = request(100 + i, 1 + (i as usize * 7) % 60, 1 + (i as usize * 5) % 23, sampling);
            // Prompts that repeat themselves, so that drafts are sometimes accepted.
            let again = job.ids.clone();
            job.ids.extend(again);
            job.draft = i % 4 != 1;
            job
        })
        .collect()
}

#[test]
fn each_equals_its_solo_run() {
    let jobs = jobs();
    let solo = engine(&options(&tiny_dir(), 1, 64), 1, plain);
    let alone: Vec<_> = jobs.iter().map(|j| reply(&solo.submit(j.clone()).unwrap()).unwrap()).collect();
    drop(solo);

    let four = engine(&options(&tiny_dir(), 4, 24), 1, |_| guessing(Repeats));
    let mut handles = Vec::new();
    let mut aborted = Vec::new();
    for (i, job) in jobs.iter().enumerate() {
        handles.push(four.submit(job.clone()).unwrap());
        if i.is_multiple_of(5) {
            let mut long = job.clone();
            long.max_tokens = 400;
            aborted.push(four.submit(long).unwrap());
        }
    }
    // Leave in every phase: queued, prefilling, decoding.
    for (i, handle) in aborted.iter().enumerate() {
        for _ in 0..i % 3 {
            let _ = handle.events.recv();
        }
        handle.cancel();
    }
    for (i, (handle, want)) in handles.iter().zip(&alone).enumerate() {
        assert_eq!(&reply(handle).unwrap(), want, "request {i}");
    }
    for handle in &aborted {
        assert!(handle.events.iter().any(|e| matches!(e, Event::Done { finish: Finish::Cancelled, .. })));
    }
    let stats = four.stats();
    assert_eq!((stats.errors, stats.decoding, stats.prefilling, stats.waiting), (0, 0, 0, 0));
    assert!(stats.drafted > stats.accepted && stats.accepted > 0, "{stats:?}");
}
