//! The pages of plugins are those of their manifests.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use plugfold::plugins::docs;

#[test]
fn the_pages_are_fresh() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let pages = docs::pages(&docs::manifests(&root).unwrap());
    for (place, text) in &pages {
        let there = std::fs::read_to_string(root.join("docs").join(place)).unwrap_or_default();
        assert!(there == *text, "docs/{place} is stale: run `cargo run -- plugins docs`");
    }
    // And none is of a plugin that is gone.
    for entry in std::fs::read_dir(root.join("docs/plugins")).unwrap() {
        let place = format!("plugins/{}", entry.unwrap().file_name().to_str().unwrap());
        assert!(pages.iter().any(|(page, _)| *page == place), "docs/{place} belongs to no plugin");
    }
}
