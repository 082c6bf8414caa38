//! Case 39: a mismatch is explained field by field; a verdict is kept for a content and no longer.
#![allow(clippy::unwrap_used)]

mod plugins;

use plugins::{DEED, HOSTILE, Place, hostile_as, patch};

const NAME: &str = "9904-hostilo";

fn built_otherwise(from: &str, to: &str) -> Vec<u8> {
    let mut bytes = hostile_as("9904", "hostilo");
    patch(&mut bytes, from, to);
    bytes
}

#[test]
fn case_39_the_note_is_compared_before_anything_is_loaded() {
    let place = Place::new();
    let target = plugfold_abi::boundary::Note::this_target();
    let other: String = target.chars().map(|c| if c.is_ascii_digit() { '9' } else { c }).collect();
    for (from, to, words) in [
        ("\nmajor=1\n", "\nmajor=7\n", ["boundary version 7 (this host: 1)", "rebuild it"]),
        ("\npanic=unwind\n", "\npanic=aborts\n", ["panic strategy aborts (this host: unwind)", "rebuild it"]),
        ("plugfold-note\n", "plugfold-mote\n", ["magic line", "build it against"]),
        (&format!("\ntarget={target}\n"), &format!("\ntarget={other}\n"), ["target ", "rebuild it"]),
    ] {
        place.put(NAME, &built_otherwise(from, to));
        // A library that would abort when loaded: it is not.
        place.refused(&[NAME], "load-abort", &words);
    }
}

#[test]
fn case_39_every_field_of_a_layout_that_differs_is_told_with_both_values() {
    let place = Place::new();
    let told = place.refused(
        &[HOSTILE],
        "configure-layout",
        &[
            "plugin 9900-hostile (",
            "interface `spans` has another layout",
            "here fn(",
            "there fn(",
            "absent",
            "rebuild",
        ],
    );
    let fields = told.lines().filter(|l| l.contains(": here ") && l.contains("; there ")).count();
    assert!(fields >= 3, "{told}");
    let forget = || std::fs::remove_dir_all(place.path("cache")).unwrap();
    forget();
    place.refused(&[HOSTILE], "configure-version", &["version 99 of interface `spans`", "knows version 0"]);
    forget();
    place.refused(&[HOSTILE], "configure-unknown", &["version 3 of interface `telepathy`", "does not have"]);
}

#[test]
fn case_39_a_verdict_holds_for_the_content_only() {
    let place = Place::new();
    let good = hostile_as("9904", "hostilo");
    let mut bad = good.clone();
    // The same size, another content: its root cannot be found.
    patch(&mut bad, "plugfold_root", "plugfold_roof");
    let path = place.put(NAME, &bad);
    let time = std::fs::metadata(&path).unwrap().modified().unwrap();
    place.refused(&[NAME], "", &["exports no plugfold_root"]);
    let told =
        place.refused(&[NAME], "", &["exports no plugfold_root", "plugins check 9904-hostilo --again"]);
    assert!(told.contains("kept since"), "{told}");
    // A good one with the same size and time.
    std::fs::write(&path, &good).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    let output = place.generate(&[NAME], "", &[]);
    assert!(output.status.success(), "{output:?}");
    // And back.
    std::fs::write(&path, &bad).unwrap();
    place.refused(&[NAME], "", &["exports no plugfold_root"]);
}

#[test]
fn case_39_a_bad_verdict_can_be_cleared() {
    let place = Place::new();
    let path = place.path("plugins");
    place.put(NAME, &hostile_as("9904", "hostilo"));
    place.refused(&[NAME], "configure-exit", &["ended the process in its step `configure`"]);
    // The cause is gone, the verdict is not, and says how to clear it.
    place.refused(&[NAME], "", &["ended the process", "plugins check 9904-hostilo --again"]);
    let check = ["plugins", "check", NAME, "--again", "--plugin-path", path.to_str().unwrap()];
    assert!(place.plugfold(&check).env(DEED, "").output().unwrap().status.success());
    let output = place.generate(&[NAME], "", &[]);
    assert!(output.status.success(), "{output:?}");
}
