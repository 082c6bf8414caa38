//! Eight lanes of 32 bits and the choice of instruction set.
//!
//! Everything is written lane by lane on arrays and compiled once for each instruction set that `pulp` finds at
//! run time; the compiler turns the loops into vector instructions there. Each lane does the same operations in
//! the same order everywhere, so the bits do not depend on the machine.

use pulp::{Arch, Simd, WithSimd};

/// Lanes that the kernels treat as a unit.
pub(super) const LANES: usize = 8;

/// Eight values, aligned for one 256-bit load.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Lanes<T>(pub [T; LANES]);

impl<T: Copy> Lanes<T> {
    #[inline(always)]
    pub fn splat(value: T) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    pub fn map<U: Copy>(self, f: impl Fn(T) -> U) -> Lanes<U> {
        Lanes(core::array::from_fn(|i| f(self.0[i])))
    }

    #[inline(always)]
    pub fn zip<U: Copy, V: Copy>(self, other: Lanes<U>, f: impl Fn(T, U) -> V) -> Lanes<V> {
        Lanes(core::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes<f32> {
    /// `self + a · b` with one rounding.
    #[inline(always)]
    pub fn add_product(self, a: Self, b: Self) -> Self {
        Self(core::array::from_fn(|i| a.0[i].mul_add(b.0[i], self.0[i])))
    }
}

/// Work that has a vector form.
pub(super) trait Kernel {
    /// The vector form. `#[inline(always)]`, so that it is compiled with the caller's instruction set, which has a
    /// fused multiply-add.
    fn run(self);
    /// The same results from the build's base instruction set, which may have none.
    fn run_scalar(self);
}

struct Dispatched<K>(K);

impl<K: Kernel> WithSimd for Dispatched<K> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        if S::IS_SCALAR { self.0.run_scalar() } else { self.0.run() }
    }
}

/// Which code path a call takes. Both give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Path {
    /// The best instruction set that the machine has.
    #[default]
    Simd,
    /// The build's base instruction set, for comparison.
    Scalar,
}

/// Runs `kernel` on `path`.
#[inline]
pub(super) fn dispatch<K: Kernel>(path: Path, kernel: K) {
    match path {
        Path::Simd => Arch::new().dispatch(Dispatched(kernel)),
        Path::Scalar => kernel.run_scalar(),
    }
}
