//! What stores may do with sequences, and the records of plugins' state parts.

use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{
    DraftRows, Drafter, DrafterObject, Family, FamilyInfo, FamilyRows, Mapper, Owner, PartRows, Sequences,
    StatePart,
};
use plugfold_abi::{Addressing, List, OpError, Slice, SlotState};
use serde::{Deserialize, Serialize};

use super::{Core, LoadError};
use crate::hooks::{HookError, Hooked, Hooks};
use crate::memory::free_bytes;
use crate::state::Place;

#[derive(Serialize, Deserialize)]
struct Record {
    id: String,
    version: u32,
    bytes: Vec<u8>,
}

/// The records of all parts of a slot.
pub(super) fn save_parts(hooks: &Hooks, slot: u32) -> Result<Vec<u8>, HookError> {
    if hooks.parts.is_empty() {
        return Ok(Vec::new());
    }
    let mut records = Vec::new();
    for h in &hooks.parts {
        let mut bytes = List::new();
        h.call(|p| p.save(slot, &mut bytes))?;
        let (id, version) = (h.call(StatePart::id)?.to_string(), h.call(StatePart::version)?);
        records.push(Record { id, version, bytes: bytes.into() });
    }
    let named = |e: postcard::Error| HookError { owner: "engine".into(), error: OpError::new(e.to_string()) };
    postcard::to_stdvec(&records).map_err(named)
}

/// Gives every part its record. One that is missing or of another version: the part begins anew, or, where it is needed,
/// the snapshot is refused.
pub(super) fn load_parts(hooks: &Hooks, slot: u32, bytes: &[u8]) -> Result<(), LoadError> {
    let unreadable =
        |e: postcard::Error| LoadError::Layout(format!("the parts of a snapshot cannot be read: {e}"));
    let records: Vec<Record> =
        if bytes.is_empty() { Vec::new() } else { postcard::from_bytes(bytes).map_err(unreadable)? };
    for h in &hooks.parts {
        let (id, version) = (h.call(StatePart::id)?, h.call(StatePart::version)?);
        match records.iter().find(|r| r.id == id.as_str() && r.version == version) {
            Some(record) => h.call(|p| p.load(slot, Slice::from(&record.bytes[..])))?,
            None if h.call(StatePart::needed)? => {
                return Err(LoadError::Layout(format!(
                    "a snapshot lacks part {id} version {version} of plugin {}",
                    h.owner
                )));
            }
            None => h.call(|p| p.begin(slot))?,
        }
    }
    Ok(())
}

/// Where rows of a slot's sequence lie.
pub(super) fn places(
    hooks: &Hooks,
    family: &Family,
    slot: u32,
    first: u32,
    rows: u32,
    reserve: bool,
) -> Result<Vec<Place>, OpError> {
    let end = first.checked_add(rows).ok_or_else(|| OpError::new("rows beyond any family"))?;
    if family.addressing != Addressing::Paged {
        return Ok((first..end).map(|row| Place { slot, row }).collect());
    }
    for h in &hooks.mappers {
        if h.call(Mapper::family).is_ok_and(|id| id == family.id) {
            let mut found = List::new();
            let mapped = h.call(|m| m.rows(slot, first, rows, reserve, &mut found));
            mapped.map_err(|e| OpError::new(e.to_string()))?;
            let each = family.rows.max(1);
            return Ok(found.iter().map(|r| Place { slot: r / each, row: r % each }).collect());
        }
    }
    Err(OpError::new(format!("cache family {} is paged and no plugin brings its map", family.id)))
}

impl Core {
    fn places(
        &self,
        slot: u32,
        family: u32,
        first: u32,
        rows: u32,
        reserve: bool,
    ) -> Result<Vec<Place>, OpError> {
        let found = self.caches.families().get(family as usize);
        let found = found.ok_or_else(|| OpError::new(format!("there is no family {family}")))?;
        places(&self.hooks, found, slot, first, rows, reserve)
    }
}

/// A core as stores see it.
pub struct SequencesOf<'a>(Mutex<&'a mut Core>);

impl<'a> SequencesOf<'a> {
    /// Lends a core to stores.
    pub fn new(core: &'a mut Core) -> Self {
        Self(Mutex::new(core))
    }

    fn core(&self, slot: u32) -> Result<MutexGuard<'_, &'a mut Core>, OpError> {
        let core = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = core.capacity.slots;
        if (slot as usize) < slots { Ok(core) } else { Err(OpError::new(format!("slot {slot} of {slots}"))) }
    }
}

impl Sequences for SequencesOf<'_> {
    fn families(&self) -> Result<List<FamilyInfo>, OpError> {
        let core = self.core(0)?;
        let info = |(i, f): (usize, &Family)| FamilyInfo {
            family: f.clone(),
            stacked_row_bytes: core.caches.stacked_row_bytes(i) as u64,
        };
        Ok(core.caches.families().iter().enumerate().map(info).collect())
    }

    fn length(&self, slot: u32) -> Result<u32, OpError> {
        Ok(self.core(slot)?.slots[slot as usize].len() as u32)
    }

    fn gather(
        &self,
        slot: u32,
        family: u32,
        first: u32,
        rows: u32,
        out: &mut List<u8>,
    ) -> Result<(), OpError> {
        let core = self.core(slot)?;
        let mut bytes = Vec::new();
        let places = core.places(slot, family, first, rows, false)?;
        let done = core.caches.gather(family as usize, &places, &mut bytes)?;
        done.ok_or_else(|| OpError::new(format!("family {family} has no rows {first} to {}", first + rows)))?;
        out.extend_from_slice(&bytes);
        Ok(())
    }

    fn scatter(&self, slot: u32, family: u32, first: u32, bytes: Slice<'_, u8>) -> Result<(), OpError> {
        let mut core = self.core(slot)?;
        let rows = core.caches.rows_in(family as usize, &bytes).unwrap_or(0);
        let places = core.places(slot, family, first, rows, true)?;
        let done = core.caches.scatter(family as usize, &places, &bytes)?;
        done.ok_or_else(|| {
            OpError::new(format!("family {family} has no rows at {first} for {} bytes", bytes.len()))
        })?;
        // What was there is gone, also when the rest never comes: no snapshot may rely on it. Rows of a drafter's own hold no
        // part of the sequence's text.
        let written = &core.caches.families()[family as usize];
        let (owner, positions) = (written.owner, written.positions_a_row);
        if owner != Owner::Drafter {
            core.slots[slot as usize].written.truncate((first * positions) as usize);
        }
        Ok(())
    }

    fn draft_rows(&self, slot: u32) -> Result<DraftRows, OpError> {
        let core = self.core(slot)?;
        let reads = |d: &Hooked<DrafterObject>| d.hook.wants().is_ok_and(|w| w.mtp_layer);
        if !core.has_mtp || !core.hooks.drafters.iter().any(reads) {
            return Ok(DraftRows::Broken);
        }
        for part in &core.hooks.parts {
            let says = part.call(|p| p.draft_rows(slot)).map_err(|e| OpError::new(e.to_string()))?;
            if says != DraftRows::Silent {
                return Ok(says);
            }
        }
        Ok(DraftRows::Silent)
    }

    fn part_rows(&self, slot: u32) -> Result<List<FamilyRows>, OpError> {
        let core = self.core(slot)?;
        let mut all = List::new();
        for h in &core.hooks.parts {
            let told = h.call(|p| p.rows(slot)).map_err(|e| OpError::new(e.to_string()))?;
            for PartRows { family, first, rows } in &told {
                let mine = |f: &Family| f.id == *family && f.owner == Owner::Drafter;
                let found = core.caches.families().iter().position(mine);
                let inside = |at: &usize| {
                    first.checked_add(*rows).is_some_and(|end| end <= core.caches.families()[*at].rows)
                };
                let at = found.filter(inside).ok_or_else(|| {
                    let text =
                        format!("rows {first} to {} of {family}: no drafter's family has them", first + rows);
                    OpError::new(h.named(&OpError::new(text)).to_string())
                })?;
                all.push(FamilyRows { family: at as u32, first: *first, rows: *rows });
            }
        }
        Ok(all)
    }

    fn free_bytes(&self) -> Result<u64, OpError> {
        Ok(free_bytes())
    }

    fn state(&self, slot: u32, out: &mut List<u8>) -> Result<(), OpError> {
        let core = self.core(slot)?;
        let at = SlotState { slot, parity: core.slots[slot as usize].parity };
        out.extend_from_slice(bytemuck::cast_slice(&core.caches.copy_state(at)?));
        Ok(())
    }

    fn parts(&self, slot: u32, out: &mut List<u8>) -> Result<(), OpError> {
        let core = self.core(slot)?;
        let bytes = save_parts(&core.hooks, slot).map_err(|e| OpError::new(e.to_string()))?;
        out.extend_from_slice(&bytes);
        Ok(())
    }

    fn resume(
        &self,
        slot: u32,
        ids: Slice<'_, u32>,
        state: Slice<'_, u8>,
        parts: Slice<'_, u8>,
    ) -> Result<(), OpError> {
        let mut core = self.core(slot)?;
        let at = SlotState { slot, parity: 0 };
        let number = |b: &[u8]| b.first_chunk().map_or(0.0, |b| f32::from_ne_bytes(*b));
        let floats: Vec<f32> = state.chunks_exact(4).map(number).collect();
        let mine = core.caches.state_len();
        if floats.len() != mine || ids.len() > core.capacity.tokens {
            let text =
                format!("a state of {} numbers at length {}, where {mine} are kept", floats.len(), ids.len());
            return Err(OpError::new(text));
        }
        core.caches.put_state(at, &floats)?;
        let s = &mut core.slots[slot as usize];
        s.parity = 0;
        s.ids = ids.to_vec();
        s.written = ids.to_vec();
        if let Err(error) = load_parts(&core.hooks, slot, &parts) {
            core.slots[slot as usize].ids.clear();
            return Err(OpError::new(error.to_string()));
        }
        Ok(())
    }
}
