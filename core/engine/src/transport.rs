//! Transports of collectives, chosen by name, and the control plane that they are opened with.

use std::sync::Arc;

use plugfold_abi::points::{Control, ControlObject, Transport};
use plugfold_abi::{CommObject, List, OpError, Slice, Text, TextBuf};

use crate::hooks::Hooks;
use crate::rank::StartError;
use crate::ranks::World;

/// Seconds that a wait for another rank may take before the watch ends it.
const PATIENCE_S: f64 = 5.0;

/// A world as transports see it.
struct ControlOf<'a>(&'a World);

impl Control for ControlOf<'_> {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(self.0.rank() as u32)
    }
    fn ranks(&self) -> Result<u32, OpError> {
        Ok(self.0.ranks() as u32)
    }
    fn gather(&self, what: Text<'_>, mine: Slice<'_, u8>) -> Result<List<List<u8>>, OpError> {
        let all = self.0.gather_to_all(what.get_str(), &mine);
        let all = all.map_err(|e| OpError::fatal(e.to_string()))?;
        Ok(all.into_iter().map(List::from).collect())
    }
    fn patience_s(&self) -> Result<f64, OpError> {
        Ok(PATIENCE_S)
    }
    fn ended(&self) -> Result<TextBuf, OpError> {
        Ok(self.0.ended().map_or_else(TextBuf::new, |end| end.to_string().into()))
    }
    fn host(&self) -> Result<TextBuf, OpError> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Ok(id.trim().into())
    }
    fn streams(&self) -> Result<CommObject, OpError> {
        Ok(CommObject::new(self.0.comm()))
    }
}

/// Opens the collectives of all ranks, in step. One rank has none.
///
/// # Errors
/// A name that no loaded plugin has, or a transport that cannot be opened.
pub fn open(name: Option<&str>, hooks: &Hooks, world: &World) -> Result<Option<Arc<CommObject>>, StartError> {
    let mut found = None;
    let mut names = Vec::new();
    for h in &hooks.transports {
        let own = h.call(|t| t.name())?.to_string();
        if names.contains(&own) {
            return Err(StartError::Options(format!(
                "two plugins bring a transport called `{own}` (the second is {}): take one off the list",
                h.owner
            )));
        }
        if Some(own.as_str()) == name {
            found = Some(h);
        }
        names.push(own);
    }
    if let (Some(name), None) = (name, found) {
        return Err(StartError::Options(format!(
            "no loaded plugin brings the transport `{name}`; there are: {}",
            if names.is_empty() { "none".into() } else { names.join(", ") }
        )));
    }
    if world.ranks() == 1 {
        return Ok(None);
    }
    let Some(h) = found else { return Ok(Some(Arc::new(CommObject::new(world.comm())))) };
    let control = ControlOf(world);
    let opened = h.call(|t| t.open(&ControlObject::lend(&control)));
    let mine = opened.as_ref().err().map_or_else(String::new, ToString::to_string);
    for (rank, said) in world.gather_to_all("transport", mine.as_bytes())?.iter().enumerate() {
        if !said.is_empty() && opened.is_ok() {
            let said = String::from_utf8_lossy(said);
            return Err(StartError::Elsewhere(format!(
                "{} cannot open the transport: {said}",
                world.who(rank)
            )));
        }
    }
    Ok(Some(Arc::new(opened?)))
}
