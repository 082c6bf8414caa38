//! What a sequence owns: rows in the cache families, recurrent state in two buffers with a parity, and its ids.

use std::sync::Arc;

use plugfold_abi::points::{Families, Family, Owner};
use plugfold_abi::{Addressing, CacheView, KnobValue, SlotState, Text};
use plugfold_kernels::device::{Device, DeviceError, Memory};

use crate::config::{Attention, Indexer, ModelConfig};
use crate::split::Split;

/// Sizes that decide how much memory sequences take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Sequences at once.
    pub slots: usize,
    /// Tokens a sequence.
    pub tokens: usize,
    /// Rows of the largest verify window.
    pub window_rows: usize,
}

/// The families of the reference layout on one rank.
pub fn reference_families(config: &ModelConfig, split: Split, capacity: Capacity, mtp: bool) -> Families {
    let k = config.kda;
    let heads = split.share(k.heads).len();
    let c = heads * k.head_dim;
    let m = config.mla;
    let mla_heads = split.share(m.heads).len();
    let layers_where = |f: &dyn Fn(Attention) -> bool| -> Vec<u32> {
        let all = config.layers.iter().enumerate();
        all.filter(|(_, l)| f(l.attention)).map(|(i, _)| i as u32).collect()
    };
    let kda = layers_where(&|a| a == Attention::Kda);
    let mla = layers_where(&|a| matches!(a, Attention::Mla { .. }));
    let own = layers_where(&|a| a == Attention::Mla { indexer: Indexer::Own });
    let state = |id: &str, row_elements: usize, rows: usize, buffers, in_snapshot| Family {
        id: id.into(),
        layers: kda.clone().into(),
        owner: Owner::Model,
        addressing: Addressing::State,
        format: "f32".into(),
        row_bytes: row_elements as u64 * 4,
        positions_a_row: 0,
        rows: rows as u32,
        buffers,
        in_snapshot,
    };
    let token = |id: &str, layers: &[u32], owner, row_elements: usize, positions_a_row: usize| Family {
        id: id.into(),
        layers: layers.to_vec().into(),
        owner,
        addressing: Addressing::Linear,
        format: "f32".into(),
        row_bytes: row_elements as u64 * 4,
        positions_a_row: positions_a_row as u32,
        rows: capacity.tokens.div_ceil(positions_a_row) as u32,
        buffers: 1,
        in_snapshot: false,
    };
    let kv = mla_heads * (m.key_dim + m.value_dim);
    let dim = config.index.head_dim;
    let mut families = vec![
        state("kda.state", heads * k.head_dim * k.head_dim, 1, 2, true),
        state("kda.conv", (k.taps - 1) * 3 * c, 1, 2, true),
        state("kda.replay", 3 * c + 3 * c + heads, capacity.window_rows, 1, false),
        token("mla.kv", &mla, Owner::Model, kv, 1),
        token("idx.token", &own, Owner::Model, 2 * dim, 1),
        token("idx.pool", &own, Owner::Model, dim, config.index.pool),
    ];
    if mtp {
        let layer = [config.layers.len() as u32];
        families.push(token("mla.kv", &layer, Owner::Mtp, kv, 1));
        families.push(token("idx.token", &layer, Owner::Mtp, 2 * dim, 1));
        families.push(token("idx.pool", &layer, Owner::Mtp, dim, config.index.pool));
    }
    Families {
        all: families.into(),
        context: capacity.tokens as u32,
        window_rows: capacity.window_rows as u32,
        mla_heads: mla_heads as u32,
        mla_key: m.key_dim as u32,
        mla_value: m.value_dim as u32,
        mla_latent: m.kv_rank as u32,
    }
}

/// Alignment of records, in bytes.
const ALIGN: usize = 64;

struct Store {
    family: usize,
    layer: u32,
    format: Text<'static>,
    memory: Memory,
}

/// Where a row of a family lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Slot of the table: with pages not always that of the sequence.
    pub slot: u32,
    /// Row of the slot.
    pub row: u32,
}

/// The memory of all families, allocated once.
pub struct CacheTable {
    families: Vec<Family>,
    stores: Vec<Store>,
    slots: usize,
}

impl CacheTable {
    /// Allocates, zeroed, on a device or, without one, of the host, whose system hands out pages as they are touched.
    ///
    /// # Errors
    /// A device's memory that is used up.
    pub fn new(
        families: Vec<Family>,
        slots: usize,
        device: Option<&Arc<dyn Device>>,
    ) -> Result<Self, DeviceError> {
        let mut stores = Vec::new();
        for (family, f) in families.iter().enumerate() {
            // Kept for the life of the process: views carry it, and there are a handful of formats.
            let format = Text::from(&*Box::leak(f.format.to_string().into_boxed_str()));
            for &layer in &f.layers {
                let memory = Memory::new(device, "caches", slots * slot_bytes(f))?;
                stores.push(Store { family, layer, format, memory });
            }
        }
        Ok(Self { families, stores, slots })
    }

    /// The families.
    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// Bytes of all families of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.families.iter().map(|f| slot_bytes(f) * f.layers.len()).sum()
    }

    /// Bytes of all families of all slots.
    pub fn bytes(&self) -> usize {
        self.stores.iter().map(|s| s.memory.len()).sum()
    }

    fn view_of(&self, store: &Store) -> CacheView {
        let f = &self.families[store.family];
        let buffer = buffer_bytes(f) as u64;
        CacheView {
            base: store.memory.address(),
            slot_stride: slot_bytes(f) as u64,
            parity_stride: if f.buffers > 1 { buffer } else { 0 },
            row_bytes: f.row_bytes,
            rows: f.rows,
            slots: self.slots as u32,
            format: store.format,
            addressing: f.addressing,
        }
    }

    /// The view of a family in a layer.
    pub fn view(&self, family: &str, layer: u32) -> Option<CacheView> {
        let found =
            self.stores.iter().find(|s| s.layer == layer && self.families[s.family].id.as_str() == family)?;
        Some(self.view_of(found))
    }

    /// Zeroes the recurrent state of one buffer of a slot: the state before the first token.
    ///
    /// # Errors
    /// What a device says.
    pub fn clear_state(&mut self, at: SlotState) -> Result<(), DeviceError> {
        let records = self.records(at);
        records
            .into_iter()
            .try_for_each(|(store, offset, bytes)| self.stores[store].memory.zero(offset, bytes))
    }

    /// Copies the recurrent state of one buffer of a slot.
    ///
    /// # Errors
    /// What a device says.
    pub fn copy_state(&self, at: SlotState) -> Result<Vec<f32>, DeviceError> {
        let records = self.records(at);
        let mut out = vec![0.0_f32; records.iter().map(|(_, _, bytes)| bytes / 4).sum()];
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
        for (store, offset, bytes) in records {
            let (mine, after) = rest.split_at_mut(bytes);
            self.stores[store].memory.read(offset, mine)?;
            rest = after;
        }
        Ok(out)
    }

    /// Puts a copied state into one buffer of a slot.
    ///
    /// # Errors
    /// What a device says.
    ///
    /// # Panics
    /// When the copy is of another layout: snapshots are only made by [`CacheTable::copy_state`] of the same engine.
    pub fn put_state(&mut self, at: SlotState, state: &[f32]) -> Result<(), DeviceError> {
        let mut rest: &[u8] = bytemuck::cast_slice(state);
        for (store, offset, bytes) in self.records(at) {
            let (mine, after) = rest.split_at(bytes);
            self.stores[store].memory.write(offset, mine)?;
            rest = after;
        }
        assert!(rest.is_empty(), "a snapshot of another layout");
        Ok(())
    }

    /// Numbers in the recurrent state of a sequence.
    pub fn state_len(&self) -> usize {
        self.records(SlotState { slot: 0, parity: 0 }).iter().map(|(_, _, bytes)| bytes / 4).sum()
    }

    /// Where the recurrent state of one buffer of a slot lies: store, offset, bytes.
    fn records(&self, at: SlotState) -> Vec<(usize, usize, usize)> {
        let mut found = Vec::new();
        for (i, store) in self.stores.iter().enumerate() {
            let f = &self.families[store.family];
            if f.in_snapshot {
                let bytes = f.rows as usize * f.row_bytes as usize;
                found.push((i, self.offset(store, at, 0), bytes));
            }
        }
        found
    }

    /// Where a row of a store begins, in bytes.
    fn offset(&self, store: &Store, at: SlotState, row: u32) -> usize {
        let f = &self.families[store.family];
        let parity = if f.buffers > 1 { at.parity as usize * buffer_bytes(f) } else { 0 };
        at.slot as usize * slot_bytes(f) + parity + row as usize * f.row_bytes as usize
    }

    /// Bytes of a row of a family over all its layers.
    pub fn stacked_row_bytes(&self, family: usize) -> usize {
        self.families.get(family).map_or(0, |f| f.row_bytes as usize * f.layers.len())
    }

    /// Copies rows, all layers of a row together, to the end of `out`. `None`: no such rows.
    ///
    /// # Errors
    /// What a device says.
    pub fn gather(
        &self,
        family: usize,
        rows: &[Place],
        out: &mut Vec<u8>,
    ) -> Result<Option<()>, DeviceError> {
        let Some(stores) = self.stores_of(family, rows) else { return Ok(None) };
        let (each, stacked) = (self.families[family].row_bytes as usize, self.stacked_row_bytes(family));
        let start = out.len();
        out.resize(start + rows.len() * stacked, 0);
        let mut taken = Vec::new();
        let mut done = 0;
        for run in runs(rows) {
            for (layer, store) in stores.iter().map(|s| &self.stores[*s]).enumerate() {
                taken.resize(run.len() * each, 0);
                let at = SlotState { slot: run[0].slot, parity: 0 };
                store.memory.read(self.offset(store, at, run[0].row), &mut taken)?;
                for (row, bytes) in taken.chunks_exact(each).enumerate() {
                    let to = start + (done + row) * stacked + layer * each;
                    out[to..to + each].copy_from_slice(bytes);
                }
            }
            done += run.len();
        }
        Ok(Some(()))
    }

    /// How many rows bytes are; `None`: not whole ones.
    pub fn rows_in(&self, family: usize, bytes: &[u8]) -> Option<u32> {
        let size = self.stacked_row_bytes(family);
        bytes.len().checked_div(size).filter(|n| n * size == bytes.len()).map(|n| n as u32)
    }

    /// The opposite of [`CacheTable::gather`]. `None`: no such rows, or another number of bytes.
    ///
    /// # Errors
    /// What a device says.
    pub fn scatter(
        &mut self,
        family: usize,
        rows: &[Place],
        bytes: &[u8],
    ) -> Result<Option<()>, DeviceError> {
        let whole = self.rows_in(family, bytes).is_some_and(|n| n as usize == rows.len());
        let Some(stores) = self.stores_of(family, rows).filter(|_| whole) else { return Ok(None) };
        let (each, stacked) = (self.families[family].row_bytes as usize, self.stacked_row_bytes(family));
        let mut given = Vec::new();
        let mut done = 0;
        for run in runs(rows) {
            for (layer, store) in stores.iter().enumerate() {
                given.clear();
                for row in done..done + run.len() {
                    let from = row * stacked + layer * each;
                    given.extend_from_slice(&bytes[from..from + each]);
                }
                let at = SlotState { slot: run[0].slot, parity: 0 };
                let offset = self.offset(&self.stores[*store], at, run[0].row);
                self.stores[*store].memory.write(offset, &given)?;
            }
            done += run.len();
        }
        Ok(Some(()))
    }

    fn stores_of(&self, family: usize, rows: &[Place]) -> Option<Vec<usize>> {
        let f = self.families.get(family)?;
        let inside = rows.iter().all(|place| place.row < f.rows && (place.slot as usize) < self.slots);
        // Rows of a ring are named by their place; where positions lie in it is its owner's to know.
        let by_place = matches!(f.addressing, Addressing::Linear | Addressing::Paged | Addressing::Ring);
        let of_family = |(i, s): (usize, &Store)| (s.family == family).then_some(i);
        (inside && by_place).then(|| self.stores.iter().enumerate().filter_map(of_family).collect())
    }

    /// Everything that decides a sequence's future: its committed state and all rows below its length, layer by layer.
    /// Equal sequences have equal images; tests compare them bit for bit.
    ///
    /// `paged`: where rows of a paged family lie, by its index and how many are wanted.
    ///
    /// # Errors
    /// What a device says.
    pub fn image(
        &mut self,
        at: SlotState,
        length: usize,
        owner: Owner,
        paged: impl Fn(usize, u32) -> Vec<Place>,
    ) -> Result<Vec<(String, Vec<u32>)>, DeviceError> {
        let mut out = Vec::new();
        for store in self.stores.iter().filter(|s| self.families[s.family].owner == owner) {
            let f = &self.families[store.family];
            let read = |at: SlotState, row: u32, rows: u32| {
                let mut bits = vec![0_u32; rows as usize * (f.row_bytes as usize / 4)];
                let bytes = bytemuck::cast_slice_mut(&mut bits);
                store.memory.read(self.offset(store, at, row), bytes).map(|()| bits)
            };
            let rows = length as u32 / f.positions_a_row.max(1);
            let bits = match f.addressing {
                Addressing::State if f.in_snapshot => read(at, 0, f.rows)?,
                Addressing::State => continue,
                Addressing::Paged => {
                    let mut bits = Vec::new();
                    for place in paged(store.family, rows) {
                        bits.extend(read(SlotState { slot: place.slot, parity: 0 }, place.row, 1)?);
                    }
                    bits
                }
                Addressing::Linear | Addressing::Ring => {
                    read(SlotState { slot: at.slot, parity: 0 }, 0, rows)?
                }
            };
            out.push((format!("{} layer {}", f.id, store.layer), bits));
        }
        Ok(out)
    }
}

/// Places cut into runs of rows that follow each other in one slot.
fn runs(rows: &[Place]) -> impl Iterator<Item = &[Place]> {
    rows.chunk_by(|a, b| a.slot == b.slot && a.row + 1 == b.row)
}

fn buffer_bytes(f: &Family) -> usize {
    (f.row_bytes as usize * f.rows as usize).next_multiple_of(ALIGN)
}

fn slot_bytes(f: &Family) -> usize {
    buffer_bytes(f) * f.buffers as usize
}

/// A sequence's recurrent state at a length, to continue from it later.
///
/// The rows of the token families are not copied: a snapshot is valid only on its slot, and only while the slot's rows
/// are still those of its ids ([`Slot::written`]).
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The ids up to the snapshot.
    pub ids: Arc<[u32]>,
    /// The slot it was taken from.
    pub slot: usize,
    /// Arithmetic of the prefill that made it: only equal tags resume.
    pub tag: u64,
    /// Recurrent state.
    pub(crate) state: Vec<f32>,
    /// Records of plugins' state parts.
    pub(crate) parts: Vec<u8>,
}

/// One place for a sequence.
#[derive(Clone, Debug, Default)]
pub struct Slot {
    /// Ids whose rows are committed.
    pub ids: Vec<u32>,
    /// Ids whose rows lie in the token families, from position 0: those of the present sequence, or, before it has
    /// written anything, of the one before it.
    pub written: Vec<u32>,
    /// Which state buffer is committed.
    pub parity: u32,
    /// The request's knobs, by number.
    pub knobs: Arc<[KnobValue]>,
}

impl Slot {
    /// Committed length.
    pub fn len(&self) -> usize {
        self.ids.len()
    }
    /// Whether nothing is committed.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
    /// Whether the rows that a snapshot relies on are still there.
    pub fn holds(&self, snapshot: &Snapshot) -> bool {
        self.written.starts_with(&snapshot.ids)
    }
}
