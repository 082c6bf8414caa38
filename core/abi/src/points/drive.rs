//! The course of rounds: how a rank waits for the next one, and how one is run.

use crate::TextBuf;

crate::interface! {
    /// Tells a rank that waits that there is something to do.
    "bell", 0: Bell, BellObject, BellTable {
        /// Sleeps until something arrives of which it has not told in this call, at most so many seconds (infinite: as long
        /// as it takes). Whether something has.
        fn sleep(&self, seconds: f64) -> bool;
        /// Rank 0: requests that have arrived and have no slot. A follower: 1 where a plan has arrived.
        fn arrived(&self) -> u32;
    }
}

crate::interface! {
    /// How a rank waits; chosen by name (the setting `plan_wait`). An error ends the engine.
    "plan-wait", 0: PlanWait, PlanWaitObject, PlanWaitTable {
        /// Name.
        fn name(&self) -> TextBuf;
        /// Rank 0 has nothing to do. It looks again when this returns, and calls again where nothing has arrived.
        fn idle(&self, bell: &BellObject) -> () = bell.sleep(f64::INFINITY).map(|_| ());
        /// Rank 0 is about to plan with requests that have no slot, while so many sequences run: it may wait for more.
        fn gather(&self, running: u32, bell: &BellObject) -> () = Ok(());
        /// A follower waits for a plan. It looks when this returns, and sleeps in the kernel where none has arrived.
        fn follow(&self, bell: &BellObject) -> () = bell.sleep(f64::INFINITY).map(|_| ());
    }
}

/// A round that is to run. The same on every rank.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundFacts {
    /// Its number.
    pub round: u64,
    /// Sequences that begin.
    pub admissions: u32,
    /// Prompt pieces.
    pub pieces: u32,
    /// Sequences that decode.
    pub decoding: u32,
}

crate::interface! {
    /// The parts of one round. Each rank has to take the same ones in the same order.
    "round-parts", 0: RoundParts, RoundPartsObject, RoundPartsTable {
        /// Cancels and admissions; does nothing the second time.
        fn admit(&self) -> ();
        /// Prompt pieces, after [`RoundParts::admit`]; does nothing the second time.
        fn prefill(&self) -> ();
        /// One window over those of the plan's sequences that still decode; how many are left. May be called again: what
        /// several windows give is handed out together.
        fn window(&self) -> u32;
    }
}

crate::interface! {
    /// Runs rounds; chosen by name (the setting `round_driver`). Without one a round is its parts, each once. Replicated.
    /// An error ends the engine on all ranks: nobody can know how far the others are.
    "round-driver", 0: RoundDriver, RoundDriverObject, RoundDriverTable {
        /// Name.
        fn name(&self) -> TextBuf;
        /// Runs one round. Parts that it does not take are taken after it.
        fn round(&self, facts: &RoundFacts, parts: &RoundPartsObject) -> ();
    }
}
