//! Transports of collectives, chosen by name.

use std::sync::Arc;

use plugfold_abi::CommObject;
use plugfold_abi::points::{ControlObject, Transport};

use crate::hooks::{Hooks, chosen};
use crate::rank::StartError;
use crate::ranks::World;

/// Opens the collectives of all ranks, in step. One rank has none.
///
/// # Errors
/// A name that no loaded plugin has, or a transport that cannot be opened.
pub fn open(name: Option<&str>, hooks: &Hooks, world: &World) -> Result<Option<Arc<CommObject>>, StartError> {
    let found = chosen(&hooks.transports, "transport", name, Transport::name)
        .map_err(|e| StartError::Options(e.to_string()))?;
    if world.ranks() == 1 {
        return Ok(None);
    }
    let Some(h) = found else { return Ok(Some(Arc::new(CommObject::new(world.comm())))) };
    let opened = h.call(|t| t.open(ControlObject::new(world.plane())));
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
