//! The engine says what a file tells it to: given tokens or bytes, in given chunks, after given pauses, and faults on demand.
//!
//! Everything of the engine runs as ever (slots, rounds, drafts and their verification, exchanges between ranks, snapshots);
//! only the model's arithmetic is gone. A pass drops every step before the head, and the head's logits are those of the
//! [`script`].

pub mod hooks;
pub mod script;
pub mod stage;
pub mod vocabulary;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{DraftPolicyObject, DrafterObject, Host, Level, Limits, ObserverObject};
use plugfold_abi::{List, OpError, PassObject, ProviderObject, Text, TextBuf};

use hooks::{Always, Cast, Chunks, Emptied, Head, Zeros};
use script::Scripts;
use stage::Stage;

const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin.
#[derive(Default)]
pub struct Scripted {
    /// The scripts, once they are read, with a digest of their file.
    read: OnceLock<(Arc<Stage>, u64)>,
}

/// The hooks that let these scripts speak on a rank.
pub fn offers(stage: &Arc<Stage>, rank: u32) -> List<Offer> {
    List::from(vec![
        Offer::of(PassObject::new(Emptied)),
        Offer::of(ProviderObject::new(Zeros)),
        Offer::of(ProviderObject::new(Head { stage: stage.clone(), rank })),
        Offer::of(DrafterObject::new(Chunks(stage.clone()))),
        Offer::of(DraftPolicyObject::new(Always::new(stage.clone()))),
        Offer::of(ObserverObject::new(Cast(stage.clone()))),
    ])
}

fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}

impl Plugin for Scripted {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let file = setup.knobs.text("file")?;
        if file.is_empty() {
            setup.host.log(Level::Info, Text::from("file is empty: the model itself speaks"))?;
            return Ok(List::new());
        }
        let wrong = |e: String| OpError::invalid(format!("file: {e}"));
        let scripts = Scripts::read(Path::new(file)).map_err(wrong)?;
        let bytes = std::fs::read(file).map_err(|e| wrong(format!("{file}: {e}")))?;
        let warning =
            format!("replies are those of {} scripts in {file}, not the model's", scripts.all.len());
        setup.host.log(Level::Warn, Text::from(warning.as_str()))?;
        let (stage, _) = self.read.get_or_init(|| (Arc::new(Stage::new(scripts)), digest(&bytes)));
        Ok(offers(stage, setup.host.rank()?))
    }

    fn prepare(&self, limits: &Limits) -> Result<(), OpError> {
        let largest = self.read.get().map_or(0, |(stage, _)| stage.largest_chunk());
        if largest > limits.window_rows as usize {
            return Err(OpError::invalid(format!(
                "a script has chunks of {largest} tokens, and a window has {} rows: make them smaller, or start with more \
                 window_rows",
                limits.window_rows
            )));
        }
        Ok(())
    }

    fn digest(&self) -> Result<List<TextBuf>, OpError> {
        let line = self.read.get().map(|(_, digest)| TextBuf::from(format!("scripts = {digest:016x}")));
        Ok(line.into_iter().collect())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: Scripted::default());
