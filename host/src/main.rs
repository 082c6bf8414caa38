//! The `plugfold` program.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run() {
        Ok(code) => code,
        Err(error) => {
            cli::tell(&format_args!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}
