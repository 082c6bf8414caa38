//! 0280: surplus rows of a window get the logits of their last real row, so that they pick experts that are read anyway.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use plugfold_abi::points::{
    BatchFacts, FieldId, FieldPer, FieldSpec, Fields, Observer, ObserverObject, Words,
};
use plugfold_abi::{
    Below, BelowObject, Bits, Call, Claim, DType, Granted, List, OpError, Phase, Plan, Provider, Query,
    TextBuf, View,
};
use plugfold_engine::core::{Core, SeqRows, Want};
use plugfold_kernels::cpu::operands::Operands;
use plugfold_tests::model::{forward, ids, prefill};

use super::{EVERYWHERE, Log, Model, Planted, add, bits, in_force, who};

/// How many rows of each sequence are real, in the forwards to come. Nothing is said: all.
#[derive(Default)]
pub struct Surplus {
    real: Mutex<Vec<u32>>,
    field: AtomicU32,
}

impl Surplus {
    fn set(&self, real: &[u32]) {
        *self.real.lock().unwrap() = real.to_vec();
    }
    fn real(&self, seq: usize, rows: u32) -> u32 {
        self.real.lock().unwrap().get(seq).map_or(rows, |real| rows.min(*real))
    }
}

impl Words for Surplus {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("tied".into())
    }
    fn value(&self, facts: &BatchFacts<'_>) -> Result<u64, OpError> {
        let surplus = facts.rows.iter().enumerate().any(|(i, rows)| self.real(i, *rows) < *rows);
        Ok(u64::from(facts.phase == Phase::Window && surplus))
    }
}

impl Fields for Surplus {
    fn spec(&self) -> Result<FieldSpec, OpError> {
        let (dtype, per) = (DType::U32, FieldPer::Row);
        Ok(FieldSpec { name: "row_source".into(), dtype, per, width: 1, late: false })
    }
    fn numbered(&self, id: FieldId) -> Result<(), OpError> {
        self.field.store(id, Ordering::Relaxed);
        Ok(())
    }
    fn fill(&self, facts: &BatchFacts<'_>, view: View) -> Result<(), OpError> {
        let mut first = 0;
        for (seq, rows) in facts.rows.iter().enumerate() {
            let real = self.real(seq, *rows);
            for row in 0..*rows {
                #[allow(clippy::cast_ptr_alignment)] // fields lie on multiples of 64 bytes
                let at = view.ptr.cast::<u32>();
                // SAFETY: the field has an entry for every row of the round, and is this call's alone.
                unsafe { *at.add((first + row) as usize) = first + row.min(real - 1) };
            }
            first += rows;
        }
        Ok(())
    }
}

/// The replacement of the router's logits.
pub struct Tie {
    surplus: Arc<Surplus>,
    log: Log,
}

impl Tie {
    pub fn new(surplus: Arc<Surplus>, log: Log) -> Self {
        Self { surplus, log }
    }
}

impl Provider for Tie {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok("moe.logits".into())
    }
    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        let tied = query.words.iter().any(|w| w.name.as_str() == "tied" && w.value == 1);
        let mine = query.phase == Phase::Window && tied;
        Ok(if mine { Claim::Yes(Granted::plain(Bits::of("ref"))) } else { Claim::No })
    }
    fn run(&self, call: &Call<'_>, _: &Plan, below: &BelowObject) -> Result<(), OpError> {
        self.log.ran("0280", call);
        below.run(call)?;
        let o = Operands::new("moe.logits", call)?;
        let mut logits = o.output::<f32>(0, "logits", o.rows(), o.size(0, "E")?)?;
        let field = call.round.fields[self.surplus.field.load(Ordering::Relaxed) as usize];
        for r in 0..o.rows() {
            #[allow(clippy::cast_ptr_alignment)] // as in `fill`
            let at = field.ptr.cast::<u32>();
            // SAFETY: the field has an entry for every row of the round; it was filled before the forward.
            let source = unsafe { *at.add(o.first_row() + r) } as usize - o.first_row();
            if source != r {
                let row = logits.row(source).to_vec();
                logits.row_mut(r).copy_from_slice(&row);
            }
        }
        Ok(())
    }
}

/// The experts that each row picks, by layer.
#[derive(Clone, Default)]
struct Picks(Arc<Mutex<BTreeMap<u32, Vec<Vec<i32>>>>>);

impl Observer for Picks {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(0)
    }
    fn watches(&self) -> Result<List<TextBuf>, OpError> {
        Ok(List::from(vec!["moe.pick".into()]))
    }
    fn ran(&self, call: &Call<'_>) -> Result<(), OpError> {
        let o = Operands::new("moe.pick", call)?;
        let k = o.size(1, "k")?;
        let ids = o.output::<i32>(0, "ids", o.rows(), k)?;
        let rows = (0..o.rows()).map(|r| ids.row(r).to_vec()).collect();
        self.0.lock().unwrap().insert(call.layer, rows);
        Ok(())
    }
}

/// Rows that pick other experts than the row that they stand for.
fn astray(picks: &Picks, sources: &[usize]) -> Result<(), String> {
    for (layer, rows) in &*picks.0.lock().unwrap() {
        for (row, source) in sources.iter().enumerate() {
            if rows[row] != rows[*source] {
                let (mine, theirs) = (&rows[row], &rows[*source]);
                return Err(format!("layer {layer}: row {row} picks {mine:?}, row {source} {theirs:?}"));
            }
        }
    }
    Ok(())
}

/// A committed state, part by part.
type Image = Vec<(String, Vec<u32>)>;

/// What a round gave.
struct Round {
    /// Logits of real rows and the states of both sequences, as bits.
    real: (Vec<u32>, [Image; 2]),
    astray: Result<(), String>,
    /// Who runs the router's logits, in tied rounds and in others.
    routers: [String; 2],
}

/// Two sequences in one window: two real rows and two more, and four real ones.
fn round(core: &mut Core, surplus: &Surplus, log: &Log, picks: &Picks, padded: bool) -> Round {
    surplus.set(&[]);
    let prompts = [ids(1, 23, 480), ids(2, 40, 480)];
    prompts.iter().enumerate().for_each(|(slot, prompt)| drop(prefill(core, slot, prompt, 16)));
    let mut first = ids(3, 2, 480);
    let second = ids(4, 4, 480);
    let mut real = Vec::new();
    if padded {
        first.extend([first[1]; 2]);
        surplus.set(&[2, 4]);
        log.take();
        let seqs = [(0, &first), (1, &second)];
        let rows = seqs.map(|(slot, tokens)| SeqRows { slot, tokens, want: Want::All, embeds: &[] });
        let f = core.forward(Phase::Window, &rows, None, false).unwrap();
        assert_eq!(f.failure, None);
        assert_eq!(log.take(), in_force(core), "what runs is what the resolver prints, in a tied round");
        let logits = bits(core.output(&f, "logits").unwrap());
        let width = logits.len() / 8;
        real.extend_from_slice(&logits[..2 * width]);
        real.extend_from_slice(&logits[4 * width..]);
        core.commit(&f, &[2, 4]).unwrap();
    } else {
        for (slot, tokens) in [(0, &first), (1, &second)] {
            let f = forward(core, Phase::Window, slot, tokens, Want::All);
            real.extend(bits(core.output(&f, "logits").unwrap()));
            core.commit(&f, &[tokens.len()]).unwrap();
        }
    }
    let astray = if padded { astray(picks, &[0, 1, 1, 1, 4, 5, 6, 7]) } else { Ok(()) };
    let mut routers = [String::new(), String::new()];
    for (router, real) in routers.iter_mut().zip([&[2][..], &[]]) {
        surplus.set(real);
        *router = who(core, "moe.logits");
    }
    Round { real: (real, [0, 1].map(|slot| core.image(slot))), astray, routers }
}

fn rounds(model: Model, ranks: usize, list: &[&str], planted: Planted, padded: bool) -> Vec<Round> {
    let state: Vec<_> =
        (0..ranks).map(|_| (Log::default(), Arc::<Surplus>::default(), Picks::default())).collect();
    let hooks = |rank: usize, hooks: &mut plugfold_engine::hooks::Hooks| {
        let (log, surplus, picks) = &state[rank];
        add(hooks, model, list, log, surplus, planted);
        hooks.add_object("watch", ObserverObject::new(picks.clone())).unwrap();
    };
    model.run(ranks, hooks, |core| {
        let (log, surplus, picks) = &state[core.split().rank];
        round(core, surplus, log, picks, padded)
    })
}

#[test]
fn surplus_rows_pick_what_their_source_picks_and_real_rows_keep_their_bits() {
    for (model, ranks) in EVERYWHERE {
        let alone = rounds(model, ranks, &[], Planted::default(), false);
        for list in [&["0280"][..], &["0130", "0280"], &["0280", "0130"], &["0006", "0130", "0580", "0280"]] {
            let what = format!("{model:?} on {ranks} ranks with {list:?}");
            let tied = rounds(model, ranks, list, Planted::default(), true);
            for (rank, (alone, tied)) in alone.iter().zip(&tied).enumerate() {
                assert!(tied.real == alone.real, "{what}: rank {rank}: real rows have other bits than alone");
                assert_eq!(tied.astray, Ok(()), "{what}");
                // The fused router keeps away from tied rounds only.
                let fused = if list.contains(&"0130") { "0130" } else { "ref" };
                assert_eq!(tied.routers, ["0280", fused], "{what}");
            }
        }
        // The control: nobody ties, the replies are as exact, and surplus rows go astray.
        for list in [&[][..], &["0130"]] {
            for (alone, loose) in alone.iter().zip(rounds(model, ranks, list, Planted::default(), true)) {
                assert!(loose.real == alone.real, "{model:?} with {list:?}");
                assert!(loose.astray.is_err(), "{model:?} with {list:?}: the ties would prove nothing");
            }
        }
    }
}

#[test]
fn a_fusion_that_swallows_the_tie_is_caught() {
    for (model, ranks) in EVERYWHERE {
        let planted = Planted { swallows: true, ..Planted::default() };
        for (list, swallowed) in [(["0280", "0130"], true), (["0130", "0280"], true)] {
            for round in rounds(model, ranks, &list, planted, true) {
                // It says that it is over 0280, so nothing stops it, and what is in force says who runs.
                assert_eq!(round.routers, ["0130", "0130"], "{model:?}: {list:?}");
                assert_eq!(round.astray.is_err(), swallowed, "{model:?}: {list:?}: {:?}", round.astray);
            }
        }
    }
}
