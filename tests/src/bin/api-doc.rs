//! Writes `docs/API.md` from the server's route table.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/API.md");
    std::fs::write(page, plugfold::http::doc::markdown())
}
