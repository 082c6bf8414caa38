//! Drafts with the checkpoint's multi-token-prediction layer.
//!
//! The layer's row for position `i` pairs the model's final row at `i` with the token at `i + 1`, and predicts the token at
//! `i + 2`. So the newest row always waits for its token: until more is absorbed, or until drafts are asked for and the
//! token drawn last is known. A chain goes on from the layer's own row and the token that it picked.

mod drafter;
mod lane;

use std::sync::Arc;

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{DrafterObject, StatePartObject};
use plugfold_abi::{List, OpError, TextBuf};
use plugfold_base_mtp_api::MtpObject;

pub use drafter::Chains;

const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin.
#[derive(Default)]
pub struct BaseMtp {
    chains: Arc<Chains>,
}

impl Plugin for BaseMtp {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, _: &Setup<'_>) -> Result<List<Offer>, OpError> {
        Ok(List::from(vec![
            Offer::of(DrafterObject::new(self.chains.clone())),
            Offer::of(StatePartObject::new(self.chains.clone())),
        ]))
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        Ok(List::from(vec![Offer::of(MtpObject::new(self.chains.clone()))]))
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: BaseMtp::default());
