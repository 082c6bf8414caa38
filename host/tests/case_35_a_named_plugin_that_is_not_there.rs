//! Case 35: a list names a plugin that is not there.
#![allow(clippy::unwrap_used)]

mod plugins;

use plugins::{Place, ROWS};

#[test]
fn case_35_the_refusal_names_place_folders_and_the_nearest() {
    let place = Place::new();
    let told = place.refused(
        &[ROWS, "prefil_rows"],
        "",
        &[
            "plugin prefil_rows (",
            "profile.toml:4)",
            "is not there",
            "looked in",
            "did you mean \"0003-prefill-rows\"",
        ],
    );
    assert!(told.contains(place.path("plugins").to_str().unwrap()), "{told}");
    assert_eq!(told.trim_end().lines().count(), 1, "{told}");
}

#[test]
fn case_35_the_start_ends_before_anything_is_loaded() {
    let place = Place::new();
    let profile = place.profile(&["nothing-like-it"]);
    // Even the model need not be there: the plugins are looked for before it is read.
    let text = std::fs::read_to_string(&profile).unwrap();
    std::fs::write(&profile, text.replace("tests/fixtures/tiny", "tests/fixtures")).unwrap();
    let output =
        place.plugfold(&["generate", "--ids", "1", "--profile", profile.to_str().unwrap()]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("plugin nothing-like-it (") && told.contains("is not there"), "{told}");
    assert!(!told.contains("did you mean"), "{told}");
}

#[test]
fn case_35_names_are_ids_or_folder_names() {
    let place = Place::new();
    for name in ["0003", "0003-prefill-rows"] {
        let output = place.generate(&[name], "", &[]);
        assert!(output.status.success(), "{name}: {output:?}");
    }
    place.refused(&["0003_prefill_rows"], "", &["did you mean \"0003-prefill-rows\""]);
}

#[test]
fn case_35_settings_are_shown_without_it() {
    let place = Place::new();
    let profile = place.profile(&[ROWS, "nothing-like-it"]);
    let text = std::fs::read_to_string(&profile).unwrap();
    std::fs::write(&profile, text + "[knobs.nothing-like-it]\nx = 1\n").unwrap();
    let output =
        place.plugfold(&["config", "show", "--profile", profile.to_str().unwrap()]).output().unwrap();
    let (shown, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success(), "{told}");
    assert!(told.contains("plugin nothing-like-it (") && told.contains("profile.toml:4)"), "{told}");
    for row in ["context ", "0003.prefill_rows "] {
        assert!(shown.lines().any(|line| line.starts_with(row)), "no {row:?} in {shown}");
    }
    place.profile(&[ROWS]);
    let output =
        place.plugfold(&["config", "show", "--profile", profile.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
