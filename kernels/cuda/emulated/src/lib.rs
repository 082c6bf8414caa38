//! A machine that runs the kernels' sources on the CPU: they are compiled as C++ with `host.hpp`, which runs a block's
//! threads as fibers. It says whether kernels compute the right thing, and the engine around them, where there is no GPU.
//!
//! The memory of one that is [`guarded`](HostMachine::guarded) can be read and written only while a kernel runs or bytes are
//! copied: whoever takes one of its addresses for one of the host's is ended by the system at once.

mod memory;
mod recorded;
pub mod stream;

use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use plugfold_cuda::source::Source;
use plugfold_cuda::{CudaError, Launch, Machine, kernels};
use sha2::{Digest, Sha256};

use memory::Region;
use recorded::{Recorded, Recordings};
use stream::{Pending, Stream, Streamed, Work};

/// Runs a kernel: grid, block, bytes of shared memory, seed of the order of threads, arguments.
type Run = unsafe extern "C" fn(*const [c_uint; 3], *const [c_uint; 3], c_uint, u64, *const *const c_void);

const HEADER: &str = include_str!("host.hpp");

/// The machine. A source is compiled when the first of its kernels is launched.
#[derive(Default)]
pub struct HostMachine {
    libraries: Mutex<HashMap<&'static str, Library>>,
    memory: Mutex<Region>,
    scratch: Mutex<Grown>,
    round: Mutex<Grown>,
    inputs: Mutex<Grown>,
    last_round: Mutex<Vec<u8>>,
    seed: Mutex<u64>,
    epoch: AtomicU64,
    recordings: Mutex<Recordings>,
    /// Work of other libraries.
    pending: Pending,
    stream: OnceLock<Stream>,
    /// What tells it from other machines, where it was given.
    identity: Option<String>,
    /// A source, and what is written in it for what.
    fault: Option<(&'static str, &'static str, &'static str)>,
}

/// Memory that is made anew when more is asked for than it has: address and bytes.
#[derive(Default)]
struct Grown(u64, usize);

impl HostMachine {
    /// A machine whose memory only kernels and copies can reach. Each launch takes longer.
    pub fn guarded() -> Self {
        Self { memory: Mutex::new(Region::guarded()), ..Self::default() }
    }

    /// A machine on which one source has `wrong` in place of `right`, to see whether that is found.
    pub fn with_fault(source: &'static str, right: &'static str, wrong: &'static str) -> Self {
        Self { fault: Some((source, right, wrong)), ..Self::default() }
    }

    /// The same machine under another name, to see whether two of one name are told apart.
    #[must_use]
    pub fn named(self, identity: &str) -> Self {
        Self { identity: Some(identity.into()), ..self }
    }

    fn region(&self) -> MutexGuard<'_, Region> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recordings(&self) -> MutexGuard<'_, Recordings> {
        self.recordings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A GPU that waits while it records fails.
    fn not_recording(&self, call: &str) -> Result<(), CudaError> {
        if self.recordings().open.is_some() {
            return Err(refused(call, "it cannot be recorded"));
        }
        Ok(())
    }

    fn grown(&self, held: &Mutex<Grown>, bytes: usize) -> Result<u64, CudaError> {
        let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.1 < bytes || held.0 == 0 {
            self.not_recording("more memory")?;
            // What was asked for may still use the old memory.
            self.pending.settle();
            let mut region = self.region();
            if held.0 != 0 {
                region.release(held.0);
            }
            self.epoch.fetch_add(1, Ordering::Relaxed);
            // What nobody wrote is no number.
            *held = Grown(region.allocate(bytes, 0xff).map_err(full)?, bytes);
        }
        Ok(held.0)
    }
}

fn refused(call: &str, problem: &str) -> CudaError {
    CudaError::Launch { kernel: call.into(), problem: problem.into() }
}

fn full(bytes: usize) -> CudaError {
    let (need, free) = ((bytes as u64).div_ceil(1_000_000), 0);
    let total = memory::LIMIT as u64 / 1_000_000;
    CudaError::OutOfMemory { device: 0, what: "the emulated device".into(), need, free, total }
}

/// Held while a kernel runs.
static TURN: Mutex<()> = Mutex::new(());

/// Where compiled sources are kept.
fn folder() -> PathBuf {
    let folder = std::env::temp_dir().join("plugfold-emulated");
    std::fs::create_dir_all(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    folder
}

/// Compiles a source, unless its library is there already.
fn library(source: &Source, fault: Option<(&str, &str, &str)>) -> Library {
    let mut whole = source.whole();
    if let Some((_, right, wrong)) = fault.filter(|f| f.0 == source.name) {
        assert!(whole.contains(right), "{}.cu does not say {right:?}", source.name);
        whole = whole.replace(right, wrong);
    }
    let mut text = format!("{HEADER}\n{whole}");
    for kernel in kernels().iter().filter(|k| k.source.name == source.name) {
        let run = format!(
            "extern \"C\" void run_{0}(const Dim* g, const Dim* b, u32 s, u64 seed, void** a) {{ host::launch({0}, *g, \
             *b, s, seed, a); }}\n",
            kernel.name
        );
        text += &run;
    }
    // Its name says what it was made of.
    let digest = Sha256::digest(&text);
    let name =
        format!("{}-{:016x}", source.name, u64::from_be_bytes(digest[..8].try_into().unwrap_or_default()));
    let (folder, name) = (folder(), name.as_str());
    let built = folder.join(format!("{name}.so"));
    // Tests run in processes of their own: one compiles, the others wait.
    let lock = File::create(folder.join(format!("{name}.lock"))).expect("a lock file");
    lock.lock().expect("the lock");
    if !built.exists() {
        let (cpp, part) = (folder.join(format!("{name}.cpp")), folder.join(format!("{name}.part")));
        compile(&cpp, &part, &text);
        std::fs::rename(&part, &built).expect("the library's place");
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

impl Machine for HostMachine {
    fn class(&self) -> &'static str {
        "emulated"
    }

    fn name(&self) -> String {
        "CUDA kernels on the CPU".into()
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError> {
        launch.check()?;
        if let Some(list) = &mut self.recordings().open {
            list.push(Recorded::of(launch));
            return Ok(());
        }
        self.pending.settle();
        let name = launch.kernel.name;
        let refuse = |problem: String| CudaError::Launch { kernel: name.into(), problem };
        let mut libraries = self.libraries.lock().unwrap_or_else(PoisonError::into_inner);
        let library = libraries
            .entry(launch.kernel.source.name)
            .or_insert_with(|| library(launch.kernel.source, self.fault));
        let args: Vec<*const c_void> = launch.args.iter().map(|a| a.address().cast()).collect();
        // A library is loaded once in a process, and with it the fibers: machines take turns.
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seed = self.seed.lock().unwrap_or_else(PoisonError::into_inner);
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut region = self.region();
        let _open = region.open();
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
        self.grown(&self.scratch, bytes)
    }

    fn aligned_input(&self, bytes: usize) -> Result<u64, CudaError> {
        self.grown(&self.inputs, bytes)
    }

    fn round_memory(&self, bytes: usize) -> Result<u64, CudaError> {
        self.grown(&self.round, bytes)
    }

    fn allocate(&self, _what: &str, bytes: usize) -> Result<u64, CudaError> {
        self.region().allocate(bytes, 0).map_err(full)
    }

    fn release(&self, address: u64) {
        self.pending.settle();
        self.region().release(address);
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    fn record(&self) -> Result<(), CudaError> {
        let mut all = self.recordings();
        if all.open.is_some() {
            return Err(refused("record", "a recording is under way"));
        }
        all.open = Some(Vec::new());
        Ok(())
    }

    fn recorded(&self) -> Result<u64, CudaError> {
        let mut all = self.recordings();
        let list = all.open.take().ok_or_else(|| refused("record", "no recording is under way"))?;
        all.made += 1;
        let number = all.made;
        all.lists.insert(number, list.into());
        Ok(number)
    }

    fn replay(&self, recording: u64) -> Result<(), CudaError> {
        let found = self.recordings().lists.get(&recording).cloned();
        let list = found.ok_or_else(|| refused("replay", "there is no such recording"))?;
        list.iter().try_for_each(|recorded| recorded.launch(self))
    }

    fn forget_recordings(&self) {
        self.recordings().lists.clear();
    }

    fn identity(&self) -> Result<(usize, String), CudaError> {
        // The memory of two machines never lies at one place of one process.
        let own = || format!("emulated {} {:x}", std::process::id(), self.region().base());
        Ok((0, self.identity.clone().unwrap_or_else(own)))
    }

    fn enter(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn stream(&self) -> u64 {
        (&raw const *self.stream.get_or_init(|| Stream::of(self))) as u64
    }

    fn forget_recording(&self, recording: u64) {
        self.recordings().lists.remove(&recording);
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        self.not_recording("upload")?;
        self.pending.settle();
        self.write(to, bytes);
        Ok(())
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.not_recording("download")?;
        self.pending.settle();
        self.read(from, bytes);
        Ok(())
    }

    fn zero(&self, at: u64, bytes: usize) -> Result<(), CudaError> {
        self.not_recording("zero")?;
        self.pending.settle();
        let mut region = self.region();
        let _open = region.open();
        // SAFETY: as above.
        unsafe { (at as *mut u8).write_bytes(0, bytes) };
        Ok(())
    }

    fn free_bytes(&self) -> Result<u64, CudaError> {
        Ok(self.region().free_bytes() as u64)
    }

    fn last_round(&self) -> &Mutex<Vec<u8>> {
        &self.last_round
    }
}

impl Streamed for HostMachine {
    fn push(&self, work: Work) {
        let work = Arc::new(work);
        match &mut self.recordings().open {
            Some(list) => list.push(Recorded::Other(work)),
            None => self.pending.push(work),
        }
    }

    fn read(&self, from: u64, bytes: &mut [u8]) {
        let mut region = self.region();
        let _open = region.open();
        // SAFETY: addresses are of memory that this machine holds, or that the caller lent.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), bytes.len()) };
    }

    fn write(&self, to: u64, bytes: &[u8]) {
        let mut region = self.region();
        let _open = region.open();
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
    }
}
