//! Shell profiles with every published key load unchanged, with all of their plugins and with few.

#![allow(clippy::unwrap_used)]

use plugfold::knobs::{EnvFile, Import, Resolved};
use plugfold_tests::catalogue::resolve;
use plugfold_tests::hooks::map;

const FILES: [(&str, &str); 4] = [
    ("prod", include_str!("../fixtures/env/prod.env")),
    ("prod-single", include_str!("../fixtures/env/prod-single.env")),
    ("prod-batch", include_str!("../fixtures/env/prod-batch.env")),
    ("minimal", include_str!("../fixtures/env/minimal.env")),
];

fn load(name: &str, here: &dyn Fn(&str) -> bool) -> (Import, Resolved) {
    let text = FILES.iter().find(|(file, _)| *file == name).unwrap().1;
    let import = Import::new(&EnvFile::parse(text).unwrap(), name, here).unwrap();
    let ids: Vec<&str> = import.plugins.iter().map(|label| id(label)).collect();
    let resolved = resolve(&ids, &import.text, &[], &[]).unwrap_or_else(|error| panic!("{name}: {error}"));
    (import, resolved)
}

fn id(label: &str) -> &str {
    let entry = map().all().find(|entry| entry.manifest.is_called(label));
    &entry.unwrap_or_else(|| panic!("no entry is called {label}")).manifest.id
}

fn value(resolved: &Resolved, path: &str) -> String {
    let (owner, key) = path.split_once('.').unwrap();
    resolved.get(owner, key).unwrap_or_else(|| panic!("{path} is not there")).value.to_string()
}

#[test]
fn with_all_of_their_plugins() {
    let (import, resolved) = load("prod", &|_| true);
    assert!(import.missing.is_empty() && import.plugins.len() > 55, "{:?}", import.plugins);
    for (path, expected) in [
        ("engine.context", "1048576"),
        ("engine.slots", "4"),
        ("server.served_name", "GLM-5.3-Flash-EXL3"),
        ("server.max_tokens", "32768"),
        ("0001.nonexpert", "q4mse"),
        ("0003.prefill_rows", "auto"),
        ("0090.prefill_rows_max", "4096"),
        ("0080.fast_experts", "fat"),
        ("0006.expert_loop_cfg", "4,2"),
        ("0190.moe_glue", "5"),
        ("0240.bits", "4"),
        ("0380.max_rows", "16"),
        ("0010.auto_fdrafts", "7"),
        ("0070.calib", "cached"),
        ("0200.row_ms", "6.5"),
        ("0290.tokens", "1048576"),
        ("0580.cfg", "nc,8,1"),
        ("0620.fixes", "history,reasoning,choice,args,thinkcalls,opencalls,argkeys"),
        ("base-graph.graph_rows", "16"),
        ("base-nccl.ib_hca", "rocep1s0f1,roceP2p1s0f1"),
    ] {
        assert_eq!(value(&resolved, path), expected, "{path}");
    }
    // What is off, and what only the launcher of two nodes reads, is all that nobody takes.
    let unused: Vec<&str> = resolved.report.iter().filter_map(|line| line.split(": ").nth(1)).collect();
    assert_eq!(
        unused,
        [
            "plugin 0005-prefill-profile is not loaded",
            "plugin 0083-fp8-prefill is not loaded",
            "this program has no such settings of its engine",
            "this program has no such settings of its launch"
        ]
    );
    let lists = |name: &str| import.plugins.iter().any(|label| label.starts_with(name));
    for off in
        ["0005", "0030", "0040", "0083", "0092", "0130", "0260", "0400", "0450", "0470", "base-scripted"]
    {
        assert!(!lists(off), "{off} is switched on");
    }
    assert!(import.in_server.iter().any(|label| label.starts_with("0002")), "{:?}", import.in_server);
    for on in ["0004", "0170", "0360", "0610", "0690", "base-dflash2", "base-mtp"] {
        assert!(lists(on), "{on} is switched off");
    }
}

#[test]
fn the_others_switch_on_less() {
    let count = |name: &str| load(name, &|_| true).0.plugins;
    let (prod, single, batch, minimal) =
        (count("prod"), count("prod-single"), count("prod-batch"), count("minimal"));
    assert!(prod.len() > batch.len() && batch.len() > single.len() && single.len() > minimal.len());
    let has = |list: &[String], name: &str| list.iter().any(|label| label.starts_with(name));
    assert!(has(&batch, "0120") && has(&batch, "0180") && !has(&batch, "0290") && !has(&batch, "0610"));
    assert!(!has(&single, "0120") && has(&single, "0110") && has(&single, "0060"));
    assert!(
        !has(&minimal, "0060") && !has(&minimal, "0080") && !has(&minimal, "0085") && has(&minimal, "0020")
    );
}

#[test]
fn with_few_or_no_plugins_the_rest_is_said() {
    for (name, _) in FILES {
        let (import, resolved) = load(name, &|id| ["0003", "0020", "0090"].contains(&id));
        assert_eq!(
            import.plugins,
            ["0003-prefill-rows", "0020-suffix-drafter", "0090-request-knobs"],
            "{name}"
        );
        assert!(import.text.contains("#   0001-exl3-nonexpert-q4"), "{}", import.text);
        let report = resolved.report.join("\n");
        assert!(report.contains("plugin 0001-exl3-nonexpert-q4 is not loaded: nonexpert"), "{report}");
        assert!(report.contains("plugin 0085-c-independent-prefill, which adds that value"), "{report}");
        let (import, _) = load(name, &|_| false);
        assert!(import.plugins.is_empty() && import.missing.len() > 10, "{name}");
    }
}
