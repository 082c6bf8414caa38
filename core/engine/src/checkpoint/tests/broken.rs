//! Files that are missing, cut short, or lie.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::super::{Checkpoint, CheckpointErrors};
use super::*;

fn open(dir: &TempDir) -> CheckpointErrors {
    match Checkpoint::open(dir.path()) {
        Ok(_) => panic!("was opened"),
        Err(errors) => errors,
    }
}

/// The one error of a folder holds all of these words.
fn one_error(dir: &TempDir, words: &[&str]) {
    let errors = open(dir);
    assert_eq!(errors.errors.len(), 1, "{errors}");
    let text = errors.to_string();
    for word in words {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
}

fn cut(path: &Path, length: u64) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(length).unwrap();
}

#[test]
fn a_folder_without_weights() {
    let dir = tempfile::tempdir().unwrap();
    one_error(&dir, &["neither model.safetensors.index.json nor model.safetensors"]);
    let missing = Checkpoint::open(&dir.path().join("nowhere")).err().unwrap();
    assert!(missing.to_string().contains("cannot read"), "{missing}");
    let file = inside(&dir, "file");
    std::fs::write(&file, "").unwrap();
    assert!(Checkpoint::open(&file).is_err());
}

#[test]
fn shards_that_are_missing_or_cut_short() {
    let dir = copy();
    std::fs::remove_file(inside(&dir, SHARD_2)).unwrap();
    one_error(&dir, &[SHARD_2, "is missing", "the index expects", "such as model."]);

    let length = std::fs::metadata(Path::new(TINY).join(SHARD_1)).unwrap().len();
    for (left, words) in [
        (0, "has 0 bytes, too few"),
        (7, "has 7 bytes, too few"),
        (8, "is cut short"),
        (5000, "is cut short"),
        (length - 1, "is cut short"),
    ] {
        let dir = copy();
        cut(&inside(&dir, SHARD_1), left);
        one_error(&dir, &[SHARD_1, words]);
    }
    // With half of the data gone every tensor behind the cut is named.
    let dir = copy();
    cut(&inside(&dir, SHARD_1), length / 2);
    let errors = open(&dir);
    assert!(errors.errors.len() > 20);
    let text = errors.to_string();
    assert_eq!(text.lines().count(), 1 + 20 + 1, "{text}");
    assert!(text.ends_with(&format!("and {} more", errors.errors.len() - 20)), "{text}");
}

#[test]
fn a_shard_that_is_a_folder() {
    let dir = copy();
    std::fs::remove_file(inside(&dir, SHARD_1)).unwrap();
    std::fs::create_dir(inside(&dir, SHARD_1)).unwrap();
    one_error(&dir, &[SHARD_1]);
}

#[test]
fn both_shards_are_told_of_at_once() {
    let dir = copy();
    std::fs::remove_file(inside(&dir, SHARD_1)).unwrap();
    cut(&inside(&dir, SHARD_2), 4);
    let text = open(&dir).to_string();
    assert!(text.contains("for 2 reasons") && text.contains(SHARD_1) && text.contains(SHARD_2), "{text}");
}

/// A header, its data, and what must be said of them.
#[test]
fn headers_that_lie() {
    let long = format!("{}{}", u64::MAX, "0");
    let huge = usize::MAX / 8;
    let entry = |dtype: &str, shape: &str, from: &str, to: &str| {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let one = |value: String| format!(r#"{{"x":{value}}}"#);
    let cases = [
        (String::new(), "the header is not what a safetensors file has"),
        ("{".to_owned(), "the header is not what a safetensors file has"),
        ("[]".to_owned(), "an object with one entry a tensor"),
        ("null".to_owned(), "an object with one entry a tensor"),
        ("{}".to_owned(), "has 8 bytes after its last tensor"),
        (one("3".to_owned()), "tensor x"),
        (one(entry("F128", "[2]", "0", "8")), "tensor x"),
        (one(entry("F32", "[-2]", "0", "8")), "tensor x"),
        (one(entry("F32", "[2]", "0", &long)), "tensor x"),
        (one(entry("F32", "[2]", "8", "0")), "end at 0, before they begin at 8"),
        (one(entry("F32", "[3]", "0", "8")), "shape [3] of F32 does not fit its 8 bytes"),
        (one(entry("F32", "[2]", "0", "16")), "wants bytes 0 to 16, but the file holds 8"),
        (one(entry("U8", &format!("[{huge}]"), "0", &huge.to_string())), "is cut short"),
        (one(entry("U8", &format!("[{huge},{huge}]"), "0", "8")), "does not fit its 8 bytes"),
        (one(entry("F4", "[3]", "0", "1")), "does not fit its 1 bytes"),
        (one(entry("F32", "[1]", "4", "8")), "malformed"),
        (one(entry("F32", "[1]", "0", "4")), "has 4 bytes after its last tensor"),
        (
            format!(r#"{{"x":{},"x":{}}}"#, entry("F32", "[1]", "0", "4"), entry("F32", "[1]", "4", "8")),
            "tensor x: stands twice",
        ),
        (
            format!(r#"{{"x":{},"y":{}}}"#, entry("F32", "[1]", "0", "4"), entry("U8", "[6]", "2", "8")),
            "tensor y: its bytes overlap those of x",
        ),
    ];
    for (header, words) in cases {
        one_error(&single(&assemble(&header, &[0; 8])), &["model.safetensors", words]);
    }
    let mut claim = u64::MAX.to_le_bytes().to_vec();
    claim.extend_from_slice(b"{}");
    one_error(&single(&claim), &["claims a header of 18446744073709551615 bytes"]);
    let mut claim = 1000u64.to_le_bytes().to_vec();
    claim.extend_from_slice(b"{}");
    one_error(&single(&claim), &["claims a header of 1000 bytes, but the file ends after 10"]);
    one_error(&single(&assemble("{\"\u{1}\": ", &[])), &["the header is not"]);
}

#[test]
fn an_index_that_lies() {
    let write = |dir: &TempDir, value: Value| {
        std::fs::write(inside(dir, "model.safetensors.index.json"), value.to_string()).unwrap();
    };
    let map = |file: &str| json!({ "weight_map": { "lm_head.weight": file } });
    for (value, words) in [
        (json!([]), "is not an index"),
        (json!({}), "is not an index"),
        (json!({ "weight_map": 3 }), "is not an index"),
        (json!({ "weight_map": {} }), "names no tensors"),
        (map("../elsewhere.safetensors"), "is not the name of a file in the same folder"),
        (map("/etc/passwd"), "is not the name of a file in the same folder"),
        (map("sub/model.safetensors"), "is not the name of a file in the same folder"),
        (map(".."), "is not the name of a file in the same folder"),
        (map(""), "is not the name of a file in the same folder"),
        (map("gone.safetensors"), "gone.safetensors is missing; the index expects 1 tensors"),
    ] {
        let dir = copy();
        write(&dir, value);
        one_error(&dir, &[words]);
    }
    let path = Path::new(TINY).join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    // A tensor that no file has, and one that is in the other file.
    index["weight_map"]["made.up"] = json!(SHARD_2);
    index["weight_map"]["lm_head.weight"] = json!(SHARD_2);
    let dir = copy();
    write(&dir, index.clone());
    let text = open(&dir).to_string();
    assert!(text.contains("for 2 reasons"), "{text}");
    for tensor in ["made.up", "lm_head.weight"] {
        assert!(text.contains(&format!("{SHARD_2}: tensor {tensor} is not in this file")), "{text}");
    }
    // A tensor that the index forgets is still found, but not in silence.
    let weights = index["weight_map"].as_object_mut().unwrap();
    weights.remove("made.up");
    weights.remove("lm_head.weight");
    write(&dir, index);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.files.warnings, ["1 stored tensors are not in the index, such as lm_head.weight"]);
    checkpoint.check(&CONFIG).unwrap();
}

#[test]
fn the_same_tensor_in_two_files() {
    let dir = copy();
    let mut tensors = tiny();
    tensors
        .retain(|name, _| name.contains(".experts.") || name.contains("visual") || name == "lm_head.weight");
    std::fs::write(inside(&dir, SHARD_2), file(&tensors, 0)).unwrap();
    let text = open(&dir).to_string();
    assert!(text.contains("tensor lm_head.weight is both in"), "{text}");
    assert!(text.contains(SHARD_1) && text.contains(SHARD_2), "{text}");
}

#[test]
fn a_single_file_beside_an_index_that_does_not_name_it() {
    let dir = copy();
    std::fs::write(inside(&dir, "model.safetensors"), file(&tiny(), 0)).unwrap();
    one_error(&dir, &["remove one of them"]);
    std::fs::remove_file(inside(&dir, "model.safetensors.index.json")).unwrap();
    load(dir.path(), &config()).unwrap();
}

static CONFIG: LazyLock<ModelConfig> = LazyLock::new(config);

/// A few tensors that together need everything a header can say.
static SMALL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut tensors = tiny();
    tensors.retain(|name, _| name.contains("layers.0.") && (name.contains("hc_") || name.contains("norm")));
    file(&tensors, 3)
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Bytes of the header turned over: an error or another valid header, never a panic or a read past the end.
    #[test]
    fn altered_headers_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = SMALL.clone();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (at, value) in flips {
            bytes[at.index(header)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let dir = single(&bytes);
        match Checkpoint::open(dir.path()) {
            Ok(checkpoint) => {
                for name in checkpoint.names() {
                    let data = checkpoint.tensor(name).unwrap();
                    prop_assert_eq!(data.bytes.len() * 8, data.shape.iter().product::<usize>() * data.dtype.bitsize());
                }
                checkpoint.content_id().unwrap();
                prop_assert!(checkpoint.check(&CONFIG).is_err());
            }
            Err(errors) => prop_assert!(errors.to_string().contains("model.safetensors")),
        }
    }

    /// Digits of the header replaced by other digits: offsets and shapes that are well-formed and wrong.
    #[test]
    fn altered_numbers_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), 0u8..10), 1..8)) {
        let mut bytes = SMALL.clone();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let digits: Vec<usize> = (8..header).filter(|i| bytes[*i].is_ascii_digit()).collect();
        for (at, digit) in edits {
            bytes[digits[at.index(digits.len())]] = b'0' + digit;
        }
        let dir = single(&bytes);
        if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
            checkpoint.content_id().unwrap();
            prop_assert!(checkpoint.check(&CONFIG).is_err());
        }
    }
}
