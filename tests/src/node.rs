//! Client packages of npm, for whole-system tests. What is missing fails the test.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output};
use std::time::SystemTime;

use crate::python::succeeded;

/// The folder of the scripts, their list of packages and, once installed, the packages.
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/node");

/// Installs exactly the packages of a folder's `package-lock.json` beside it, unless they are there. No script of a package runs.
///
/// # Panics
/// When npm cannot; it says what it lacks.
#[allow(clippy::expect_used)]
pub fn install(folder: &Path) {
    let name = folder.file_name().expect("a folder with a name").to_string_lossy();
    // Tests are processes of their own: one installs, the others wait.
    let lock = File::create(std::env::temp_dir().join(format!("plugfold-tests-{name}.lock")));
    let lock = lock.expect("the lock file");
    lock.lock().expect("the lock");
    let written = |name: &str| -> Option<SystemTime> { folder.join(name).metadata().ok()?.modified().ok() };
    // npm writes the second when it is done.
    if written("node_modules/.package-lock.json") >= written("package-lock.json") {
        return;
    }
    let mut npm = Command::new("npm");
    npm.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]);
    let output = npm.current_dir(folder).output().expect("npm runs; node and npm must be installed");
    succeeded(&format!("npm ci in {}", folder.display()), &output);
}

/// Runs a script with an argument.
///
/// # Panics
/// When its packages cannot be installed, or there is no node to run it.
pub fn output(script: &str, argument: &str) -> Output {
    install(Path::new(SCRIPTS));
    let output = Command::new("node").arg(Path::new(SCRIPTS).join(script)).arg(argument).output();
    output.unwrap_or_else(|e| panic!("{script}: {e}"))
}

/// Runs a script with an argument.
///
/// # Panics
/// When it fails; with all that it said.
pub fn run(script: &str, argument: &str) {
    succeeded(script, &output(script, argument));
}
