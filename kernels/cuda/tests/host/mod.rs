//! A machine that runs the kernels' sources on the CPU: they are compiled as C++ with `host.hpp`, which runs a block's
//! threads as fibers. It says whether the kernels compute the right thing, where there is no GPU.

use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use libloading::Library;
use plugfold_cuda::source::Source;
use plugfold_cuda::{CudaError, Launch, Machine, kernels};

/// Runs a kernel: grid, block, bytes of shared memory, seed of the order of threads, arguments.
type Run = unsafe extern "C" fn(*const [c_uint; 3], *const [c_uint; 3], c_uint, u64, *const *const c_void);

/// The machine. Its memory is this process's; a source is compiled when the first of its kernels is launched.
#[derive(Default)]
pub struct HostMachine {
    libraries: Mutex<HashMap<&'static str, Library>>,
    memory: Mutex<Vec<Vec<[u64; 32]>>>,
    scratch: Mutex<Vec<[u64; 32]>>,
    round: Mutex<Vec<[u64; 32]>>,
    addresses: Mutex<Vec<[u64; 32]>>,
    inputs: Mutex<Vec<[u64; 32]>>,
    last_round: Mutex<Vec<u8>>,
    seed: Mutex<u64>,
    /// A source, and what is written in it for what.
    fault: Option<(&'static str, &'static str, &'static str)>,
}

impl HostMachine {
    /// A machine on which one source has `wrong` in place of `right`, to see whether that is found.
    pub fn with_fault(source: &'static str, right: &'static str, wrong: &'static str) -> Self {
        Self { fault: Some((source, right, wrong)), ..Self::default() }
    }
}

/// Compiles a source, unless its library is there already.
fn library(source: &Source, fault: Option<(&str, &str, &str)>) -> Library {
    let mut whole = source.whole();
    let mut name = source.name.to_owned();
    if let Some((_, right, wrong)) = fault.filter(|f| f.0 == source.name) {
        assert!(whole.contains(right), "{name}.cu does not say {right:?}");
        whole = whole.replace(right, wrong);
        name = format!("{name}-fault{}", whole.len());
    }
    let mut text = format!(
        "#include \"{}\"\n",
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/host/host.hpp").display()
    );
    text += &whole;
    for kernel in kernels().iter().filter(|k| k.source.name == source.name) {
        let run = format!(
            "extern \"C\" void run_{0}(const Dim* g, const Dim* b, u32 s, u64 seed, void** a) {{ host::launch({0}, *g, \
             *b, s, seed, a); }}\n",
            kernel.name
        );
        text += &run;
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (cpp, built) = (folder.join(format!("{name}.cpp")), folder.join(format!("{name}.so")));
    // Tests run in processes of their own: one compiles, the others wait.
    let lock = File::create(folder.join(format!("{name}.lock"))).expect("a lock file");
    lock.lock().expect("the lock");
    // What the library was made of, beside it.
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/host/host.hpp");
    let stamp = text.clone() + &std::fs::read_to_string(header).expect("host.hpp");
    let made_of = folder.join(format!("{name}.made-of"));
    if !built.exists() || std::fs::read_to_string(&made_of).ok().as_ref() != Some(&stamp) {
        compile(&cpp, &built, &text);
        std::fs::write(&made_of, &stamp).expect("the stamp");
    }
    // SAFETY: made above from the kernels' sources; loading runs no code of its own but initializers of empty vectors.
    unsafe { Library::new(&built) }.expect("the library")
}

fn compile(cpp: &Path, built: &Path, text: &str) {
    std::fs::write(cpp, text).expect("a source");
    let out = Command::new("g++")
        .args([
            "-std=c++17",
            "-O1",
            "-shared",
            "-fPIC",
            "-ffp-contract=off",
            "-Wno-unknown-pragmas",
            "-U_FORTIFY_SOURCE",
            "-o",
        ])
        .args([built, cpp])
        .output()
        .expect("g++ runs: install a C++ compiler (apt-get install g++)");
    assert!(out.status.success(), "{}:\n{}", cpp.display(), String::from_utf8_lossy(&out.stderr));
}

/// The first multiple of 256 in held memory.
fn aligned(held: &[[u64; 32]]) -> u64 {
    (held.as_ptr() as u64).next_multiple_of(256)
}

fn grown(held: &Mutex<Vec<[u64; 32]>>, bytes: usize) -> u64 {
    let mut held = held.lock().expect("no thread panicked");
    let units = bytes.div_ceil(256) + 1;
    if held.len() < units {
        // What nobody wrote is no number.
        *held = vec![[u64::MAX; 32]; units];
    }
    aligned(&held)
}

impl Machine for HostMachine {
    fn class(&self) -> &'static str {
        "cpu"
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError> {
        launch.check()?;
        let name = launch.kernel.name;
        let refuse = |problem: String| CudaError::Launch { kernel: name.into(), problem };
        let mut libraries = self.libraries.lock().expect("no thread panicked");
        let library = libraries
            .entry(launch.kernel.source.name)
            .or_insert_with(|| library(launch.kernel.source, self.fault));
        let args: Vec<*const c_void> = launch.args.iter().map(|a| a.address().cast()).collect();
        // Threads of one process share the fibers.
        let mut seed = self.seed.lock().expect("no thread panicked");
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // SAFETY: the function has this type by its definition in `library`; the arguments were checked against the
        // kernel's signature, and what they point to is the caller's duty as with every launch.
        unsafe {
            let run =
                library.get::<Run>(format!("run_{name}").as_bytes()).map_err(|e| refuse(e.to_string()))?;
            run(&raw const launch.grid, &[launch.threads, 1, 1], launch.shared, *seed, args.as_ptr());
        }
        Ok(())
    }

    fn scratch(&self, bytes: usize) -> Result<u64, CudaError> {
        Ok(grown(&self.scratch, bytes))
    }

    fn addresses(&self, bytes: usize) -> Result<u64, CudaError> {
        Ok(grown(&self.addresses, bytes))
    }

    fn aligned_input(&self, bytes: usize) -> Result<u64, CudaError> {
        Ok(grown(&self.inputs, bytes))
    }

    fn round_memory(&self, bytes: usize) -> Result<u64, CudaError> {
        Ok(grown(&self.round, bytes))
    }

    fn keep(&self, bytes: &[u8]) -> Result<u64, CudaError> {
        let held = vec![[0u64; 32]; bytes.len().div_ceil(256) + 1];
        let at = aligned(&held);
        self.memory.lock().expect("no thread panicked").push(held);
        self.upload(at, bytes)?;
        Ok(at)
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        // SAFETY: addresses are of memory that this machine holds, or that the caller lent.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn last_round(&self) -> &Mutex<Vec<u8>> {
        &self.last_round
    }
}
