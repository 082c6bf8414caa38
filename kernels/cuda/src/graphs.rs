//! Recorded launches: a round's kernels are sent to the device in one go.
//!
//! A recording holds the grids and arguments of its launches. Whatever changes from round to round is read by kernels from the
//! round table, which keeps its address, except for what decides grids and the choice of kernels: that is in the key.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use plugfold_abi::points::Graphs;
use plugfold_abi::{OpError, RoundTable};

use crate::machine::{Machine, round};

/// The recordings of a machine.
pub(crate) struct Recordings(pub Arc<dyn Machine>);

/// Up to where the longest sequence of a round reaches, rounded so that few keys occur: grids over positions are made for it.
pub(crate) fn reach(table: &RoundTable<'_>) -> usize {
    let ends = table.seq_start.iter().zip(table.seq_rows.iter()).map(|(start, rows)| start + rows);
    (ends.max().unwrap_or(0) as usize).next_power_of_two()
}

impl Graphs for Recordings {
    fn key(&self, table: &RoundTable<'_>) -> Result<u64, OpError> {
        let mut hash = DefaultHasher::new();
        // Places the table, so that a table that outgrows its memory counts among what has moved.
        round(&*self.0, table)?.hash(&mut hash);
        self.0.epoch().hash(&mut hash);
        (table.rows(), table.out_rows.len(), table.embeds.is_empty(), reach(table)).hash(&mut hash);
        (&table.seq_first[..], &table.seq_rows[..]).hash(&mut hash);
        Ok(hash.finish())
    }

    fn begin(&self, table: &RoundTable<'_>) -> Result<(), OpError> {
        round(&*self.0, table)?;
        Ok(self.0.record()?)
    }

    fn end(&self) -> Result<u64, OpError> {
        Ok(self.0.recorded()?)
    }

    fn launch(&self, recording: u64, table: &RoundTable<'_>) -> Result<(), OpError> {
        round(&*self.0, table)?;
        Ok(self.0.replay(recording)?)
    }

    fn forget(&self, recording: u64) -> Result<(), OpError> {
        self.0.forget_recording(recording);
        Ok(())
    }
}
