//! `plugins new`: what it writes builds, loads and passes its test. And a list of many plugins.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::process::Command;

use plugins::{Place, ROOT, hostile_as, patch};

/// A workspace like this one, with no plugins but its own.
fn workspace() -> Place {
    let place = Place::new();
    let text = std::fs::read_to_string(format!("{ROOT}/Cargo.toml")).unwrap();
    let line = |line: &str| match line.split_once(" = ") {
        Some(("members", _)) => "members = [\"plugins/*\"]".to_owned(),
        Some(("default-members", _)) => String::new(),
        _ => line.replace("{ path = \"", &format!("{{ path = \"{ROOT}/")),
    };
    let text: Vec<String> = text.lines().map(line).collect();
    std::fs::write(place.path("Cargo.toml"), text.join("\n")).unwrap();
    std::fs::copy(format!("{ROOT}/Cargo.lock"), place.path("Cargo.lock")).unwrap();
    std::fs::create_dir_all(place.path("core/abi")).unwrap();
    std::fs::write(place.path("core/abi/Cargo.toml"), "").unwrap();
    place
}

#[test]
fn a_new_plugin_builds_passes_its_test_and_loads() {
    let place = workspace();
    let plugfold = |arguments: &[&str]| {
        let output = place.plugfold(arguments).current_dir(place.path("")).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let told = plugfold(&["plugins", "new", "9998-my-idea"]);
    assert!(
        told.contains("plugins/9998-my-idea") && told.contains("cargo test -p plugfold-9998-my-idea"),
        "{told}"
    );
    // Beside the program, so that what both need is compiled once; taken away again below.
    let built = plugins::built();
    for command in ["test", "build"] {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([command, "--offline", "--quiet", "-p", "plugfold-9998-my-idea", "--target-dir"]);
        if built.ends_with("release") {
            cargo.arg("--release");
        }
        let output = cargo.arg(built.parent().unwrap()).current_dir(place.path("")).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let library = place.put("9998-my-idea", &plugins::library("9998-my-idea"));
    std::fs::remove_file(built.join(library.file_name().unwrap())).unwrap();
    let folder = place.path("plugins");
    let folder = folder.to_str().unwrap();
    let told = plugfold(&["plugins", "check", "9998", "--plugin-path", folder]);
    assert_eq!(told, "9998-my-idea: can be used\n");
    let told = plugfold(&["plugins", "inspect", "9998", "--plugin-path", folder]);
    assert!(told.contains("- class: same-bits") && told.contains("| `moe.act` | W D P |"), "{told}");
    let model = plugins::tiny();
    let told = plugfold(&[
        "plugins",
        "resolve",
        "--model",
        &model,
        "--context",
        "256",
        "--plugin",
        "9998",
        "--plugin-path",
        folder,
    ]);
    let act: Vec<&str> = told.lines().filter(|l| l.trim_start().starts_with("moe.act")).collect();
    assert!(act.len() >= 2 && act.iter().all(|l| l.contains("9998") && l.contains("ref")), "{told}");
    let run = |more: &[&str]| {
        let mut arguments =
            vec!["generate", "--model", &model, "--context", "256", "--ids", "5,6,7,8,9,10", "--json"];
        arguments.extend(["--max-tokens", "6", "--ignore-eos"]);
        arguments.extend(more);
        let told: serde_json::Value = serde_json::from_str(&plugfold(&arguments)).unwrap();
        told["ids"].clone()
    };
    assert_eq!(run(&["--plugin", "9998", "--plugin-path", folder]), run(&[]));
}

#[test]
fn a_list_of_many_plugins_starts() {
    let place = Place::new();
    let mut bytes = hostile_as("9100", "hostile");
    let mut names: Vec<String> = Vec::new();
    for i in 0..12 {
        let id = format!("91{i:02}");
        if let Some(before) = names.last() {
            patch(&mut bytes, &format!("id = \"{}\"", &before[..4]), &format!("id = \"{id}\""));
            patch(&mut bytes, &format!("hostile_{}", &before[..4]), &format!("hostile_{id}"));
        }
        names.push(format!("{id}-hostile"));
        place.put(&names[i], &bytes);
    }
    // From the last to the first: nothing moves them.
    let list: Vec<&str> = names.iter().rev().map(String::as_str).collect();
    let output = place.generate(&list, "", &[]);
    assert!(output.status.success(), "{output:?}");
    let profile = place.profile(&list);
    let arguments = ["plugins", "resolve", "--no-model", "--profile", profile.to_str().unwrap()];
    let output = place.plugfold(&arguments).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("  1. 9111-hostile (") && told.contains(" 12. 9100-hostile ("), "{told}");
}
