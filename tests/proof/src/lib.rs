//! A plugin that stands at many points at once in a library that is built apart from the engine: a fusion, a pass, a store
//! whose index goes with every plan, a state part and an observer. What it does is plain; that it crosses is the point.

plugfold_abi::fixed_layouts!();

mod fused;
mod part;
mod pieces;
mod store;

use std::sync::Arc;

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Host as _, ObserverObject, SectionObject, StatePartObject, StoreObject};
use plugfold_abi::{List, OpError, PassObject, ProviderObject, TextBuf};

const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin.
struct Proof;

impl Plugin for Proof {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let fault = setup.knobs.text("fault")?;
        let host = setup.host();
        plugfold_kernels::cpu::threads_of(setup.host)?;
        let last = host.rank()? + 1 == host.ranks()?;
        let told = Arc::new(part::Told::new(host, fault == "forgets"));
        let store = Arc::new(store::Memory::new(told.clone(), fault == "drifts" && last));
        Ok(List::from(vec![
            Offer::of(ProviderObject::new(fused::Route { wrong: fault == "wrong" })),
            Offer::of(PassObject::new(pieces::Pieces)),
            Offer::of(StoreObject::new(store.clone())),
            Offer::of(SectionObject::new(store::Index(store))),
            Offer::of(StatePartObject::new(told.clone())),
            Offer::of(ObserverObject::new(told)),
        ]))
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: Proof);
