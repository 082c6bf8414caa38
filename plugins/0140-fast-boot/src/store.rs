//! The store `folders` of prepared weights.

use std::sync::{Arc, Mutex, PoisonError};

use plugfold_abi::points::{Host as _, HostObject, Level, Piece, Prepared, PreparedKey, PreparedStore};
use plugfold_abi::{Maybe, OpError, Slice, SliceMut, Text, TextBuf};

use crate::folder::{DATA, Manifest, Place, Root};
use crate::read::{How, read};
use crate::write::write;

/// What hooks of this plugin share.
#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Key of this rank's weights, once they are loaded.
    key: String,
    /// Folders are written although the knob does not say so.
    write: bool,
    /// What happened to this rank's folder, for the command that prepares.
    told: Vec<String>,
}

impl Shared {
    fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Key of this rank's weights in hexadecimal.
    pub fn key(&self) -> String {
        self.with(|s| s.key.clone())
    }

    /// Has missing folders written.
    pub fn write(&self) {
        self.with(|s| s.write = true);
    }

    /// What happened to this rank's folder.
    pub fn told(&self) -> Vec<String> {
        self.with(|s| s.told.clone())
    }
}

/// The store.
pub struct Folders {
    /// Where they are.
    pub root: Root,
    /// How they are read.
    pub how: How,
    /// Whether missing ones are written.
    pub write: bool,
    /// What is shared with commands and services.
    pub shared: Shared,
    /// For the log.
    pub host: &'static HostObject,
}

impl Folders {
    fn say(&self, level: Level, text: &str) -> Result<(), OpError> {
        self.shared.with(|s| s.told.push(text.to_owned()));
        self.host.log(level, Text::from(text))
    }

    fn sound(place: &Place) -> Result<Manifest, String> {
        let manifest = Manifest::read(&place.folder)?;
        if manifest.key == place.key {
            return Ok(manifest);
        }
        let differs = manifest.lines.iter().zip(&place.lines).find(|(there, here)| there != here);
        let differs =
            differs.map_or_else(String::new, |(there, here)| format!(": {there:?} there, {here:?} here"));
        Err(format!("{} is of another key{differs}", place.folder.display()))
    }
}

impl PreparedStore for Folders {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("folders".into())
    }

    fn find(&self, key: &PreparedKey<'_>) -> Result<Maybe<Prepared>, OpError> {
        let place = self.root.place(key);
        self.shared.with(|s| s.key.clone_from(&place.key));
        if !place.folder.exists() {
            let told = format!("no prepared weights in {}: they are built", place.folder.display());
            self.say(Level::Info, &told)?;
            return Ok(Maybe::RNone);
        }
        match Self::sound(&place) {
            Ok(manifest) => {
                let (index, bytes) = (manifest.index_bytes().into(), manifest.bytes);
                Ok(Maybe::RSome(Prepared { index, bytes }))
            }
            Err(why) => {
                self.say(Level::Warn, &format!("prepared weights are ignored: {why}"))?;
                Ok(Maybe::RNone)
            }
        }
    }

    fn read(&self, key: &PreparedKey<'_>, memory: SliceMut<'_, u8>) -> Result<(), OpError> {
        let place = self.root.place(key);
        let started = std::time::Instant::now();
        let manifest = Self::sound(&place).map_err(OpError::new)?;
        let data = place.folder.join(DATA);
        let refused = read(&data, &manifest, self.how, memory.into_mut()).map_err(OpError::new)?;
        if refused {
            self.say(
                Level::Info,
                &format!("{} is read through the page cache: direct reads are refused", data.display()),
            )?;
        }
        let seconds = started.elapsed().as_secs_f64();
        let gb = manifest.bytes as f64 / 1e9;
        self.host.gauge(Text::from("prepared_bytes"), manifest.bytes as f64)?;
        self.host.gauge(Text::from("prepared_read_seconds"), seconds)?;
        self.say(Level::Info, &format!("read {} ({gb:.2} GB in {seconds:.2} s)", place.folder.display()))
    }

    fn offer(
        &self,
        key: &PreparedKey<'_>,
        index: Slice<'_, u8>,
        pieces: Slice<'_, Piece<'_>>,
    ) -> Result<(), OpError> {
        if !self.write && !self.shared.with(|s| s.write) {
            return Ok(());
        }
        let place = self.root.place(key);
        let told = |e: std::io::Error| OpError::new(format!("{}: {e}", place.folder.display()));
        let manifest = write(&place, &index, &pieces).map_err(told)?;
        self.say(Level::Info, &format!("wrote {} ({} bytes)", place.folder.display(), manifest.bytes))?;
        self.root.prune(&place).map_err(told)
    }
}
