//! Plugins between a checkpoint and the weights: links of `weight.source`, builders, stores of prepared weights.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use plugfold_abi::boundary::Offer;
use plugfold_abi::points::{
    Matrix, MatrixRows as _, MatrixRowsObject, Piece, PlaneLayout, Prepared, PreparedKey, PreparedStore,
    PreparedStoreObject, Purpose, WeightBuilder, WeightBuilderObject, WeightLayout, WeightLink,
    WeightLinkObject,
};
use plugfold_abi::{DType, List, Maybe, OpError, Slice, SliceMut, Text, TextBuf, View, formats};
use plugfold_engine::checkpoint::Checkpoint;
use plugfold_engine::core::{Core, CoreOptions};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::Rank;
use plugfold_engine::ranks::World;
use plugfold_engine::split::Split;
use plugfold_engine::weights::Origin;
use plugfold_kernels::cpu::math::dense::{pack_f32, packed_len};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{ids, on_ranks_with, options};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const GATE: &str = "model.language_model.layers.0.mlp.gate_proj.weight";
const OUT: &str = "model.language_model.layers.0.self_attn.o_proj.weight";

fn with(hooks: Hooks) -> CoreOptions {
    CoreOptions { hooks: Arc::new(hooks), context: Some(128), ..CoreOptions::default() }
}

fn load(hooks: Hooks) -> Result<Core, String> {
    Core::load(&tiny_dir(), &with(hooks), Split::WHOLE, None).map_err(|e| e.to_string())
}

fn bits(dir: &Path, ranks: usize, hooks: impl Fn() -> Hooks + Sync) -> Vec<u32> {
    let logits = on_ranks_with(
        &options(dir, 1, 64),
        ranks,
        |_| with(hooks()),
        |rank| rank.trace(&ids(3, 20, 480), false).unwrap().logits,
    );
    logits.iter().map(|v| v.to_bits()).collect()
}

/// `factor * x + add`, of the values before.
#[derive(Clone)]
struct Affine {
    names: Vec<&'static str>,
    factor: f32,
    add: f32,
    fault: &'static str,
}

fn affine(factor: f32, add: f32) -> Affine {
    Affine { names: vec![GATE, OUT], factor, add, fault: "" }
}

impl WeightLink for Affine {
    fn names(&self) -> Result<List<TextBuf>, OpError> {
        Ok(self.names.iter().map(|n| TextBuf::from(*n)).collect())
    }
    fn rows(
        &self,
        name: Text<'_>,
        _: u64,
        rows: u64,
        _: u64,
        cols: u64,
        before: Slice<'_, f32>,
        out: &mut List<f32>,
    ) -> Result<(), OpError> {
        assert_eq!(before.len() as u64, rows * cols, "{name}");
        match self.fault {
            "error" => return Err(OpError::new("the file of the head is gone")),
            "panic" => panic!("planted"),
            "nan" => out.push(f32::NAN),
            "short" => return Ok(()),
            _ => {}
        }
        out.extend(before.iter().skip(out.len()).map(|v| v * self.factor + self.add));
        Ok(())
    }
    fn key(&self) -> Result<TextBuf, OpError> {
        Ok(format!("{} {}", self.factor, self.add).into())
    }
}

fn links(all: &[(&str, Affine)]) -> Hooks {
    let mut hooks = Hooks::default();
    for (owner, link) in all {
        hooks.add_object(owner, WeightLinkObject::new(link.clone())).unwrap();
    }
    hooks
}

/// The tiny checkpoint with `change` made to two tensors, as plain f32.
fn changed(change: impl Fn(f32) -> f32) -> tempfile::TempDir {
    let source = Checkpoint::open(&tiny_dir()).unwrap();
    let mut tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for name in source.names() {
        let data = source.tensor(name).unwrap();
        let made = if [GATE, OUT].contains(&name) {
            assert_eq!(data.dtype, Dtype::BF16);
            let values = data.bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32());
            (Dtype::F32, data.shape.to_vec(), values.flat_map(|v| change(v).to_le_bytes()).collect())
        } else {
            (data.dtype, data.shape.to_vec(), data.bytes.to_vec())
        };
        tensors.insert(name.into(), made);
    }
    let dir = tempfile::tempdir().unwrap();
    let views = tensors.iter().map(|(n, (d, s, b))| (n, TensorView::new(*d, s.clone(), b).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    // Numbers of another type than the configuration says are only let in beside a quantization.
    let text = std::fs::read_to_string(tiny_dir().join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["quantization_config"] = serde_json::json!({"quant_method": "exl3"});
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn a_link_gives_the_model_of_a_checkpoint_with_its_values_on_any_ranks() {
    let doubled = changed(|v| v * 2.0);
    for ranks in [1, 2, 3] {
        let want = bits(doubled.path(), ranks, Hooks::default);
        let got = bits(&tiny_dir(), ranks, || links(&[("0430", affine(2.0, 0.0))]));
        assert!(got == want, "{ranks} ranks");
        assert!(got != bits(&tiny_dir(), ranks, Hooks::default), "it changes something");
    }
}

#[test]
fn two_links_of_one_tensor_run_in_list_order() {
    let (double, shift) = (affine(2.0, 0.0), affine(1.0, 0.125));
    let both = |first: &Affine, second: &Affine| links(&[("0430", first.clone()), ("0431", second.clone())]);
    let one = changed(|v| v * 2.0 + 0.125);
    let other = changed(|v| (v + 0.125) * 2.0);
    for ranks in [1, 2] {
        let got = bits(&tiny_dir(), ranks, || both(&double, &shift));
        assert!(got == bits(one.path(), ranks, Hooks::default));
        let got = bits(&tiny_dir(), ranks, || both(&shift, &double));
        assert!(got == bits(other.path(), ranks, Hooks::default));
    }
}

#[test]
fn what_a_link_does_wrong_stops_the_start_with_plugin_and_tensor() {
    let told = |link: Affine| load(links(&[("0430", link)])).err().unwrap();
    let fault = |fault| told(Affine { fault, ..affine(1.0, 0.0) });
    for (message, parts) in [
        (
            fault("error"),
            ["plugin 0430", "tensor model.language_model.layers.0.", "the file of the head is gone"],
        ),
        (fault("panic"), ["plugin 0430", "tensor model.language_model.layers.0.", "planted"]),
        (fault("nan"), ["plugin 0430", "tensor model.language_model.layers.0.", "NaN"]),
        (fault("short"), ["plugin 0430", "tensor model.language_model.layers.0.", "gives 0 values"]),
        (
            told(Affine { names: vec!["model.no_such.weight"], ..affine(1.0, 0.0) }),
            ["plugin 0430", "model.no_such.weight", "the checkpoint has no such tensor"],
        ),
        (
            told(Affine { names: vec!["model.visual.post_layernorm.weight"], ..affine(1.0, 0.0) }),
            ["plugin 0430", "model.visual.", "no weight of this model is made of it"],
        ),
    ] {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn states_of_other_weights_have_another_tag() {
    let tag = |hooks| {
        let mut core = load(hooks).unwrap();
        core.tag(&[]).unwrap().id
    };
    let plain = tag(Hooks::default());
    let (one, other) = (tag(links(&[("0430", affine(2.0, 0.0))])), tag(links(&[("0430", affine(3.0, 0.0))])));
    assert!(plain != one && one != other && plain != other);
    assert_eq!(tag(links(&[("0430", affine(2.0, 0.0))])), one);
    let nothing = Affine { names: Vec::new(), ..affine(2.0, 0.0) };
    assert_eq!(tag(links(&[("0430", nothing)])), plain, "a link that replaces nothing");
}

#[test]
fn ranks_with_other_links_do_not_start() {
    let options = options(&tiny_dir(), 1, 64);
    let mut worlds = World::local(2).unwrap();
    let (other, theirs) = (worlds.remove(1), options.clone());
    let hooks = |factor| with(links(&[("0430", affine(factor, 0.0))]));
    let follower = thread::spawn(move || Rank::load(&theirs, hooks(2.0), other).err());
    let lead = Rank::load(&options, hooks(3.0), worlds.remove(0)).err().unwrap().to_string();
    let follower = follower.join().unwrap().unwrap().to_string();
    assert!([lead, follower].iter().all(|told| told.contains("weights as plugins change them")));
}

/// Stores a role in the panels of the reference, in f32, each value plus its own number; counts what it built.
struct Panels {
    name: &'static str,
    role: &'static str,
    purpose: Purpose,
    add: f32,
    fault: &'static str,
}

const HEAD: Panels = Panels { name: "panels", role: "head", purpose: Purpose::Main, add: 0.0, fault: "" };

impl WeightBuilder for Panels {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(self.name.into())
    }
    fn key(&self) -> Result<TextBuf, OpError> {
        Ok(format!("{}", self.add).into())
    }
    fn layout(&self, m: &Matrix<'_>) -> Result<Maybe<WeightLayout>, OpError> {
        if m.role.get_str() != self.role || m.purpose != self.purpose {
            return Ok(Maybe::RNone);
        }
        let len = packed_len(m.n as usize, m.k as usize) as u32;
        let planes = match self.fault {
            "planes" => List::new(),
            _ => List::from(vec![PlaneLayout { dtype: DType::F32, rows: m.count, cols: len }]),
        };
        Ok(Maybe::RSome(WeightLayout { format: formats::PANEL16_F32.into(), planes }))
    }
    fn build(&self, m: &Matrix<'_>, rows: &MatrixRowsObject, planes: Slice<'_, View>) -> Result<(), OpError> {
        if self.fault == "error" {
            return Err(OpError::new("no room"));
        }
        let (n, k) = (m.n as usize, m.k as usize);
        for matrix in 0..m.count {
            let mut values = vec![0.0; n * k];
            let beyond = u32::from(self.fault == "beyond");
            rows.read(matrix, beyond, m.n, m.first, m.k, SliceMut::from(&mut values[..]))?;
            for value in &mut values {
                *value += self.add;
            }
            let packed = pack_f32(&values, n, k);
            let at = matrix as usize * packed.len();
            assert_eq!(planes[0].ptr as usize % 64, 0);
            // Planes begin at multiples of 64.
            #[allow(clippy::cast_ptr_alignment)]
            // SAFETY: the plane has room for all matrices, and is this call's.
            let to =
                unsafe { std::slice::from_raw_parts_mut(planes[0].ptr.cast::<f32>().add(at), packed.len()) };
            to.copy_from_slice(&packed);
        }
        Ok(())
    }
}

fn builders(all: Vec<(&str, &[String], Panels)>) -> Hooks {
    let mut hooks = Hooks::default();
    for (owner, over, builder) in all {
        hooks.add(owner, over, Offer::of(WeightBuilderObject::new(builder))).unwrap();
    }
    hooks
}

#[test]
fn what_a_builder_stores_is_what_it_read_fused_sliced_and_stacked() {
    for role in
        ["head", "kda.in", "kda.o", "mla.in", "mla.kv_b", "mlp.down", "experts.gate_up", "experts.down"]
    {
        for ranks in [1, 2, 3] {
            let got = bits(&tiny_dir(), ranks, || builders(vec![("0001", &[], Panels { role, ..HEAD })]));
            assert!(got == bits(&tiny_dir(), ranks, Hooks::default), "{role} on {ranks} ranks");
        }
    }
    let other = bits(&tiny_dir(), 1, || builders(vec![("0001", &[], Panels { add: 0.5, ..HEAD })]));
    assert!(other != bits(&tiny_dir(), 1, Hooks::default), "it is what runs");
}

#[test]
fn two_builders_of_one_matrix_need_an_order() {
    let two = |over: &[String]| {
        let second = Panels { name: "others", add: 1.0, ..HEAD };
        load(builders(vec![("0001", &[], HEAD), ("0470", over, second)]))
    };
    let told = two(&[]).err().unwrap();
    assert!(
        ["0470", "0001", "panels", "others", "head", "`over`"].iter().all(|p| told.contains(p)),
        "{told}"
    );
    assert!(two(&["0001".to_owned()]).is_ok());
    let got = bits(&tiny_dir(), 1, || {
        let second = Panels { name: "others", add: 1.0, ..HEAD };
        builders(vec![("0001", &[], HEAD), ("0470", &["0001".to_owned()], second)])
    });
    let want = bits(&tiny_dir(), 1, || builders(vec![("0470", &[], Panels { add: 1.0, ..HEAD })]));
    assert!(got == want, "the one above the other stores it");
}

#[test]
fn what_a_builder_does_wrong_stops_the_start_with_plugin_and_matrix() {
    for (fault, part) in [("error", "no room"), ("planes", "0 planes"), ("beyond", "are outside")] {
        let told = load(builders(vec![("0001", &[], Panels { fault, ..HEAD })])).err().unwrap();
        assert!(told.contains("0001") && told.contains("head") && told.contains(part), "{told}");
    }
}

/// A copy for drafting is found by draft programs alone, and decides no reply.
#[test]
fn a_copy_for_one_phase_is_that_phases_alone() {
    let hooks = || {
        let copy = Panels { purpose: Purpose::Draft, add: 9.0, ..HEAD };
        builders(vec![("0001", &[], copy)])
    };
    assert!(bits(&tiny_dir(), 1, hooks) == bits(&tiny_dir(), 1, Hooks::default));
    let core = load(hooks()).unwrap();
    let heads: Vec<(Purpose, &str)> = core
        .weights()
        .all()
        .filter(|(.., w)| w.role.get_str() == "head")
        .map(|(_, _, purpose, w)| (purpose, w.format.get_str()))
        .collect();
    assert_eq!(heads.len(), 2);
    assert!(heads.contains(&(Purpose::Draft, formats::PANEL16_F32)), "{heads:?}");
    assert!(heads.contains(&(Purpose::Main, formats::PANEL16_BF16)), "{heads:?}");
}

/// Key, index and bytes of what was kept.
type Kept = (String, Vec<u8>, Vec<u8>);

/// Keeps one rank's weights a key in memory.
#[derive(Clone, Default)]
struct Shelf {
    kept: Arc<Mutex<Vec<Kept>>>,
    fault: &'static str,
}

fn key(key: &PreparedKey<'_>) -> String {
    key.lines.to_string()
}

impl PreparedStore for Shelf {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("shelf".into())
    }
    fn find(&self, of: &PreparedKey<'_>) -> Result<Maybe<Prepared>, OpError> {
        let kept = self.kept.lock().unwrap();
        let found = kept.iter().find(|(k, ..)| *k == key(of)).map(|(_, index, bytes)| {
            let mut index = index.clone();
            if self.fault == "index" {
                index.truncate(9);
            }
            let cut = if self.fault == "cut" { 1 << 16 } else { 0 };
            Prepared { index: index.into(), bytes: bytes.len() as u64 - cut }
        });
        Ok(found.into())
    }
    fn read(&self, of: &PreparedKey<'_>, memory: SliceMut<'_, u8>) -> Result<(), OpError> {
        if self.fault == "read" {
            return Err(OpError::new("chunk 3 has another hash"));
        }
        let memory = memory.into_mut();
        assert_eq!((memory.as_ptr() as usize % 4096, memory.len() % 4096), (0, 0));
        let kept = self.kept.lock().unwrap();
        let (_, _, bytes) = kept.iter().find(|(k, ..)| *k == key(of)).unwrap();
        let len = bytes.len().min(memory.len());
        memory[..len].copy_from_slice(&bytes[..len]);
        Ok(())
    }
    fn offer(
        &self,
        of: &PreparedKey<'_>,
        index: Slice<'_, u8>,
        pieces: Slice<'_, Piece<'_>>,
    ) -> Result<(), OpError> {
        let mut bytes = Vec::new();
        for piece in pieces.iter() {
            assert_eq!(piece.offset % 4096, 0);
            assert!(piece.offset >= bytes.len() as u64, "pieces ascend");
            bytes.resize(piece.offset as usize, 0);
            bytes.extend_from_slice(&piece.bytes);
        }
        self.kept.lock().unwrap().push((key(of), index.to_vec(), bytes));
        Ok(())
    }
}

fn shelved(shelf: &Shelf, more: Hooks) -> Hooks {
    let mut hooks = more;
    hooks.add_object("0140", PreparedStoreObject::new(shelf.clone())).unwrap();
    hooks
}

#[test]
fn prepared_weights_give_the_bits_of_built_ones_on_every_rank() {
    for ranks in [1, 2] {
        let shelf = Shelf::default();
        let plain = bits(&tiny_dir(), ranks, Hooks::default);
        for round in 0..2 {
            assert!(
                bits(&tiny_dir(), ranks, || shelved(&shelf, Hooks::default())) == plain,
                "{ranks}, {round}"
            );
            assert_eq!(shelf.kept.lock().unwrap().len(), ranks, "built once");
        }
        let core =
            Core::load(&tiny_dir(), &with(shelved(&shelf, Hooks::default())), Split::WHOLE, None).unwrap();
        let want = if ranks == 1 { Origin::Prepared("shelf".into()) } else { Origin::Built };
        assert_eq!(*core.origin(), want, "{ranks} ranks are another key than one");
    }
}

#[test]
fn every_plane_is_read_back_bit_for_bit_with_its_shape() {
    let shelf = Shelf::default();
    let hooks = || shelved(&shelf, builders(vec![("0001", &[], HEAD)]));
    let (built, read) = (load(hooks()).unwrap(), load(hooks()).unwrap());
    assert_eq!((built.origin(), read.origin()), (&Origin::Built, &Origin::Prepared("shelf".into())));
    let sorted = |core: &Core| {
        let mut all: Vec<_> = core
            .weights()
            .all()
            .map(|(layer, site, purpose, w)| {
                let planes = w.planes.map(|v| {
                    let len = v.span_bytes();
                    if len == 0 {
                        return (v.rows, v.cols, v.stride, v.dtype as u8, Vec::new());
                    }
                    // SAFETY: planes of loaded weights are readable and unwritten.
                    let bytes = unsafe { std::slice::from_raw_parts(v.ptr, len) };
                    (v.rows, v.cols, v.stride, v.dtype as u8, bytes.to_vec())
                });
                let sizes = (w.n, w.k, w.count);
                (layer, site, purpose, w.role.to_string(), w.format.to_string(), sizes, planes)
            })
            .collect();
        all.sort();
        all
    };
    assert!(sorted(&built) == sorted(&read));
}

#[test]
fn what_is_wrong_with_prepared_weights_is_passed_over() {
    let good = Shelf::default();
    load(shelved(&good, Hooks::default())).unwrap();
    for fault in ["index", "cut", "read"] {
        let core = load(shelved(&Shelf { fault, ..good.clone() }, Hooks::default())).unwrap();
        assert_eq!(*core.origin(), Origin::Built, "{fault}");
    }
    assert_eq!(*load(shelved(&good, Hooks::default())).unwrap().origin(), Origin::Prepared("shelf".into()));
}

#[test]
fn everything_that_decides_a_byte_is_in_the_key() {
    let shelf = Shelf::default();
    let keys = |hooks: Hooks, options: CoreOptions, dir: &Path, split| {
        let options = CoreOptions { hooks: Arc::new(shelved(&shelf, hooks)), context: Some(64), ..options };
        let comm = None;
        drop(Core::load(dir, &options, split, comm));
        shelf.kept.lock().unwrap().len()
    };
    let usual = CoreOptions::default;
    assert_eq!(keys(Hooks::default(), usual(), &tiny_dir(), Split::WHOLE), 1);
    assert_eq!(keys(Hooks::default(), usual(), &tiny_dir(), Split::WHOLE), 1, "the same again");
    let longer = CoreOptions { slots: 3, ..usual() };
    assert_eq!(keys(Hooks::default(), longer, &tiny_dir(), Split::WHOLE), 1, "sizes that decide no weight");
    assert_eq!(keys(links(&[("0430", affine(2.0, 0.0))]), usual(), &tiny_dir(), Split::WHOLE), 2, "a link");
    assert_eq!(
        keys(links(&[("0430", affine(3.0, 0.0))]), usual(), &tiny_dir(), Split::WHOLE),
        3,
        "its values"
    );
    let builder = |add| builders(vec![("0001", &[], Panels { add, ..HEAD })]);
    assert_eq!(keys(builder(0.0), usual(), &tiny_dir(), Split::WHOLE), 4, "a builder");
    assert_eq!(keys(builder(1.0), usual(), &tiny_dir(), Split::WHOLE), 5, "its settings");
    let moved = changed(|v| v);
    assert_eq!(keys(Hooks::default(), usual(), moved.path(), Split::WHOLE), 6, "other files");
    let config = moved.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{text}\n")).unwrap();
    assert_eq!(keys(Hooks::default(), usual(), moved.path(), Split::WHOLE), 7, "another configuration");
    let lines = shelf.kept.lock().unwrap()[0].0.clone();
    for name in
        ["checkpoint = ", "file model-0000", "engine = ", "kernels = ", "device = cpu", "rank = 0 of 1"]
    {
        assert!(lines.contains(name), "{name} is not in {lines}");
    }
}

#[test]
fn two_stores_are_refused() {
    let mut hooks = shelved(&Shelf::default(), Hooks::default());
    hooks.add_object("0141", PreparedStoreObject::new(Shelf::default())).unwrap();
    let told = load(hooks).err().unwrap();
    assert!(told.contains("0140") && told.contains("0141") && told.contains("one off the list"), "{told}");
}
