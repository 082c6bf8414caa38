//! Requests as scripts of plans: what an engine would plan, written down, so that every rank runs the same.

use plugfold_abi::KnobValue;
use plugfold_engine::plan::{Admission, Piece, Plan, Resume};
use plugfold_engine::rank::Rank;
use plugfold_engine::rounds::Outcome;
use plugfold_engine::service::Sampling;

/// A committed state: families and layers with their bits.
pub(super) type Image = Vec<(String, Vec<u32>)>;

/// A request.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub name: String,
    pub ids: Vec<u32>,
    pub sampling: Sampling,
    pub tokens: usize,
    pub draft: bool,
    pub policy: String,
    pub resume: Resume,
    pub marks: Vec<usize>,
    pub knobs: Vec<KnobValue>,
}

/// What a request gave.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Told {
    pub tokens: Vec<u32>,
    pub resumed: usize,
    pub drafted: usize,
    pub accepted: usize,
    pub image: Image,
}

pub(super) const SAMPLED: Sampling =
    Sampling { temperature: 0.9, top_k: 20, top_p: 0.95, min_p: 0.0, seed: Some(7) };

/// Pseudo-random ids below `vocab`, the same for the same seed.
pub(super) fn ids(seed: u64, n: usize, vocab: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % vocab as u64) as u32
    };
    (0..n).map(|_| next()).collect()
}

impl Job {
    pub(super) fn new(name: &str, ids: Vec<u32>, tokens: usize, sampled: bool) -> Self {
        let sampling = if sampled { SAMPLED } else { Sampling::GREEDY };
        let how = if sampled { "sampled" } else { "greedy" };
        Self {
            name: format!("{name}, {} tokens, {how}", ids.len()),
            ids,
            sampling,
            tokens,
            draft: true,
            policy: String::new(),
            resume: Resume::Fresh,
            marks: Vec::new(),
            knobs: Vec::new(),
        }
    }

    fn admission(&self, slot: usize) -> Admission {
        Admission {
            slot,
            ids: self.ids.clone(),
            temperature: self.sampling.temperature,
            top_k: self.sampling.top_k,
            top_p: self.sampling.top_p,
            min_p: self.sampling.min_p,
            seed: self.sampling.seed.unwrap_or(1),
            max_tokens: self.tokens,
            draft: self.draft,
            policy: self.policy.clone(),
            resume: self.resume.clone(),
            marks: self.marks.clone(),
            knobs: self.knobs.clone(),
            request: slot as u64 + 1,
            ..Admission::default()
        }
    }
}

/// One rank's side of a script.
pub(super) struct Player<'r> {
    pub rank: &'r mut Rank,
    round: u64,
}

impl<'r> Player<'r> {
    pub(super) fn new(rank: &'r mut Rank) -> Self {
        Self { rank, round: 0 }
    }

    fn plan(&mut self, plan: Plan) -> Result<Vec<(usize, Outcome)>, String> {
        self.round += 1;
        let plan = Plan { round: self.round, ..plan };
        let report = self.rank.rounds.run(&mut self.rank.core, &self.rank.world, plan);
        Ok(report.map_err(|e| e.to_string())?.outcomes)
    }

    /// Runs requests together, each in the slot of its index; prompts in pieces of `piece` tokens, in turn.
    pub(super) fn together(
        &mut self,
        jobs: &[Job],
        first_slot: usize,
        piece: usize,
    ) -> Result<Vec<Told>, String> {
        let mut told =
            vec![
                Told { tokens: Vec::new(), resumed: 0, drafted: 0, accepted: 0, image: Vec::new() };
                jobs.len()
            ];
        let mut left: Vec<bool> = vec![true; jobs.len()];
        let admissions = jobs.iter().enumerate().map(|(i, j)| j.admission(first_slot + i)).collect();
        let mut plan = Plan { admissions, ..Plan::default() };
        let mut prefilling: Vec<usize> = (0..jobs.len()).collect();
        while left.contains(&true) {
            if let Some(&next) = prefilling.first() {
                plan.pieces.push(Piece { slot: first_slot + next, tokens: piece });
            }
            plan.decode = (0..jobs.len())
                .filter(|i| left[*i] && !prefilling.contains(i))
                .map(|i| first_slot + i)
                .collect();
            for (slot, outcome) in self.plan(std::mem::take(&mut plan))? {
                let i = slot - first_slot;
                match outcome {
                    Outcome::Begun(resumed) => told[i].resumed = resumed,
                    // The next prompt takes its turn.
                    Outcome::Absorbed(_) => prefilling.rotate_left(1),
                    Outcome::Tokens { tokens, drafted, end, .. } => {
                        prefilling.retain(|p| *p != i);
                        told[i].drafted += drafted;
                        told[i].accepted += tokens.len() - 1;
                        told[i].tokens.extend(tokens);
                        if end.is_some() {
                            left[i] = false;
                            told[i].image = self.rank.core.image(slot);
                        }
                    }
                    Outcome::Failed(message) => return Err(format!("{} failed: {message}", jobs[i].name)),
                }
            }
        }
        Ok(told)
    }

    /// Runs one request in a slot.
    pub(super) fn alone(&mut self, job: &Job, slot: usize, piece: usize) -> Result<Told, String> {
        let mut told = self.together(std::slice::from_ref(job), slot, piece)?;
        told.pop().ok_or_else(|| "a request without a reply".into())
    }
}

/// The first difference of two replies and their states.
pub(super) fn difference(ours: &Told, theirs: &Told) -> Option<String> {
    if let Some(at) =
        (0..ours.tokens.len().max(theirs.tokens.len())).find(|i| ours.tokens.get(*i) != theirs.tokens.get(*i))
    {
        return Some(format!("token {at} is {:?}, not {:?}", ours.tokens.get(at), theirs.tokens.get(at)));
    }
    images(&ours.image, &theirs.image)
}

/// The first difference of two states.
pub(super) fn images(ours: &Image, theirs: &Image) -> Option<String> {
    if ours.len() != theirs.len() {
        return Some(format!("the state has {} families and layers, not {}", ours.len(), theirs.len()));
    }
    for ((name, a), (_, b)) in ours.iter().zip(theirs) {
        if a.len() != b.len() {
            return Some(format!("{name} of the state has {} numbers, not {}", a.len(), b.len()));
        }
        if let Some(at) = a.iter().zip(b).position(|(x, y)| x != y) {
            return Some(format!(
                "{name} of the state differs first at number {at}: {:08x}, not {:08x}",
                a[at], b[at]
            ));
        }
    }
    None
}
