//! Client packages of PyPI, for whole-system tests. What is missing fails the test.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder of the scripts.
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/python");

/// A Python with the packages of `python/requirements.txt`: the one the test run prepared, or one made here.
///
/// # Panics
/// When it cannot be made.
#[allow(clippy::expect_used)]
pub fn python() -> PathBuf {
    if let Some(python) = std::env::var_os("PLUGFOLD_TEST_PYTHON") {
        return python.into();
    }
    let home = std::env::temp_dir().join("plugfold-tests-python");
    let requirements = Path::new(SCRIPTS).join("requirements.txt");
    let run = |program: &Path, arguments: &[&OsStr]| {
        let output = Command::new(program).args(arguments).output();
        let output = output.unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        assert!(output.status.success(), "{}: {output:?}", program.display());
    };
    // Tests run as processes of their own: one makes it, the others wait.
    let lock = File::create(home.with_extension("lock")).expect("a lock file in the temporary folder");
    lock.lock().expect("a lock on a temporary file");
    run(Path::new("python3"), &["-m".as_ref(), "venv".as_ref(), home.as_os_str()]);
    run(
        &home.join("bin/pip"),
        &["install".as_ref(), "--quiet".as_ref(), "-r".as_ref(), requirements.as_os_str()],
    );
    home.join("bin/python")
}

/// Runs a script with an argument.
///
/// # Panics
/// When there is no Python to run it.
pub fn output(script: &str, argument: &str) -> Output {
    let output = Command::new(python()).arg(Path::new(SCRIPTS).join(script)).arg(argument).output();
    output.unwrap_or_else(|e| panic!("{script}: {e}"))
}

/// Runs a script with an argument.
///
/// # Panics
/// When it fails; with all that it said.
pub fn run(script: &str, argument: &str) {
    succeeded(script, &output(script, argument));
}

/// Fails with all that a script said, unless it succeeded.
///
/// # Panics
/// See above.
pub fn succeeded(script: &str, output: &Output) {
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{script}:\n{}\n{}", said(&output.stdout), said(&output.stderr));
}
