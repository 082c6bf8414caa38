//! Notes, and the root function that `export!` makes.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::boundary::{MAGIC, MAJOR, Note, NoteError, Offer, Opaque, PANIC, join, note_len};
use crate::life::{Plugin, PluginObject, Setup};
use crate::{List, OpError, TextBuf};

const MANIFEST: &str = "id = \"9999\"\n\n[[knob]]\nkey = \"a=b\"\n";

/// A plugin with nothing but its manifest.
struct Empty;

/// Whether making the plugin panics.
static BROKEN: AtomicBool = AtomicBool::new(false);

impl Empty {
    fn new() -> Self {
        assert!(!BROKEN.load(Ordering::Relaxed), "made to fail");
        Self
    }
}

impl Plugin for Empty {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, _: &Setup<'_>) -> Result<List<Offer>, OpError> {
        Ok(List::new())
    }
}

crate::export!(manifest: MANIFEST, plugin: Empty::new());

fn note(lines: &[&str]) -> Result<Note, NoteError> {
    Note::parse([lines.join("\n").as_str(), "id = 1"].join("\n\n").as_bytes())
}

#[test]
fn an_exported_note_says_all_that_is_asked() {
    let note = Note::parse(&PLUGFOLD_NOTE_BYTES).unwrap();
    assert_eq!(note.major, MAJOR);
    assert_eq!(note.target, Note::this_target());
    assert_eq!(note.panic, PANIC);
    assert_eq!(note.manifest, MANIFEST, "with its empty line and its equals sign");
    assert_eq!((note.build.len(), note.build.chars().all(|c| c.is_ascii_hexdigit())), (16, true));
}

#[test]
fn parts_are_joined_in_order() {
    const PARTS: &[&str] = &["ab", "", "ç", "d"];
    const WHOLE: [u8; note_len(PARTS)] = join(PARTS);
    assert_eq!(WHOLE, "abçd".as_bytes());
}

#[test]
fn a_note_that_lacks_something_is_refused_with_its_name() {
    let good = [MAGIC, "major=1", "target=x86_64-linux", "panic=unwind", "build=00", "crate=idea"];
    let read = note(&good).unwrap();
    assert_eq!(
        (read.major, read.root_symbol().as_str(), read.manifest.as_str()),
        (1, "plugfold_root_idea", "id = 1")
    );
    for (i, key) in ["major", "target", "panic", "build", "crate"].iter().enumerate() {
        let mut lines = good.to_vec();
        lines.remove(i + 1);
        assert_eq!(note(&lines).unwrap_err().to_string(), format!("its note lacks `{key}`"));
    }
    // Keys that only a later release knows change nothing.
    assert_eq!(note(&[&good[..], &["colour=red"]].concat()), Ok(read));
}

#[test]
fn what_is_no_note_is_refused() {
    let text = |bytes: &[u8]| Note::parse(bytes).unwrap_err().to_string();
    assert_eq!(text(b"plugfold-note\nmajor=\xff\n\nid = 1"), "its note is not UTF-8");
    assert_eq!(text(b"plugfold-note\nmajor=1\n"), "its note has no manifest");
    assert_eq!(text(b""), "its note has no manifest");
    assert_eq!(text(b"plugfold-nota\nmajor=1\n\nid = 1"), "its note does not begin with its magic line");
    for major in ["x", "-1", "1.0", ""] {
        let line = format!("major={major}");
        let read = note(&[MAGIC, &line, "target=a", "panic=unwind", "build=0", "crate=idea"]);
        assert_eq!(read.unwrap_err().to_string(), "its note has a major version that is no number");
    }
}

unsafe extern "C" fn keep(context: *mut Opaque, offer: Offer) {
    // SAFETY: the test below gives a `Vec<Offer>`.
    unsafe { &mut *context.cast::<Vec<Offer>>() }.push(offer);
}

#[test]
fn the_root_function_offers_a_plugin_or_says_that_it_cannot() {
    let mut offers: Vec<Offer> = Vec::new();
    let context = (&raw mut offers).cast();
    // SAFETY: `keep` takes the offer over.
    assert_eq!(unsafe { plugfold_root(context, keep) }, 0);
    let plugin: PluginObject = offers.remove(0).take().unwrap();
    assert_eq!(plugin.describe().unwrap(), MANIFEST);
    assert_eq!(plugin.digest().unwrap().len(), 0);
    BROKEN.store(true, Ordering::Relaxed);
    // SAFETY: as above.
    assert_eq!(unsafe { plugfold_root(context, keep) }, 1, "a panic in the constructor");
    assert!(offers.is_empty());
}
