//! The encoder of EXL3 on a device: the states that the CPU's encoder finds, bit for bit.

use std::sync::{Arc, Mutex, PoisonError};

use plugfold_kernels::cpu::exl3::quantize::Tiles;
use plugfold_kernels::cpu::exl3::{Codebook, Error, POSITIONS, Rate};

use crate::error::CudaError;
use crate::kernel::{Arg, Kernel, Launch, kernel};
use crate::machine::Machine;

/// Threads of a block, and states of each.
const THREADS: usize = 1024;
const STATES: usize = 65_536 / THREADS;
/// Nodes that a thread finishes at once: `GROUP` of the source.
const GROUP: usize = 8;
/// Tiles whose targets and states are on the device at a time.
const BATCH: usize = 8192;

/// Encodes tiles of one codebook and rate.
pub struct TileQuantizer {
    machine: Arc<dyn Machine>,
    codebook: Codebook,
    rate: Rate,
    kernel: &'static Kernel,
    /// Blocks that run at once.
    blocks: usize,
    /// Memory for one batch at a time.
    memory: Mutex<Memory>,
}

/// Addresses on the device.
struct Memory {
    /// Code values by state, and in the order of the threads.
    codes: u64,
    mine: u64,
    targets: u64,
    states: u64,
    /// The costs in front of each position, of a tile a block.
    history: u64,
}

/// Nodes in front of an even position, the most that there are.
const fn nodes(halves: usize) -> usize {
    1 << (16 - halves / 2)
}

/// Copies of a tile's costs in shared memory: `COPIES` of the source.
const fn copies(halves: usize) -> usize {
    match nodes(halves) {
        ..=8192 => 2,
        8193..=16384 => 1,
        _ => 0,
    }
}

/// The states of the threads, eight at a time, thread by thread: `mine` of the source.
fn order(halves: usize) -> Vec<u16> {
    let many = halves.div_ceil(2);
    let nodes = 1 << (16 - many);
    let share = if nodes < THREADS { THREADS / nodes } else { 1 };
    let per = nodes * share / THREADS;
    let choices = (1 << many) / share;
    let at_once = if copies(halves) == 1 || per < GROUP { per } else { GROUP };
    let mut order = Vec::with_capacity(THREADS * STATES);
    for eight in 0..STATES / 8 {
        for thread in 0..THREADS {
            for m in 8 * eight..8 * eight + 8 {
                let (group, rest) = (m / (choices * at_once), m % (choices * at_once));
                let choice = rest / at_once * share + thread % share;
                let node = thread / share * per + group * at_once + rest % at_once;
                order.push((choice << (16 - many) | node) as u16);
            }
        }
    }
    order
}

impl TileQuantizer {
    /// An encoder on a machine that runs `blocks` blocks at once: as many as it has multiprocessors.
    ///
    /// # Errors
    /// A rate that the codebook lacks, or memory that is used up.
    pub fn new(
        machine: Arc<dyn Machine>,
        codebook: Codebook,
        rate: Rate,
        blocks: usize,
    ) -> Result<Self, Error> {
        if !rate.is_whole() && codebook != Codebook::Mul1 {
            return Err(Error::Rate { codebook: codebook.name(), bits: rate.to_string() });
        }
        let halves = rate.halves();
        let name = format!("encode_{halves}");
        let kernel = kernel(&name).map_err(|e| told(&e))?;
        let table = codebook.table();
        let half = |state: u16| f16_bits(table[usize::from(state)]);
        let codes: Vec<u16> = (0..=u16::MAX).map(half).collect();
        let mine: Vec<u16> = order(halves).into_iter().map(half).collect();
        let blocks = blocks.max(1);
        let mut taken = Vec::new();
        let mut take = || -> Result<Memory, CudaError> {
            let mut allocate = |what: &str, bytes: usize| {
                let at = machine.allocate(what, bytes)?;
                taken.push(at);
                Ok::<u64, CudaError>(at)
            };
            let memory = Memory {
                codes: allocate("a codebook", 2 * codes.len())?,
                mine: allocate("a codebook", 2 * mine.len())?,
                targets: allocate("weights to encode", BATCH * size_of::<[f32; POSITIONS]>())?,
                states: allocate("encoded weights", BATCH * size_of::<[u16; POSITIONS]>())?,
                history: allocate("the encoder's costs", blocks * POSITIONS * nodes(halves) * 4)?,
            };
            machine.upload(memory.codes, bytemuck::cast_slice(&codes))?;
            machine.upload(memory.mine, bytemuck::cast_slice(&mine))?;
            Ok(memory)
        };
        match take() {
            Ok(memory) => Ok(Self { machine, codebook, rate, kernel, blocks, memory: Mutex::new(memory) }),
            Err(error) => {
                for at in taken {
                    machine.release(at);
                }
                Err(told(&error))
            }
        }
    }

    fn batch(
        &self,
        memory: &Memory,
        targets: &[[f32; POSITIONS]],
        states: &mut [[u16; POSITIONS]],
    ) -> Result<(), CudaError> {
        let halves = self.rate.halves();
        self.machine.upload(memory.targets, bytemuck::cast_slice(targets))?;
        self.machine.launch(&Launch {
            kernel: self.kernel,
            grid: [self.blocks.min(targets.len()) as u32, 1, 1],
            threads: THREADS as u32,
            shared: (copies(halves) * nodes(halves) * 4) as u32,
            args: &[
                Arg::Pointer(memory.targets),
                Arg::Pointer(memory.codes),
                Arg::Pointer(memory.mine),
                Arg::Pointer(memory.history),
                Arg::Pointer(memory.states),
                Arg::Word(targets.len() as u32),
            ],
        })?;
        self.machine.download(memory.states, bytemuck::cast_slice_mut(states))
    }
}

impl Drop for TileQuantizer {
    fn drop(&mut self) {
        let Memory { codes, mine, targets, states, history } =
            self.memory.get_mut().unwrap_or_else(PoisonError::into_inner);
        for at in [codes, mine, targets, states, history] {
            self.machine.release(*at);
        }
    }
}

impl Tiles for TileQuantizer {
    fn kind(&self) -> (Codebook, Rate) {
        (self.codebook, self.rate)
    }

    fn encode(&self, targets: &[[f32; POSITIONS]]) -> Result<Vec<[u16; POSITIONS]>, Error> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let mut states = vec![[0; POSITIONS]; targets.len()];
        for (targets, states) in targets.chunks(BATCH).zip(states.chunks_mut(BATCH)) {
            self.batch(&memory, targets, states).map_err(|e| told(&e))?;
        }
        Ok(states)
    }
}

fn told(error: &CudaError) -> Error {
    Error::Device(error.to_string())
}

/// Bits of the half that a code value is.
fn f16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let (sign, exponent, mantissa) = (bits >> 16 & 0x8000, bits >> 23 & 0xff, bits & 0x7f_ffff);
    if exponent == 0 {
        return sign as u16;
    }
    // Code values are normal halves or zero, so the lower bits of the mantissa are none.
    debug_assert!((113..143).contains(&exponent) && mantissa.trailing_zeros() >= 13 || mantissa == 0);
    (sign | (exponent - 112) << 10 | mantissa >> 13) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_one_place() {
        for rate in Rate::all() {
            let mut order = order(rate.halves());
            order.sort_unstable();
            assert!(order.iter().copied().eq(0..=u16::MAX), "{rate} bits");
        }
    }

    #[test]
    fn code_values_are_halves() {
        for codebook in Codebook::ALL {
            for &value in codebook.table() {
                assert_eq!(half::f16::from_bits(f16_bits(value)).to_f32().to_bits(), value.to_bits());
            }
        }
    }
}
