//! Cache layout with a part replaced, thin: latent rows (0060), their format (0220), their addressing (0290) and one kernel over
//! them (0410), in every mixture, on the exact-integer model.
//!
//! Kernels are written once: what is in force of format and addressing is put in front of them, here as traits where device
//! code has headers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use plugfold_abi::boundary::Offer;
use plugfold_abi::points::{
    BatchFacts, Families, FieldId, FieldPer, FieldSpec, Fields, FieldsObject, LayoutLink, LayoutLinkObject,
    Mapper, MapperObject, Sequences, SequencesObject,
};
use plugfold_abi::{
    Addressing, Base, BelowObject, Bits, Buffer, CacheView, Call, Claim, DType, Extent, Granted, List,
    OpError, Operand, Pass, PassContext, PassObject, Phase, Plan, Program, Provider, ProviderObject, Query,
    Reach, Slice, SlotState, Step, TextBuf, View,
};
use plugfold_engine::core::{Core, SeqRows, SequencesOf, Want};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::split::Split;
use plugfold_kernels::cpu::operands::Operands;
use plugfold_tests::integer::{self, fold};
use plugfold_tests::model::{forward, ids, prefill};

/// Positions of a page.
const PAGE: u32 = 8;
/// Pages a sequence may have.
const PAGES: u32 = 32;
const SLOTS: usize = 2;

/// A row format: how a latent lies in bytes.
fn load(format: &str, bytes: &[u8], width: usize) -> Vec<f32> {
    match format {
        "latent.f32" => {
            bytes.chunks(4).take(width).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        }
        // Folded whole numbers fit into a byte exactly.
        _ => bytes[..width].iter().map(|b| f32::from(*b as i8)).collect(),
    }
}

fn store(format: &str, row: &[f32], bytes: &mut [u8]) {
    match format {
        "latent.f32" => {
            for (b, v) in bytes.chunks_mut(4).zip(row) {
                b.copy_from_slice(&v.to_le_bytes());
            }
        }
        _ => {
            for (b, v) in bytes.iter_mut().zip(row) {
                *b = *v as i8 as u8;
            }
        }
    }
}

/// An addressing: where the row of a position lies.
fn place(view: &CacheView, field: Option<View>, seq: usize, at: SlotState, position: usize) -> (u32, u32) {
    match (view.addressing, field) {
        (Addressing::Paged, Some(pages)) => {
            #[allow(clippy::cast_ptr_alignment)] // fields lie on multiples of 64 bytes
            let table = pages.ptr.cast::<u32>();
            // SAFETY: the field has a row of `PAGES` entries for each sequence of the table.
            let page = unsafe { *table.add(seq * pages.stride as usize + position / PAGE as usize) };
            let row = page * PAGE + position as u32 % PAGE;
            (row / view.rows, row % view.rows)
        }
        _ => (at.slot, position as u32),
    }
}

/// The pages of all sequences on one rank: lowest free page first, from the middle, so that no page lies where it would.
#[derive(Clone, Default)]
struct Pages {
    state: Arc<Mutex<PageState>>,
    field: Arc<Mutex<FieldId>>,
}

#[derive(Default)]
struct PageState {
    of: BTreeMap<u32, Vec<u32>>,
    free: BTreeSet<u32>,
}

impl Pages {
    fn new(pages: u32) -> Self {
        let all = Self::default();
        all.state.lock().unwrap().free = (0..pages).collect();
        all
    }

    /// Makes pages for the rows up to `end`; a sequence that begins gives back what its slot had.
    fn ensure(&self, slot: u32, start: u32, end: u32) -> Result<Vec<u32>, OpError> {
        let mut state = self.state.lock().unwrap();
        let mut mine = state.of.remove(&slot).unwrap_or_default();
        let keep = start.div_ceil(PAGE) as usize;
        state.free.extend(mine.drain(keep.min(mine.len())..));
        let mut full = Ok(());
        while mine.len() < end.div_ceil(PAGE) as usize {
            let middle = state.free.len() / 2;
            let Some(page) = state.free.iter().nth(middle).copied() else {
                full = Err(OpError::new(format!("no page is left for rows {start} to {end}")));
                break;
            };
            state.free.remove(&page);
            mine.push(page);
        }
        state.of.insert(slot, mine.clone());
        full.map(|()| mine)
    }
}

impl Fields for Pages {
    fn spec(&self) -> Result<FieldSpec, OpError> {
        let (per, width) = (FieldPer::Sequence, PAGES);
        Ok(FieldSpec { name: "page_table".into(), dtype: DType::U32, per, width, late: false })
    }
    fn numbered(&self, id: FieldId) -> Result<(), OpError> {
        *self.field.lock().unwrap() = id;
        Ok(())
    }
    fn fill(&self, batch: &BatchFacts<'_>, entries: View) -> Result<(), OpError> {
        let each = batch.slots.iter().zip(batch.starts.iter()).zip(batch.rows.iter());
        for (i, ((slot, start), rows)) in each.enumerate() {
            for (j, page) in self.ensure(*slot, *start, start + rows)?.into_iter().enumerate() {
                #[allow(clippy::cast_ptr_alignment)] // as above
                let table = entries.ptr.cast::<u32>();
                // SAFETY: as above; this hook fills the field alone.
                unsafe { *table.add(i * entries.stride as usize + j) = page };
            }
        }
        Ok(())
    }
}

impl Mapper for Pages {
    fn family(&self) -> Result<TextBuf, OpError> {
        Ok("mla.kv".into())
    }
    fn rows(
        &self,
        slot: u32,
        first: u32,
        rows: u32,
        reserve: bool,
        out: &mut List<u32>,
    ) -> Result<(), OpError> {
        let known = self.state.lock().unwrap().of.get(&slot).cloned().unwrap_or_default();
        let pages = if reserve { self.ensure(slot, first, first + rows)? } else { known };
        for position in first..first + rows {
            let page = pages.get((position / PAGE) as usize);
            let page = page.ok_or_else(|| OpError::new(format!("position {position} has no page")))?;
            out.push(page * PAGE + position % PAGE);
        }
        Ok(())
    }
}

/// An edit of the cache table.
struct Edit(fn(&mut Families));

impl LayoutLink for Edit {
    fn edit(&self, families: &mut Families) -> Result<(), OpError> {
        (self.0)(families);
        Ok(())
    }
}

fn latents(families: &mut Families) {
    let width = u64::from(families.mla_latent);
    for family in families.named("mla.kv") {
        (family.format, family.row_bytes) = ("latent.f32".into(), 4 * width);
    }
}

fn bytes(families: &mut Families) {
    let width = u64::from(families.mla_latent);
    for family in families.named("mla.kv") {
        (family.format, family.row_bytes) = ("latent.i8".into(), width.next_multiple_of(4));
    }
}

fn paged(families: &mut Families) {
    for family in families.named("mla.kv") {
        family.addressing = Addressing::Paged;
    }
}

/// 0060's pass: rows are written as they are; absorb before attention, expand after it.
struct Latent;

impl Pass for Latent {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("latent".into())
    }
    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        let mut steps = List::new();
        for mut step in std::mem::take(&mut program.steps) {
            let op = step.op.to_string();
            if op == "mla.write" {
                step.weights.clear();
            }
            if !["mla.dense", "mla.sparse"].contains(&op.as_str()) {
                steps.push(step);
                continue;
            }
            let wide = step.dims[0] * step.dims[3];
            let mut buffer = |name: &str| {
                program.buffers.push(Buffer {
                    name: format!("{name}.{}", step.layer).into(),
                    extent: Extent { base: Base::Rows, times: 1 },
                    cols: wide,
                    dtype: DType::F32,
                    input: false,
                    output: false,
                });
                Operand { buffer: program.buffers.len() as u32 - 1, col: 0, cols: wide }
            };
            let (absorbed, sums) = (buffer("absorbed"), buffer("sums"));
            let local = |op: &str, input: Operand, output: Operand| Step {
                op: op.into(),
                inputs: List::from(vec![input]),
                outputs: List::from(vec![output]),
                weights: List::from(vec!["mla.kv_b".into()]),
                caches: List::new(),
                reach: Reach::Row,
                ..step.clone()
            };
            let (before, after) =
                (local("mla.absorb", step.inputs[0], absorbed), local("mla.expand", sums, step.outputs[0]));
            (step.inputs[0], step.outputs[0]) = (absorbed, sums);
            steps.extend([before, step, after]);
        }
        program.steps = steps;
        Ok(())
    }
}

/// The operations over latents, for whatever format and addressing is in force.
struct Kernel {
    op: &'static str,
    bits: Bits,
    /// The format that it is for; empty: every latent one.
    format: &'static str,
    phase: Option<Phase>,
    pages: Arc<Mutex<FieldId>>,
    ran: Arc<AtomicU64>,
}

impl Provider for Kernel {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.op.into())
    }
    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        let format = query.caches[0].format.get_str();
        let mine = ["mla.absorb", "mla.expand"].contains(&self.op)
            || (format.starts_with("latent.") && (self.format.is_empty() || self.format == format));
        let mine = mine && self.phase.is_none_or(|phase| phase == query.phase);
        Ok(if mine { Claim::Yes(Granted::plain(self.bits.clone())) } else { Claim::No })
    }
    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        self.ran.fetch_add(1, Ordering::Relaxed);
        let o = Operands::new(self.op, call)?;
        let (heads, key, value, rank) = (o.size(0, "H")?, o.size(1, "d")?, o.size(2, "v")?, o.size(3, "r")?);
        let view = call.caches[0];
        let pages = (view.addressing == Addressing::Paged)
            .then(|| call.round.fields[*self.pages.lock().unwrap() as usize]);
        match self.op {
            "mla.write" => {
                let latent = o.input::<f32>(0, "latent", o.rows(), rank)?;
                for s in o.sequences()? {
                    for (i, r) in s.rows.clone().enumerate() {
                        let (slot, row) = place(&view, pages, s.index, s.at, s.start + i);
                        let to = view.row_ptr(SlotState { slot, parity: 0 }, row);
                        // SAFETY: the row lies in the family, and is this call's alone.
                        let to = unsafe { std::slice::from_raw_parts_mut(to, view.row_bytes as usize) };
                        store(view.format.get_str(), latent.row(r), to);
                    }
                }
            }
            "mla.absorb" => {
                let q = o.input::<f32>(0, "q", o.rows(), heads * key)?;
                let mut out = o.output::<f32>(0, "absorbed", o.rows(), heads * rank)?;
                for r in 0..o.rows() {
                    for h in 0..heads {
                        // Most of the matrix is zeros: along its rows, so that few numbers are touched.
                        let out = &mut out.row_mut(r)[h * rank..(h + 1) * rank];
                        out.fill(0.0);
                        for (i, q) in
                            q.row(r)[h * key..(h + 1) * key].iter().enumerate().filter(|(_, q)| **q != 0.0)
                        {
                            for (j, out) in out.iter_mut().enumerate() {
                                *out += q * weight(&o, rank, h * (key + value) + i, j);
                            }
                        }
                    }
                }
            }
            "mla.expand" => {
                let sums = o.input::<f32>(0, "sums", o.rows(), heads * rank)?;
                let mut out = o.output::<f32>(0, "rows", o.rows(), heads * value)?;
                for r in 0..o.rows() {
                    for h in 0..heads {
                        for i in 0..value {
                            let sum: f32 = (0..rank)
                                .map(|j| {
                                    sums.row(r)[h * rank + j]
                                        * weight(&o, rank, h * (key + value) + key + i, j)
                                })
                                .sum();
                            out.row_mut(r)[h * value + i] = fold(sum as i64);
                        }
                    }
                }
            }
            op => {
                let lists = if op == "mla.sparse" {
                    let most = o.size(4, "L")?;
                    Some((
                        o.input::<i32>(1, "lists", o.rows(), most)?,
                        o.input::<i32>(2, "counts", o.rows(), 1)?,
                    ))
                } else {
                    None
                };
                let q = o.input::<f32>(0, "absorbed", o.rows(), heads * rank)?;
                let mut out = o.output::<f32>(0, "sums", o.rows(), heads * rank)?;
                for s in o.sequences()? {
                    for (i, r) in s.rows.clone().enumerate() {
                        let keys: Vec<usize> = match &lists {
                            Some((lists, counts)) => lists.row(r)[..counts.row(r)[0] as usize]
                                .iter()
                                .map(|k| *k as usize)
                                .collect(),
                            None => (0..=s.start + i).collect(),
                        };
                        let latents: Vec<Vec<f32>> = keys
                            .into_iter()
                            .map(|k| {
                                let (slot, row) = place(&view, pages, s.index, s.at, k);
                                let from = view.row_ptr(SlotState { slot, parity: 0 }, row);
                                // SAFETY: rows up to the call's own were written by earlier calls.
                                let from =
                                    unsafe { std::slice::from_raw_parts(from, view.row_bytes as usize) };
                                load(view.format.get_str(), from, rank)
                            })
                            .collect();
                        for (h, out) in out.row_mut(r).chunks_mut(rank).enumerate() {
                            let q = &q.row(r)[h * rank..(h + 1) * rank];
                            out.fill(0.0);
                            for latent in &latents {
                                let score: f32 = q.iter().zip(latent).map(|(a, b)| a * b).sum();
                                let weight = fold(score as i64);
                                out.iter_mut().zip(latent).for_each(|(o, l)| *o += weight * l);
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// An element of `kv_b`, as the source of the model makes it: read from its panels of 16 outputs.
fn weight(o: &Operands<'_>, k: usize, row: usize, col: usize) -> f32 {
    let plane = o.call.weights[0].unwrap().planes[0];
    let at = (row / 16 * k + col) * 16 + row % 16;
    #[allow(clippy::cast_ptr_alignment)] // panels lie on multiples of 64 bytes
    // SAFETY: the element lies inside the panels.
    let bits = unsafe { *plane.ptr.cast::<u16>().add(at) };
    f32::from_bits(u32::from(bits) << 16)
}

/// Which of the plugins are loaded.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mix {
    bytes: bool,
    paged: bool,
    sparse: bool,
}

struct Loaded {
    core: Core,
    pages: Pages,
    sparse: Arc<AtomicU64>,
}

fn mixed(mix: Mix, pool: u32) -> Result<Loaded, String> {
    let pages = Pages::new(pool);
    let sparse = Arc::new(AtomicU64::new(0));
    let own = |name: &str| Bits::own(name);
    let kernel = |op, bits, format, phase, ran: &Arc<AtomicU64>| {
        ProviderObject::new(Kernel { op, bits, format, phase, pages: pages.field.clone(), ran: ran.clone() })
    };
    let core = integer::core(SLOTS, Split::WHOLE, None, |hooks: &mut Hooks| {
        let other = Arc::default();
        let over = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<String>>();
        let mut add =
            |owner: &str, names: &[&str], offer: Offer| hooks.add(owner, &over(names), offer).unwrap();
        let base = ["integer"];
        add("0060", &base, Offer::of(LayoutLinkObject::new(Edit(latents))));
        add("0060", &base, Offer::of(PassObject::new(Latent)));
        for op in ["mla.absorb", "mla.expand", "mla.write", "mla.dense", "mla.sparse"] {
            add("0060", &base, Offer::of(kernel(op, own("latent"), "", None, &other)));
        }
        if mix.bytes {
            let over = ["0060", "integer"];
            add("0220", &over, Offer::of(LayoutLinkObject::new(Edit(bytes))));
            add("0220", &over, Offer::of(kernel("mla.write", own("latent-i8"), "latent.i8", None, &other)));
        }
        if mix.paged {
            let over = ["0060", "0220"];
            add("0290", &over, Offer::of(LayoutLinkObject::new(Edit(paged))));
            add("0290", &over, Offer::of(FieldsObject::new(pages.clone())));
            add("0290", &over, Offer::of(MapperObject::new(pages.clone())));
        }
        if mix.sparse {
            let bits = Bits::of("latent");
            let offer = Offer::of(kernel("mla.sparse", bits, "", Some(Phase::Prefill), &sparse));
            add("0410", &["0060"], offer);
        }
    })?;
    Ok(Loaded { core, pages, sparse })
}

/// Two sequences with prompts, a shared window, a cut commit and a step; everything as bits.
fn run(core: &mut Core) -> Vec<u32> {
    let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
    let mut all = bits(&prefill(core, 0, &ids(1, 40, 480), 16));
    all.extend(bits(&prefill(core, 1, &ids(2, 9, 480), 16)));
    let (a, b) = (ids(3, 5, 480), ids(4, 3, 480));
    let rows = [
        SeqRows { slot: 1, tokens: &a, want: Want::All, embeds: &[] },
        SeqRows { slot: 0, tokens: &b, want: Want::All, embeds: &[] },
    ];
    let f = core.forward(Phase::Window, &rows, None, false).unwrap();
    assert_eq!(f.failure, None);
    all.extend(bits(core.output(&f, "logits").unwrap()));
    core.commit(&f, &[2, 3]).unwrap();
    for slot in [0, 1] {
        let f = forward(core, Phase::Window, slot, &[9], Want::All);
        all.extend(bits(core.output(&f, "logits").unwrap()));
        core.commit(&f, &[1]).unwrap();
    }
    all
}

fn all_mixes() -> Vec<Mix> {
    let on = |i: usize, bit: usize| i >> bit & 1 == 1;
    (0..8).map(|i| Mix { bytes: on(i, 0), paged: on(i, 1), sparse: on(i, 2) }).collect()
}

#[test]
fn every_mixture_of_format_addressing_and_kernel_gives_the_same_bits() {
    let plain = run(&mut integer::core(SLOTS, Split::WHOLE, None, |_| {}).unwrap());
    let (mut tags, mut images) = (BTreeMap::new(), BTreeMap::new());
    for mix in all_mixes() {
        let mut loaded = mixed(mix, 64).unwrap();
        assert!(run(&mut loaded.core) == plain, "{mix:?} changes bits");
        assert_eq!(loaded.sparse.load(Ordering::Relaxed) > 0, mix.sparse, "{mix:?}");
        let family = loaded.core.cache_table().families().iter().find(|f| f.id.as_str() == "mla.kv").unwrap();
        assert_eq!(family.format.as_str(), if mix.bytes { "latent.i8" } else { "latent.f32" });
        assert_eq!(family.addressing == Addressing::Paged, mix.paged, "{mix:?}");
        // Addressing and kernels of equal bits are in no tag; a format is.
        let tag = loaded.core.tag(&[]).unwrap().id;
        assert_eq!(*tags.entry(mix.bytes).or_insert(tag), tag, "{mix:?}");
        // Neither are they in what a sequence is.
        let image = loaded.core.image(0);
        assert!(*images.entry(mix.bytes).or_insert(image.clone()) == image, "{mix:?}: rows differ");
    }
    assert_ne!(tags[&true], tags[&false]);
}

#[test]
fn pages_move_rows_and_stores_find_them() {
    let mix = Mix { bytes: true, paged: true, sparse: true };
    let mut loaded = mixed(mix, 64).unwrap();
    let prompt = ids(7, 40, 480);
    let want = prefill(&mut loaded.core, 0, &prompt, 16);
    let moved = loaded.pages.state.lock().unwrap().of[&0].clone();
    assert!(moved.iter().zip(0..).any(|(page, i)| *page != i), "pages lie where rows would: {moved:?}");
    let image = loaded.core.image(0);
    // What a store copies from one slot and puts into another: all rows but those that need no copy, and the state.
    let (mut families, mut state) = (Vec::new(), List::new());
    {
        let sequences = SequencesOf::new(&mut loaded.core);
        let lent = SequencesObject::lend(&sequences);
        for (i, info) in lent.families().unwrap().iter().enumerate() {
            if info.family.addressing == Addressing::State {
                continue;
            }
            let rows = 40 / info.family.positions_a_row;
            let mut bytes = List::new();
            lent.gather(0, i as u32, 0, rows, &mut bytes).unwrap();
            families.push((i as u32, bytes));
        }
        lent.state(0, &mut state).unwrap();
    }
    // The rows are overwritten, and other pages are free.
    prefill(&mut loaded.core, 0, &ids(8, 33, 480), 16);
    loaded.core.begin(1);
    {
        let sequences = SequencesOf::new(&mut loaded.core);
        let lent = SequencesObject::lend(&sequences);
        for (i, bytes) in &families {
            lent.scatter(1, *i, 0, Slice::from(&bytes[..])).unwrap();
        }
        lent.resume(1, Slice::from(&prompt[..]), Slice::from(&state[..]), Slice::default()).unwrap();
        assert!(lent.gather(1, 3, 0, 10_000, &mut List::new()).is_err(), "rows that no page holds");
    }
    assert!(loaded.core.image(1) == image, "the restored sequence is the stored one");
    // And it goes on as the stored one would.
    let next = |core: &mut Core, slot| {
        let f = forward(core, Phase::Window, slot, &[5, 6], Want::All);
        let row = core.output(&f, "logits").unwrap().to_vec();
        core.commit(&f, &[2]).unwrap();
        row
    };
    let got = next(&mut loaded.core, 1);
    assert_eq!(prefill(&mut loaded.core, 0, &prompt, 16), want);
    assert_eq!(next(&mut loaded.core, 0), got);
}

#[test]
fn a_pool_without_pages_fails_the_forward_that_needs_them() {
    let mix = Mix { bytes: false, paged: true, sparse: false };
    // Six pages: 48 positions in all.
    let mut loaded = mixed(mix, 6).unwrap();
    let core = &mut loaded.core;
    prefill(core, 0, &ids(1, 30, 480), 30);
    core.begin(1);
    let tokens = ids(2, 30, 480);
    let rows = [SeqRows { slot: 1, tokens: &tokens, want: Want::Last, embeds: &[] }];
    let f = core.forward(Phase::Prefill, &rows, None, false).unwrap();
    let failed = f.failure.unwrap().to_string();
    assert!(failed.contains("run by 0290: no page is left for rows 0 to 30"), "{failed}");
    // The other sequence has its pages, and a shorter one fits.
    let f = forward(core, Phase::Window, 0, &[1], Want::Last);
    core.commit(&f, &[1]).unwrap();
    prefill(core, 1, &tokens[..14], 14);
}

#[test]
fn two_edits_of_one_field_need_an_order() {
    let refused = integer::core(1, Split::WHOLE, None, |hooks| {
        hooks.add_object("0060", LayoutLinkObject::new(Edit(latents))).unwrap();
        hooks.add_object("0220", LayoutLinkObject::new(Edit(bytes))).unwrap();
    });
    let told = refused.err().unwrap();
    assert!(told.contains("0060") && told.contains("0220") && told.contains("mla.kv"), "{told}");
}
