//! The acceptance list of 0140: folders of the tiny model, damaged folders, cost tables of two ranks.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use plugfold_0140_fast_boot::command::{Tool, What};
use plugfold_0140_fast_boot::costs::Cache;
use plugfold_0140_fast_boot::folder::{CHUNK, DATA, MANIFEST, Manifest, Root};
use plugfold_0140_fast_boot::read::{How, Verify, read};
use plugfold_0140_fast_boot::store::{Folders, Shared};
use plugfold_0140_fast_boot::write::write;
use plugfold_0140_fast_boot_api::{CostTable, MeasureCosts, MeasureCostsObject, WeightCache as _};
use plugfold_abi::points::{
    Command as _, Host, HostObject, Level, Piece, PreparedKey, PreparedStore as _, PreparedStoreObject,
};
use plugfold_abi::{List, OpError, Slice, SliceMut, Text, TextBuf};
use plugfold_engine::core::{Core, CoreOptions};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::split::Split;
use plugfold_engine::weights::Origin;
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::host::Alone;
use plugfold_tests::model::{ids, on_ranks_with, options};

const HOW: How = How { threads: 3, direct: true, verify: Verify::Full };

struct Place {
    dir: tempfile::TempDir,
    host: Alone,
}

impl Place {
    fn new() -> Self {
        // Beside the sources: the folder for temporary files may lie in memory, where nothing is read directly.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { dir, host: Alone::default() }
    }

    fn root(&self) -> Root {
        Root(self.dir.path().join("prepared"))
    }

    fn store(&self, how: How, write: bool) -> Folders {
        let (root, shared, host) = (self.root(), Shared::default(), self.host.object());
        Folders { root, how, write, shared, host }
    }

    fn options(&self, how: How, write: bool) -> CoreOptions {
        let mut hooks = Hooks::default();
        hooks.add_object("0140", PreparedStoreObject::new(self.store(how, write))).unwrap();
        CoreOptions { hooks: Arc::new(hooks), context: Some(64), ..CoreOptions::default() }
    }

    fn start(&self, how: How, write: bool) -> Core {
        Core::load(&tiny_dir(), &self.options(how, write), Split::WHOLE, None).unwrap()
    }

    fn folders(&self) -> Vec<PathBuf> {
        self.root().folders().unwrap().into_iter().map(|(folder, _)| folder).collect()
    }

    fn told(&self, part: &str) -> bool {
        self.host.lines().iter().any(|line| line.contains(part))
    }
}

fn prepared(core: &Core) -> bool {
    *core.origin() == Origin::Prepared("folders".into())
}

#[test]
fn folders_of_every_rank_give_the_replies_of_built_weights() {
    let logits = |ranks: usize, core: &(dyn Fn(usize) -> CoreOptions + Sync)| {
        on_ranks_with(&options(&tiny_dir(), 1, 64), ranks, core, |rank| {
            let logits = rank.trace(&ids(5, 30, 480), false).unwrap().logits;
            (logits.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), prepared(&rank.core))
        })
    };
    for ranks in [1, 2] {
        let want = logits(ranks, &|_| CoreOptions::default()).0;
        let place = Place::new();
        let options = |_: usize| CoreOptions { context: None, ..place.options(HOW, true) };
        assert_eq!(logits(ranks, &options), (want.clone(), false));
        assert_eq!(place.folders().len(), ranks);
        for direct in [true, false] {
            let how = How { direct, ..HOW };
            let options = |_: usize| CoreOptions { context: None, ..place.options(how, false) };
            assert_eq!(logits(ranks, &options), (want.clone(), true), "direct {direct}");
        }
    }
}

#[test]
fn nothing_is_written_unless_asked_for() {
    let place = Place::new();
    place.start(HOW, false);
    assert!(place.folders().is_empty() && place.told("no prepared weights in"));
}

/// Where a start is expected to find the folder sound, and where not.
#[test]
fn a_damaged_folder_is_told_and_passed_over() {
    let place = Place::new();
    place.start(HOW, true);
    let folder = place.folders().remove(0);
    assert!(prepared(&place.start(HOW, false)));
    let (data, manifest) = (folder.join(DATA), folder.join(MANIFEST));

    // One byte in the only chunk, which is also the last: every mode but `off` notices.
    let file = fs::OpenOptions::new().read(true).write(true).open(&data).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 9999).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 9999).unwrap();
    for (verify, sound) in [(Verify::Full, false), (Verify::Sample, false), (Verify::Off, true)] {
        for direct in [true, false] {
            assert_eq!(prepared(&place.start(How { verify, direct, ..HOW }, false)), sound, "{verify:?}");
        }
    }
    file.write_all_at(&byte, 9999).unwrap();
    assert!(prepared(&place.start(HOW, false)));

    // Data that ends early.
    let whole = fs::read(&data).unwrap();
    file.set_len(whole.len() as u64 - 4096).unwrap();
    assert!(!prepared(&place.start(HOW, false)));
    assert!(place.told("prepared weights are ignored") && place.told("must have"));
    fs::write(&data, &whole).unwrap();
    assert!(prepared(&place.start(HOW, false)));

    // A manifest of another key, or none that can be read.
    let text = fs::read_to_string(&manifest).unwrap();
    let mut other: serde_json::Value = serde_json::from_str(&text).unwrap();
    other["lines"][0] = "prepared = 0".into();
    for bad in
        [other.to_string(), text[..text.len() / 2].to_owned(), text.replace("\"format\":1", "\"format\":2")]
    {
        fs::write(&manifest, bad).unwrap();
        assert!(!prepared(&place.start(HOW, false)));
    }
    assert!(place.told("its key is not that of its lines") && place.told("of format 2"));
    let mut lines: Vec<String> = serde_json::from_str::<Manifest>(&text).unwrap().lines;
    lines[0] = "prepared = 0".into();
    other["key"] = plugfold_0140_fast_boot::folder::hash(lines.join("\n").as_bytes()).into();
    fs::write(&manifest, other.to_string()).unwrap();
    assert!(!prepared(&place.start(HOW, false)));
    assert!(place.told("is of another key: \"prepared = 0\" there, \"prepared = 1\" here"));

    // A start that may write puts it right.
    place.start(HOW, true);
    assert!(prepared(&place.start(HOW, false)));
}

fn key(lines: &str, rank: u32) -> PreparedKey<'_> {
    PreparedKey { model: Text::from("model"), rank, ranks: 2, lines: Text::from(lines) }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let words = ids(seed, len.div_ceil(4), u32::MAX);
    words.iter().flat_map(|w| w.to_le_bytes()).take(len).collect()
}

/// Several chunks: pieces that lie across them, what a sample sees, threads that share the work.
#[test]
fn many_chunks_are_read_back_by_any_number_of_threads() {
    let place = Place::new();
    let of = place.root().place(&key("a = 1", 0));
    let sizes = [5000, CHUNK as usize + 10_000, 0, 4096, 100];
    let made: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(i, n)| bytes(i as u64 + 1, *n)).collect();
    let mut pieces = Vec::new();
    let mut image = Vec::new();
    for part in &made {
        pieces.push(Piece { offset: image.len() as u64, bytes: Slice::from(&part[..]) });
        image.extend_from_slice(part);
        image.resize(image.len().next_multiple_of(4096), 0);
    }
    let manifest = write(&of, b"index", &pieces).unwrap();
    assert_eq!((manifest.hashes.len(), manifest.bytes), (2, image.len() as u64));
    assert_eq!(Manifest::read(&of.folder).unwrap().index_bytes(), b"index");
    let data = of.folder.join(DATA);
    let mut memory = vec![0u8; image.len() + 2 * 4096];
    let start = (memory.as_ptr() as usize).wrapping_neg() % 4096;
    for threads in [1, 2, 8] {
        for direct in [true, false] {
            let to = &mut memory[start..start + image.len()];
            to.fill(9);
            read(&data, &manifest, How { threads, direct, verify: Verify::Full }, to).unwrap();
            assert!(*to == image, "{threads} threads, direct {direct}");
        }
    }
    // Memory that direct reads cannot use is filled all the same, and it is said.
    let odd = &mut memory[start + 1..start + 1 + image.len()];
    let refused = read(&data, &manifest, HOW, odd).unwrap();
    assert!(refused && *odd == image);
    let told = read(&data, &manifest, HOW, &mut memory[..4096]).unwrap_err();
    assert!(told.contains("do not fit"), "{told}");
}

#[test]
fn a_write_that_ends_early_leaves_nothing_under_the_name() {
    let place = Place::new();
    let of = place.root().place(&key("a = 1", 0));
    let some = bytes(1, 5000);
    let pieces = [
        Piece { offset: 0, bytes: Slice::from(&some[..]) },
        Piece { offset: 4096, bytes: Slice::from(&some[..]) },
    ];
    assert!(write(&of, b"", &pieces).is_err(), "the second begins inside of the first");
    assert!(!of.folder.exists() && place.folders().is_empty());
    assert_eq!(fs::read_dir(of.folder.parent().unwrap()).unwrap().count(), 0, "nor beside it");
    // What a killed process leaves has another name, and is neither listed nor used.
    fs::create_dir_all(of.folder.with_file_name(".rank0.4711")).unwrap();
    assert!(place.folders().is_empty());
    assert!(place.store(HOW, false).find(&key("a = 1", 0)).unwrap().is_none());
}

#[test]
fn the_two_newest_keys_of_a_model_and_rank_are_kept() {
    let place = Place::new();
    let store = place.store(HOW, true);
    let piece = bytes(3, 100);
    let keep = |lines: &str, rank| {
        let pieces = [Piece { offset: 0, bytes: Slice::from(&piece[..]) }];
        store.offer(&key(lines, rank), Slice::from(&b"i"[..]), Slice::from(&pieces[..])).unwrap();
    };
    keep("checkpoint = one", 0);
    keep("checkpoint = one", 1);
    let oldest = place.root().place(&key("checkpoint = one", 0)).folder;
    let manifest = oldest.join(MANIFEST);
    let mut old: Manifest = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    old.created -= 1000;
    fs::write(&manifest, serde_json::to_vec(&old).unwrap()).unwrap();
    keep("checkpoint = two", 0);
    keep("checkpoint = three", 0);
    let left: Vec<bool> = ["one", "two", "three"]
        .map(|name| place.root().place(&key(&format!("checkpoint = {name}"), 0)).folder.exists())
        .into();
    assert_eq!(left, [false, true, true]);
    assert!(place.root().place(&key("checkpoint = one", 1)).folder.exists(), "another rank's");
}

#[test]
fn the_commands_tell_what_is_there_and_find_damage() {
    let place = Place::new();
    let tool = |what, root| Tool { what, root, how: HOW, shared: Shared::default() };
    let run = |what| tool(what, Some(place.root())).run(Slice::default()).map(String::from);
    let off = tool(What::Status, None).begin(Slice::default()).unwrap_err().to_string();
    assert!(off.contains("0140.dir"), "{off}");
    let extra = [TextBuf::from("now")];
    assert!(tool(What::Verify, Some(place.root())).begin(Slice::from(&extra[..])).is_err());
    assert!(run(What::Status).unwrap().contains("no prepared folders"));
    place.start(HOW, true);
    let folder = place.folders().remove(0);
    let name = folder.display().to_string();
    for (what, part) in
        [(What::Status, "GB, key"), (What::Verify, "1 chunks are sound"), (What::Rate, "GB/s")]
    {
        let told = run(what).unwrap();
        assert!(told.contains(&name) && told.contains(part), "{told}");
    }
    let data = fs::OpenOptions::new().write(true).open(folder.join(DATA)).unwrap();
    data.write_all_at(&[77; 8], 1 << 20).unwrap();
    let told = run(What::Verify).unwrap_err().to_string();
    assert!(told.contains("not all folders are sound") && told.contains("chunk 0 of 1"), "{told}");
    let shared = Shared::default();
    let prepare = Tool { what: What::Prepare, root: Some(place.root()), how: HOW, shared: shared.clone() };
    assert_eq!(prepare.begin(Slice::default()), Ok(true), "it wants the model");
    let mut hooks = Hooks::default();
    let store = Folders { shared, ..place.store(HOW, false) };
    hooks.add_object("0140", PreparedStoreObject::new(store)).unwrap();
    let core = CoreOptions { hooks: Arc::new(hooks), context: Some(64), ..CoreOptions::default() };
    Core::load(&tiny_dir(), &core, Split::WHOLE, None).unwrap();
    let told = prepare.run(Slice::default()).unwrap().to_string();
    assert!(told.contains("wrote ") && run(What::Verify).is_ok(), "{told}");
}

/// Two ranks that agree through a table in memory.
#[derive(Clone)]
struct Pair {
    rank: u32,
    words: Arc<Mutex<Vec<Vec<u8>>>>,
    meet: Arc<Barrier>,
}

impl Host for Pair {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(self.rank)
    }
    fn ranks(&self) -> Result<u32, OpError> {
        Ok(2)
    }
    fn threads(&self) -> Result<u32, OpError> {
        Ok(1)
    }
    fn log(&self, _: Level, _: Text<'_>) -> Result<(), OpError> {
        Ok(())
    }
    fn count(&self, _: Text<'_>, _: f64) -> Result<(), OpError> {
        Ok(())
    }
    fn gauge(&self, _: Text<'_>, _: f64) -> Result<(), OpError> {
        Ok(())
    }
    fn cache_folder(&self) -> Result<TextBuf, OpError> {
        Err(OpError::new("no folder"))
    }
    fn model_folder(&self) -> Result<TextBuf, OpError> {
        Ok(TextBuf::new())
    }
    fn agree(&self, _: Text<'_>, mine: Slice<'_, u8>) -> Result<List<List<u8>>, OpError> {
        self.words.lock().unwrap()[self.rank as usize] = mine.to_vec();
        self.meet.wait();
        let all = self.words.lock().unwrap().iter().map(|w| List::from(w.clone())).collect();
        self.meet.wait();
        Ok(all)
    }
}

/// Measures numbers that no two measurements have in common.
struct Clock<'a>(&'a AtomicU32);

impl MeasureCosts for Clock<'_> {
    fn measure(&self) -> Result<List<f64>, OpError> {
        let n = f64::from(self.0.fetch_add(1, Ordering::Relaxed));
        Ok(List::from(vec![n + 0.1, 1.0 / (n + 3.0)]))
    }
}

/// What both ranks get.
fn both(folder: &Path, identity: [&str; 2], cap: &str, cached: bool, measured: &AtomicU32) -> Vec<CostTable> {
    let (words, meet) = (Arc::new(Mutex::new(vec![Vec::new(); 2])), Arc::new(Barrier::new(2)));
    thread::scope(|scope| {
        let one = |rank: usize| {
            let pair = Pair { rank: rank as u32, words: words.clone(), meet: meet.clone() };
            let host: &'static HostObject = Box::leak(Box::new(HostObject::new(pair)));
            let lines = [TextBuf::from(identity[rank])];
            let (folder, clock_cap) = (folder.to_owned(), cap.to_owned());
            scope.spawn(move || {
                let cache = Cache { folder, clock_cap, warm_up: true, shared: Shared::default(), host };
                let clock = Clock(measured);
                cache.costs(Slice::from(&lines[..]), cached, &MeasureCostsObject::lend(&clock)).unwrap()
            })
        };
        let ranks: Vec<_> = (0..2).map(one).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

#[test]
fn a_stored_cost_table_is_the_same_on_both_ranks_and_nothing_is_timed() {
    let place = Place::new();
    let folder = place.dir.path().join("calib");
    let measured = AtomicU32::new(0);
    let count = || measured.load(Ordering::Relaxed);
    let ask = |identity, cap, cached| both(&folder, identity, cap, cached, &measured);
    let first = ask(["rows = 8", "rows = 8"], "", true);
    assert_eq!((count(), first[0].cached, first[0].warm_up), (2, false, false), "measured on both ranks");
    assert_eq!(first[0], first[1]);
    let again = ask(["rows = 8", "rows = 8"], "", true);
    assert_eq!((count(), again[0].cached, again[0].warm_up), (2, true, true), "no timing runs");
    assert_eq!((&again[0], &again[0].values), (&again[1], &first[0].values));
    // Anything else on any rank is measured again; `real` always is, and refreshes the table.
    assert!(!ask(["rows = 9", "rows = 9"], "", true)[0].cached);
    assert!(!ask(["rows = 8", "rows = 9"], "", true)[1].cached);
    assert!(!ask(["rows = 8", "rows = 8"], "2 GHz", true)[0].cached);
    let before = count();
    let real = ask(["rows = 8", "rows = 8"], "", false);
    assert_eq!((count(), real[0].cached), (before + 2, false));
    assert_eq!(ask(["rows = 8", "rows = 8"], "", true)[1].values, real[0].values);
    // A file that cannot be read is passed over.
    for entry in fs::read_dir(&folder).unwrap() {
        fs::write(entry.unwrap().path(), "{").unwrap();
    }
    assert!(!ask(["rows = 8", "rows = 8"], "", true)[0].cached);
}

#[test]
fn memory_for_a_read_is_the_weights_own() {
    let place = Place::new();
    place.start(HOW, true);
    let core = place.start(HOW, false);
    let manifest = Manifest::read(&place.folders()[0]).unwrap();
    // Nothing beside the one arena: no staging memory stays, and none was needed.
    assert_eq!(core.memory().0 as u64, manifest.bytes);
    let memory = &mut [0; 10];
    assert!(place.store(HOW, false).read(&key("nothing", 0), SliceMut::from(&mut memory[..])).is_err());
}
