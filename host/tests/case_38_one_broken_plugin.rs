//! Case 38: one broken plugin must not disable the tool.
#![allow(clippy::unwrap_used)]

mod plugins;

use plugins::{DEED, HOSTILE, Place, ROWS, hostile_as};

/// A folder in which three files are broken, each in its way.
fn place() -> Place {
    let place = Place::new();
    let whole = hostile_as("9901", "cutshor");
    place.put("9901-cutshor", &whole[..whole.len() / 2]);
    place.put("9902-words", b"I am not a library");
    place.put("9903-empty", b"");
    place.put("9904-hostilo", &hostile_as("9904", "hostilo"));
    place
}

#[test]
fn case_38_the_tools_work_and_name_what_is_broken() {
    let place = place();
    let folder = place.path("plugins");
    for arguments in [&["--help"][..], &["plugins", "--help"]] {
        assert!(place.plugfold(arguments).output().unwrap().status.success());
    }
    // Nothing is loaded for a listing, so a plugin that would abort is listed as what it says it is.
    let list = place
        .plugfold(&["plugins", "list", "--plugin-path", folder.to_str().unwrap()])
        .env(DEED, "load-abort")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&list.stdout);
    assert!(list.status.success(), "{list:?}");
    let line = |name: &str| {
        told.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("no {name}: {told}"))
    };
    for (name, why) in [
        ("9901-cutshor", "damaged"),
        ("9902-words", "no shared library"),
        ("9903-empty", "no shared library"),
    ] {
        assert!(line(name).contains("broken") && line(name).contains(why), "{told}");
    }
    for name in ["9904-hostilo", HOSTILE, ROWS] {
        assert!(!line(name).contains("broken"), "{told}");
    }
    let inspect = place.plugfold(&["plugins", "inspect", "0003"]).output().unwrap();
    let told = String::from_utf8_lossy(&inspect.stdout);
    for words in
        ["# 0003-prefill-rows", "- class: same-bits", "| `prefill_rows` |", "GLM53_TF_PREFILL_ROWS", "sha256"]
    {
        assert!(told.contains(words), "no {words:?} in {told}");
    }
}

#[test]
fn case_38_serving_refuses_only_what_the_list_names() {
    let place = place();
    let output = place.generate(&[ROWS], "", &[]);
    assert!(output.status.success(), "{output:?}");
    place.refused(&[ROWS, "9902"], "", &["plugin 9902 (", "profile.toml:4)", "no shared library"]);
    place.refused(&["9901-cutshor"], "", &["plugin 9901-cutshor (", "profile.toml:3)", "damaged"]);
}

#[test]
fn case_38_check_names_each_that_dies_and_keeps_the_others() {
    let place = place();
    let folder = place.path("plugins");
    let check = |deed: &str, names: &[&str]| {
        let mut command = place.plugfold(&["plugins", "check", "--again", "--patience", "2"]);
        command.args(names).args(["--plugin-path", folder.to_str().unwrap()]);
        let output = command.env(DEED, deed).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (good, told) = check("", &["0003", "9904"]);
    assert!(good, "{told}");
    for (deed, why) in [
        ("load-abort", "ended the process in its step `load`"),
        ("describe-abort", "ended the process in its step `describe`"),
        ("describe-hang", "did not end its step `describe` within 2 s"),
        ("configure-exit", "ended the process in its step `configure` (exit status: 0)"),
        ("configure-panic", "hostile: a panic at configure"),
        ("drop-abort", "ended the process in its step `drop`"),
    ] {
        let (good, told) = check(deed, &["9904", "0003"]);
        assert!(!good, "{deed}: {told}");
        assert!(told.contains("9904-hostilo: broken: ") && told.contains(why), "{deed}: {told}");
        assert!(told.contains("0003-prefill-rows: can be used"), "{deed}: {told}");
    }
}
