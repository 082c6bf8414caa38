//! The `plugfold` program.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("plugfold: {error:#}");
            ExitCode::FAILURE
        }
    }
}
