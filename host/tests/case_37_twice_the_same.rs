//! Case 37: one plugin twice.
#![allow(clippy::unwrap_used)]

mod plugins;

use plugins::{HOSTILE, Place, ROWS, hostile_as, library};

#[test]
fn case_37_listed_twice() {
    let place = Place::new();
    let words = ["plugin 0003 (", "profile.toml:5)", "listed twice", "profile.toml:3)", "remove one"];
    let told = place.refused(&[ROWS, HOSTILE, "0003"], "", &words);
    assert_eq!(told.trim_end().lines().count(), 1, "{told}");
}

#[test]
fn case_37_two_files_of_one_plugin() {
    let place = Place::new();
    let second = place.put(ROWS, &library(ROWS));
    let first = plugins::built().join(plugins::file_name(ROWS));
    place.refused(
        &[ROWS],
        "",
        &[second.to_str().unwrap(), first.to_str().unwrap(), "both plugin", "remove one"],
    );
}

#[test]
fn case_37_a_link_to_the_same_file() {
    let place = Place::new();
    let link = place.path("plugins").join(plugins::file_name(ROWS));
    std::os::unix::fs::symlink(plugins::built().join(plugins::file_name(ROWS)), &link).unwrap();
    place.refused(&[ROWS], "", &[link.to_str().unwrap(), "both plugin"]);
}

#[test]
fn case_37_a_copy_under_another_name() {
    let place = Place::new();
    let copy = place.put("0004-other-name", &library(ROWS));
    place.refused(&["0004"], "", &[copy.to_str().unwrap(), "holds plugin 0003-prefill-rows", "call it"]);
}

#[test]
fn case_37_one_number_for_two() {
    let place = Place::new();
    let copy = place.put("9900-hostili", &hostile_as("9900", "hostili"));
    place.refused(&["9900"], "", &[copy.to_str().unwrap(), "both plugin 9900"]);
    place.refused(&["9900-hostili", HOSTILE], "", &[copy.to_str().unwrap(), "both plugin 9900"]);
}
