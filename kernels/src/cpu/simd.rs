//! Run-time choice of the instruction set.
//!
//! Kernels are plain loops over fixed-size arrays, compiled once for every instruction set that pulp knows and chosen at
//! run time. They state every fused multiply-add with [`f32::mul_add`] and every order of summation, and the compiler
//! may neither fuse nor reorder anything else, so all paths give the same bits; only the speed differs.

/// Runs `job` compiled for the best instruction set of this machine.
#[inline]
pub(crate) fn dispatch<J: pulp::WithSimd>(job: J) -> J::Output {
    #[cfg(test)]
    if FORCE_SCALAR.load(std::sync::atomic::Ordering::Relaxed) {
        return job.with_simd(pulp::Scalar::new());
    }
    pulp::Arch::new().dispatch(job)
}

/// Tests set this to compare the portable path with the detected one.
#[cfg(test)]
pub(crate) static FORCE_SCALAR: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Runs `f` once on the portable path and once on the detected one; both results, portable first.
#[cfg(test)]
pub(crate) fn both_paths<T>(mut f: impl FnMut() -> T) -> (T, T) {
    use std::sync::atomic::Ordering;
    FORCE_SCALAR.store(true, Ordering::Relaxed);
    let scalar = f();
    FORCE_SCALAR.store(false, Ordering::Relaxed);
    (scalar, f())
}

/// Defines a function whose body is compiled for every instruction set.
///
/// The body must call nothing but `#[inline(always)]` functions and intrinsics in its hot loops: a call that is not
/// inlined would run code of the baseline instruction set.
macro_rules! kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident[$($gen:tt)*][$($use:tt)*]($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty $body:block) => {
        $(#[$meta])*
        $vis fn $name<'a, $($gen)*>($($arg: $ty),*) -> $ret {
            struct Job<'a, $($gen)*> {
                $($arg: $ty,)*
                life: std::marker::PhantomData<&'a ()>,
            }
            impl<'a, $($gen)*> pulp::WithSimd for Job<'a, $($use)*> {
                type Output = $ret;
                #[inline(always)]
                fn with_simd<S: pulp::Simd>(self, _simd: S) -> $ret {
                    let Self { $($arg,)* life: _ } = self;
                    $body
                }
            }
            $crate::cpu::simd::dispatch(Job::<'a, $($use)*> { $($arg,)* life: std::marker::PhantomData })
        }
    };
}
pub(crate) use kernel;
