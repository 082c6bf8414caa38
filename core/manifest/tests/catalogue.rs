//! Every entry of the catalogue's map can be said in a manifest, and all schemas in it are sound.

#![allow(clippy::unwrap_used)]

use plugfold_manifest::{Class, Loaded, Manifest};

const MAP: &str = include_str!("../../../docs/hooks.toml");
/// What the map says about an entry beside its manifest.
const NOTES: [&str; 7] = ["in_server", "class", "class_why", "status", "switch", "uses", "holes"];

fn manifests() -> Vec<Manifest> {
    let map: toml::Table = MAP.parse().unwrap();
    let lists = ["entry", "base"].map(|list| map[list].as_array().unwrap().clone());
    let read = |entry: toml::Value| {
        let mut entry = entry.as_table().unwrap().clone();
        for note in NOTES {
            entry.remove(note);
        }
        let id = entry["id"].to_string();
        // The map describes plugins, not releases of them.
        entry.insert("version".into(), "1.0.0".into());
        entry.entry("title").or_insert_with(|| "as the map says".into());
        let text = toml::to_string(&entry).unwrap();
        Manifest::read(&text, &id).unwrap_or_else(|error| panic!("{error}\n{text}"))
    };
    lists.into_iter().flatten().map(read).collect()
}

#[test]
fn every_entry_is_a_sound_manifest() {
    let plugins: Vec<Manifest> = manifests();
    assert!(plugins.len() > 84);
    let mut found = Vec::new();
    for manifest in &plugins {
        let built_in = ["engine", "server", "launch"].contains(&manifest.id.as_str());
        let about_plugins = |p: &String| p.starts_with("id `") || p.starts_with("name `");
        let problems = manifest.problems().into_iter().filter(|p| !(built_in && about_plugins(p)));
        found.extend(problems.map(|problem| format!("{}: {problem}", manifest.label())));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn all_of_them_together_share_no_name() {
    let loaded = Loaded::new(manifests()).unwrap_or_else(|error| panic!("{}", error.problems.join("\n")));
    assert!(loaded.knobs().len() > 250);
    let choices = &loaded.find("0080", "fast_experts").unwrap().schema.choices;
    assert!(
        ["v1", "fast2", "fat", "once", "auto", "tc", "fat2"].iter().all(|c| choices.iter().any(|x| x == c))
    );
    assert_eq!(
        loaded.find("0080", "fast_prefill").unwrap().schema.request_key.as_deref(),
        Some("fast_prefill")
    );
}

#[test]
fn printing_and_reading_give_the_same() {
    for manifest in manifests() {
        let text = manifest.print().unwrap();
        assert_eq!(Manifest::read(&text, "again").unwrap(), manifest, "{text}");
    }
}

#[test]
fn the_class_is_never_stronger_than_declared_without_a_reason() {
    let map: toml::Table = MAP.parse().unwrap();
    let mut weaker = Vec::new();
    for manifest in manifests() {
        let entries = map["entry"].as_array().unwrap();
        let entry = entries.iter().find(|e| e["id"].as_str() == Some(&manifest.id));
        let Some(declared) = entry.and_then(|e| e["class"].as_str()) else { continue };
        let declared = *Class::ALL.iter().find(|class| class.word() == declared).unwrap();
        let why = entry.is_some_and(|e| e.get("class_why").is_some());
        assert_eq!(manifest.class() > declared, why, "{}: {}", manifest.label(), manifest.class());
        if manifest.class() < declared {
            weaker.push(manifest.id);
        }
    }
    // What these change follows from what they extend, or from the data that they carry; 0005 only watches.
    assert_eq!(weaker, ["0005", "0085", "0091", "0092", "0093", "0350", "0500"]);
}
