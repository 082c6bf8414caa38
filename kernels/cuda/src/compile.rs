//! NVRTC, the run-time compiler: CUDA C++ text to machine code of one architecture.
//!
//! The library is looked for when something has to be compiled, so neither building nor running needs it where the cache
//! of compiled kernels is filled. It works without a driver and without a GPU.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::{Library, Symbol};

use crate::error::CudaError;
use crate::source::Source;

/// Says where NVRTC is: the file, or the folder of it.
pub const NVRTC_VARIABLE: &str = "PLUGFOLD_NVRTC";

/// Options of every compilation. Nothing may be fused or rounded otherwise than the sources say: bits are promised.
pub const OPTIONS: [&str; 7] = [
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--device-as-default-execution-space",
    "--ptxas-options=--warn-on-spills",
];

/// The architecture whose code a GPU runs best: with its own instructions from 9.0 on.
pub fn architecture(major: u32, minor: u32) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

/// The loaded library.
pub struct Nvrtc {
    library: Library,
    version: (c_int, c_int),
    /// The compiler's own parts, which it finds by name where they are loaded.
    _parts: Option<Library>,
}

/// What a compilation gave.
pub struct Compiled {
    /// Machine code, as the driver loads it.
    pub cubin: Vec<u8>,
    /// What the compiler said.
    pub log: String,
}

type Program = *mut c_void;

/// Destroys its program.
struct Held<'n>(&'n Nvrtc, Program);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let destroy = self.0.symbol::<unsafe extern "C" fn(*mut Program) -> c_int>(c"nvrtcDestroyProgram");
        if let Ok(destroy) = destroy {
            // SAFETY: the program was made by `nvrtcCreateProgram` and is destroyed once.
            unsafe { destroy(&raw mut self.1) };
        }
    }
}

fn candidates() -> Vec<PathBuf> {
    let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    if let Some(told) = std::env::var_os(NVRTC_VARIABLE) {
        // Told where it is, nothing else is taken.
        let told = PathBuf::from(told);
        return if told.is_dir() { names.iter().map(|n| told.join(n)).collect() } else { vec![told] };
    }
    let folders = ["", "/usr/local/cuda/lib64", "/usr/local/cuda/targets/sbsa-linux/lib"];
    folders.iter().flat_map(|f| names.iter().map(move |n| PathBuf::from(f).join(n))).collect()
}

/// The library of built-in functions beside a compiler, loaded: the compiler looks for it by name only.
fn parts(compiler: &Path) -> Option<Library> {
    let folder = compiler.parent().filter(|p| !p.as_os_str().is_empty())?;
    let names =
        std::fs::read_dir(folder).ok()?.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
    let name = names.into_iter().find(|n| n.starts_with("libnvrtc-builtins.so"))?;
    // SAFETY: as the compiler itself.
    unsafe { Library::new(folder.join(name)) }.ok()
}

impl Nvrtc {
    /// The library, loaded once.
    ///
    /// # Errors
    /// What the loader said about every place that was tried.
    pub fn get() -> Result<&'static Nvrtc, String> {
        static LOADED: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        LOADED.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Nvrtc, String> {
        let mut said = Vec::new();
        for path in candidates() {
            let parts = parts(&path);
            // SAFETY: NVRTC's initializers have no contract of their own; the path is a system library's or the user's word.
            match unsafe { Library::new(&path) } {
                Ok(library) => {
                    let mut this = Nvrtc { library, version: (0, 0), _parts: parts };
                    this.version = this.ask_version()?;
                    return Ok(this);
                }
                Err(e) => said.push(e.to_string()),
            }
        }
        Err(said.join("; "))
    }

    fn ask_version(&self) -> Result<(c_int, c_int), String> {
        let (mut major, mut minor) = (0, 0);
        let ask = self.symbol::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(c"nvrtcVersion")?;
        // SAFETY: both pointers are to live integers.
        let code = unsafe { ask(&raw mut major, &raw mut minor) };
        if code == 0 { Ok((major, minor)) } else { Err(format!("nvrtcVersion failed: {code}")) }
    }

    fn symbol<T>(&self, name: &CStr) -> Result<Symbol<'_, T>, String> {
        // SAFETY: the types are those of NVRTC's C interface, which has not changed since CUDA 11.1.
        unsafe { self.library.get(name.to_bytes_with_nul()) }.map_err(|e| e.to_string())
    }

    /// Its version, `major.minor`.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Compiles a source for an architecture ("sm_90a").
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's log.
    pub fn compile(&self, source: &Source, arch: &str) -> Result<Compiled, CudaError> {
        let fail = |log: String| CudaError::Compile {
            file: format!("{}.cu", source.name),
            arch: arch.into(),
            compiler: self.version(),
            log,
        };
        self.text(&source.whole(), source.name, arch).map_err(fail)
    }

    fn text(&self, text: &str, name: &str, arch: &str) -> Result<Compiled, String> {
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Run = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        let text = CString::new(text).map_err(|e| e.to_string())?;
        let name = CString::new(format!("{name}.cu")).map_err(|e| e.to_string())?;
        let options: Vec<CString> = OPTIONS
            .iter()
            .map(|o| (*o).to_owned())
            .chain([format!("--gpu-architecture={arch}")])
            .map(|o| CString::new(o).unwrap_or_default())
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        let create = self.symbol::<Create>(c"nvrtcCreateProgram")?;
        // SAFETY: texts end with a zero and outlive the call; there are no headers.
        let code = unsafe {
            create(&raw mut program, text.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null())
        };
        if code != 0 {
            return Err(format!("nvrtcCreateProgram failed: {code}"));
        }
        let program = Held(self, program);
        let compile = self.symbol::<Run>(c"nvrtcCompileProgram")?;
        // SAFETY: the program is live, the options too.
        let code = unsafe { compile(program.1, pointers.len() as c_int, pointers.as_ptr()) };
        let log = String::from_utf8_lossy(&self.bytes(
            &program,
            c"nvrtcGetProgramLogSize",
            c"nvrtcGetProgramLog",
        )?)
        .trim_end_matches('\0')
        .trim()
        .to_owned();
        if code != 0 {
            return Err(format!("{log}\n(nvrtcCompileProgram: {code})"));
        }
        let cubin = self.bytes(&program, c"nvrtcGetCUBINSize", c"nvrtcGetCUBIN")?;
        Ok(Compiled { cubin, log })
    }

    fn bytes(&self, program: &Held<'_>, size: &CStr, get: &CStr) -> Result<Vec<u8>, String> {
        let ask = self.symbol::<unsafe extern "C" fn(Program, *mut usize) -> c_int>(size)?;
        let mut len = 0;
        // SAFETY: the program is live, the pointer is to a live integer.
        let code = unsafe { ask(program.1, &raw mut len) };
        let mut bytes = vec![0u8; len];
        let read = self.symbol::<unsafe extern "C" fn(Program, *mut c_char) -> c_int>(get)?;
        // SAFETY: the buffer has the size that was asked for.
        let code = if code == 0 { unsafe { read(program.1, bytes.as_mut_ptr().cast()) } } else { code };
        if code == 0 { Ok(bytes) } else { Err(format!("{} failed: {code}", get.to_string_lossy())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_named_as_the_compiler_does() {
        assert_eq!(architecture(9, 0), "sm_90a");
        assert_eq!(architecture(12, 1), "sm_121a");
        assert_eq!(architecture(8, 9), "sm_89");
    }
}
