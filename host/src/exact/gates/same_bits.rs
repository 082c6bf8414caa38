//! Plugins that promise to change no reply, each on and off: the same tokens, and the same committed states, on every rank.

use super::super::lab::on_all;
use super::super::plants::OWNER;
use super::super::script::{Job, Player, Told, difference};
use super::super::{Setup, Verdict};
use super::{Ran, TOKENS, jobs, sizes};

/// Prompt tokens of a piece: more than a window's rows, since some plugins run large chunks only.
const PIECE: usize = 64;

/// What a rank did: every case with its reply and the state after it.
type Transcript = Vec<(String, Told)>;

/// Requests alone, with drafts and without, and two that share rounds.
fn transcript(setup: &Setup) -> Result<Vec<Transcript>, String> {
    on_all(setup, |rank| {
        let mut p = Player::new(rank);
        let all = jobs(&sizes(p.rank), TOKENS);
        let mut told = Vec::new();
        for job in &all {
            for draft in [true, false] {
                let job = Job { draft, ..job.clone() };
                let how = if draft { "drafted" } else { "serial" };
                told.push((format!("{}, {how}", job.name), p.alone(&job, 0, PIECE)?));
            }
        }
        for pair in all.windows(2) {
            for (job, one) in pair.iter().zip(p.together(pair, 0, PIECE)?) {
                told.push((format!("{}, in company", job.name), one));
            }
        }
        Ok(told)
    })
}

pub(super) fn same_bits(setup: &Setup) -> Ran {
    let mut wide = setup.clone();
    wide.options.slots = wide.options.slots.max(2);
    let mut without: Vec<(String, Setup)> = Vec::new();
    if wide.plant.is_some() {
        // A fault is planted as a plugin that claims the reference's bits: it must stand the same trial.
        without.push((format!("plugin {OWNER}"), Setup { plant: None, ..wide.clone() }));
    }
    for plugin in &wide.silent {
        let mut off = Setup { load: plugin.without.clone(), ..wide.clone() };
        off.options.transport = off.options.transport.filter(|_| !plugin.transport);
        off.options.executor = off.options.executor.filter(|_| !plugin.executor);
        without.push((format!("{} plugin {}", plugin.class, plugin.name), off));
    }
    if without.is_empty() {
        return Ok(Verdict::Nothing("no plugin is loaded that says it changes no reply".into()));
    }
    let failed = |who: &str| {
        let case = format!("running {who}");
        move |what: String| (case, what)
    };
    let with = transcript(&wide).map_err(failed("with all plugins"))?;
    let mut count = 0;
    for (who, setup) in without {
        let off = transcript(&setup).map_err(failed(&format!("without {who}")))?;
        for (rank, (with, off)) in with.iter().zip(&off).enumerate() {
            for ((case, with), (_, off)) in with.iter().zip(off) {
                if let Some(what) = difference(with, off) {
                    return Err((format!("{who} on, not off: rank {rank}, {case}"), what));
                }
                count += 1;
            }
        }
    }
    Ok(Verdict::Holds(count))
}
