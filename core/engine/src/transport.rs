//! Transports of collectives, chosen by name.

use std::sync::Arc;

use plugfold_abi::points::{ControlObject, Transport};
use plugfold_abi::{CommObject, Maybe};
use plugfold_kernels::device::Device;

use crate::hooks::{Hooks, chosen};
use crate::rank::StartError;
use crate::ranks::World;

/// Opens the collectives of all ranks, in step. One rank has none.
///
/// `device`: where this rank's model lies, if it is not the host.
///
/// # Errors
/// A name that no loaded plugin has, or a transport that cannot be opened.
pub fn open(
    name: Option<&str>,
    hooks: &Hooks,
    world: &World,
    device: Option<&dyn Device>,
) -> Result<Option<Arc<CommObject>>, StartError> {
    if world.ranks() == 1 {
        // The name is checked all the same.
        chosen(&hooks.transports, "transport", name, Transport::name)
            .map_err(|e| StartError::Options(e.to_string()))?;
        return Ok(None);
    }
    open_any(name, hooks, world, device).map(Some)
}

/// As [`open`], also for one rank alone: to try a transport, or to measure it.
///
/// # Errors
/// As [`open`].
pub fn open_any(
    name: Option<&str>,
    hooks: &Hooks,
    world: &World,
    device: Option<&dyn Device>,
) -> Result<Arc<CommObject>, StartError> {
    let found = chosen(&hooks.transports, "transport", name, Transport::name)
        .map_err(|e| StartError::Options(e.to_string()))?;
    let Some(h) = found else { return Ok(Arc::new(CommObject::new(world.comm()))) };
    let access = || device.and_then(Device::access).map_or(Maybe::RNone, Maybe::RSome);
    let opened = h.call(|t| t.open(ControlObject::new(world.plane()), access()));
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
    Ok(Arc::new(opened?))
}
