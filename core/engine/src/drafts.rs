//! Drafters: they propose, the model decides. Nothing here can change a reply.

/// Proposes tokens that may follow. Runs on every rank with the same inputs and must give the same answers there:
/// no clocks, no local settings.
pub trait Drafter: Send {
    /// Up to `budget` tokens that may follow `ids` (prompt, reply so far, and the pending token last).
    fn propose(&mut self, slot: usize, ids: &[u32], budget: usize) -> Vec<u32>;
    /// A sequence was committed up to `length` tokens; what was drafted beyond is void.
    fn forget(&mut self, slot: usize, length: usize);
}
