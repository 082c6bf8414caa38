//! `build_id!()`: sixteen hexadecimal digits over a crate's sources and manifest, so that ranks can tell whether they run
//! the same plugin although each compiled its own.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro::TokenStream;

/// Expands to the digest as a string literal. Every file that entered it is tracked, so a change rebuilds the crate.
#[proc_macro]
pub fn build_id(_: TokenStream) -> TokenStream {
    let Some(root) = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from) else {
        return error("CARGO_MANIFEST_DIR is not set: build with cargo");
    };
    let mut files = Vec::new();
    for name in ["Cargo.toml", "plugin.toml"] {
        files.extend(Some(root.join(name)).filter(|p| p.is_file()));
    }
    collect(&root.join("src"), &mut files);
    files.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut tracked = String::new();
    for file in &files {
        let Ok(bytes) = fs::read(file) else {
            return error(&format!("{} cannot be read", file.display()));
        };
        let name = file.strip_prefix(&root).unwrap_or(file).to_string_lossy().into_owned();
        hash = name
            .bytes()
            .chain([0])
            .chain(bytes)
            .fold(hash, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(5));
        let _ = write!(tracked, "const _: &[u8] = include_bytes!({:?});", file.to_string_lossy());
    }
    let code = format!("{{ {tracked} \"{hash:016x}\" }}");
    code.parse().unwrap_or_else(|_| error("the build id does not parse"))
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}

fn error(message: &str) -> TokenStream {
    format!("compile_error!({message:?})").parse().unwrap_or_default()
}
