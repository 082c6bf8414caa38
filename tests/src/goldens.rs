//! Reference results, as made by other implementations.

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

/// The tiny random checkpoint with its goldens.
pub fn tiny_dir() -> PathBuf {
    fixtures().join("tiny")
}

/// Folder of the fixtures.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// A file of named tensors.
pub struct Goldens {
    bytes: Vec<u8>,
}

impl Goldens {
    /// Reads a file.
    ///
    /// # Panics
    /// When there is none: tests cannot go on without.
    #[allow(clippy::expect_used)]
    pub fn open(path: &Path) -> Self {
        Self { bytes: std::fs::read(path).expect("the fixture exists") }
    }

    /// The goldens of the tiny checkpoint.
    pub fn tiny() -> Self {
        Self::open(&tiny_dir().join("goldens.safetensors"))
    }

    #[allow(clippy::expect_used)]
    fn get(&self, name: &str, dtype: Dtype) -> (Vec<usize>, Vec<[u8; 4]>) {
        let all = SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        let tensor = all.tensor(name).unwrap_or_else(|e| panic!("golden {name}: {e}"));
        assert_eq!(tensor.dtype(), dtype, "golden {name}");
        let words = tensor.data().chunks_exact(4).map(|c| [c[0], c[1], c[2], c[3]]).collect();
        (tensor.shape().to_vec(), words)
    }

    /// A tensor of floats.
    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.get(name, Dtype::F32).1.into_iter().map(f32::from_le_bytes).collect()
    }

    /// A tensor of ids.
    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.get(name, Dtype::I32).1.into_iter().map(u32::from_le_bytes).collect()
    }

    /// A tensor's shape.
    #[allow(clippy::expect_used)]
    pub fn shape(&self, name: &str) -> Vec<usize> {
        let all = SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        all.tensor(name).unwrap_or_else(|e| panic!("golden {name}: {e}")).shape().to_vec()
    }
}

/// The largest absolute difference over the standard deviation of the golden tensor.
pub fn relative(got: &[f32], golden: &[f32]) -> f64 {
    assert_eq!(got.len(), golden.len(), "as many values as the golden has");
    let n = golden.len() as f64;
    let mean = golden.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let variance = golden.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
    let largest = got
        .iter()
        .zip(golden)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs())
        // NaN must not hide: it compares as larger than everything.
        .max_by(f64::total_cmp)
        .unwrap_or(0.0);
    largest / variance.sqrt().max(1e-30)
}

/// Checks a relative difference against a bound.
///
/// # Panics
/// When it is larger, naming both.
pub fn within(what: &str, got: &[f32], golden: &[f32], bound: f64) {
    let r = relative(got, golden);
    assert!(r <= bound, "{what}: {r:.2e} relative, the bound is {bound:.0e}");
}
