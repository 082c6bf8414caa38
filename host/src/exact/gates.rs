//! The gates.

mod rows;
mod same_bits;

use plugfold_abi::Phase;
use plugfold_abi::points::{DraftPolicy, Store, StoreOffer};
use plugfold_abi::{Slice, Text};
use plugfold_engine::core::{Core, SeqRows, Want};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::plan::Resume;
use plugfold_engine::rank::Rank;

use super::lab::on_all;
use super::script::{Image, Job, Player, Told, difference, ids, images};
use super::{Setup, Verdict};

/// A broken promise: (case, what).
type Failed = (String, String);
type Ran = Result<Verdict, Failed>;

/// One promise and how it is tried.
pub struct Gate {
    /// Name on the command line.
    pub name: &'static str,
    /// What it promises.
    pub promise: &'static str,
    pub(super) run: fn(&Setup) -> Ran,
}

/// All gates.
pub const GATES: &[Gate] = &[
    Gate { name: "drafted", promise: "a drafted reply is the serial one", run: drafted },
    Gate { name: "batched", promise: "a reply in company is the one alone", run: batched },
    Gate { name: "resumed", promise: "a resumed reply is the fresh one", run: resumed },
    Gate { name: "chunks", promise: "the size of chunks changes nothing", run: chunks },
    Gate { name: "keeps", promise: "a kept part of a window is as many serial steps", run: keeps },
    Gate { name: "commits", promise: "a forward commits nothing", run: commits },
    Gate { name: "rows", promise: "a row's bits depend on the row", run: rows::rows },
    Gate { name: "ranks", promise: "ranks agree", run: ranks },
    Gate { name: "same-bits", promise: "a plugin that says so changes no reply", run: same_bits::same_bits },
];

/// Sizes of a model that cases are made of.
struct Sizes {
    vocab: usize,
    context: usize,
    /// From here on rows see only a selection.
    limit: usize,
    slots: usize,
    window: usize,
}

fn sizes(rank: &Rank) -> Sizes {
    let config = rank.core.config();
    Sizes {
        // Control tokens lie at the end of vocabularies.
        vocab: (config.vocab_size * 7 / 8).max(2),
        context: rank.core.capacity().tokens,
        limit: config.index.topk + config.index.pool,
        slots: rank.core.capacity().slots,
        window: rank.core.capacity().window_rows,
    }
}

/// Prompts: short, crossing the dense limit while decoding, past it; one that repeats itself, so that lookups match.
fn jobs(s: &Sizes, tokens: usize) -> Vec<Job> {
    let fits = |n: usize| n + tokens < s.context;
    let mut all = Vec::new();
    for (i, n) in [5, s.limit.saturating_sub(tokens / 2), s.limit + 9].into_iter().enumerate() {
        if fits(n) && n > 0 {
            all.push(Job::new("random", ids(i as u64 + 1, n, s.vocab), tokens, i % 2 == 1));
        }
    }
    let part = ids(9, 12, s.vocab);
    let again: Vec<u32> = part.iter().cycle().take(41).copied().collect();
    for sampled in [false, true] {
        if fits(again.len()) {
            all.push(Job::new("repeating", again.clone(), tokens, sampled));
        }
    }
    all
}

/// Runs a script on all ranks; a failure to run is a broken promise, too. The ranks must agree on what they report.
fn play<T: Send + PartialEq>(
    setup: &Setup,
    script: impl Fn(&mut Player<'_>) -> Result<Result<T, Failed>, String> + Sync,
) -> Result<T, Failed> {
    let ran = on_all(setup, |rank| script(&mut Player::new(rank)));
    let mut all = ran.map_err(|what| ("running".to_owned(), what))?;
    if let Some(at) = all.iter().position(Result::is_err) {
        return all.swap_remove(at);
    }
    all.swap_remove(0)
}

fn holds(
    setup: &Setup,
    script: impl Fn(&mut Player<'_>) -> Result<Result<usize, Failed>, String> + Sync,
) -> Ran {
    play(setup, script).map(Verdict::Holds)
}

fn same(case: &str, ours: &Told, theirs: &Told) -> Result<(), Failed> {
    difference(ours, theirs).map_or(Ok(()), |what| Err((case.to_owned(), what)))
}

/// Runs the rest of a script that returns at a broken promise.
macro_rules! keep {
    ($result:expr) => {
        if let Err(failed) = $result {
            return Ok(Err(failed));
        }
    };
}

const PIECE: usize = 16;
const TOKENS: usize = 20;

/// Whether some link of the draft policy knows a form.
fn accepts(p: &Player<'_>, policy: &str) -> bool {
    let links = &p.rank.core.hooks().policies;
    links.iter().any(|h| h.hook.accepts(Text::from(policy)).is_ok_and(|found| found.is_some()))
}

fn drafted(setup: &Setup) -> Ran {
    let probe = on_all(setup, |rank| Ok(rank.rounds.drafters().len()))
        .map_err(|what| ("starting".to_owned(), what))?;
    let serial = |p: &mut Player<'_>, job: &Job| p.alone(&Job { draft: false, ..job.clone() }, 0, PIECE);
    let mut count = 0;
    if probe.first().is_some_and(|n| *n > 0) {
        count += play(setup, |p| {
            let mut count = 0;
            for job in jobs(&sizes(p.rank), TOKENS) {
                let want = serial(p, &job)?;
                let mut policies = vec![String::new()];
                for policy in ["3", "7", "c4:0.2", "l7:2", "auto"] {
                    if accepts(p, policy) {
                        policies.push(policy.into());
                    }
                }
                for policy in policies {
                    let told = p.alone(&Job { policy: policy.clone(), ..job.clone() }, 0, PIECE)?;
                    keep!(same(&format!("{}, policy `{policy}`", job.name), &told, &want));
                    count += 1;
                }
            }
            Ok(Ok(count))
        })?;
    }
    // Whatever drafters there are: drafts that are right for a while, then wrong.
    let recorded = super::plants::with_recorded(setup);
    count += play(&recorded, |p| {
        let mut count = 0;
        for job in jobs(&sizes(p.rank), TOKENS) {
            let want = serial(p, &job)?;
            super::plants::record(&job.ids, &want.tokens);
            let told = p.alone(&job, 0, PIECE)?;
            keep!(same(&format!("{}, recorded drafts", job.name), &told, &want));
            if told.accepted == 0 && told.drafted > 0 {
                return Ok(Err((job.name, "no recorded draft was accepted: nothing was tried".into())));
            }
            count += 1;
        }
        Ok(Ok(count))
    })?;
    Ok(Verdict::Holds(count))
}

fn batched(setup: &Setup) -> Ran {
    let mut wide = setup.clone();
    wide.options.slots = wide.options.slots.max(3);
    holds(&wide, |p| {
        let s = sizes(p.rank);
        let all = jobs(&s, TOKENS);
        let mut alone = Vec::new();
        for job in &all {
            alone.push(p.alone(&Job { draft: false, ..job.clone() }, 0, PIECE)?);
        }
        let mut count = 0;
        for (turn, group) in all.windows(s.slots.min(3)).enumerate() {
            let told = p.together(group, 0, PIECE)?;
            for (i, told) in told.iter().enumerate() {
                keep!(same(
                    &format!("{}, in company of {}", group[i].name, group.len() - 1),
                    told,
                    &alone[turn + i]
                ));
                count += 1;
            }
        }
        Ok(Ok(count))
    })
}

fn resumed(setup: &Setup) -> Ran {
    let mut wide = setup.clone();
    wide.options.slots = wide.options.slots.max(2);
    holds(&wide, |p| {
        let s = sizes(p.rank);
        let mut count = 0;
        for job in jobs(&s, TOKENS) {
            let first = p.alone(&job, 0, PIECE)?;
            // The next turn: the prompt, the reply without its last token or with it, and something new.
            for extra in [0, 1] {
                let mut ids = job.ids.clone();
                ids.extend(&first.tokens[..first.tokens.len() - extra]);
                ids.extend(self::ids(77 + extra as u64, 6, s.vocab));
                if ids.len() + TOKENS >= s.context {
                    continue;
                }
                let next = Job { ids, ..job.clone() };
                let lengths: Vec<usize> =
                    p.rank.rounds.kept(&p.rank.core, 0).filter_map(|k| k.resumes(&next.ids)).collect();
                let fresh = p.alone(&next, 1, PIECE)?;
                // Stores first: what they keep last is then the reply that the next turn goes on from.
                count += match stored(p, &next, &fresh)? {
                    Ok(n) => n,
                    Err(failed) => return Ok(Err(failed)),
                };
                for length in lengths {
                    let again = p.alone(&job, 0, PIECE)?;
                    keep!(same(&format!("{}, run again", job.name), &again, &first));
                    let told = p.alone(&Job { resume: Resume::Slot(length), ..next.clone() }, 0, PIECE)?;
                    if told.resumed != length {
                        let what = format!(
                            "{} tokens were resumed, not the {length} that the slot keeps",
                            told.resumed
                        );
                        return Ok(Err((next.name, what)));
                    }
                    keep!(same(&format!("{}, resumed at {length}", next.name), &told, &fresh));
                    count += 1;
                }
            }
        }
        Ok(Ok(count))
    })
}

/// Resumes a prompt from every offer of every store.
fn stored(p: &mut Player<'_>, next: &Job, fresh: &Told) -> Result<Result<usize, Failed>, String> {
    let hooks = p.rank.core.hooks().clone();
    if hooks.stores.is_empty() {
        return Ok(Ok(0));
    }
    let defaults = hooks.knobs.defaults.clone();
    let tag = p.rank.core.tag(&defaults).map_err(|e| e.to_string())?;
    let mut found = Vec::new();
    if p.rank.world.is_lead() {
        for o in offers_of(p, &hooks, next, tag.id, tag.grid)? {
            let digest = hooks.stores[o.store as usize].call(Store::digest).map_err(|e| e.to_string())?;
            found.push((o.store, o.ticket, o.length, digest));
        }
    }
    let bytes = serde_json::to_vec(&found).map_err(|e| e.to_string())?;
    let bytes = if p.rank.world.ranks() > 1 {
        p.rank.world.share("offers", 0, &bytes).map_err(|e| e.to_string())?
    } else {
        bytes
    };
    let found: Vec<(u32, u64, u32, u64)> = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    let mut count = 0;
    // One: keeping its reply may change what the others name.
    for (store, ticket, length, digest) in found.into_iter().take(1) {
        let resume = Resume::Store { store: store as usize, ticket, length: length as usize, digest };
        let told = p.alone(&Job { resume, ..next.clone() }, 1, PIECE)?;
        if told.resumed != length as usize {
            let what =
                format!("store {store} resumed {} tokens, not the {length} that it offered", told.resumed);
            return Ok(Err((next.name.clone(), what)));
        }
        keep!(same(&format!("{}, resumed at {length} from store {store}", next.name), &told, fresh));
        count += 1;
    }
    Ok(Ok(count))
}

/// What stores hold for a prompt, as rank 0 sees it.
fn offers_of(
    p: &Player<'_>,
    hooks: &Hooks,
    job: &Job,
    tag: u64,
    grid: u32,
) -> Result<Vec<StoreOffer>, String> {
    let facts = plugfold_abi::points::RequestFacts {
        request: 1,
        ids: Slice::from(&job.ids[..]),
        max_tokens: job.tokens as u32,
        background: false,
        draft: true,
        draft_layer: true,
        waited_s: 0.0,
        knobs: Slice::from(&p.rank.core.hooks().knobs.defaults[..]),
        tag,
        grid,
    };
    let mut all = Vec::new();
    for (index, h) in hooks.stores.iter().enumerate() {
        let found = h.call(|s| s.offer(&facts)).map_err(|e| e.to_string())?;
        all.extend(found.iter().map(|o| StoreOffer { store: index as u32, ..*o }));
    }
    Ok(all)
}

fn chunks(setup: &Setup) -> Ran {
    holds(setup, |p| {
        let mut count = 0;
        for job in jobs(&sizes(p.rank), 4) {
            let job = Job { draft: false, ..job };
            let want = p.alone(&job, 0, job.ids.len())?;
            for piece in [1, 3, 7, 64] {
                let told = p.alone(&job, 0, piece)?;
                keep!(same(&format!("{}, pieces of {piece}", job.name), &told, &want));
                count += 1;
            }
            let marks: Vec<usize> = [2, 7, 21].into_iter().filter(|m| *m < job.ids.len()).collect();
            let told = p.alone(&Job { marks, draft: true, ..job.clone() }, 0, job.ids.len())?;
            keep!(same(&format!("{}, with snapshots on the way", job.name), &told, &want));
            count += 1;
        }
        Ok(Ok(count))
    })
}

fn prefill(core: &mut Core, slot: usize, ids: &[u32]) -> Result<(), String> {
    core.begin(slot);
    for tokens in ids.chunks(PIECE) {
        let rows = [SeqRows { slot, tokens, want: Want::Nothing, embeds: &[] }];
        let f = core.forward(Phase::Prefill, &rows, None, false).map_err(|e| e.to_string())?;
        if let Some(failure) = &f.failure {
            return Err(failure.to_string());
        }
        core.commit(&f, &[tokens.len()]).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Serial steps.
fn serial(core: &mut Core, slot: usize, tokens: &[u32]) -> Result<(), String> {
    for token in tokens {
        let rows = [SeqRows { slot, tokens: std::slice::from_ref(token), want: Want::Last, embeds: &[] }];
        let f = core.forward(Phase::Window, &rows, None, false).map_err(|e| e.to_string())?;
        core.commit(&f, &[1]).map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn starts(s: &Sizes) -> Vec<usize> {
    [2, 3, s.limit.saturating_sub(3), s.limit + 5]
        .into_iter()
        .filter(|n| *n > 0 && n + s.window + 2 < s.context)
        .collect()
}

fn keeps(setup: &Setup) -> Ran {
    holds(setup, |p| {
        let s = sizes(p.rank);
        let core = &mut p.rank.core;
        let mut count = 0;
        for start in starts(&s) {
            let (prompt, window) = (ids(3, start, s.vocab), ids(5, s.window, s.vocab));
            for keep in 1..=window.len() {
                prefill(core, 0, &prompt)?;
                serial(core, 0, &window[..keep])?;
                let want: Image = core.image(0);
                prefill(core, 0, &prompt)?;
                let rows = [SeqRows { slot: 0, tokens: &window, want: Want::All, embeds: &[] }];
                let f = core.forward(Phase::Window, &rows, None, false).map_err(|e| e.to_string())?;
                core.commit(&f, &[keep]).map_err(|e| e.to_string())?;
                if let Some(what) = images(&core.image(0), &want) {
                    return Ok(Err((format!("{keep} of {} rows at position {start}", window.len()), what)));
                }
                count += 1;
            }
        }
        Ok(Ok(count))
    })
}

fn commits(setup: &Setup) -> Ran {
    holds(setup, |p| {
        let s = sizes(p.rank);
        let core = &mut p.rank.core;
        let mut count = 0;
        for start in starts(&s) {
            prefill(core, 0, &ids(3, start, s.vocab))?;
            let before = core.image(0);
            let window = ids(5, s.window, s.vocab);
            for phase in [Phase::Window, Phase::Prefill] {
                let rows = [SeqRows { slot: 0, tokens: &window, want: Want::All, embeds: &[] }];
                let f = core.forward(phase, &rows, None, false).map_err(|e| e.to_string())?;
                if let Some(failure) = &f.failure {
                    return Err(failure.to_string());
                }
                if let Some(what) = images(&core.image(0), &before) {
                    return Ok(Err((format!("{phase:?} at position {start}"), what)));
                }
                count += 1;
            }
        }
        Ok(Ok(count))
    })
}

fn ranks(setup: &Setup) -> Ran {
    if setup.ranks == 1 {
        return Ok(Verdict::Nothing("one rank".into()));
    }
    let ran = on_all(setup, |rank| {
        let mut p = Player::new(rank);
        let mut all = Vec::new();
        for job in jobs(&sizes(p.rank), TOKENS) {
            let mut told = p.alone(&job, 0, PIECE)?;
            // Heads are divided; what every rank holds whole is the indexer's.
            told.image.retain(|(name, _)| name.starts_with("idx."));
            all.push((job.name, told));
        }
        Ok(all)
    });
    let all = ran.map_err(|what| ("running".to_owned(), what))?;
    let mut count = 0;
    for (rank, theirs) in all.iter().enumerate().skip(1) {
        for ((case, ours), (_, told)) in all[0].iter().zip(theirs) {
            if let Some(what) = difference(told, ours) {
                return Err((format!("{case}, rank {rank} against rank 0"), what));
            }
            count += 1;
        }
    }
    Ok(Verdict::Holds(count))
}
