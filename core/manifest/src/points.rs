//! The hook points of the design, and the limits that plugins may raise.

/// How several plugins combine at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// All run in order, each given the result so far.
    Chain,
    /// All run in order on rank 0; the result travels.
    Planned,
    /// All run in order on every rank, without a clock.
    Replicated,
    /// Sees, never changes.
    Observer,
    /// One of several is chosen by its name.
    Chosen,
    /// Has a name of its own; two of one name refuse to start.
    Named,
}

impl Kind {
    /// Every kind, in the order of the page.
    pub const ALL: [Kind; 6] =
        [Kind::Chain, Kind::Planned, Kind::Replicated, Kind::Observer, Kind::Chosen, Kind::Named];

    /// Title on the page.
    pub fn title(self) -> &'static str {
        match self {
            Kind::Chain => "Chains",
            Kind::Planned => "Policies, planned on rank 0",
            Kind::Replicated => "Policies, replicated",
            Kind::Observer => "Observers",
            Kind::Chosen => "Chosen by name",
            Kind::Named => "Named",
        }
    }
}
/// A hook point other than an operation.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Name.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
}

const fn point(name: &'static str, kind: Kind) -> Point {
    Point { name, kind }
}

/// Every hook point of the design that is not an operation.
pub const POINTS: &[Point] = &[
    point("weight.source", Kind::Chain),
    point("limits", Kind::Chain),
    point("cache.layout", Kind::Chain),
    point("program", Kind::Chain),
    point("request.rewrite", Kind::Chain),
    point("request.check", Kind::Chain),
    point("request.prepare", Kind::Chain),
    point("request.gate", Kind::Chain),
    point("prompt", Kind::Chain),
    point("drafts", Kind::Chain),
    point("logits", Kind::Chain),
    point("stream", Kind::Chain),
    point("reply.repair", Kind::Chain),
    point("reply.parse", Kind::Chain),
    point("reply.finish", Kind::Chain),
    point("store", Kind::Chain),
    point("plan.place", Kind::Planned),
    point("plan.admit", Kind::Planned),
    point("plan.marks", Kind::Planned),
    point("plan.pieces", Kind::Planned),
    point("plan.emit", Kind::Planned),
    point("plan.spans", Kind::Replicated),
    point("draft", Kind::Replicated),
    point("capture", Kind::Replicated),
    point("boot", Kind::Observer),
    point("plan-made", Kind::Observer),
    point("launched", Kind::Observer),
    point("round-done", Kind::Observer),
    point("sequence.begun", Kind::Observer),
    point("sequence.absorbed", Kind::Observer),
    point("sequence.committed", Kind::Observer),
    point("sequence.rewound", Kind::Observer),
    point("sequence.saved", Kind::Observer),
    point("sequence.restored", Kind::Observer),
    point("sequence.spilled", Kind::Observer),
    point("sequence.ended", Kind::Observer),
    point("operation.begun", Kind::Observer),
    point("operation.done", Kind::Observer),
    point("request.begun", Kind::Observer),
    point("request.ended", Kind::Observer),
    point("thread.started", Kind::Observer),
    point("weight-builder", Kind::Chosen),
    point("prepared-store", Kind::Chosen),
    point("drafter", Kind::Chosen),
    point("transport", Kind::Chosen),
    point("plan-wait", Kind::Chosen),
    point("executor", Kind::Chosen),
    point("round-driver", Kind::Chosen),
    point("route", Kind::Named),
    point("subcommand", Kind::Named),
];

/// Limits that a plugin may raise, and that expressions of knobs may name.
pub const LIMITS: &[&str] = &[
    "context",
    "slots",
    "window_rows",
    "prefill_rows",
    "prefill_rows_max",
    "piece",
    "capacity",
    "pool_tokens",
    "end_ids",
];
