//! Weights put together of segments: what a launch must know of their tables.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use plugfold_abi::Segment;

use crate::error::CudaError;
use crate::machine::Machine;

/// Segments that are multiplied in one go: part numbers of each matrix, whose results do not add to one another's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wave {
    /// First part.
    pub part: u32,
    /// How many.
    pub parts: u32,
    /// Most stored inputs and outputs of a trellis.
    pub k: u32,
    /// As `k`.
    pub n: u32,
    /// Most outputs of panels.
    pub panels: u32,
    /// Whether there are trellises, panels of bf16, panels of f32.
    pub kinds: [bool; 3],
    /// The trellis, where the weight is one matrix and the wave one segment: it goes along with launches.
    pub only: Option<Segment>,
}

/// A table that was read.
#[derive(Debug)]
pub struct Table {
    /// Device address of each matrix's first segment's place, one more than there are matrices.
    pub first: u64,
    /// In the order in which they run.
    pub waves: Vec<Wave>,
}

/// Tables by their address. A weight lives as long as the engine, so a table is read once.
///
/// Beside them, words in which the blocks of a launch hand numbers over to one another.
#[derive(Default)]
pub struct Tables {
    known: Mutex<HashMap<u64, Arc<Table>>>,
    /// Address and number of the words.
    handed: Mutex<(u64, usize)>,
}

/// What a weight's table and data must fit.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Outputs of a matrix.
    pub n: u32,
    /// Inputs of a matrix.
    pub k: u32,
    /// Matrices.
    pub count: u32,
    /// Rows of the table.
    pub rows: u32,
    /// Lines of the data.
    pub lines: u32,
}

impl Tables {
    /// The table at an address, read and checked when it is first asked for.
    ///
    /// # Errors
    /// A text that says what is wrong with it, or what the machine says.
    pub fn get(&self, machine: &dyn Machine, address: u64, shape: Shape) -> Result<Arc<Table>, String> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.get(&address) {
            return Ok(found.clone());
        }
        let mut words = vec![0u32; shape.rows as usize * Segment::WORDS];
        let said = |e: CudaError| e.to_string();
        machine.download(address, bytemuck::cast_slice_mut(&mut words)).map_err(said)?;
        let segments: Vec<Segment> = words.as_chunks().0.iter().map(segment).collect();
        let matrices = matrices(&segments, shape)?;
        let mut first = Vec::with_capacity(matrices.len() + 1);
        first.push(0u32);
        for m in &matrices {
            first.push(first[first.len() - 1] + m.len() as u32);
        }
        let address_of_first = machine.keep(bytemuck::cast_slice(&first)).map_err(said)?;
        let table = Arc::new(Table { first: address_of_first, waves: waves(&matrices) });
        known.insert(address, table.clone());
        Ok(table)
    }

    /// At least `count` words of 64 bits that are 0, and 0 again when the launch that uses them has ended.
    ///
    /// Launches follow one another, so all share them. They move when more are wanted; the old ones stay, for launches that
    /// were captured.
    ///
    /// # Errors
    /// What the machine says.
    pub fn handed(&self, machine: &dyn Machine, count: usize) -> Result<u64, CudaError> {
        let mut handed = self.handed.lock().unwrap_or_else(PoisonError::into_inner);
        if handed.1 < count {
            let enough = count.next_power_of_two().max(1024);
            *handed = (machine.keep(&vec![0; enough * 8])?, enough);
        }
        Ok(handed.0)
    }
}

fn segment(words: &[u32; Segment::WORDS]) -> Segment {
    let [
        matrix,
        output,
        outputs,
        input,
        inputs,
        lead,
        skip,
        kind,
        k,
        n,
        halves,
        codebook,
        data,
        suh,
        svh,
        bias,
    ] = *words;
    Segment {
        matrix,
        output,
        outputs,
        input,
        inputs,
        lead,
        skip,
        kind,
        k,
        n,
        halves,
        codebook,
        data,
        suh,
        svh,
        bias,
    }
}

/// The fields of a segment, in order.
pub fn words(s: &Segment) -> [u32; Segment::WORDS] {
    let at = [s.matrix, s.output, s.outputs, s.input, s.inputs, s.lead, s.skip, s.kind];
    let stored = [s.k, s.n, s.halves, s.codebook, s.data, s.suh, s.svh, s.bias];
    std::array::from_fn(|i| if i < 8 { at[i] } else { stored[i - 8] })
}

/// The segments of each matrix. They must cover it once and lie inside the data: kernels trust them.
fn matrices(segments: &[Segment], shape: Shape) -> Result<Vec<Vec<Segment>>, String> {
    let mut found = vec![Vec::new(); shape.count as usize];
    let mut last = 0;
    for s in segments {
        if s.matrix < last || s.matrix >= shape.count {
            return Err(format!(
                "segments of matrix {} after those of {last}, there are {}",
                s.matrix, shape.count
            ));
        }
        last = s.matrix;
        check(s, shape.lines)?;
        found[s.matrix as usize].push(*s);
    }
    for (m, segments) in found.iter().enumerate() {
        let (mut outputs, mut end, mut inputs) = (0, 0, shape.k);
        let covered = segments.iter().all(|s| {
            if inputs == shape.k && s.input == 0 {
                (outputs, end, inputs) = (end, s.output.saturating_add(s.outputs), 0);
            }
            let fits = s.output == outputs
                && s.output.saturating_add(s.outputs) == end
                && s.outputs > 0
                && s.input == inputs
                && s.inputs > 0;
            inputs = inputs.saturating_add(s.inputs);
            fits
        });
        if !covered || end != shape.n || inputs != shape.k {
            return Err(format!("the segments of matrix {m} do not cover [{}, {}] once", shape.n, shape.k));
        }
    }
    Ok(found)
}

fn check(s: &Segment, lines: u32) -> Result<(), String> {
    if s.lead.saturating_add(s.inputs) > s.k || s.skip.saturating_add(s.outputs) > s.n {
        return Err(format!("a segment uses more than its stored [{}, {}]: {s:?}", s.n, s.k));
    }
    let (k, n) = (u64::from(s.k), u64::from(s.n));
    let inside = |line: u32, bytes: u64| {
        u64::from(line) * Segment::LINE as u64 + bytes <= u64::from(lines) * Segment::LINE as u64
    };
    let there = match s.kind {
        Segment::EXL3 => {
            let whole = matches!(s.halves, 2..=16) && s.halves.is_multiple_of(2);
            let half = matches!(s.halves, 3 | 5 | 7) && s.codebook == 2;
            if !(whole || half) || s.codebook > 2 || k % 128 != 0 || n % 128 != 0 {
                return Err(format!("no such rate, codebook or size: {s:?}"));
            }
            inside(s.data, k / 16 * (n / 16) * 16 * u64::from(s.halves))
                && inside(s.suh, 2 * k)
                && inside(s.svh, 2 * n)
                && (s.bias == Segment::NONE || inside(s.bias, 4 * n))
        }
        Segment::BF16 | Segment::F32 => {
            if (s.lead, s.skip, s.inputs, s.outputs) != (0, 0, s.k, s.n) {
                return Err(format!("panels are used whole, not as in {s:?}"));
            }
            if !s.input.is_multiple_of(4) {
                return Err(format!("panels must start at an input that is a multiple of 4: {s:?}"));
            }
            inside(s.data, n.div_ceil(16) * 16 * k * if s.kind == Segment::BF16 { 2 } else { 4 })
        }
        other => return Err(format!("segments of kind {other} do not exist")),
    };
    if there { Ok(()) } else { Err(format!("a segment lies outside the {lines} lines of data: {s:?}")) }
}

fn waves(matrices: &[Vec<Segment>]) -> Vec<Wave> {
    let most = matrices.iter().map(Vec::len).max().unwrap_or(0);
    let mut waves: Vec<Wave> = Vec::new();
    // A part that adds in any matrix has a wave of its own: it comes after the parts that it adds to.
    let mut open = false;
    for part in 0..most {
        let here = || matrices.iter().filter_map(move |m| m.get(part));
        let adds = here().any(|s| s.input > 0);
        if adds || !open {
            waves.push(Wave { part: part as u32, ..Wave::default() });
        }
        open = !adds;
        if let Some(wave) = waves.last_mut() {
            wave.parts += 1;
            for s in here() {
                wave.kinds[s.kind as usize] = true;
                wave.only =
                    Some(*s).filter(|s| s.kind == Segment::EXL3 && matrices.len() == 1 && wave.parts == 1);
                if s.kind == Segment::EXL3 {
                    (wave.k, wave.n) = (wave.k.max(s.k), wave.n.max(s.n));
                } else {
                    wave.panels = wave.panels.max(s.n);
                }
            }
        }
    }
    waves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trellis(matrix: u32, output: u32, input: u32) -> Segment {
        Segment {
            matrix,
            output,
            outputs: 128,
            input,
            inputs: 128,
            lead: 0,
            skip: 0,
            kind: Segment::EXL3,
            k: 128,
            n: 128,
            halves: 8,
            codebook: 2,
            data: 0,
            suh: 0,
            svh: 0,
            bias: Segment::NONE,
        }
    }

    const SHAPE: Shape = Shape { n: 256, k: 256, count: 2, rows: 8, lines: 128 };

    #[test]
    fn words_of_a_segment_are_read_back() {
        let all = Segment { lead: 3, skip: 5, svh: 7, suh: 9, data: 11, ..trellis(1, 2, 4) };
        assert_eq!(segment(&words(&all)), all);
    }

    fn grid(matrix: u32) -> [Segment; 4] {
        [trellis(matrix, 0, 0), trellis(matrix, 0, 128), trellis(matrix, 128, 0), trellis(matrix, 128, 128)]
    }

    #[test]
    fn parts_that_add_run_after_what_they_add_to() {
        let all = [grid(0), grid(1)].concat();
        let found = waves(&matrices(&all, SHAPE).unwrap());
        assert_eq!(
            found.iter().map(|w| (w.part, w.parts)).collect::<Vec<_>>(),
            [(0, 1), (1, 1), (2, 1), (3, 1)]
        );
        let wide = Shape { k: 128, count: 1, ..SHAPE };
        let found = waves(&matrices(&[trellis(0, 0, 0), trellis(0, 128, 0)], wide).unwrap());
        assert_eq!(found.iter().map(|w| (w.part, w.parts, w.k, w.n)).collect::<Vec<_>>(), [(0, 2, 128, 128)]);
        assert_eq!(found[0].only, None);
    }

    #[test]
    fn one_segment_of_one_matrix_goes_along_with_launches() {
        let only = |segments: &[Segment], shape| -> Vec<Option<Segment>> {
            waves(&matrices(segments, shape).unwrap()).iter().map(|w| w.only).collect()
        };
        let one = Shape { n: 128, k: 256, count: 1, ..SHAPE };
        let parts = [trellis(0, 0, 0), trellis(0, 0, 128)];
        assert_eq!(only(&parts, one), parts.map(Some));
        let stack = Shape { n: 128, k: 128, count: 2, ..SHAPE };
        assert_eq!(only(&[trellis(0, 0, 0), trellis(1, 0, 0)], stack), [None]);
    }

    #[test]
    fn tables_that_would_lead_a_kernel_astray_are_refused() {
        let all = [grid(0), grid(1)].concat();
        let with = |change: &dyn Fn(&mut Segment)| {
            let mut bad = all.clone();
            change(&mut bad[2]);
            matrices(&bad, SHAPE).unwrap_err()
        };
        assert!(with(&|s| s.output = 64).contains("matrix 0 do not cover [256, 256] once"));
        assert!(with(&|s| s.matrix = 7).contains("matrix 7"));
        assert!(with(&|s| s.data = 1 << 20).contains("outside the 128 lines"));
        assert!(with(&|s| s.inputs = 129).contains("more than its stored"));
        assert!(with(&|s| s.halves = 9).contains("no such rate"));
        assert!(with(&|s| s.kind = 9).contains("kind 9"));
        assert!(matrices(&all[..7], SHAPE).unwrap_err().contains("matrix 1"));
    }
}
