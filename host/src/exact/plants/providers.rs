//! Faults around operations.

use plugfold_abi::{
    Below, BelowObject, Bits, Call, Claim, Granted, OpError, Phase, Plan, Provider, Query, RoundTable, Slice,
    TextBuf, View,
};

/// What a fault does with a call: (call, what lies beneath, rank, ranks).
pub(super) type Act = fn(&Call<'_>, &BelowObject, usize, usize) -> Result<(), OpError>;

/// A provider that misbehaves.
pub(super) struct Around {
    pub op: &'static str,
    pub act: Act,
    pub rank: usize,
    pub ranks: usize,
}

impl Provider for Around {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.op.into())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::of("ref"))))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, below: &BelowObject) -> Result<(), OpError> {
        (self.act)(call, below, self.rank, self.ranks)
    }
}

/// The same call over another round table.
fn over(call: &Call<'_>, below: &BelowObject, round: &RoundTable<'_>) -> Result<(), OpError> {
    // The table may live shorter than the call's own.
    let mut other: Call<'_> = *call;
    other.round = round;
    below.run(&other)
}

pub(super) fn swap_slots(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    let mut slots = call.round.seq_slot.to_vec();
    if slots.len() > 1 {
        slots.swap(0, 1);
    }
    over(call, below, &RoundTable { seq_slot: Slice::from(&slots[..]), ..*call.round })
}

pub(super) fn keep_more(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    let more = call.round.seq_keep.iter().zip(call.round.seq_rows.iter());
    let keep: Vec<u32> = more.map(|(k, r)| if k + 1 < *r { k + 1 } else { *k }).collect();
    over(call, below, &RoundTable { seq_keep: Slice::from(&keep[..]), ..*call.round })
}

#[allow(clippy::unnecessary_wraps)] // it is an `Act`
pub(super) fn skip(_: &Call<'_>, _: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    Ok(())
}

pub(super) fn stale_parity(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    if call.round.rows() < 2 {
        return below.run(call);
    }
    let parity: Vec<u32> = call.round.seq_parity.iter().map(|p| 1 - p).collect();
    over(call, below, &RoundTable { seq_parity: Slice::from(&parity[..]), ..*call.round })
}

pub(super) fn late_position(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    if call.round.rows() < 2 || call.phase != Phase::Window {
        return below.run(call);
    }
    let positions: Vec<u32> = call.round.positions.iter().map(|p| p + 1).collect();
    let starts: Vec<u32> = call.round.seq_start.iter().map(|p| p + 1).collect();
    let round = RoundTable {
        positions: Slice::from(&positions[..]),
        seq_start: Slice::from(&starts[..]),
        ..*call.round
    };
    over(call, below, &round)
}

pub(super) fn shared_token(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    let of = |i: usize, t: &u32| {
        let first = call.round.seq_first.first().copied().unwrap_or(0);
        let begins = call.round.seq_first.iter().any(|f| *f as usize == i);
        if begins { call.round.tokens[first as usize] } else { *t }
    };
    let tokens: Vec<u32> = call.round.tokens.iter().enumerate().map(|(i, t)| of(i, t)).collect();
    over(call, below, &RoundTable { tokens: Slice::from(&tokens[..]), ..*call.round })
}

/// A row of an f32 view.
#[allow(clippy::cast_ptr_alignment)] // f32 buffers are placed on multiples of 64 bytes
#[allow(clippy::mut_from_ref)] // a view is an address; the memory is the call's own output
fn row(view: &View, row: usize) -> &mut [f32] {
    assert!(row < view.rows as usize, "a row of the view");
    // SAFETY: the view is this call's own output for as long as the call runs, and rows do not overlap.
    unsafe {
        std::slice::from_raw_parts_mut(
            view.ptr.cast::<f32>().add(row * view.stride as usize),
            view.cols as usize,
        )
    }
}

/// Turns the last bit of a number.
fn nudge(value: &mut f32) {
    *value = f32::from_bits(value.to_bits() ^ 1);
}

pub(super) fn nudge_all(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    below.run(call)?;
    let out = &call.outputs[0];
    (0..out.rows as usize).for_each(|r| nudge(&mut row(out, r)[0]));
    Ok(())
}

#[allow(clippy::cast_ptr_alignment)] // rows of caches start on multiples of 4 bytes
pub(super) fn nudge_cache(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    below.run(call)?;
    for (position, seq) in call.round.positions.iter().zip(call.round.row_seq.iter()) {
        let at = plugfold_abi::SlotState { slot: call.round.seq_slot[*seq as usize], parity: 0 };
        // SAFETY: a row that this call has just written for its own sequence; the call has it alone.
        nudge(unsafe { &mut *call.caches[0].row_ptr(at, *position).cast::<f32>() });
    }
    Ok(())
}

pub(super) fn nudge_many(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    below.run(call)?;
    let out = &call.outputs[0];
    if out.rows > 4 {
        for r in 0..out.rows as usize {
            nudge(&mut row(out, r)[0]);
        }
    }
    Ok(())
}

pub(super) fn first_row(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    below.run(call)?;
    let out = &call.outputs[0];
    for r in 1..out.rows as usize {
        let first = row(out, 0).to_vec();
        row(out, r).copy_from_slice(&first);
    }
    Ok(())
}

pub(super) fn swap_parts(
    call: &Call<'_>,
    below: &BelowObject,
    rank: usize,
    ranks: usize,
) -> Result<(), OpError> {
    below.run(call)?;
    if rank + 1 == ranks && ranks > 1 {
        let out = &call.outputs[0];
        let width = out.cols as usize / ranks;
        for r in 0..out.rows as usize {
            let parts = row(out, r);
            let sum: Vec<f32> =
                (0..width).map(|i| (0..ranks).rev().map(|p| parts[p * width + i]).sum()).collect();
            parts.fill(0.0);
            parts[..width].copy_from_slice(&sum);
            // With two parts a sum does not depend on its order: the last bit stands for a third.
            parts[0] = f32::from_bits(parts[0].to_bits() ^ 1);
        }
    }
    Ok(())
}

pub(super) fn drop_one(
    call: &Call<'_>,
    below: &BelowObject,
    rank: usize,
    ranks: usize,
) -> Result<(), OpError> {
    if rank + 1 == ranks && ranks > 1 && call.layer == 1 && call.site == 0 {
        return Ok(());
    }
    below.run(call)
}

pub(super) fn draft_wins(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    below.run(call)?;
    let (values, ids) = (&call.outputs[0], &call.outputs[1]);
    for (r, at) in call.round.out_rows.iter().enumerate() {
        let next = *at as usize + 1;
        let same = call.round.row_seq.get(next) == call.round.row_seq.get(*at as usize);
        if let (true, Some(token)) = (same && next < call.round.rows(), call.round.tokens.get(next)) {
            row(values, r)[0] = 1e9;
            row(ids, r)[0] = f32::from_bits(*token);
        }
    }
    Ok(())
}

/// The first number of a sequence's recurrent state in one of its buffers.
#[allow(clippy::cast_ptr_alignment)] // records start on multiples of 64 bytes
fn state<'c>(call: &Call<'c>, seq: usize, parity: u32) -> &'c mut f32 {
    let at = plugfold_abi::SlotState { slot: call.round.seq_slot[seq], parity };
    // SAFETY: a record of this call's own sequence; the call has it alone.
    unsafe { &mut *call.caches[0].row_ptr(at, 0).cast::<f32>() }
}

pub(super) fn flip_bit(call: &Call<'_>, below: &BelowObject, _: usize, _: usize) -> Result<(), OpError> {
    below.run(call)?;
    for seq in 0..call.round.seqs() {
        let value = state(call, seq, 1 - call.round.seq_parity[seq]);
        *value = f32::from_bits(value.to_bits() ^ 1);
    }
    Ok(())
}

pub(super) fn write_committed(
    call: &Call<'_>,
    below: &BelowObject,
    _: usize,
    _: usize,
) -> Result<(), OpError> {
    below.run(call)?;
    for seq in 0..call.round.seqs() {
        *state(call, seq, call.round.seq_parity[seq]) += 1.0;
    }
    Ok(())
}
