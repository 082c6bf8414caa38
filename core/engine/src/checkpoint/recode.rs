//! EXL3 layers under other names: cut or fused along their outputs, which needs no decoding.

use std::ops::Range;

use plugfold_kernels::cpu::exl3::BLOCK;
use safetensors::Dtype;

use super::Checkpoint;
use super::error::CheckpointError;
use super::inventory::Expected;
use super::layout::{Layout, Naming, Target};
use super::resolve::{Resolved, Source};
use super::spelling::{Spellings, Style};

/// Tensors that say something about a layer as a whole.
const SHARED: [&str; 5] = ["suh", "su", "mcg", "mul1", "scale"];

/// Some outputs of a stored layer, or all.
struct Share<'a> {
    /// Name of the module that they get.
    name: String,
    /// The stored module.
    module: &'a str,
    outputs: Range<usize>,
}

/// Adds the coded tensors, in order of the inventory.
pub(super) fn layout<'a>(
    tensors: &'a Resolved,
    spellings: &Spellings,
    naming: Naming,
    coded: &[(Expected, &'a Source)],
    layout: &mut Layout<'a>,
) -> Result<(), CheckpointError> {
    let checkpoint = &tensors.checkpoint;
    // Shares that are to be one layer, with its name; others are alone.
    let mut groups: Vec<(String, Vec<Share<'a>>)> = Vec::new();
    for (expected, source) in coded {
        let Some(exl3) = &source.exl3 else { continue };
        let all = spellings.of_tensor(expected);
        let module = |index: usize| all[index].module().unwrap_or(&all[index].tensor).to_owned();
        let fused = all.iter().position(|s| naming == Naming::Exl3 && s.style == Style::FusedProjection);
        let outputs = exl3.row()..exl3.row() + expected.shape[0];
        let share = Share { name: module(0), module: &exl3.module, outputs };
        let name = module(fused.unwrap_or(0));
        match groups.last_mut() {
            Some((before, shares)) if fused.is_some() && *before == name => shares.push(share),
            _ => groups.push((name, vec![share])),
        }
    }
    for (name, shares) in groups {
        let stored = shares[0].module;
        let end = shares.last().map_or(0, |s| s.outputs.end);
        let neighbours = shares.windows(2).all(|w| w[0].outputs.end == w[1].outputs.start);
        if neighbours && shares.iter().all(|s| s.module == stored) {
            // One stored layer already, or a part of one.
            cut(checkpoint, stored, &name, shares[0].outputs.start..end, layout)?;
        } else if let Some(reason) = unlike(checkpoint, &shares) {
            layout.notes.push(format!("{name} stays in parts: {reason}"));
            for share in &shares {
                cut(checkpoint, share.module, &share.name, share.outputs.clone(), layout)?;
            }
        } else {
            fuse(checkpoint, &name, &shares, layout);
        }
    }
    Ok(())
}

/// Stored tensors of a module, by suffix.
fn stored<'a>(checkpoint: &'a Checkpoint, module: &str) -> Vec<(&'a str, &'a str)> {
    let prefix = format!("{module}.");
    let from = std::ops::Bound::Included(prefix.clone());
    let range = checkpoint.files.tensors.range::<String, _>((from, std::ops::Bound::Unbounded));
    range
        .map(|(name, _)| name.as_str())
        .take_while(|name| name.starts_with(&prefix))
        .map(|name| (name, &name[prefix.len()..]))
        .collect()
}

/// Outputs and bytes of an output that a tensor of a layer has: of a trellis in every row of tiles.
struct Columns {
    /// Outputs, padding included.
    n: usize,
    /// Rows of tiles.
    rows: usize,
    /// Bytes of 128 outputs.
    block: usize,
}

fn columns(suffix: &str, shape: &[usize], bytes: usize) -> Option<Columns> {
    let (rows, n) = match (suffix, shape) {
        ("trellis", &[rows, n, _]) => (rows, 16 * n),
        ("sv", &[n]) => (1, 16 * n),
        ("svh" | "bias", &[n]) => (1, n),
        _ => return None,
    };
    let blocks = rows * n / BLOCK;
    (blocks > 0).then(|| Columns { n, rows, block: bytes / blocks })
}

/// The shape of `n` outputs.
fn with_outputs(suffix: &str, shape: &[usize], n: usize) -> Vec<usize> {
    match (suffix, shape) {
        ("trellis", &[k, _, units]) => vec![k, n / 16, units],
        ("sv", _) => vec![n / 16],
        _ => vec![n],
    }
}

/// Adds some outputs of a layer as a layer of its own.
fn cut<'a>(
    checkpoint: &'a Checkpoint,
    module: &str,
    name: &str,
    outputs: Range<usize>,
    layout: &mut Layout<'a>,
) -> Result<(), CheckpointError> {
    for (full, suffix) in stored(checkpoint, module) {
        let Some(data) = checkpoint.tensor(full) else { continue };
        let target =
            |shape, pieces| Target { name: format!("{name}.{suffix}"), dtype: data.dtype, shape, pieces };
        let whole = target(data.shape.to_vec(), vec![data.bytes]);
        layout.targets.push(match columns(suffix, data.shape, data.bytes.len()) {
            Some(c) if outputs.start > 0 || outputs.end.next_multiple_of(BLOCK) < c.n => {
                if outputs.start % BLOCK + outputs.end % BLOCK > 0 {
                    return Err(CheckpointError::Layout {
                        tensor: full.to_owned(),
                        reason: format!(
                            "outputs {outputs:?} cannot be cut out without decoding, which works on whole blocks of \
                             {BLOCK}"
                        ),
                    });
                }
                let row = c.n / BLOCK * c.block;
                let (first, end) = (outputs.start / BLOCK * c.block, outputs.end / BLOCK * c.block);
                let pieces = (0..c.rows).map(|r| &data.bytes[r * row + first..r * row + end]).collect();
                target(with_outputs(suffix, data.shape, outputs.len()), pieces)
            }
            _ => whole,
        });
    }
    Ok(())
}

/// Why layers cannot be one; `None` if they can.
fn unlike(checkpoint: &Checkpoint, shares: &[Share<'_>]) -> Option<String> {
    let first = stored(checkpoint, shares[0].module);
    for share in shares {
        if !share.outputs.len().is_multiple_of(BLOCK) || share.outputs.start != 0 {
            return Some(format!(
                "{} has {} outputs, no multiple of {BLOCK}",
                share.module,
                share.outputs.len()
            ));
        }
        let other = stored(checkpoint, share.module);
        if !first.iter().map(|(_, s)| s).eq(other.iter().map(|(_, s)| s)) {
            return Some(format!("{} and {} have other tensors", shares[0].module, share.module));
        }
        for ((a, suffix), (b, _)) in first.iter().zip(&other) {
            let (Some(a), Some(b)) = (checkpoint.tensor(a), checkpoint.tensor(b)) else { continue };
            let same = if SHARED.contains(suffix) {
                (a.dtype, a.shape, a.bytes) == (b.dtype, b.shape, b.bytes)
            } else {
                let ends = |shape: &[usize]| (shape.first().copied(), shape.get(2).copied());
                a.dtype == b.dtype && (*suffix != "trellis" || ends(a.shape) == ends(b.shape))
            };
            if !same {
                return Some(format!("{}.{suffix} and {}.{suffix} differ", shares[0].module, share.module));
            }
        }
    }
    None
}

/// Adds layers as one, their outputs one after another.
fn fuse<'a>(checkpoint: &'a Checkpoint, name: &str, shares: &[Share<'_>], layout: &mut Layout<'a>) {
    let n = shares.iter().map(|s| s.outputs.len()).sum();
    for (full, suffix) in stored(checkpoint, shares[0].module) {
        let Some(data) = checkpoint.tensor(full) else { continue };
        let dtype: Dtype = data.dtype;
        let (mut shape, mut pieces) = (data.shape.to_vec(), vec![data.bytes]);
        if let Some(c) = columns(suffix, data.shape, data.bytes.len()) {
            shape = with_outputs(suffix, data.shape, n);
            let all: Vec<&'a [u8]> = shares
                .iter()
                .filter_map(|s| checkpoint.tensor(&format!("{}.{suffix}", s.module)))
                .map(|t| t.bytes)
                .collect();
            pieces = (0..c.rows)
                .flat_map(|r| {
                    all.iter().map(move |bytes| &bytes[bytes.len() / c.rows * r..][..bytes.len() / c.rows])
                })
                .collect();
        }
        layout.targets.push(Target { name: format!("{name}.{suffix}"), dtype, shape, pieces });
    }
}
