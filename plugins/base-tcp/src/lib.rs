//! Collectives over the stream sockets between ranks: any hosts, any network, no speed.

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Control, ControlObject, DeviceAccessObject, Transport, TransportObject};
use plugfold_abi::{CommObject, List, Maybe, OpError, TextBuf};

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin.
pub struct Tcp;

impl Plugin for Tcp {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, _: &Setup<'_>) -> Result<List<Offer>, OpError> {
        Ok(List::from(vec![Offer::of(TransportObject::new(Streams))]))
    }
}

struct Streams;

impl Transport for Streams {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("tcp".into())
    }
    fn open(&self, control: ControlObject, _: Maybe<DeviceAccessObject>) -> Result<CommObject, OpError> {
        control.streams()
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: Tcp);
