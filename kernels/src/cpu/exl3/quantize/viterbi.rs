//! The tile encoder: the state sequence around the ring that fits 256 targets best.
//!
//! A dynamic program over the trellis. The node in front of a position is what survives of the state before it; a
//! step extends every node by all choices of new bits and keeps the cheapest way into each node behind the position.
//! Only costs are kept: on the way back, the choice at the one node of each position is found again by looking at
//! its few predecessors, which costs nothing and frees the forward loop of bookkeeping.
//!
//! The ring is closed in two sweeps: the first starts half way round with every state allowed and serves to learn
//! which node crosses the seam in front of position 0; the second starts and ends in that node.

use rayon::prelude::*;

use crate::cpu::exl3::codebook::Codebook;
use crate::cpu::exl3::error::Error;
use crate::cpu::exl3::lanes::{Kernel, LANES, Lanes, Path, dispatch};
use crate::cpu::exl3::rate::{POSITIONS, Rate};

/// Positions on either side of the seam that the first sweep runs through.
const SWEEP: usize = POSITIONS / 2;
/// Out-nodes that the inner loop handles at once.
const NODES: usize = 4 * LANES;

/// Who encodes tiles: [`TileEncoder`] here, or a device. The states of a tile depend on its targets only, and are the same
/// whoever finds them.
pub trait Tiles: Send + Sync {
    /// Codebook and rate of the tiles.
    fn kind(&self) -> (Codebook, Rate);

    /// Finds states for each tile of `targets`, given in ring order.
    ///
    /// # Errors
    /// What a device says.
    fn encode(&self, targets: &[[f32; POSITIONS]]) -> Result<Vec<[u16; POSITIONS]>, Error>;
}

/// Encodes tiles for one codebook and rate.
#[derive(Debug)]
pub struct TileEncoder {
    codebook: Codebook,
    rate: Rate,
    /// Code values of all states, the states of one step beside one another: entry
    /// `(node / NODES, candidate, node % NODES)`, for steps that end in front of an even and of an odd position.
    tables: [Vec<f32>; 2],
    codes: &'static [f32],
}

impl Tiles for TileEncoder {
    fn kind(&self) -> (Codebook, Rate) {
        (self.codebook, self.rate)
    }

    fn encode(&self, targets: &[[f32; POSITIONS]]) -> Result<Vec<[u16; POSITIONS]>, Error> {
        Ok(self.encode(targets))
    }
}

impl TileEncoder {
    /// An encoder for this codebook and rate.
    ///
    /// # Errors
    /// If the codebook does not have the rate.
    pub fn new(codebook: Codebook, rate: Rate) -> Result<Self, Error> {
        if !rate.is_whole() && codebook != Codebook::Mul1 {
            return Err(Error::Rate { codebook: codebook.name(), bits: rate.to_string() });
        }
        let codes = codebook.table();
        let tables = [0, 1].map(|parity| {
            let step = rate.step(parity);
            let nodes = 1 << (16 - step);
            let mut table = Vec::with_capacity(codes.len());
            for block in (0..nodes).step_by(NODES) {
                for candidate in 0..1 << step {
                    table.extend_from_slice(&codes[candidate * nodes + block..][..NODES]);
                }
            }
            table
        });
        Ok(Self { codebook, rate, tables, codes })
    }

    /// Finds states for each tile of `targets`, given in ring order, with the sum of squared errors that they leave.
    ///
    /// The states of a tile depend on its targets only. Work is spread over the current rayon pool.
    pub fn encode(&self, targets: &[[f32; POSITIONS]]) -> Vec<[u16; POSITIONS]> {
        targets
            .par_iter()
            .map_init(|| Workspace::new(self.rate), |space, targets| self.encode_tile(space, targets))
            .collect()
    }

    /// The code value of a state.
    pub fn value(&self, state: u16) -> f32 {
        self.codes[usize::from(state)]
    }

    fn encode_tile(&self, space: &mut Workspace, targets: &[f32; POSITIONS]) -> [u16; POSITIONS] {
        // No way back leads through the part in front of the seam: two places for its costs suffice.
        let slot =
            |position: usize| if position < POSITIONS { SWEEP + position % 2 } else { position % POSITIONS };
        space.costs(slot(POSITIONS - SWEEP)).fill(0.0);
        for position in POSITIONS - SWEEP..POSITIONS + SWEEP {
            self.step(space, targets, position % POSITIONS, slot(position), slot(position + 1));
        }
        let end = cheapest(space.costs(SWEEP));
        let seam = self.trace(space, targets, SWEEP - 1, end, |_, _| ());
        let costs = space.costs(0);
        costs.fill(f32::INFINITY);
        costs[seam] = 0.0;
        for position in 0..POSITIONS - 1 {
            self.step(space, targets, position, position, position + 1);
        }
        let mut states = [0; POSITIONS];
        let start =
            self.trace(space, targets, POSITIONS - 1, seam, |position, state| states[position] = state);
        debug_assert_eq!(start, seam);
        states
    }

    /// Walks back from node `node` behind position `last` to position 0; returns the node in front of it.
    fn trace(
        &self,
        space: &mut Workspace,
        targets: &[f32; POSITIONS],
        last: usize,
        mut node: usize,
        mut visit: impl FnMut(usize, u16),
    ) -> usize {
        for position in (0..=last).rev() {
            let (step, next) = (self.rate.step(position), self.rate.step(position + 1));
            let costs = space.costs(position);
            let mut best = (f32::INFINITY, node);
            for candidate in 0..1 << next {
                let state = candidate << (16 - next) | node;
                let error = self.codes[state] - targets[position];
                let cost = error.mul_add(error, costs[state >> step]);
                if cost < best.0 {
                    best = (cost, state);
                }
            }
            visit(position, best.1 as u16);
            node = best.1 >> step;
        }
        node
    }

    /// Takes the step of `position` from the costs in place `from` to those in place `to`.
    fn step(
        &self,
        space: &mut Workspace,
        targets: &[f32; POSITIONS],
        position: usize,
        from: usize,
        to: usize,
    ) {
        let next = position + 1;
        let table = &self.tables[next % 2];
        let (from, to) = space.pair(from, to);
        let target = targets[position];
        macro_rules! run {
            ($($from:literal => $to:literal),*) => {
                match (self.rate.step(position), self.rate.step(next)) {
                    $(($from, $to) => dispatch(Path::Simd, Step::<$from, $to> { table, target, from, to }),)*
                    other => unreachable!("no rate has steps {other:?}"),
                }
            };
        }
        run!(1 => 1, 2 => 2, 3 => 3, 4 => 4, 5 => 5, 6 => 6, 7 => 7, 8 => 8, 1 => 2, 2 => 1, 2 => 3, 3 => 2, 3 => 4, 4 => 3);
    }
}

fn cheapest(costs: &[f32]) -> usize {
    costs
        .iter()
        .enumerate()
        .fold((0, f32::INFINITY), |best, (i, &c)| if c < best.1 { (i, c) } else { best })
        .0
}

/// The costs of the nodes in front of each position.
struct Workspace {
    /// Room for the nodes of the smaller step.
    nodes: usize,
    costs: Vec<f32>,
}

impl Workspace {
    fn new(rate: Rate) -> Self {
        let nodes = 1 << (16 - rate.step(0));
        Self { nodes, costs: vec![0.0; POSITIONS * nodes] }
    }

    fn costs(&mut self, position: usize) -> &mut [f32] {
        &mut self.costs[position * self.nodes..][..self.nodes]
    }

    /// The costs in front of two positions.
    fn pair(&mut self, from: usize, to: usize) -> (&[f32], &mut [f32]) {
        let (low, high) = self.costs.split_at_mut(self.nodes * from.max(to));
        if from < to {
            (&low[self.nodes * from..][..self.nodes], &mut high[..self.nodes])
        } else {
            (&high[..self.nodes], &mut low[self.nodes * to..][..self.nodes])
        }
    }
}

/// One step: `IN` new bits of the position, `OUT` of the next.
struct Step<'a, const IN: usize, const OUT: usize> {
    table: &'a [f32],
    target: f32,
    from: &'a [f32],
    to: &'a mut [f32],
}

impl<const IN: usize, const OUT: usize> Kernel for Step<'_, IN, OUT> {
    fn run_scalar(self) {
        self.run();
    }

    #[inline(always)]
    fn run(self) {
        let Self { table, target, from, to } = self;
        let stride = 1 << (16 - OUT - IN);
        let blocks = table.chunks_exact(NODES << OUT).zip(to.as_chunks_mut::<NODES>().0);
        for (block, (table, to)) in blocks.enumerate() {
            let first = (block * NODES) >> IN;
            let mut best = [Lanes::splat(f32::INFINITY); NODES / LANES];
            for (candidate, values) in table.as_chunks::<NODES>().0.iter().enumerate() {
                let costs = &from[candidate * stride + first..][..const { shared(IN) }];
                for (half, best) in best.iter_mut().enumerate() {
                    *best = Lanes(core::array::from_fn(|i| {
                        let error = values[LANES * half + i] - target;
                        let cost = error.mul_add(error, costs[(LANES * half + i) >> IN]);
                        if cost < best.0[i] { cost } else { best.0[i] }
                    }));
                }
            }
            for (to, best) in to.as_chunks_mut::<LANES>().0.iter_mut().zip(best) {
                *to = best.0;
            }
        }
    }
}

/// Different predecessors that [`NODES`] neighbouring states have.
const fn shared(step: usize) -> usize {
    if NODES >> step == 0 { 1 } else { NODES >> step }
}
