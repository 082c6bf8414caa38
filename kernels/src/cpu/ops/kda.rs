//! Gated linear attention: `kda.mix`, `kda.commit`.

use plugfold_abi::{Addressing, OpError, Phase, SlotState};

use super::operands::{Cache, Operands, Sequence};
use crate::cpu::math::kda::{Inputs, Shape, Weights, mix as mix_rows, replay};

fn shape(o: &Operands<'_>) -> Result<Shape, OpError> {
    Ok(Shape { heads: o.size(0, "H")?, width: o.size(1, "K")?, taps: o.size(2, "T")? })
}

struct Families<'c> {
    state: Cache<'c>,
    window: Cache<'c>,
    replay: Cache<'c>,
}

fn families<'c>(o: &Operands<'c>, shape: Shape) -> Result<Families<'c>, OpError> {
    Ok(Families {
        state: o.state(0, "kda.state", shape.state_len())?,
        window: o.state(1, "kda.conv", shape.window_len())?,
        replay: o.cache(2, "kda.replay", shape.replay_len(), Addressing::State)?,
    })
}

/// Where the replay records of a slot lie: one buffer, whatever the parity.
fn records(at: SlotState) -> SlotState {
    SlotState { slot: at.slot, parity: 0 }
}

fn whole(o: &Operands<'_>, s: &Sequence) -> Result<(), OpError> {
    if s.whole {
        return Ok(());
    }
    let all = o.round().seq_rows[s.index];
    Err(o.error(&format!(
        "the call covers {} of {all} rows of sequence {}, must cover all",
        s.rows.len(),
        s.index
    )))
}

pub(super) fn mix(o: &Operands<'_>) -> Result<(), OpError> {
    let shape = shape(o)?;
    let (rows, channels) = (o.rows(), shape.channels());
    let x = Inputs {
        qkv: o.input(0, "qkv", rows, shape.qkv_len())?,
        f: o.input(1, "f", rows, channels)?,
        gate: o.input(2, "gate", rows, channels)?,
        b: o.input(3, "b", rows, shape.heads)?,
    };
    let weights = Weights {
        conv: o.vector(0, "kda.conv", shape.qkv_len() * shape.taps)?,
        dt_bias: o.vector(1, "kda.dt_bias", channels)?,
        a_log: o.vector(2, "kda.a_log", shape.heads)?,
        o_norm: o.vector(3, "kda.o_norm", shape.width)?,
        rms_eps: o.param(0),
        lower_bound: (o.dim(3) != 0).then(|| o.param(1)),
    };
    let families = families(o, shape)?;
    let mut rest = o.output::<f32>(0, "rows", rows, channels)?;
    let mut done = 0;
    for s in o.sequences()? {
        whole(o, &s)?;
        let (_, after) = rest.split_rows_at(s.rows.start - done);
        let (out, after) = after.split_rows_at(s.rows.len());
        (rest, done) = (after, s.rows.end);
        let replay = if o.call.phase == Phase::Window {
            // SAFETY: the records of this call's sequences are this call's alone, and each slot occurs once.
            Some(unsafe { families.replay.write(records(s.at), 0, s.rows.len())? })
        } else {
            None
        };
        // SAFETY: as above; read and written buffers have different parities.
        let (window, state, next_window, next_state) = unsafe {
            (
                families.window.record(s.at)?,
                families.state.record(s.at)?,
                families.window.next_record(s.at)?,
                families.state.next_record(s.at)?,
            )
        };
        let x = x.range(s.rows.start, s.rows.len());
        mix_rows(shape, weights, x, window, state, next_window, next_state, replay, out);
    }
    Ok(())
}

pub(super) fn commit(o: &Operands<'_>) -> Result<(), OpError> {
    let shape = shape(o)?;
    let families = families(o, shape)?;
    let round = o.round();
    if round.seq_keep.len() != round.seqs() {
        return Err(o.error(&format!(
            "round table: seq_keep has {} entries, must have {}",
            round.seq_keep.len(),
            round.seqs()
        )));
    }
    for index in o.call.seqs.within(round.seqs()) {
        let (keep, all) = (round.seq_keep[index] as usize, round.seq_rows[index] as usize);
        if keep > all {
            return Err(o.error(&format!("keep {keep} rows of sequence {index}, which has {all}")));
        }
        if keep == all {
            continue;
        }
        let at = SlotState { slot: round.seq_slot[index], parity: round.seq_parity[index] };
        // SAFETY: the records of this call's sequences are this call's alone; read and written buffers have different
        // parities.
        let (records, window, state, next_window, next_state) = unsafe {
            (
                families.replay.read(records(at), 0, keep)?,
                families.window.record(at)?,
                families.state.record(at)?,
                families.window.next_record(at)?,
                families.state.next_record(at)?,
            )
        };
        let records = if keep == 0 { crate::cpu::rows::Rows::new(&[], shape.replay_len()) } else { records };
        replay(shape, records, window, state, next_window, next_state);
    }
    Ok(())
}
