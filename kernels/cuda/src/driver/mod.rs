//! The GPU behind CUDA's driver, which is loaded when it is first asked for.

mod calls;
mod graph;
mod memory;

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use crate::cache::{Cache, Origin};
use crate::compile::architecture;
use crate::error::CudaError;
use crate::kernel::{Kernel, Launch};
use crate::machine::Machine;
use crate::source::SOURCES;
use calls::{attribute, call, call_at};
use graph::Graph;
pub use memory::{Arena, Event, Pinned};
use memory::{Grown, Kept};

/// The driver's CUDA version that this crate's bindings are of: 13.0.
const NEEDED: i32 = 13_000;

/// How many devices the driver shows.
///
/// # Errors
/// No driver, or one that is too old.
pub fn devices() -> Result<usize, CudaError> {
    // SAFETY: looks for the library and closes it.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver("libcuda.so is not on the loader's path".into()));
    }
    let (mut version, mut count) = (0, 0);
    // SAFETY: pointers are to live integers; the library is there.
    unsafe {
        call("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
        if version < NEEDED {
            let text = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
            return Err(CudaError::OldDriver { have: text(version), need: text(NEEDED) });
        }
        match sys::cuInit(0) {
            sys::CUresult::CUDA_SUCCESS => {}
            sys::CUresult::CUDA_ERROR_NO_DEVICE => return Ok(0),
            code => {
                return Err(CudaError::NoDriver(format!("cuInit says {code:?}")));
            }
        }
        call("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
    }
    Ok(count.max(0) as usize)
}

/// The class of a device, as [`Machine::class`] gives it, without opening it.
///
/// # Errors
/// No driver, an old one, no such device.
pub fn class(index: usize) -> Result<String, CudaError> {
    use sys::CUdevice_attribute_enum as A;
    let count = devices()?;
    if index >= count {
        return Err(CudaError::NoDevice { index, count });
    }
    let mut device = 0;
    // SAFETY: the pointer is to a live handle; the index is one of the driver's.
    call("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index as i32) })?;
    let major = attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(format!("sm_{major}{minor}"))
}

/// A device's context: its primary one, held while this lives.
#[derive(Debug)]
pub(crate) struct Context {
    index: usize,
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: contexts may be used from any thread once they are current there, which every call sees to.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes it this thread's.
    fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as `self` lives.
        call("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.handle) })
    }
}

impl Context {
    /// Its device's number for life, as `nvidia-smi -L` prints it (without the first word).
    fn uuid(&self) -> Result<String, CudaError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the pointer is to a live value; the device is the driver's.
        call("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.device) })?;
        let mut text = String::new();
        for (at, byte) in uuid.bytes.iter().enumerate() {
            let cut = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
            let _ = write!(text, "{cut}{:02x}", *byte as u8);
        }
        Ok(text)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `Gpu::open`.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A loaded kernel.
#[derive(Clone, Copy)]
struct Function(sys::CUfunction);
// SAFETY: functions belong to a module that stays loaded.
unsafe impl Send for Function {}

/// A stream: work on it runs in order.
struct Stream(sys::CUstream);
// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// What was recorded, by number.
#[derive(Default)]
struct Recorded {
    made: u64,
    graphs: HashMap<u64, Graph>,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// As the driver names it.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: u64,
}

/// A GPU with one stream and the kernels for it.
pub struct Gpu {
    context: Arc<Context>,
    facts: Facts,
    class: String,
    stream: Stream,
    functions: Mutex<HashMap<&'static str, Function>>,
    kept: Mutex<HashMap<u64, Kept>>,
    scratch: Mutex<Grown>,
    inputs: Mutex<Grown>,
    round: Mutex<Grown>,
    last_round: Mutex<Vec<u8>>,
    /// How often memory that launches use was made anew.
    epoch: AtomicU64,
    recordings: Mutex<Recorded>,
    /// The last launch, to say where a fault that shows later may come from.
    last: Mutex<&'static str>,
}

impl Gpu {
    /// Opens a device and loads every kernel, from the cache or compiled; `told` hears where each source's code came from.
    ///
    /// # Errors
    /// No driver, an old one, no such device, a kernel that does not compile.
    pub fn open(index: usize, cache: &Cache, mut told: impl FnMut(&str, &Origin)) -> Result<Self, CudaError> {
        let count = devices()?;
        if index >= count {
            return Err(CudaError::NoDevice { index, count });
        }
        let context = Arc::new(Self::context(index)?);
        let facts = Self::facts_of(&context)?;
        let (major, minor) = facts.capability;
        if major < 8 {
            return Err(CudaError::OldDevice { index, name: facts.name, have: format!("{major}.{minor}") });
        }
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; the pointer is to a live stream handle.
        call("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, 1) })?;
        let this = Self {
            class: format!("sm_{major}{minor}"),
            stream: Stream(stream),
            functions: Mutex::default(),
            kept: Mutex::default(),
            scratch: Mutex::default(),
            inputs: Mutex::default(),
            round: Mutex::default(),
            last_round: Mutex::default(),
            epoch: AtomicU64::default(),
            recordings: Mutex::default(),
            last: Mutex::default(),
            context,
            facts,
        };
        let arch = architecture(major, minor);
        for source in SOURCES {
            let (code, origin) = cache.code(source, &arch)?;
            told(source.name, &origin);
            this.load(source.name, &code)?;
        }
        Ok(this)
    }

    fn context(index: usize) -> Result<Context, CudaError> {
        let (mut device, mut handle) = (0, std::ptr::null_mut());
        // SAFETY: pointers are to live handles; the index is one of the driver's.
        unsafe {
            call("cuDeviceGet", sys::cuDeviceGet(&raw mut device, index as i32))?;
            call("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut handle, device))?;
        }
        let context = Context { index, device, handle };
        context.enter()?;
        Ok(context)
    }

    fn facts_of(context: &Context) -> Result<Facts, CudaError> {
        use sys::CUdevice_attribute_enum as A;
        let mut name = [0u8; 128];
        let mut memory = 0;
        // SAFETY: the buffer has the length that is given; the device is the driver's.
        unsafe {
            call("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr().cast(), 127, context.device))?;
            call("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut memory, context.device))?;
        }
        let name = name.split(|b| *b == 0).next().unwrap_or_default();
        let ask = |a| attribute(context.device, a);
        Ok(Facts {
            name: String::from_utf8_lossy(name).into(),
            capability: (
                ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: ask(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory: memory as u64,
        })
    }

    fn load(&self, source: &str, code: &[u8]) -> Result<(), CudaError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the code is a whole cubin, as its digest or the compiler says; the module stays loaded.
        let loaded = unsafe { sys::cuModuleLoadData(&raw mut module, code.as_ptr().cast()) };
        call_at("cuModuleLoadData", loaded, || {
            format!("{source}.cu, {} bytes for {}", code.len(), self.class)
        })?;
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        for kernel in crate::kernel::kernels().into_iter().filter(|k| k.source.name == source) {
            functions.insert(kernel.name, Self::function(module, kernel)?);
        }
        Ok(())
    }

    fn function(module: sys::CUmodule, kernel: &Kernel) -> Result<Function, CudaError> {
        use sys::CUfunction_attribute_enum as A;
        let name = CString::new(kernel.name).unwrap_or_default();
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a zero.
        let found = unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
        call_at("cuModuleGetFunction", found, || kernel.name.into())?;
        // SAFETY: the function is the module's.
        let raised = unsafe {
            sys::cuFuncSetAttribute(
                function,
                A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                crate::kernel::SHARED_MOST as i32 - Self::own_shared(function)?,
            )
        };
        call_at("cuFuncSetAttribute", raised, || format!("shared memory of {}", kernel.name))?;
        Ok(Function(function))
    }

    /// Bytes of shared memory that a kernel declares itself.
    fn own_shared(function: sys::CUfunction) -> Result<i32, CudaError> {
        let mut bytes = 0;
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded, the pointer is to a live integer.
        call("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&raw mut bytes, which, function) })?;
        Ok(bytes)
    }

    /// What the device is.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Cycles a second that a multiprocessor runs at, at most.
    ///
    /// # Errors
    /// What the driver says.
    pub fn clock(&self) -> Result<f64, CudaError> {
        let kilohertz =
            attribute(self.context.device, sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
        Ok(f64::from(kilohertz) * 1e3)
    }

    /// Copies bytes from one place of the device to another, after what was launched before.
    ///
    /// # Errors
    /// What the driver says.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: addresses are of memory with as many bytes, as the caller says.
        let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream.0) };
        call_at("cuMemcpyDtoDAsync", copied, || format!("{bytes} bytes"))
    }

    /// Frees what [`Machine::allocate`] gave. Providers that were made before must not be used any more.
    pub fn forget(&self) {
        if self.synchronize().is_ok() {
            self.kept.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    /// Zeroed memory at a fixed address.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], saying for what.
    pub fn arena(&self, what: &str, bytes: usize) -> Result<Arena, CudaError> {
        Arena::new(&self.context, what, bytes)
    }

    /// Host memory that the device can copy from and to while the host goes on.
    ///
    /// # Errors
    /// What the driver says.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned, CudaError> {
        Pinned::new(&self.context, bytes)
    }

    /// Marks a point of the stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn event(&self) -> Result<Event, CudaError> {
        Event::record(&self.context, self.stream.0)
    }

    /// Waits until everything that was launched has run.
    ///
    /// # Errors
    /// What the driver says, also of earlier launches.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the stream lives as long as `self`.
        call_at("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream.0) }, || {
            self.said_last()
        })
    }

    fn said_last(&self) -> String {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_empty() { "nothing was launched".into() } else { format!("the last launch was {last}") }
    }

    fn grown(&self, which: &Mutex<Grown>, what: &str, bytes: usize) -> Result<u64, CudaError> {
        let mut grown = which.lock().unwrap_or_else(PoisonError::into_inner);
        if grown.bytes() < bytes {
            // Nobody may use the old memory any more.
            self.synchronize()?;
            self.epoch.fetch_add(1, Ordering::Relaxed);
        }
        grown.at_least(&self.context, what, bytes)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.synchronize().is_ok() {
            // SAFETY: nothing runs on the stream any more, and nobody else has it.
            unsafe { sys::cuStreamDestroy_v2(self.stream.0) };
        }
    }
}

impl Machine for Gpu {
    fn class(&self) -> &str {
        &self.class
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError> {
        launch.check()?;
        self.context.enter()?;
        let function = *self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(launch.kernel.name)
            .ok_or_else(|| CudaError::Launch {
                kernel: launch.kernel.name.into(),
                problem: "it was not loaded".into(),
            })?;
        let mut args: Vec<*mut c_void> = launch.args.iter().map(|a| a.address().cast_mut().cast()).collect();
        let [x, y, z] = launch.grid;
        // SAFETY: the arguments are as many and of the kinds that the kernel's source declares (`check`), and live until
        // the call returns, which copies them; what they point to is the duty of who builds a call.
        let launched = unsafe {
            sys::cuLaunchKernel(
                function.0,
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                launch.shared,
                self.stream.0,
                args.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        call_at("cuLaunchKernel", launched, || launch.to_string())?;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = launch.kernel.name;
        Ok(())
    }

    fn scratch(&self, bytes: usize) -> Result<u64, CudaError> {
        self.grown(&self.scratch, "scratch of an operation", bytes)
    }

    fn aligned_input(&self, bytes: usize) -> Result<u64, CudaError> {
        self.grown(&self.inputs, "an aligned input", bytes)
    }

    fn round_memory(&self, bytes: usize) -> Result<u64, CudaError> {
        self.grown(&self.round, "the round table", bytes)
    }

    fn allocate(&self, what: &str, bytes: usize) -> Result<u64, CudaError> {
        let kept = Kept::new(&self.context, what, bytes)?;
        let at = kept.address();
        self.zero(at, bytes)?;
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).insert(at, kept);
        Ok(at)
    }

    fn release(&self, address: u64) {
        // Freeing waits for what runs.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
    }

    fn zero(&self, at: u64, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: the caller's address has as many bytes.
        let zeroed = unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.stream.0) };
        call_at("cuMemsetD8Async", zeroed, || format!("{bytes} bytes, {}", self.said_last()))
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    fn record(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        graph::begin(self.stream.0)
    }

    fn recorded(&self) -> Result<u64, CudaError> {
        self.context.enter()?;
        let graph = Graph::end(self.stream.0, &self.context)?;
        let mut all = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        all.made += 1;
        let number = all.made;
        all.graphs.insert(number, graph);
        Ok(number)
    }

    fn replay(&self, recording: u64) -> Result<(), CudaError> {
        self.context.enter()?;
        let all = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        let graph = all.graphs.get(&recording).ok_or_else(|| CudaError::Launch {
            kernel: format!("recording {recording}"),
            problem: "there is no such recording".into(),
        })?;
        graph.launch(self.stream.0)?;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = "a recording";
        Ok(())
    }

    fn forget_recording(&self, recording: u64) {
        self.recordings.lock().unwrap_or_else(PoisonError::into_inner).graphs.remove(&recording);
    }

    fn forget_recordings(&self) {
        self.recordings.lock().unwrap_or_else(PoisonError::into_inner).graphs.clear();
    }

    fn identity(&self) -> Result<(usize, String), CudaError> {
        Ok((self.context.index, self.context.uuid()?))
    }

    fn enter(&self) -> Result<(), CudaError> {
        self.context.enter()
    }

    fn stream(&self) -> u64 {
        self.stream.0 as u64
    }

    fn free_bytes(&self) -> Result<u64, CudaError> {
        Ok(memory::free(&self.context)?.0)
    }

    fn name(&self) -> String {
        let Facts { name, memory, .. } = &self.facts;
        format!("{name} ({}, {} GB)", self.class, memory / 1_000_000_000)
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: pageable host memory is read before the call returns; the caller's address has room for it.
        let copied =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream.0) };
        call_at("cuMemcpyHtoDAsync", copied, || format!("{} bytes, {}", bytes.len(), self.said_last()))
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return self.synchronize();
        }
        self.context.enter()?;
        // SAFETY: the buffer lives until the synchronization below.
        let copied =
            unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.stream.0) };
        let said = || format!("{} bytes, {}", bytes.len(), self.said_last());
        call_at("cuMemcpyDtoHAsync", copied, said)?;
        self.synchronize()
    }

    fn last_round(&self) -> &Mutex<Vec<u8>> {
        &self.last_round
    }
}
