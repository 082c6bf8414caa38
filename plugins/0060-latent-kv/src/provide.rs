//! The five operations on the CPU, in f32. A row's bits depend on its own operands; dense and listed keys are one arithmetic.

use plugfold_abi::{
    Addressing, BelowObject, Bits, Call, Claim, Granted, OpError, Plan, Provider, Query, TextBuf, formats,
};
use plugfold_kernels::cpu::Lists;
use plugfold_kernels::cpu::math::dense::PackedMatrix;
use plugfold_kernels::cpu::math::latent;
use plugfold_kernels::cpu::math::mla::{Keys, Shape, latent_attention};
use plugfold_kernels::cpu::operands::{Cache, Operands};

use crate::{ABSORB, EXPAND, FAMILY, FORMAT, KV_B};

/// One of the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// `mla.write`: latents as they are.
    Write,
    /// `mla.absorb`.
    Absorb,
    /// `mla.dense`.
    Dense,
    /// `mla.sparse`.
    Sparse,
    /// `mla.expand`.
    Expand,
}

/// All of them.
pub const ALL: [Op; 5] = [Op::Write, Op::Absorb, Op::Dense, Op::Sparse, Op::Expand];

impl Op {
    const fn name(self) -> &'static str {
        match self {
            Op::Write => "mla.write",
            Op::Absorb => ABSORB,
            Op::Dense => "mla.dense",
            Op::Sparse => "mla.sparse",
            Op::Expand => EXPAND,
        }
    }

    const fn bits(self) -> &'static str {
        match self {
            Op::Write => "latent-f32",
            Op::Absorb | Op::Expand => "latent-fma",
            Op::Dense | Op::Sparse => "latent-tile16",
        }
    }
}

/// The provider of one operation.
pub struct Latent(pub Op);

/// Whether a product may be claimed: of a matrix in panels. One in another format is its plugin's to multiply by; where
/// nobody does, the start is refused with operation, layer and format.
fn product(query: &Query<'_>) -> bool {
    let [format, rest @ ..] = query.weight_formats;
    let panels = [formats::PANEL16_BF16, formats::PANEL16_F32].contains(&format.get_str());
    panels && rest.iter().all(|f| f.is_empty())
}

impl Provider for Latent {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.0.name().into())
    }

    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        if query.op.get_str() != self.0.name() || query.device_class.get_str() != "cpu" {
            return Ok(Claim::No);
        }
        let [cache, rest @ ..] = query.caches;
        let latents = cache.format.get_str() == FORMAT
            && cache.addressing == Addressing::Linear
            && rest.iter().all(|c| c.format.is_empty());
        let mine = match self.0 {
            Op::Absorb | Op::Expand => product(query),
            Op::Write | Op::Dense | Op::Sparse => {
                latents && query.weight_formats.iter().all(|f| f.is_empty())
            }
        };
        Ok(if mine { Claim::Yes(Granted::plain(Bits::own(self.0.bits()))) } else { Claim::No })
    }

    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        let o = Operands::new(self.0.name(), call)?;
        let sizes = Sizes::of(&o)?;
        match self.0 {
            Op::Write => write(&o, &sizes),
            Op::Absorb => {
                let q = o.input(0, "q", o.rows(), sizes.shape.heads * sizes.shape.key)?;
                let out = o.output(0, "absorbed", o.rows(), sizes.wide())?;
                latent::absorb(q, sizes.matrix(&o)?, sizes.shape, out);
                Ok(())
            }
            Op::Dense => attend(&o, &sizes, |_, position| Ok(Keys::Below(position + 1))),
            Op::Sparse => {
                let lists = Lists::new(&o, o.size(4, "L")?)?;
                attend(&o, &sizes, |row, position| lists.keys(row, position))
            }
            Op::Expand => {
                let sums = o.input(0, "sums", o.rows(), sizes.wide())?;
                let out = o.output(0, "rows", o.rows(), sizes.shape.heads * sizes.shape.value)?;
                latent::expand(sums, sizes.matrix(&o)?, sizes.shape, out);
                Ok(())
            }
        }
    }
}

/// The sizes that all of them have: H, d, v, r.
struct Sizes {
    shape: Shape,
    rank: usize,
}

impl Sizes {
    fn of(o: &Operands<'_>) -> Result<Self, OpError> {
        let shape = Shape { heads: o.size(0, "H")?, key: o.size(1, "d")?, value: o.size(2, "v")? };
        Ok(Self { shape, rank: o.size(3, "r")? })
    }

    /// Numbers of a row with a latent a head.
    fn wide(&self) -> usize {
        self.shape.heads * self.rank
    }

    fn matrix<'c>(&self, o: &Operands<'c>) -> Result<PackedMatrix<'c>, OpError> {
        o.panels(0, KV_B, self.shape.row_len(), self.rank)
    }

    fn cache<'c>(&self, o: &Operands<'c>) -> Result<Cache<'c>, OpError> {
        o.cache_in(FORMAT, 0, FAMILY, self.rank, Addressing::Linear)
    }
}

fn write(o: &Operands<'_>, sizes: &Sizes) -> Result<(), OpError> {
    let latents = o.input::<f32>(0, "latent", o.rows(), sizes.rank)?;
    let cache = sizes.cache(o)?;
    for s in o.sequences()? {
        // SAFETY: the rows of this call's sequences are this call's alone.
        let mut out = unsafe { cache.write(s.at, s.start, s.rows.len())? };
        for (i, row) in s.rows.enumerate() {
            out.row_mut(i).copy_from_slice(latents.row(row));
        }
    }
    Ok(())
}

/// Runs attention sequence by sequence; `keys(row of the call, position)` are a row's keys.
fn attend<'c>(
    o: &Operands<'c>,
    sizes: &Sizes,
    keys: impl Fn(usize, usize) -> Result<Keys<'c>, OpError>,
) -> Result<(), OpError> {
    let cache = sizes.cache(o)?;
    let q = o.input::<f32>(0, "absorbed", o.rows(), sizes.wide())?;
    let mut rest = o.output::<f32>(0, "sums", o.rows(), sizes.wide())?;
    let mut done = 0;
    for s in o.sequences()? {
        let (_, after) = rest.split_rows_at(s.rows.start - done);
        let (out, after) = after.split_rows_at(s.rows.len());
        (rest, done) = (after, s.rows.end);
        // SAFETY: rows up to the call's own were written by earlier calls; nothing writes them during this one.
        let latents = unsafe { cache.read(s.at, 0, s.start + s.rows.len())? };
        let keys = s
            .rows
            .clone()
            .enumerate()
            .map(|(i, row)| keys(row, s.start + i))
            .collect::<Result<Vec<_>, _>>()?;
        let q = q.range(s.rows.start, s.rows.len());
        latent_attention(q, latents, sizes.shape.heads, |r| keys[r], o.param(0), out);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::{CacheKind, Phase, Text};

    fn query(op: Op, weight: &'static str, cache: &'static str, addressing: Addressing) -> Query<'static> {
        let mut query = Query::of(op.name(), Phase::Window);
        query.device_class = Text::from("cpu");
        query.weight_formats[0] = Text::from(weight);
        query.caches[0] = CacheKind { format: Text::from(cache), addressing };
        query
    }

    fn bits(op: Op, query: &Query<'_>) -> Option<String> {
        match Latent(op).claim(query).unwrap() {
            Claim::Yes(granted) => Some(granted.bits.name().to_owned()),
            _ => None,
        }
    }

    #[test]
    fn rows_are_claimed_in_their_own_format_only() {
        for op in [Op::Write, Op::Dense, Op::Sparse] {
            let linear = Addressing::Linear;
            assert_eq!(bits(op, &query(op, "", FORMAT, linear)).as_deref(), Some(op.bits()));
            for other in [
                query(op, "", "f32", linear),
                query(op, "", "latent.fp8", linear),
                query(op, "", FORMAT, Addressing::Paged),
                query(op, formats::PANEL16_BF16, FORMAT, linear),
                Query { device_class: Text::from("sm_90"), ..query(op, "", FORMAT, linear) },
            ] {
                assert_eq!(bits(op, &other), None, "{op:?}");
            }
        }
    }

    #[test]
    fn a_matrix_in_another_format_is_left_to_others() {
        for op in [Op::Absorb, Op::Expand] {
            for format in [formats::PANEL16_BF16, formats::PANEL16_F32] {
                assert_eq!(
                    bits(op, &query(op, format, "", Addressing::State)).as_deref(),
                    Some("latent-fma")
                );
            }
            for format in [formats::EXL3_SEGMENTS, "q4.g64"] {
                assert_eq!(bits(op, &query(op, format, "", Addressing::State)), None, "{format}");
            }
        }
    }
}
