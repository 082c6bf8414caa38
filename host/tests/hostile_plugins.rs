//! Hostile plugins: a starting server refuses with a reason, a serving server goes on serving.
#![allow(clippy::unwrap_used)]

mod plugins;

use plugins::{HOSTILE, Place, ROWS, hostile_as, library};

#[test]
fn a_plugin_that_fails_at_any_step_is_refused_by_name_and_reason() {
    let place = Place::new();
    let cases: &[(&str, &str)] = &[
        ("load-panic", "ended the process in its step `load` (signal: 6"),
        ("load-abort", "ended the process in its step `load`"),
        ("load-exit", "ended the process in its step `load` (exit status: 0)"),
        ("root-panic", "its root failed"),
        ("describe-panic", "hostile: a panic at describe"),
        ("describe-error", "hostile: an error at describe"),
        ("describe-lie", "its manifest lies: the file says `title = \"Misbehaves on demand\"`"),
        ("configure-panic", "hostile: a panic at configure"),
        ("configure-error", "hostile: an error at configure"),
        ("configure-abort", "ended the process in its step `configure`"),
        ("configure-nothing", "its manifest lies: it lists the point plan.spans and registers no spans"),
        ("configure-undeclared", "its manifest lies: it registers a hook of `observer`"),
        ("publish-panic", "hostile: a panic at publish"),
        ("connect-error", "hostile: an error at connect"),
        ("memory-much", "bytes of memory"),
        ("prepare-panic", "hostile: a panic at prepare"),
        ("check-fails", "its self-check fails: hostile: two is not three"),
        ("check-panic", "hostile: a panic at check"),
        ("digest-panic", "hostile: a panic at digest"),
        ("calibrate-error", "hostile: an error at calibrate"),
        ("ready-panic", "hostile: a panic at ready"),
    ];
    for (i, (deed, why)) in cases.iter().enumerate() {
        // Verdicts are by content, and the content is the same for every deed.
        let _ = std::fs::remove_dir_all(place.path("cache"));
        let told = place.refused(&[ROWS, HOSTILE], deed, &["plugin 9900-hostile (", "profile.toml:4)", why]);
        assert!(told.contains("libplugfold_9900_hostile.so"), "{told}");
        assert!(!told.contains("prefill-rows"), "case {i}: {told}");
    }
}

#[test]
fn a_library_that_drops_badly_harms_nobody() {
    let place = Place::new();
    let output = place.generate(&[HOSTILE], "drop-panic", &[]);
    assert!(output.status.success(), "{output:?}");
    place.refused(&[hostile_beside(&place)], "drop-abort", &["ended the process in its step `drop`"]);
}

/// The hostile plugin as another content, with a verdict of its own.
fn hostile_beside(place: &Place) -> &'static str {
    place.put("9904-hostilo", &hostile_as("9904", "hostilo"));
    "9904-hostilo"
}

#[test]
fn one_rank_that_refuses_ends_all_with_its_reason() {
    let place = Place::new();
    for (deed, why) in [
        ("configure-error@1", "hostile: an error at configure"),
        ("publish-panic@1", "hostile: a panic at publish"),
        ("prepare-error@1", "hostile: an error at prepare"),
        ("ready-panic@1", "hostile: a panic at ready"),
    ] {
        let output = place.generate(&[HOSTILE], deed, &["--ranks", "2"]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{deed}: {output:?}");
        let lead = told.lines().find(|l| l.starts_with("plugfold: rank 1 of 2")).unwrap_or_default();
        assert!(lead.contains("refuses: plugin 9900-hostile (") && lead.contains(why), "{deed}: {told}");
    }
    let output = place.generate(&[HOSTILE], "digest-own@1", &["--ranks", "2"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("plugin 9900: mood: rank 0 has `even`, rank 1 has `odd`"), "{told}");
}

#[test]
fn a_serving_server_goes_on_serving() {
    let place = Place::new();
    let mut replies = Vec::new();
    for (deed, why) in [
        ("call-panic", "hostile: a panic at call"),
        ("call-error", "hostile: an error at call"),
        ("call-empty", "its chunks of tokens"),
        ("call-backward", ""),
    ] {
        let served = place.serve(&[HOSTILE], deed, &[]);
        let (status, reply) = served.complete();
        assert_eq!(status, status_of(why), "{deed}: {reply}");
        if !why.is_empty() {
            let told = reply["error"]["message"].as_str().unwrap_or_default();
            assert!(told.contains("plugin 9900") && told.contains(why), "{deed}: {told}");
        }
        let (status, health) = served.health();
        assert_eq!((status, health["ok"].as_bool()), (200, Some(true)), "{deed}: {health}");
        // The next request has the server that the first had.
        assert_eq!(served.complete().0, status_of(why), "{deed}");
        // A request leaves the count just after its last byte was sent, so a quick reader may still see it.
        let left = (0..1000).any(|_| served.health().1["inflight"].as_u64() == Some(0));
        assert!(left, "{deed}: {}", served.health().1);
        replies.push(served.end("-TERM"));
    }
    assert!(replies.iter().all(std::process::ExitStatus::success), "{replies:?}");
}

/// A request ends well, or with the plugin's fault.
fn status_of(why: &str) -> u16 {
    if why.is_empty() { 200 } else { 500 }
}

#[test]
fn a_process_that_was_killed_is_told_at_the_next_start_with_its_plugins() {
    let place = Place::new();
    let served = place.serve(&[ROWS], "", &[]);
    assert_eq!(served.complete().0, 200);
    served.end("-KILL");
    let output = place.generate(&[ROWS], "", &[]);
    let told = String::from_utf8_lossy(&output.stderr);
    for words in ["ended without a word while serving", ROWS, "--safe-mode"] {
        assert!(told.contains(words), "no {words:?} in {told}");
    }
    // Told once; and a process that ends in order leaves nothing to tell.
    let output = place.generate(&[ROWS], "", &[]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn safe_mode_starts_without_plugins() {
    let place = Place::new();
    place.put("9904-hostilo", &library(HOSTILE)[..100]);
    let output = place.generate(&["9904-hostilo", ROWS], "", &["--safe-mode"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{output:?}");
    assert!(told.contains("safe mode: without 9904-hostilo, 0003-prefill-rows"), "{told}");
}
