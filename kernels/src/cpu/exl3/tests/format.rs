use std::collections::BTreeMap;

use super::*;
use crate::cpu::exl3::*;

/// Tensors that own their bytes, to be tampered with.
#[derive(Clone, Default)]
struct Owned(BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

impl Tensors for Owned {
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        self.0.get(name).map(|(dtype, shape, data)| RawTensor { dtype: *dtype, shape: shape.clone(), data })
    }
}

impl Owned {
    fn layer(from: &str) -> Self {
        let bytes = fixture("layers.safetensors");
        let file = File::new(&bytes);
        let mut owned = Self::default();
        for suffix in ["trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias"] {
            if let Some(t) = file.tensor(&format!("{from}.{suffix}")) {
                owned.0.insert(format!("l.{suffix}"), (t.dtype, t.shape, t.data.to_vec()));
            }
        }
        owned
    }

    fn with(mut self, suffix: &str, change: impl FnOnce(&mut (Dtype, Vec<usize>, Vec<u8>))) -> Self {
        let entry = self.0.entry(format!("l.{suffix}")).or_insert((Dtype::I32, vec![], vec![0; 4]));
        change(entry);
        self
    }

    fn without(mut self, suffix: &str) -> Self {
        self.0.remove(&format!("l.{suffix}"));
        self
    }
}

fn marker(value: u32) -> impl FnOnce(&mut (Dtype, Vec<usize>, Vec<u8>)) {
    move |t| *t = (Dtype::I32, vec![], value.to_le_bytes().to_vec())
}

#[test]
fn files_that_lie_are_refused_by_the_name_of_the_tensor() {
    let good = Owned::layer("tall-mcg-4");
    assert!(read_layer(&good, "l").is_ok());
    let half = Owned::layer("small-mul1-2.5");
    assert!(read_layer(&half, "l").is_ok());
    let cases: Vec<(&str, Owned, &str)> = vec![
        ("trellis is missing", good.clone().without("trellis"), "l.trellis"),
        ("input scales are missing", good.clone().without("suh"), "l.suh or su"),
        ("output scales are missing", good.clone().without("svh"), "l.svh or sv"),
        ("trellis of floats", good.clone().with("trellis", |t| t.0 = Dtype::F16), "l.trellis"),
        ("two dimensions", good.clone().with("trellis", |t| t.1 = vec![32, 16 * 64]), "l.trellis"),
        ("no such rate", good.clone().with("trellis", |t| t.1 = vec![32, 8, 128 + 16]), "l.trellis"),
        ("fewer bytes than the shape", good.clone().with("trellis", |t| t.2.truncate(100)), "l.trellis"),
        ("more rate than bytes", good.clone().with("trellis", |t| t.1[2] = 80), "l.trellis"),
        ("k no multiple of 128", good.clone().with("trellis", |t| t.1 = vec![4, 128, 64]), "l.trellis"),
        (
            "no rows",
            good.clone().with("trellis", |t| *t = (Dtype::I16, vec![0, 16, 64], vec![])),
            "l.trellis",
        ),
        (
            "a shape that overflows",
            good.clone().with("trellis", |t| t.1 = vec![(usize::MAX / 16) & !7, 1 << 20, 64]),
            "l.trellis",
        ),
        (
            "scales of another k",
            good.clone().with("suh", |t| *t = (Dtype::F16, vec![256], vec![0; 512])),
            "l.suh",
        ),
        (
            "scales of another n",
            good.clone().with("svh", |t| *t = (Dtype::F16, vec![512], vec![0; 1024])),
            "l.svh",
        ),
        ("scales in single precision", good.clone().with("svh", |t| t.0 = Dtype::F32), "l.svh"),
        ("marker with another value", good.clone().with("mcg", marker(1)), "l.mcg"),
        (
            "marker that is a vector",
            good.clone().with("mcg", |t| *t = (Dtype::I32, vec![2], vec![0; 8])),
            "l.mcg",
        ),
        ("marker of another type", good.clone().with("mcg", |t| t.0 = Dtype::F32), "l.mcg"),
        ("both markers", good.clone().with("mul1", marker(MUL1_MULTIPLIER)), "l.mul1"),
        ("half bits without mul1", half.without("mul1"), "l.trellis"),
        (
            "bias of another n",
            good.clone().with("bias", |t| *t = (Dtype::F16, vec![128], vec![0; 256])),
            "l.bias",
        ),
        ("bias of integers", good.clone().with("bias", |t| t.0 = Dtype::I16), "l.bias"),
    ];
    for (what, tensors, named) in cases {
        let error = read_layer(&tensors, "l").map(|_| ()).expect_err(what).to_string();
        assert!(error.contains(named), "{what}: {error}");
    }
}

#[test]
fn markers_of_one_element_and_other_bias_types_are_accepted() {
    let good = Owned::layer("tall-mcg-4");
    let reference = read_layer(&good, "l").unwrap();
    let vector = good.clone().with("mcg", |t| t.1 = vec![1]);
    assert!(read_layer(&vector, "l").unwrap() == reference);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let other = good.clone().with("bias", |t| {
            t.2 =
                t.2.as_chunks::<2>()
                    .0
                    .iter()
                    .map(|b| f16::from_le_bytes(*b).to_f32())
                    .flat_map(|b| match dtype {
                        Dtype::Bf16 => bf16::from_f32(b).to_le_bytes().to_vec(),
                        _ => b.to_le_bytes().to_vec(),
                    })
                    .collect();
            t.0 = dtype;
        });
        let layer = read_layer(&other, "l").unwrap();
        assert!(largest_difference(layer.bias().unwrap(), reference.bias().unwrap()) <= 0.02);
    }
}

#[test]
fn slices_read_from_file_equal_slices_of_the_layer() {
    for case in ["tall-mul1-4", "mid-mcg-3", "legacy-mcg-3"] {
        let tensors = Owned::layer(case);
        let layer = read_layer(&tensors, "l").unwrap();
        let blocks = |channels: usize| {
            (0..channels / 128).flat_map(move |a| (a + 1..=channels / 128).map(move |b| 128 * a..128 * b))
        };
        let whole = layer.weight();
        for k in blocks(layer.k()) {
            for n in blocks(layer.n()) {
                let part = read_slice(&tensors, "l", k.clone(), n.clone()).unwrap();
                assert!(part == layer.slice("l", k.clone(), n.clone()).unwrap());
                assert_eq!(part.bias().is_some(), layer.bias().is_some() && k.start == 0);
                let w = part.weight();
                for (row, w) in k.clone().zip(w.chunks_exact(n.len())) {
                    assert_eq!(w, &whole[row * layer.n()..][n.clone()], "{case} {k:?} {n:?}");
                }
            }
        }
        for bad in [0..0, 0..64, 64..128, 0..layer.k() + 128] {
            assert!(read_slice(&tensors, "l", bad.clone(), 0..128).is_err());
            assert!(layer.slice("l", bad, 0..128).is_err());
        }
    }
}
