//! The note in a library's file: read from the file before anything of it runs.
//!
//! Text: a line with [`MAGIC`], lines `key=value`, an empty line, then the manifest.

/// Section of the library's file that holds the note.
pub const NOTE_SECTION: &str = ".plugfold";
/// What the name of the one exported function begins with; the crate's name follows.
pub const ROOT_SYMBOL: &str = "plugfold_root";
/// First line of a note.
pub const MAGIC: &str = "plugfold-note";
/// Major version of the boundary: the root function and the note.
pub const MAJOR: u32 = 1;
/// What this crate's panics do: a library that aborts on panic is refused.
pub const PANIC: &str = if cfg!(panic = "abort") { "abort" } else { "unwind" };

/// Bytes of all parts together.
pub const fn note_len(parts: &[&str]) -> usize {
    let (mut i, mut n) = (0, 0);
    while i < parts.len() {
        n += parts[i].len();
        i += 1;
    }
    n
}

/// The parts, one after another, as bytes that can stand in a section.
pub const fn join<const N: usize>(parts: &[&str]) -> [u8; N] {
    let mut out = [0; N];
    let (mut i, mut at) = (0, 0);
    while i < parts.len() {
        let bytes = parts[i].as_bytes();
        let mut j = 0;
        while j < bytes.len() {
            out[at] = bytes[j];
            at += 1;
            j += 1;
        }
        i += 1;
    }
    out
}

/// What a note says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Major version of the boundary.
    pub major: u32,
    /// `arch-os` it was built for.
    pub target: String,
    /// "unwind" or "abort".
    pub panic: String,
    /// Digest of the plugin's sources.
    pub build: String,
    /// Name of its crate, which its root function carries.
    pub name: String,
    /// The manifest, TOML.
    pub manifest: String,
}

/// A section that is no note of this major version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoteError(pub String);

impl std::fmt::Display for NoteError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for NoteError {}

impl Note {
    /// Reads a note.
    ///
    /// # Errors
    /// Bytes that are not a note, or a key that is missing.
    pub fn parse(bytes: &[u8]) -> Result<Self, NoteError> {
        let wrong = |what: &str| NoteError(format!("its note {what}"));
        let text = std::str::from_utf8(bytes).map_err(|_| wrong("is not UTF-8"))?;
        let (head, manifest) = text.split_once("\n\n").ok_or_else(|| wrong("has no manifest"))?;
        let mut lines = head.lines();
        if lines.next() != Some(MAGIC) {
            return Err(wrong("does not begin with its magic line"));
        }
        let pairs: Vec<(&str, &str)> = lines.filter_map(|l| l.split_once('=')).collect();
        let get = |key: &str| {
            let found = pairs.iter().find(|(k, _)| *k == key).map(|(_, v)| (*v).to_owned());
            found.ok_or_else(|| NoteError(format!("its note lacks `{key}`")))
        };
        Ok(Self {
            major: get("major")?.parse().map_err(|_| wrong("has a major version that is no number"))?,
            target: get("target")?,
            panic: get("panic")?,
            build: get("build")?,
            name: get("crate")?,
            manifest: manifest.to_owned(),
        })
    }

    /// The symbol of the library's root function.
    pub fn root_symbol(&self) -> String {
        format!("{ROOT_SYMBOL}_{}", self.name)
    }

    /// The target of this build, as notes write it.
    pub fn this_target() -> String {
        format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)
    }
}

/// Makes a library of a crate: its note, with the manifest, and its root function.
///
/// ```ignore
/// plugfold_abi::export!(manifest: include_str!("../plugin.toml"), plugin: MyPlugin);
/// ```
/// `MyPlugin` is a value (or a constructor call) that implements [`Plugin`](crate::life::Plugin).
#[macro_export]
macro_rules! export {
    (manifest: $manifest:expr, plugin: $plugin:expr $(,)?) => {
        const PLUGFOLD_NOTE: &[&str] = &[
            $crate::boundary::MAGIC,
            "\nmajor=1\ntarget=",
            std::env::consts::ARCH,
            "-",
            std::env::consts::OS,
            "\npanic=",
            $crate::boundary::PANIC,
            "\nbuild=",
            $crate::build_id!(),
            "\ncrate=",
            env!("CARGO_CRATE_NAME"),
            "\n\n",
            $manifest,
        ];

        // Read from the file by the host before the library is loaded.
        #[used]
        #[unsafe(link_section = ".plugfold")]
        static PLUGFOLD_NOTE_BYTES: [u8; $crate::boundary::note_len(PLUGFOLD_NOTE)] =
            $crate::boundary::join(PLUGFOLD_NOTE);

        /// The root of this plugin: gives its one offer.
        ///
        /// # Safety
        /// Called by the host with a function that takes the offer over.
        // Named after the crate, so that a program may link several plugins.
        #[unsafe(export_name = concat!("plugfold_root_", env!("CARGO_CRATE_NAME")))]
        pub unsafe extern "C" fn plugfold_root(
            context: *mut $crate::boundary::Opaque,
            give: $crate::boundary::Give,
        ) -> i32 {
            let made = $crate::boundary::guard("root", "plugin", || {
                Ok($crate::boundary::Offer::of($crate::life::PluginObject::new($plugin)))
            });
            match made.into_result() {
                Ok(offer) => {
                    // SAFETY: the host's promise.
                    unsafe { give(context, offer) };
                    0
                }
                Err(_) => 1,
            }
        }
    };
}
