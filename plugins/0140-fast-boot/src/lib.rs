//! Weights are read as they were built at an earlier start: [`folder`] says where they lie, [`write`](mod@write) and [`read`]
//! move them, [`store`] is asked by the engine. [`costs`] stores cost tables, [`boot`] tells how a start goes, [`command`] has
//! the tools.

pub mod boot;
pub mod command;
pub mod costs;
pub mod folder;
pub mod read;
pub mod store;
pub mod write;

use std::path::PathBuf;
use std::sync::OnceLock;

use plugfold_0140_fast_boot_api::WeightCacheObject;
use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{CommandObject, HostObject, ObserverObject, PreparedStoreObject};
use plugfold_abi::{List, OpError, TextBuf};

use boot::Timeline;
use command::{Tool, What, how};
use costs::Cache;
use folder::Root;
use store::{Folders, Shared};

const MANIFEST: &str = include_str!("../plugin.toml");

/// What the service is made of.
struct Tables {
    folder: PathBuf,
    clock_cap: String,
    warm_up: bool,
    host: &'static HostObject,
}

/// The plugin.
#[derive(Default)]
pub struct FastBoot {
    shared: Shared,
    tables: OnceLock<Tables>,
}

impl Plugin for FastBoot {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let (knobs, host) = (setup.knobs, setup.host());
        let how = how(knobs.int("threads")?, knobs.bool("direct")?, knobs.text("verify")?)?;
        let root = match knobs.text("dir")? {
            "" | "0" | "off" => None,
            dir => Some(Root(dir.into())),
        };
        let tables = Tables {
            folder: knobs.text("calib_dir")?.into(),
            clock_cap: knobs.text("clock_cap")?.to_owned(),
            warm_up: knobs.bool("warmup")?,
            host,
        };
        if self.tables.set(tables).is_err() {
            return Err(OpError::new("configured twice"));
        }
        let mut offers = vec![Offer::of(ObserverObject::new(Timeline(host)))];
        for what in What::ALL {
            let tool = Tool { what, root: root.clone(), how, shared: self.shared.clone() };
            offers.push(Offer::of(CommandObject::new(tool)));
        }
        if let Some(root) = root {
            let (write, shared) = (knobs.bool("write")?, self.shared.clone());
            offers.push(Offer::of(PreparedStoreObject::new(Folders { root, how, write, shared, host })));
        }
        Ok(offers.into())
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        let Some(t) = self.tables.get() else {
            return Err(OpError::new("published before it was configured"));
        };
        let cache = Cache {
            folder: t.folder.clone(),
            clock_cap: t.clock_cap.clone(),
            warm_up: t.warm_up,
            shared: self.shared.clone(),
            host: t.host,
        };
        Ok(List::from(vec![Offer::of(WeightCacheObject::new(cache))]))
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: FastBoot::default());
