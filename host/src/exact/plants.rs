//! Faults, planted as a plugin would be: each breaks one promise, and the gates that must notice are named.

mod providers;
mod recorded;
mod stale;

use plugfold_abi::points::{SpanChoice, SpanFacts, Spans, SpansObject};
use plugfold_abi::{List, OpError, Pass, PassContext, PassObject, Program, ProviderObject, TextBuf};
use plugfold_engine::hooks::Hooks;

pub(super) use recorded::{record, with_recorded};

/// Who planted it, in messages.
pub const OWNER: &str = "planted";

/// A fault.
pub struct Plant {
    /// Name on the command line.
    pub name: &'static str,
    /// What it does.
    pub what: &'static str,
    /// Gates of which at least one must notice.
    pub caught_by: &'static [&'static str],
    /// Fewest ranks on which it does anything.
    pub ranks: usize,
    kind: Kind,
}

enum Kind {
    /// Around an operation.
    Around(&'static str, providers::Act),
    Pass,
    Spans,
    Store,
}

/// All faults.
pub const PLANTS: &[Plant] = &[
    around(
        "swap-slots",
        "the recurrence of the first two sequences of a call runs in each other's slot",
        &["batched", "rows"],
        "kda.mix",
        providers::swap_slots,
    ),
    around(
        "flip-state-bit",
        "a bit of a committed state is turned when a window is cut",
        &["keeps", "drafted"],
        "kda.commit",
        providers::flip_bit,
    ),
    around(
        "keep-one-more",
        "one row too many is kept when a window is cut",
        &["keeps", "drafted"],
        "kda.commit",
        providers::keep_more,
    ),
    around(
        "skip-commit",
        "a cut window commits nothing",
        &["keeps", "drafted"],
        "kda.commit",
        providers::skip,
    ),
    around(
        "stale-parity",
        "calls of several rows read the state before the committed one",
        &["keeps", "rows", "chunks"],
        "kda.mix",
        providers::stale_parity,
    ),
    around(
        "position-off-by-one",
        "the indexer writes rows of a window one position late",
        &["keeps", "drafted"],
        "idx.write",
        providers::late_position,
    ),
    around(
        "accept-any-draft",
        "every draft wins the draw",
        &["drafted"],
        "sample.candidates",
        providers::draft_wins,
    ),
    around(
        "row-dependent-sum",
        "products of more than four rows differ in the last bit",
        &["rows", "chunks"],
        "dense",
        providers::nudge_many,
    ),
    around(
        "first-row-only",
        "the norm of later rows of a call is the first row's",
        &["rows", "chunks"],
        "norm",
        providers::first_row,
    ),
    around(
        "write-early",
        "a forward writes into the committed state",
        &["commits", "keeps"],
        "kda.mix",
        providers::write_committed,
    ),
    around(
        "shared-token",
        "all sequences of a call read the token of the first",
        &["batched", "rows"],
        "embed",
        providers::shared_token,
    ),
    around(
        "other-rounding",
        "products claim the reference's bits and differ in the last one, on every row alike",
        &["same-bits"],
        "dense",
        providers::nudge_all,
    ),
    around(
        "state-only",
        "rows of the attention cache differ in the last bit of one number, which hardly ever changes a token",
        &["same-bits"],
        "mla.write",
        providers::nudge_cache,
    ),
    Plant {
        ranks: 2,
        ..around(
            "rank-order",
            "one rank adds the parts of a sum in another order",
            &["ranks"],
            "comm.sum",
            providers::swap_parts,
        )
    },
    Plant {
        ranks: 2,
        ..around(
            "drop-exchange",
            "one rank leaves an exchange out",
            &["ranks", "drafted"],
            "comm.sum",
            providers::drop_one,
        )
    },
    Plant {
        name: "lost-mark",
        what: "chunks run over the places of snapshots",
        caught_by: &["chunks"],
        ranks: 1,
        kind: Kind::Spans,
    },
    Plant {
        name: "skip-wait",
        what: "a second stream is never waited for",
        caught_by: &["drafted", "commits"],
        ranks: 1,
        kind: Kind::Pass,
    },
    Plant {
        name: "stale-snapshot",
        what: "a store gives back the first state that it ever kept",
        caught_by: &["resumed"],
        ranks: 1,
        kind: Kind::Store,
    },
];

const fn around(
    name: &'static str,
    what: &'static str,
    caught_by: &'static [&'static str],
    op: &'static str,
    act: providers::Act,
) -> Plant {
    Plant { name, what, caught_by, ranks: 1, kind: Kind::Around(op, act) }
}

impl Plant {
    /// The fault of a name.
    pub fn named(name: &str) -> Option<&'static Plant> {
        PLANTS.iter().find(|p| p.name == name)
    }

    /// Adds it to the hooks of a rank, outermost.
    pub(super) fn put(&self, hooks: &mut Hooks, rank: usize, ranks: usize) -> Result<(), String> {
        let added = match self.kind {
            Kind::Around(op, act) => {
                let provider = providers::Around { op, act, rank, ranks };
                hooks.add_object(OWNER, ProviderObject::new(provider))
            }
            Kind::Pass => hooks.add_object(OWNER, PassObject::new(Careless)),
            Kind::Spans => hooks.add_object(OWNER, SpansObject::new(OverMarks)),
            Kind::Store => hooks.add_object(OWNER, stale::store()),
        };
        added.map_err(|e| e.to_string())
    }
}

/// Puts a step on a second stream that nothing waits for.
struct Careless;
impl Pass for Careless {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("careless".into())
    }
    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        if let Some(step) = program.steps.iter_mut().find(|s| s.op.as_str() == "dense") {
            step.stream = 1;
        }
        Ok(())
    }
}

/// One chunk, whatever is asked for.
struct OverMarks;
impl Spans for OverMarks {
    fn spans(&self, facts: &SpanFacts<'_>, chunks: &mut List<SpanChoice>) -> Result<(), OpError> {
        if !facts.marks.is_empty() {
            chunks.clear();
            let most = facts.most.max(1);
            let end = facts.begin + facts.tokens;
            let starts = (facts.begin..end).step_by(most as usize);
            chunks.extend(starts.map(|start| SpanChoice { start, end: (start + most).min(end) }));
        }
        Ok(())
    }
}
