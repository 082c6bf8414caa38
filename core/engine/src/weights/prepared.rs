//! Weights as they lie in memory, kept by a store of a plugin: what is kept, and reading it back.

use std::path::Path;

use memmap2::MmapMut;
use plugfold_abi::points::{PREPARED_PAGE, Piece, PreparedKey, PreparedStore, PreparedStoreObject, Purpose};
use plugfold_abi::{DType, Slice, SliceMut, Text, View};
use serde::{Deserialize, Serialize};

use super::builders::Job;
use super::{WeightError, WeightTable, intern};
use crate::hooks::{HookError, Hooked};
use crate::split::Split;

/// Version of what is kept; raised with every change of the index or of a format of the reference.
const VERSION: u32 = 1;

/// What prepared weights are of.
pub struct Shelf<'a> {
    /// Folder of the checkpoint.
    pub dir: &'a Path,
    /// Lines that identify the checkpoint: `name = value`.
    pub lines: Vec<String>,
    /// This rank's share.
    pub split: Split,
}

/// A plane in what is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KeptPlane {
    offset: u64,
    rows: u32,
    cols: u32,
    dtype: u8,
}

/// A weight in what is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KeptWeight {
    layer: u32,
    site: u32,
    role: String,
    purpose: u8,
    format: String,
    n: u32,
    k: u32,
    count: u32,
    planes: Vec<KeptPlane>,
}

const TYPES: [DType; 6] = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::U32, DType::U8];

impl KeptPlane {
    fn bytes(&self, dtype: DType) -> u64 {
        u64::from(self.rows) * u64::from(self.cols) * dtype.size() as u64
    }

    /// The plane inside of memory that was read; nothing if it would not be.
    fn view(&self, memory: &MmapMut) -> Option<View> {
        let dtype = *TYPES.get(usize::from(self.dtype))?;
        let end = self.offset.checked_add(self.bytes(dtype))?;
        if end > memory.len() as u64 || !self.offset.is_multiple_of(PREPARED_PAGE as u64) {
            return None;
        }
        // The offset is inside of the memory, so the address is.
        let ptr = memory.as_ptr().wrapping_add(self.offset as usize).cast_mut();
        Some(View { ptr, rows: self.rows, cols: self.cols, stride: self.cols, dtype })
    }
}

impl KeptWeight {
    fn is_of(&self, job: &Job<'_>) -> bool {
        let r = job.recipe;
        (self.layer, self.site, self.role.as_str()) == (r.layer, r.site, r.role)
            && self.purpose == job.purpose as u8
            && [self.n, self.k, self.count] == [r.n, r.k, r.count].map(|size| size as u32)
    }
}

/// The store that is loaded, with the key of this rank's weights.
pub struct Store<'a> {
    hook: &'a Hooked<PreparedStoreObject>,
    name: String,
    model: String,
    lines: String,
    split: Split,
}

/// The one store; `None` where no plugin brings one.
///
/// # Errors
/// Two of them, or one that fails.
pub fn open<'a, E: std::error::Error + 'static>(
    stores: &'a [Hooked<PreparedStoreObject>],
    shelf: &Shelf<'_>,
    built: &[String],
) -> Result<Option<Store<'a>>, WeightError<E>> {
    let (hook, others) = match stores {
        [] => return Ok(None),
        [hook, others @ ..] => (hook, others),
    };
    if let Some(other) = others.first() {
        return Err(WeightError::Plugin {
            owner: other.owner.to_string(),
            why: format!(
                "brings a store of prepared weights, and so does plugin {}: take one off the list",
                hook.owner
            ),
        });
    }
    let failed = |error| WeightError::Hook { what: "store of prepared weights".into(), error };
    let name = hook.call(PreparedStore::name).map_err(failed)?.to_string();
    let model = shelf.dir.canonicalize().unwrap_or_else(|_| shelf.dir.to_owned());
    let model = model.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned());
    let mut lines = vec![
        format!("prepared = {VERSION}"),
        format!("engine = {}", crate::BUILD),
        format!("kernels = {}", plugfold_kernels::BUILD),
        format!("boundary = {}", plugfold_abi::BUILD),
        "device = cpu".into(),
        format!("rank = {} of {}", shelf.split.rank, shelf.split.ranks),
    ];
    lines.extend(shelf.lines.iter().chain(built).cloned());
    Ok(Some(Store { hook, name, model, lines: lines.join("\n"), split: shelf.split }))
}

impl Store<'_> {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn key(&self) -> PreparedKey<'_> {
        PreparedKey {
            model: Text::from(&*self.model),
            rank: self.split.rank as u32,
            ranks: self.split.ranks as u32,
            lines: Text::from(&*self.lines),
        }
    }

    fn warn(&self, what: &str, error: &dyn std::fmt::Display) {
        tracing::warn!("prepared weights of rank {}: {what}: {error}", self.split.rank);
    }

    /// The weights that the store has. Anything wrong with them is told, and they are built instead.
    pub fn read(&self, jobs: &[Job<'_>]) -> Option<WeightTable> {
        let wrong = |error: HookError| self.warn("they are built from the checkpoint instead", &error);
        let found = self.hook.call(|s| s.find(&self.key())).map_err(wrong).ok()?.into_option()?;
        match self.table(jobs, &found) {
            Ok(table) => Some(table),
            Err(why) => {
                self.warn("they are built from the checkpoint instead", &why);
                None
            }
        }
    }

    fn table(&self, jobs: &[Job<'_>], found: &plugfold_abi::points::Prepared) -> Result<WeightTable, String> {
        let kept: Vec<KeptWeight> =
            postcard::from_bytes(&found.index).map_err(|e| format!("their index cannot be read ({e})"))?;
        if kept.len() != jobs.len() || kept.iter().zip(jobs).any(|(kept, job)| !kept.is_of(job)) {
            return Err("their index is of other weights".into());
        }
        let bytes = usize::try_from(found.bytes).map_err(|e| e.to_string())?;
        let len = bytes.next_multiple_of(PREPARED_PAGE).max(PREPARED_PAGE);
        let mut memory = MmapMut::map_anon(len).map_err(|e| format!("{len} bytes of memory: {e}"))?;
        self.hook
            .call(|s| s.read(&self.key(), SliceMut::from(&mut memory[..])))
            .map_err(|error| error.to_string())?;
        let mut table = WeightTable::default();
        for (kept, job) in kept.iter().zip(jobs) {
            let views: Option<Vec<View>> = kept.planes.iter().map(|plane| plane.view(&memory)).collect();
            let views = views.filter(|v| v.len() <= 4).ok_or("their index points out of them")?;
            table.push(job, intern(&kept.format), &views);
        }
        table.arena = Some(memory);
        Ok(table)
    }

    /// Offers weights that were built to the store.
    pub fn keep(&self, jobs: &[Job<'_>], table: &WeightTable) {
        let (mut index, mut pieces, mut end) = (Vec::with_capacity(jobs.len()), Vec::new(), 0_u64);
        for ((job, weight), planes) in jobs.iter().zip(&table.weights).zip(&table.planes) {
            let r = job.recipe;
            let mut kept = KeptWeight {
                layer: r.layer,
                site: r.site,
                role: r.role.into(),
                purpose: job.purpose as u8,
                format: weight.format.to_string(),
                n: weight.n,
                k: weight.k,
                count: weight.count,
                planes: Vec::with_capacity(planes.len()),
            };
            for (plane, view) in planes.iter().zip(&weight.planes) {
                kept.planes.push(KeptPlane {
                    offset: end,
                    rows: view.rows,
                    cols: view.cols,
                    dtype: view.dtype as u8,
                });
                pieces.push(Piece { offset: end, bytes: Slice::from(plane.contents()) });
                end += (plane.contents().len() as u64).next_multiple_of(PREPARED_PAGE as u64);
            }
            index.push(kept);
        }
        match postcard::to_stdvec(&index) {
            Ok(index) => {
                let (index, pieces) = (Slice::from(&index[..]), Slice::from(&pieces[..]));
                if let Err(error) = self.hook.call(|s| s.offer(&self.key(), index, pieces)) {
                    self.warn("they are not kept", &error);
                }
            }
            Err(error) => self.warn("they are not kept", &error),
        }
    }
}

/// Purposes are kept by number: a new one goes to the end.
const _: () = assert!(Purpose::ALL.len() == 3 && Purpose::Prefill as u8 == 2);
