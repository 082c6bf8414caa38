//! Collectives between GPUs over NCCL: one rank a GPU, from its memory to that of the others, in the order of its stream.
//!
//! Only all-gathers are asked for: partial sums come side by side, in the order of ranks, and whoever reads them adds them in
//! that order, so bits do not depend on the transport. Memory of the host goes over the stream sockets between ranks.

mod comm;
mod library;
mod meet;
mod settings;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{ControlObject, DeviceAccessObject, Transport, TransportObject};
use plugfold_abi::{CommObject, List, Maybe, OpError, Text, TextBuf};
use plugfold_base_nccl_api::{Nccl as Service, NcclObject};

use settings::Settings;

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");
/// How long joining may take: the first time, on many GPUs and hosts, it takes tens of seconds.
const JOIN: Duration = Duration::from_secs(90);

/// The plugin.
#[derive(Default)]
pub struct BaseNccl {
    settings: Arc<Settings>,
}

impl Plugin for BaseNccl {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        self.settings.take(&setup.knobs)?;
        Ok(List::from(vec![Offer::of(TransportObject::new(self.gpus()))]))
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        Ok(List::from(vec![Offer::of(NcclObject::new(self.gpus()))]))
    }

    fn parse(&self, key: Text<'_>, text: Text<'_>) -> Result<TextBuf, OpError> {
        if key.get_str() != "env" {
            return Ok(text.get_str().into());
        }
        let all = settings::further(&text).map_err(OpError::invalid)?;
        Ok(settings::written(&all).into())
    }
}

impl BaseNccl {
    fn gpus(&self) -> Gpus {
        Gpus { settings: self.settings.clone(), library: None, join: JOIN }
    }
}

/// The transport with another library, which joins within another time: for tests.
pub fn transport(library: PathBuf, join: Duration) -> TransportObject {
    TransportObject::new(Gpus { settings: Arc::default(), library: Some(library), join })
}

struct Gpus {
    settings: Arc<Settings>,
    /// Where the library is; `None`: where the environment says, or the loader finds it.
    library: Option<PathBuf>,
    join: Duration,
}

impl Gpus {
    fn opened(
        &self,
        control: ControlObject,
        device: Maybe<DeviceAccessObject>,
    ) -> Result<CommObject, OpError> {
        let told = self.library.clone().or_else(|| std::env::var_os(library::VARIABLE).map(PathBuf::from));
        meet::open(&self.settings, told.as_deref(), self.join, control, device)
    }
}

impl Transport for Gpus {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("nccl".into())
    }

    fn open(&self, control: ControlObject, device: Maybe<DeviceAccessObject>) -> Result<CommObject, OpError> {
        self.opened(control, device)
    }
}

impl Service for Gpus {
    fn set(&self, variable: Text<'_>, value: Text<'_>, by: Text<'_>) -> Result<(), OpError> {
        self.settings.set(&variable, &value, &by)
    }

    fn open(&self, control: ControlObject, device: Maybe<DeviceAccessObject>) -> Result<CommObject, OpError> {
        self.opened(control, device)
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: BaseNccl::default());

#[cfg(test)]
mod tests {
    use plugfold_abi::{Knob, KnobValue, Knobs, Slice};
    use plugfold_tests::host::Alone;

    use super::*;

    #[test]
    fn it_registers_what_the_manifest_says() {
        let manifest = plugfold_manifest::Manifest::parse(MANIFEST, "plugin.toml").unwrap();
        assert_eq!(manifest.label(), "base-nccl");
        let knob = |knob: &plugfold_manifest::KnobSchema| Knob {
            key: knob.key.as_str().into(),
            value: KnobValue::text(""),
            id: Maybe::RNone,
        };
        let all: Vec<Knob> = manifest.knobs.iter().map(knob).collect();
        let knobs = Knobs { all: Slice::from(&all[..]) };
        let setup = Setup { knobs, host: Alone::default().object(), device_class: Text::from("sm_90") };
        let plugin = BaseNccl::default();
        let offers = plugin.configure(&setup).unwrap();
        assert_eq!(offers.iter().map(Offer::interface).collect::<Vec<_>>(), ["transport"]);
        let services = plugin.publish().unwrap();
        assert_eq!(services.iter().map(Offer::interface).collect::<Vec<_>>(), ["nccl"]);
        let parsed = plugin.parse("env".into(), "NCCL_B=2; NCCL_A=1".into()).unwrap();
        assert_eq!(parsed.as_str(), "NCCL_A=1;NCCL_B=2");
        let told = plugin.parse("env".into(), "PATH=/".into()).unwrap_err().to_string();
        assert!(told.contains("begin with NCCL_"), "{told}");
    }

    #[test]
    fn a_plugin_above_sets_a_variable_through_the_service() {
        let plugin = BaseNccl::default();
        let offer = plugin.publish().unwrap().into_iter().next().unwrap();
        let service: NcclObject = offer.take().unwrap();
        service.set("NCCL_ALGO".into(), "Ring".into(), "0040".into()).unwrap();
        let told = service.set("NCCL_ALGO".into(), "Tree".into(), "0230".into()).unwrap_err().to_string();
        assert!(told.contains("plugin 0040 says Ring"), "{told}");
    }
}
