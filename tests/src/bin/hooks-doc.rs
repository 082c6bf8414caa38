//! Writes `docs/HOOKS.md` and `host/assets/catalogue.toml` from `docs/hooks.toml`.

use std::path::Path;

use plugfold_tests::hooks::{Map, MapError, catalogue_page, hooks_page};

fn main() -> Result<(), MapError> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let at = |name: &str| docs.join(name);
    let failed = |name: &str| {
        let path = at(name);
        move |source| MapError::File { path, source }
    };
    let text = std::fs::read_to_string(at("hooks.toml")).map_err(failed("hooks.toml"))?;
    let map = Map::parse(&text)?;
    std::fs::write(at("HOOKS.md"), hooks_page(&map)).map_err(failed("HOOKS.md"))?;
    std::fs::write(at("../host/assets/catalogue.toml"), catalogue_page(&map))
        .map_err(failed("../host/assets/catalogue.toml"))?;
    Ok(())
}
