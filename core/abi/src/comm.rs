//! Device collectives: exchanges that are calls of a program. Control messages (plans, prompts) do not use them.

use crate::OpError;

/// All ranks of one engine. Every rank makes the same calls in the same order with the same sizes.
pub trait Comm: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;
    /// How many ranks there are.
    fn ranks(&self) -> usize;
    /// Every rank's `mine`, in rank order, into `all` (`ranks * mine.len()` bytes).
    ///
    /// # Errors
    /// When a rank is gone or sent another size; names the rank.
    fn all_gather(&self, mine: &[u8], all: &mut [u8]) -> Result<(), OpError>;
}
