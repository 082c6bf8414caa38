//! Tags: which arithmetic made a state. Computed from what the prefill programs resolve to, never declared.

use plugfold_abi::{KnobValue, Phase};

use super::programs::{Key, Kind};
use super::{Core, LoadError, ResolveError};
use crate::config::{Attention, Indexer, Mlp};
use crate::program::Described;
use crate::program::common_grid;

/// The arithmetic of a request's prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// A number over the names of all arithmetics: states of different numbers never mix.
    pub id: u64,
    /// Positions at which states may be kept: multiples of this.
    pub grid: u32,
    /// Whether windows compute the same bits, so that a reply's state may be kept, too.
    pub window: bool,
}

impl Core {
    /// What each step of a phase resolves to, for whoever asks who runs what: the largest window, a full chunk, a draft.
    /// A model without a draft head has no draft phase.
    ///
    /// # Errors
    /// A program that does not resolve.
    pub fn described(&mut self, phase: Phase) -> Result<Vec<Described>, LoadError> {
        let (kind, rows) = match phase {
            Phase::Draft if !self.has_mtp => return Ok(Vec::new()),
            Phase::Draft => (Kind::Mtp, 1),
            Phase::Window => (Kind::Forward, self.capacity.window_rows as u32),
            Phase::Prefill => (Kind::Forward, 64),
        };
        let knobs = self.hooks.knobs.defaults.clone();
        let mut all = Vec::new();
        for select in [false, true] {
            let mut shape = Key { select, ..Key::new(kind, phase, rows, 1, 1) }.shape();
            self.stages.words(&self.hooks, &mut shape, (&[rows][..], &[0][..], &[][..]), &knobs)?;
            let steps = self.program(&shape)?.describe();
            // Long sequences run the same steps but for those that choose keys.
            let new: Vec<Described> =
                steps.into_iter().filter(|step| !select || !all.contains(step)).collect();
            all.extend(new);
        }
        Ok(all)
    }

    /// What kind of layer one is, in words; empty outside of the layers.
    pub fn layer_kind(&self, layer: u32) -> String {
        let Some(kind) = self.config.layers.get(layer as usize) else { return "outside".into() };
        let attention = match kind.attention {
            Attention::Kda => "kda",
            Attention::Mla { indexer: Indexer::Own } => "mla",
            Attention::Mla { indexer: Indexer::Shared } => "mla, shared index",
        };
        let mlp = match kind.mlp {
            Mlp::Dense => "dense",
            Mlp::Sparse => "experts",
        };
        format!("{attention} + {mlp}")
    }

    /// Arithmetic names of a phase for these knobs, sorted, and the grid of its states.
    ///
    /// # Errors
    /// A program that does not resolve.
    pub fn bits(
        &mut self,
        phase: Phase,
        rows: u32,
        knobs: &[KnobValue],
    ) -> Result<(Vec<String>, u32), ResolveError> {
        let (mut all, mut grid) = (Vec::new(), 1);
        for select in [false, true] {
            let mut shape = Key { select, ..Key::new(Kind::Forward, phase, rows, 1, 1) }.shape();
            let facts = (&[rows][..], &[0][..], &[][..]);
            self.stages.words(&self.hooks, &mut shape, facts, knobs)?;
            let program = self.program(&shape)?;
            all.extend(program.bits());
            grid = common_grid(grid, program.grid());
        }
        all.sort_unstable();
        all.dedup();
        Ok((all, grid))
    }

    /// The tag of requests with these knobs.
    ///
    /// # Errors
    /// A program that does not resolve, or an arithmetic that depends on the row count: one row, an odd number and a full
    /// chunk are compared.
    pub fn tag(&mut self, knobs: &[KnobValue]) -> Result<Tag, LoadError> {
        let key = self.hooks.knobs.of_bits(knobs);
        if let Some(tag) = self.tags.get(&key) {
            return Ok(*tag);
        }
        let (one, grid) = self.bits(Phase::Prefill, 1, knobs)?;
        for rows in [7, 512] {
            let (other, _) = self.bits(Phase::Prefill, rows, knobs)?;
            if other != one {
                return Err(LoadError::Size(format!(
                    "the arithmetic of prefill depends on the row count: {one:?} at 1 row, {other:?} at {rows}"
                )));
            }
        }
        let (window, _) = self.bits(Phase::Window, 1, knobs)?;
        let version = plugfold_kernels::cpu::VERSION;
        // Equal arithmetic over other weights is another state. Untouched ones add nothing.
        let weights = Some(&*self.changed).filter(|w| !w.is_empty());
        let names = one.iter().map(String::as_str).chain([version]).chain(weights);
        let id = names
            .flat_map(|s| s.bytes().chain([0]))
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
        let tag = Tag { id, grid, window: window == one };
        self.tags.insert(key, tag);
        Ok(tag)
    }
}
