//! Kernels by name, and launches that are checked against the kernels' own signatures.

use std::collections::HashMap;
use std::sync::LazyLock;

use crate::error::CudaError;
use crate::source::{SOURCES, Source};

/// What a kernel takes, as its source says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Param {
    /// An address.
    Pointer,
    /// 32 bits, signed or not.
    Word,
    /// 64 bits.
    Long,
    /// f32.
    Float,
    /// A structure by value.
    Struct(String),
}

/// A kernel of one of the sources.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Name.
    pub name: &'static str,
    /// Where it is.
    pub source: &'static Source,
    /// Most threads of a block.
    pub threads: u32,
    /// Parameters: type and name.
    pub params: Vec<(Param, &'static str)>,
}

/// An argument of a launch.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// An address of device memory, 0 for none.
    Pointer(u64),
    /// 32 bits.
    Word(u32),
    /// 64 bits.
    Long(u64),
    /// f32.
    Float(f32),
    /// A structure's name and bytes.
    Struct(&'static str, &'a [u8]),
}

impl Arg<'_> {
    /// Address of the value, for the driver: it reads as many bytes as the parameter has.
    pub fn address(&self) -> *const u8 {
        match self {
            Arg::Pointer(v) | Arg::Long(v) => std::ptr::from_ref(v).cast(),
            Arg::Word(v) => std::ptr::from_ref(v).cast(),
            Arg::Float(v) => std::ptr::from_ref(v).cast(),
            Arg::Struct(_, bytes) => bytes.as_ptr(),
        }
    }

    fn fits(&self, param: &Param) -> bool {
        match (self, param) {
            (Arg::Pointer(_), Param::Pointer)
            | (Arg::Word(_), Param::Word)
            | (Arg::Long(_), Param::Long)
            | (Arg::Float(_), Param::Float) => true,
            (Arg::Struct(name, _), Param::Struct(want)) => name == want,
            _ => false,
        }
    }
}

/// A grid of blocks that run a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'static Kernel,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of shared memory beyond what the kernel itself declares.
    pub shared: u32,
    /// Arguments, in order.
    pub args: &'a [Arg<'a>],
}

/// Blocks that a grid may have along y and z.
pub const GRID_YZ: u32 = 65_535;
/// Shared memory that a block may ask for on every supported GPU.
pub const SHARED_MOST: u32 = 96 << 10;

impl Launch<'_> {
    /// Whether the grid has no block: then there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }

    /// Refuses a launch that does not fit the kernel's signature or the limits of every GPU.
    ///
    /// # Errors
    /// [`CudaError::Launch`], naming the argument.
    pub fn check(&self) -> Result<(), CudaError> {
        let Kernel { name, threads, params, .. } = self.kernel;
        let refuse = |problem: String| Err(CudaError::Launch { kernel: (*name).into(), problem });
        if self.args.len() != params.len() {
            return refuse(format!("{} arguments, the kernel takes {}", self.args.len(), params.len()));
        }
        for (i, (arg, (param, param_name))) in self.args.iter().zip(params).enumerate() {
            if !arg.fits(param) {
                return refuse(format!("argument {i} is {arg:?}, `{param_name}` is a {param:?}"));
            }
        }
        if self.threads == 0 || self.threads > *threads || !self.threads.is_multiple_of(32) {
            return refuse(format!(
                "{} threads a block, must be a multiple of 32 up to {threads}",
                self.threads
            ));
        }
        if self.grid[1] > GRID_YZ || self.grid[2] > GRID_YZ || self.grid[0] > i32::MAX as u32 {
            return refuse(format!(
                "a grid of {:?} blocks, at most {GRID_YZ} may lie along y and z",
                self.grid
            ));
        }
        if self.shared > SHARED_MOST {
            return refuse(format!(
                "{} bytes of shared memory, at most {SHARED_MOST} are there",
                self.shared
            ));
        }
        Ok(())
    }
}

impl std::fmt::Display for Launch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [x, y, z] = self.grid;
        write!(f, "kernel {}, grid {x} x {y} x {z} of {} threads", self.kernel.name, self.threads)?;
        for (arg, (_, name)) in self.args.iter().zip(&self.kernel.params) {
            match arg {
                Arg::Word(v) => write!(f, ", {name} {v}")?,
                Arg::Float(v) => write!(f, ", {name} {v}")?,
                Arg::Long(v) => write!(f, ", {name} {v}")?,
                Arg::Pointer(_) | Arg::Struct(..) => {}
            }
        }
        Ok(())
    }
}

/// The kernels that a source defines: `KERNEL THREADS(n) name(parameters)`, or with `THREADS(n, blocks)`.
fn parse(source: &'static Source) -> Vec<Kernel> {
    let mut found = Vec::new();
    for after in source.text.split("\nKERNEL THREADS(").skip(1) {
        let kernel = after.split_once(") ").and_then(|(threads, rest)| {
            let threads = threads.split(',').next()?;
            let (name, rest) = rest.split_once('(')?;
            let (params, _) = rest.split_once(") {")?;
            let params = params.split(',').map(|p| param(p.trim())).collect();
            Some(Kernel { name, source, threads: threads.parse().ok()?, params })
        });
        // A source that breaks the rule is a fault of this crate, found by its tests.
        found.extend(kernel);
    }
    found
}

fn param(text: &'static str) -> (Param, &'static str) {
    let (kind, name) = text.rsplit_once(' ').unwrap_or(("", text));
    let param = match kind.trim_start_matches("const ") {
        k if k.ends_with('*') => Param::Pointer,
        "u32" | "i32" => Param::Word,
        "u64" => Param::Long,
        "float" => Param::Float,
        k => Param::Struct(k.into()),
    };
    (param, name)
}

static KERNELS: LazyLock<HashMap<&'static str, Kernel>> =
    LazyLock::new(|| SOURCES.iter().flat_map(parse).map(|k| (k.name, k)).collect());

/// A kernel by its name.
///
/// # Errors
/// [`CudaError::Launch`] when there is none.
pub fn kernel(name: &str) -> Result<&'static Kernel, CudaError> {
    KERNELS
        .get(name)
        .ok_or_else(|| CudaError::Launch { kernel: name.into(), problem: "there is no such kernel".into() })
}

/// All kernels, by name.
pub fn kernels() -> Vec<&'static Kernel> {
    let mut all: Vec<_> = KERNELS.values().collect();
    all.sort_by_key(|k| k.name);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_the_sources_is_found_with_its_signature() {
        let written: usize = SOURCES.iter().map(|s| s.text.matches("KERNEL THREADS(").count()).sum();
        assert_eq!(kernels().len(), written);
        assert!(
            kernels()
                .iter()
                .all(|k| k.params.iter().all(|(_, name)| !name.is_empty() && !name.contains('*')))
        );
        let norm = kernel("rms_norm").unwrap();
        let want = ["x", "x_stride", "weight", "eps", "k", "out", "out_stride"];
        assert_eq!(norm.params.iter().map(|p| p.1).collect::<Vec<_>>(), want);
        assert_eq!(norm.threads, 256);
        assert_eq!(kernel("exl3_rotate").unwrap().params[1].0, Param::Struct("Wave".into()));
    }

    #[test]
    fn launches_that_do_not_fit_are_refused_by_name() {
        let args = [
            Arg::Pointer(64),
            Arg::Word(8),
            Arg::Pointer(64),
            Arg::Float(1e-5),
            Arg::Word(8),
            Arg::Pointer(64),
            Arg::Word(8),
        ];
        let good = Launch {
            kernel: kernel("rms_norm").unwrap(),
            grid: [3, 1, 1],
            threads: 256,
            shared: 0,
            args: &args,
        };
        assert_eq!(good.check(), Ok(()));
        assert_eq!(
            good.to_string(),
            "kernel rms_norm, grid 3 x 1 x 1 of 256 threads, x_stride 8, eps 0.00001, k 8, out_stride 8"
        );
        let said = |launch: Launch<'_>| launch.check().unwrap_err().to_string();
        assert_eq!(
            said(Launch { args: &args[..6], ..good }),
            "kernel rms_norm: 6 arguments, the kernel takes 7"
        );
        let mut swapped = args;
        swapped.swap(3, 4);
        assert!(
            said(Launch { args: &swapped, ..good })
                .starts_with("kernel rms_norm: argument 3 is Word(8), `eps` is a Float")
        );
        assert!(said(Launch { threads: 512, ..good }).contains("512 threads a block"));
        assert!(said(Launch { grid: [1, 70_000, 1], ..good }).contains("along y and z"));
        assert!(kernel("nothing").unwrap_err().to_string().contains("no such kernel"));
    }
}
