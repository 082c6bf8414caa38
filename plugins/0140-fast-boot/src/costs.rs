//! Stored cost tables: the same numbers on all ranks, by an identity of everything that can change a timing.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use plugfold_0140_fast_boot_api::{CostTable, MeasureCosts as _, MeasureCostsObject, WeightCache};
use plugfold_abi::points::{Host as _, HostObject, Level};
use plugfold_abi::{List, OpError, Slice, Text, TextBuf};
use serde::{Deserialize, Serialize};

use crate::folder::hash;
use crate::store::Shared;

/// Longest file of a table.
const MAX_FILE: u64 = 1 << 20;

/// A table as it is stored.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// Identities of all ranks, in rank order.
    ranks: Vec<String>,
    /// Bits of the numbers, so that they come back as they were.
    bits: Vec<u64>,
}

/// The service `weight-cache`.
pub struct Cache {
    /// Where tables are stored.
    pub folder: PathBuf,
    /// The operator's name for a lock of clocks.
    pub clock_cap: String,
    /// Whether a stored table is followed by a warm-up.
    pub warm_up: bool,
    /// What hooks share.
    pub shared: Shared,
    /// The host.
    pub host: &'static HostObject,
}

impl Cache {
    /// Rank 0's bytes on every rank.
    fn of_lead(&self, what: &str, mine: &[u8]) -> Result<Vec<u8>, OpError> {
        let all = self.host.agree(Text::from(what), Slice::from(mine))?;
        all.first()
            .map(plugfold_abi::std_types::RVec::to_vec)
            .ok_or_else(|| OpError::new(format!("{what}: no rank answers")))
    }

    fn load(path: &Path, ranks: &[String]) -> Result<Option<Vec<u64>>, String> {
        let told = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(told(&e)),
            Ok(meta) if meta.len() > MAX_FILE => return Err(told(&"is too long for a cost table")),
            Ok(_) => {}
        }
        let kept: Kept = fs::read(path)
            .map_err(|e| told(&e))
            .and_then(|text| serde_json::from_slice(&text).map_err(|e| told(&e)))?;
        if kept.ranks != ranks || kept.bits.iter().any(|b| !f64::from_bits(*b).is_finite()) {
            return Err(told(&"is of another identity, or has numbers that are none"));
        }
        Ok(Some(kept.bits))
    }

    fn store(&self, path: &Path, ranks: Vec<String>, bits: Vec<u64>) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let partial = path.with_extension(format!("{}.partial", std::process::id()));
        fs::write(&partial, serde_json::to_vec(&Kept { ranks, bits })?)?;
        fs::rename(&partial, path)
    }
}

fn bytes_of(bits: &[u64]) -> Vec<u8> {
    bits.iter().flat_map(|b| b.to_le_bytes()).collect()
}

fn bits_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect()
}

impl WeightCache for Cache {
    fn key(&self) -> Result<TextBuf, OpError> {
        Ok(self.shared.key().into())
    }

    fn costs(
        &self,
        identity: Slice<'_, TextBuf>,
        cached: bool,
        measure: &MeasureCostsObject,
    ) -> Result<CostTable, OpError> {
        let mut lines: Vec<String> = identity.iter().map(ToString::to_string).collect();
        lines.push(format!("clock cap = {}", self.clock_cap));
        let word = format!("{} {cached}", hash(lines.join("\n").as_bytes()));
        let all = self.host.agree(Text::from("identity of the cost table"), Slice::from(word.as_bytes()))?;
        let words: Vec<String> = all.iter().map(|w| String::from_utf8_lossy(w).into_owned()).collect();
        let mode = |w: &String| w.rsplit(' ').next() == Some(if cached { "true" } else { "false" });
        if let Some(rank) = words.iter().position(|w| !mode(w)) {
            return Err(OpError::new(format!(
                "rank {rank} calibrates otherwise than rank {}: give all ranks the same calib",
                self.host.rank()?
            )));
        }
        let ranks: Vec<String> = words.iter().filter_map(|w| w.split(' ').next()).map(Into::into).collect();
        let path = self.folder.join(format!("{}.json", hash(ranks.join(" ").as_bytes())));
        let lead = self.host.rank()? == 0;
        let mut found = Vec::new();
        if cached {
            if lead {
                match Self::load(&path, &ranks) {
                    Ok(bits) => found = bits.unwrap_or_default(),
                    Err(why) => self.host.log(Level::Warn, Text::from(&*format!("{why}: measured again")))?,
                }
            }
            found = bits_of(&self.of_lead("stored cost table", &bytes_of(&found))?);
        }
        let hit = !found.is_empty();
        if !hit {
            let mine: Vec<u64> = measure.measure()?.iter().map(|v| v.to_bits()).collect();
            found = bits_of(&self.of_lead("measured cost table", &bytes_of(&mine))?);
            if lead && let Err(e) = self.store(&path, ranks, found.clone()) {
                let told = format!("{}: {e}: the cost table is not stored", path.display());
                self.host.log(Level::Warn, Text::from(&*told))?;
            }
        }
        let values: List<f64> = found.into_iter().map(f64::from_bits).collect();
        Ok(CostTable { values, cached: hit, warm_up: hit && self.warm_up })
    }
}
