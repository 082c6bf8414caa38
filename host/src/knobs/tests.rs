//! Sources, resolution and requests together.

use plugfold_abi::{KnobValue, OpError};
use plugfold_manifest::Manifest;
use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::{Asked, EnvFile, Import, KnobTable, Resolved, Sources};
use crate::http::app::ClearThinking;

const ROWS: &str = r#"
id = "0003"
name = "prefill-rows"
title = "Rows of a chunk"
version = "1.0.0"
points = ["plan.spans", "limits"]
raises = [{ limit = "prefill_rows", to = "its rows", knob = "prefill_rows" }]
knobs = [
  { key = "prefill_rows", env = ["GLM53_TF_PREFILL_ROWS"], type = "int", range = "1..prefill_rows_max", default = "64", scope = "both", effect = "schedule", where = "all", fold = "split", request_key = "prefill_rows" },
]
"#;
const KNOBS: &str = r#"
id = "0090"
name = "request-knobs"
title = "Request knobs"
version = "1.0.0"
points = ["limits"]
raises = [{ limit = "prefill_rows_max", to = "its rows", knob = "prefill_rows_max" }]
knobs = [
  { key = "prefill_rows_max", env = ["GLM53_TF_PREFILL_ROWS_MAX"], type = "int", range = "prefill_rows..", default = "prefill_rows or 64", scope = "load", effect = "schedule", where = "all", load_only = "buffers are sized by it" },
  { key = "depth", env = ["GLM53_TF_DEPTH"], type = "enum", choices = ["threshold", "cost"], default = "threshold", scope = "both", effect = "drafts", where = "rank0", fold = "own", request_key = "depth" },
  { key = "graphs", type = "bool", default = "0", scope = "both", effect = "speed", where = "all", fold = "all", request_key = "graphs", at_most_loaded = true },
  { key = "overlap", type = "list", choices = ["gather", "slab"], words = ["0"], default = "0", scope = "both", effect = "schedule", where = "all", fold = "split", request_key = "overlap", request_on = "gather,slab", request_off = "0" },
  { key = "fat", type = "int", range = "0..1", unset = "by the server", scope = "request", effect = "speed", where = "all", fold = "split", request_key = "fat" },
  { key = "dir", type = "path", words = ["off"], default = "off", scope = "load", effect = "host", where = "rank0" },
]
"#;

fn plugins() -> Vec<Manifest> {
    [ROWS, KNOBS].map(|text| Manifest::parse(text, "test").unwrap()).to_vec()
}

/// A profile's text, variables and `--set` texts, resolved with both plugins.
fn resolve(profile: &str, variables: &[(&str, &str)], sets: &[&str]) -> Result<Resolved, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("p.toml");
    std::fs::write(&file, profile).unwrap();
    let sets: Vec<String> = sets.iter().map(|text| (*text).to_owned()).collect();
    let asked = Asked {
        profile: file.to_str(),
        environment: variables.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect(),
        sets: &sets,
        ..Asked::default()
    };
    let sources = Sources::read(&asked).map_err(|e| e.to_string())?;
    Resolved::new(&sources, plugins()).map_err(|e| e.to_string())
}

fn ask(table: &KnobTable, asked: &Json) -> Result<Json, String> {
    let values = table.resolve_request(asked.as_object().unwrap()).map_err(|e| e.to_string())?;
    Ok(Json::Object(table.echo(&values)))
}

#[test]
fn sources_by_strength_with_origins() {
    let profile = "plugins = [\"0003\", \"0090-request-knobs\"]\n[knobs.0003]\nprefill_rows = 16\n[knobs.0090]\n\
                   prefill_rows_max = 512\ndir = \"cache\"\n[imported.0003]\nprefill_rows = \"8\"\n";
    let resolved = resolve(profile, &[], &[]).unwrap();
    let rows = |r: &Resolved| r.get("0003", "prefill_rows").cloned().unwrap();
    assert_eq!(rows(&resolved).value, KnobValue::Int(16));
    assert!(rows(&resolved).origin.to_string().ends_with("p.toml:3"), "{}", rows(&resolved).origin);
    let dir = resolved.get("0090", "dir").unwrap().value.to_string();
    assert!(dir.starts_with('/') && dir.ends_with("/cache"), "relative to the profile: {dir}");
    let resolved = resolve(profile, &[("GLM53_TF_PREFILL_ROWS", "32")], &[]).unwrap();
    assert_eq!(
        (rows(&resolved).value, rows(&resolved).origin.to_string()),
        (KnobValue::Int(32), "$GLM53_TF_PREFILL_ROWS".into())
    );
    let resolved =
        resolve(profile, &[("PLUGFOLD_0003_PREFILL_ROWS", "32")], &["0003.prefill_rows=128"]).unwrap();
    assert_eq!(rows(&resolved).value, KnobValue::Int(128));
    let shown = resolved.show();
    assert!(
        shown.lines().any(|l| l.starts_with("0003.prefill_rows")
            && l.contains("= 128")
            && l.ends_with("--set 0003.prefill_rows")),
        "{shown}"
    );
    assert!(shown.lines().any(|l| l.starts_with("0090.fat") && l.contains("(by the server)")), "{shown}");
    assert_eq!(
        resolved.digest()[..2],
        [("0003.prefill_rows".into(), "128".into()), ("0090.prefill_rows_max".into(), "512".into())]
    );
    assert_eq!(resolved.plugins[1].name, "0090-request-knobs");
}

#[test]
fn defaults_and_ranges_follow_limits_and_other_knobs() {
    let max = |r: &Resolved| r.get("0090", "prefill_rows_max").unwrap().value.clone();
    assert_eq!(max(&resolve("", &[], &[]).unwrap()), KnobValue::Int(64));
    assert_eq!(max(&resolve("prefill_rows = 96\n", &[], &[]).unwrap()), KnobValue::Int(96));
    assert_eq!(max(&resolve("", &[], &["0003.prefill_rows=200"]).unwrap()), KnobValue::Int(200));
    let error = resolve("", &[], &["0003.prefill_rows=200", "0090.prefill_rows_max=100"]).unwrap_err();
    assert!(error.contains("--set 0090.prefill_rows_max: 0090.prefill_rows_max is 100; it must be a whole number at least 200 (prefill_rows)"), "{error}");
}

#[test]
fn wrong_settings_name_place_and_mend() {
    for (profile, variables, sets, expected) in [
        (
            "[knobs.0003]\nprefil_rows = 3\n",
            &[][..],
            &[][..],
            "p.toml:2: unknown key \"0003.prefil_rows\"; did you mean `prefill_rows`?",
        ),
        (
            "[knobs.0003]\nprefill_rows = \"3\"\n",
            &[],
            &[],
            "p.toml:2: 0003.prefill_rows is \"3\"; it must be a whole number",
        ),
        (
            "[knobs.0003]\nprefill_rows = 0\n",
            &[],
            &[],
            "p.toml:2: 0003.prefill_rows is 0; it must be a whole number from 1 to 64 (prefill_rows_max)",
        ),
        (
            "[knobs.0240]\nbits = 4\n",
            &[],
            &[],
            "p.toml:2: bits is a knob of plugin 0240-b12x-prefill, which is not loaded: add \"0240-b12x-prefill\" to `plugins`",
        ),
        ("[knobs.0042]\nbits = 4\n", &[], &[], "no plugin `0042` is loaded"),
        (
            "",
            &[("GLM53_TF_B12X", "4")],
            &[],
            "$GLM53_TF_B12X: bits is a knob of plugin 0240-b12x-prefill, which is not loaded",
        ),
        ("", &[("PLUGFOLD_0240_BITS", "4")], &[], "plugin 0240-b12x-prefill, which is not loaded"),
        ("", &[("GLM53_TF_PREFIL_ROWS", "4")], &[], "did you mean `GLM53_TF_PREFILL_ROWS`?"),
        ("", &[("GLM53_TF_PREFILL_ROWS", "x")], &[], "$GLM53_TF_PREFILL_ROWS: 0003.prefill_rows is \"x\""),
        (
            "",
            &[("GLM53_TF_PREFILL_ROWS", "auto")],
            &[],
            "plugin 0085-c-independent-prefill, which adds that value, is not loaded",
        ),
        ("", &[], &["prefill"], "write OWNER.KEY=VALUE"),
        ("", &[], &["prot=1"], "did you mean `port`?"),
        ("", &[], &["0090.fat=1"], "0090.fat is set by requests only"),
        (
            "",
            &[("GLM53_TF_PREFILL_ROWS", "4"), ("PLUGFOLD_0003_PREFILL_ROWS", "5")],
            &[],
            "are both 0003.prefill_rows, with different values: set one of them",
        ),
    ] {
        let error = resolve(profile, variables, sets).unwrap_err();
        assert!(error.contains(expected), "expected {expected:?}, was told {error:?}");
    }
    resolve("", &[("GLM53_TF_PREFILL_ROWS", "4"), ("PLUGFOLD_0003_PREFILL_ROWS", "4")], &[]).unwrap();
    resolve("", &[("GLM53_TF_PREFILL_ROWS", ""), ("PLUGFOLD_TEST_X", "4")], &[]).unwrap();
}

#[test]
fn secrets_are_shown_nowhere() {
    let resolved = resolve("", &[("PLUGFOLD_API_KEY", "hush-hush")], &[]).unwrap();
    assert_eq!(resolved.settings.api_key.as_deref(), Some("hush-hush"));
    let shown = resolved.show();
    assert!(shown.contains("(not shown)") && !shown.contains("hush"), "{shown}");
    let twice = [("PLUGFOLD_API_KEY", "hush-hush"), ("PLUGFOLD_SERVER_API_KEY", "hush")];
    let error = resolve("", &twice, &[]).unwrap_err();
    assert!(error.contains("$PLUGFOLD_API_KEY") && !error.contains("hush"), "{error}");
}

#[test]
fn requests() {
    let resolved = resolve("", &[], &["0090.prefill_rows_max=512"]).unwrap();
    let table = resolved.table();
    assert_eq!(table.number("0003", "prefill_rows"), Some(0));
    assert_eq!(table.number("0090", "prefill_rows_max"), None);
    let defaults = json!({"prefill_rows": 64, "depth": "threshold", "graphs": 0, "overlap": 0});
    assert_eq!(ask(&table, &json!({})).unwrap(), defaults);
    let all = json!({"prefill_rows": 512, "depth": "Cost", "graphs": false, "overlap": true, "fat": true});
    let echoed = json!({"prefill_rows": 512, "depth": "cost", "graphs": 0, "overlap": 1, "fat": 1});
    assert_eq!(ask(&table, &all).unwrap(), echoed);
    for (asked, expected) in [
        (
            json!({"prefill_row": 1}),
            "has the unknown key \"prefill_row\"; did you mean \"prefill_rows\"? valid are prefill_rows, depth, graphs, overlap, fat",
        ),
        (
            json!({"prefill_rows": 0}),
            "key \"prefill_rows\" is 0; it must be a whole number from 1 to 512 (prefill_rows_max)",
        ),
        (json!({"prefill_rows": 513}), "is 513; it must be a whole number from 1 to 512"),
        (json!({"prefill_rows": "3"}), "is \"3\"; it must be a whole number"),
        (json!({"prefill_rows": 1.5}), "is 1.5; it must be a whole number"),
        (json!({"prefill_rows": null}), "is null; it must be"),
        (json!({"prefill_rows": {}}), "is an object; it must be"),
        (json!({"prefill_rows": 18_446_744_073_709_551_615_u64}), "it must be a whole number"),
        (json!({"depth": "deep"}), "must be one of threshold, cost"),
        (json!({"overlap": 2}), "is 2; it must be 0 or 1"),
        (json!({"graphs": 1}), "the server was started with 0, and a request can only go below"),
        (
            json!({"prefill_rows_max": 9}),
            "key \"prefill_rows_max\" is set when the server starts, not by a request: buffers are sized by it",
        ),
        (
            json!({"batch": 9}),
            "key \"batch\" is set when the server starts, not by a request: buffers are made for that many",
        ),
        (
            json!({"b12x": 4}),
            "key \"b12x\" is a knob of plugin 0240-b12x-prefill, which this server has not loaded",
        ),
        (json!({"kv_dtype": "fp8"}), "plugin 0220-fp8-latent-kv, which this server has not loaded"),
    ] {
        let error = ask(&table, &asked).unwrap_err();
        assert!(error.contains(expected), "{asked}: expected {expected:?}, was told {error:?}");
    }
    let veto = |knob: &super::RequestKnob, value: &KnobValue| {
        (knob.key == "depth" && value.as_text() == Some("cost")).then(|| "not in batch mode".to_owned())
    };
    let cost = json!({"depth": "cost"});
    let error = table.clone().with_veto(veto).resolve_request(cost.as_object().unwrap()).unwrap_err();
    assert_eq!(error.message, "key \"depth\" cannot be \"cost\": not in batch mode");
    let none = json!({"x": 1});
    let bare = KnobTable::default().resolve_request(none.as_object().unwrap()).unwrap_err();
    assert_eq!(bare.to_string(), "has the unknown key \"x\"; this server has no request knobs");
}

/// An owner that knows even numbers.
struct Even;
impl super::KnobOwners for Even {
    fn parse(&self, _: &super::RequestKnob, text: &str) -> Result<Result<String, String>, OpError> {
        match text.trim().parse::<u32>() {
            Ok(13) => Err(OpError::new("plugin 0007: broke")),
            Ok(n) if n % 2 == 0 => Ok(Ok(n.to_string())),
            _ => Ok(Err("odd".into())),
        }
    }
    fn veto(&self, _: &super::RequestKnob, value: &KnobValue) -> Result<Option<String>, OpError> {
        Ok((value.as_text() == Some("8")).then(|| "eight is taken".to_owned()))
    }
}

#[test]
fn custom_knobs_of_requests_are_parsed_by_their_owner() {
    let owner = "id = \"0007\"\nname = \"x\"\ntitle = \"t\"\nversion = \"1.0.0\"\n[[knob]]\nkey = \"pairs\"\n\
                 type = \"custom\"\nform = \"an even number\"\nwords = [\"off\"]\ndefault = \"02\"\nscope = \"both\"\n\
                 effect = \"host\"\nfold = \"own\"\nrequest_key = \"pairs\"\n";
    let manifests = vec![Manifest::parse(owner, "test").unwrap()];
    let table = Resolved::new(&Sources::default(), manifests).unwrap().table();
    let table = table.with_defaults([KnobValue::text("2")].into()).with_owners(std::sync::Arc::new(Even));
    assert_eq!(ask(&table, &json!({})), Ok(json!({"pairs": "2"})), "as the plugin has put it");
    for (asked, shown) in [("04", "4"), ("off", "off"), (" 6 ", "6")] {
        assert_eq!(ask(&table, &json!({"pairs": asked})), Ok(json!({"pairs": shown})));
    }
    assert_eq!(ask(&table, &json!({"pairs": 10})), Ok(json!({"pairs": "10"})));
    for (asked, told, failed) in [
        (json!("3"), "key \"pairs\" is \"3\"; it must be an even number, or off: odd", false),
        (json!("8"), "key \"pairs\" cannot be \"8\": eight is taken", false),
        (json!({}), "key \"pairs\" is an object; it must be an even number, or off", false),
        (json!("13"), "key \"pairs\" cannot be settled: plugin 0007: broke", true),
    ] {
        let asked = json!({"pairs": asked});
        let error = table.resolve_request(asked.as_object().unwrap()).unwrap_err();
        assert_eq!((error.message.as_str(), error.failed), (told, failed));
    }
}

#[test]
fn plugins_are_configured_with_theirs_and_what_they_extend() {
    let by = "id = \"0085\"\nname = \"x\"\ntitle = \"t\"\nversion = \"1.0.0\"\nextends = [\"0003\"]\n[[extend]]\n\
              knob = \"0003.prefill_rows\"\nwords = [\"auto\"]\n";
    let mut manifests = plugins();
    manifests.push(Manifest::parse(by, "test").unwrap());
    let sets = ["0003.prefill_rows=auto".to_owned()];
    let sources = Sources::read(&Asked { sets: &sets, ..Asked::default() }).unwrap();
    let resolved = Resolved::new(&sources, manifests).unwrap();
    let table = resolved.table();
    let keys =
        |id: &str| resolved.of_plugin(id, &table).iter().map(|k| k.key.to_string()).collect::<Vec<_>>();
    assert_eq!(keys("0085"), ["0003.prefill_rows"]);
    let rows = &resolved.of_plugin("0003", &table)[0];
    assert_eq!((&rows.value, rows.id.into_option()), (&KnobValue::text("auto"), Some(0)));
    // A word is no number: what follows from the knob takes its other branch.
    assert_eq!(resolved.get("0090", "prefill_rows_max").unwrap().value, KnobValue::Int(64));
}

#[test]
fn a_shell_profile_becomes_a_profile() {
    let text = "MODEL_PATH=/m\nGLM53_TF_PREFILL_ROWS=auto\nGLM53_TF_B12X=4\nCANARY=warn\nNCCL_DEBUG=INFO\nNCCL_X=1\n\
                GLM53_TF_PREFILL_ROWS_MAX=4096\nGLM53_TF_REASONING_FIELDS=reasoning\n";
    let file = EnvFile::parse(text).unwrap();
    let import = Import::new(&file, "x.env", &|id| ["0003", "0090"].contains(&id)).unwrap();
    assert_eq!(import.plugins, ["0003-prefill-rows", "0090-request-knobs"]);
    let resolved = resolve(&import.text, &[], &[]).unwrap();
    assert_eq!(resolved.get("0090", "prefill_rows_max").unwrap().value, KnobValue::Int(4096));
    assert_eq!(resolved.settings.slots, 1, "what is not said there means one");
    assert_eq!(resolved.settings.reasoning_fields, crate::http::app::ReasoningFields::Reasoning);
    let report = resolved.report.join("\n");
    for part in [
        "0003.prefill_rows = \"auto\": plugin 0085-c-independent-prefill, which adds that value, is not loaded",
        "plugin 0240-b12x-prefill is not loaded: bits",
        "plugin base-nccl is not loaded: env",
        "of its launch: canary",
    ] {
        assert!(report.contains(part), "expected {part:?} in\n{report}");
    }
    let unknown = EnvFile::parse("GLM53_TF_PREFIL_ROWS=3\nPRT=1").unwrap();
    let error = Import::new(&unknown, "x.env", &|_| true).unwrap_err().to_string();
    assert!(
        error.contains("line 1: nobody knows `GLM53_TF_PREFIL_ROWS`; did you mean `GLM53_TF_PREFILL_ROWS`?"),
        "{error}"
    );
    assert!(error.contains("line 2: nobody knows `PRT`; did you mean `PORT`?"), "{error}");
    let wrong = EnvFile::parse("PORT=x").unwrap();
    assert!(
        Import::new(&wrong, "x.env", &|_| true).unwrap_err().to_string().contains("line 1: PORT is \"x\"")
    );
}

proptest! {
    /// What a reply echoes can be asked for, and gives the same values.
    #[test]
    fn what_is_echoed_can_be_asked(rows in 1i64..=64, cost: bool, overlap: bool, fat in prop::option::of(0u8..2)) {
        let table = resolve("", &[], &[]).unwrap().table();
        let mut asked = json!({"prefill_rows": rows, "depth": if cost { "cost" } else { "threshold" }, "overlap": overlap});
        if let Some(fat) = fat {
            asked["fat"] = json!(fat);
        }
        let first = table.resolve_request(asked.as_object().unwrap()).unwrap();
        let again = table.resolve_request(&table.echo(&first)).unwrap();
        prop_assert_eq!(first, again);
    }
}

#[test]
fn reasoning_of_earlier_turns_is_kept_by_0_and_left_to_the_template_by_1() {
    let name = "GLM53_TF_CLEAR_THINKING";
    let set = |value| resolve("", &[(name, value)], &[]).map(|r| r.settings.clear_thinking);
    for (value, expected) in
        [("0", ClearThinking::Keep), ("1", ClearThinking::Template), ("", ClearThinking::Template)]
    {
        assert_eq!(set(value), Ok(expected), "{value:?}");
    }
    for value in ["2", "yes"] {
        assert!(set(value).unwrap_err().contains(name), "{value:?}");
    }
    let error = resolve("", &[("GLM53_TF_DISCONNECT_POLL_MS", "50")], &[]).unwrap_err();
    assert!(error.contains("this server does what that does without it"), "{error}");
}

#[test]
fn values_of_a_shell_profile_have_their_lines() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("p.env");
    std::fs::write(&file, "# rows\n\nGLM53_TF_PREFILL_ROWS=32\nGLM53_TF_HEALTH=strict\n").unwrap();
    let sources = Sources::read(&Asked { profile: file.to_str(), ..Asked::default() }).unwrap();
    let shown = Resolved::new(&sources, plugins()).unwrap().show();
    let line = |start: &str| shown.lines().find(|l| l.starts_with(start)).unwrap_or_default();
    assert!(line("health ").ends_with("p.env:4"), "{shown}");
    assert!(line("0003.prefill_rows ").ends_with("p.env:3"), "{shown}");
    assert!(line("effort_field ").ends_with("p.env (its reader's default)"), "{shown}");
    assert!(!shown.contains(".env:0"), "{shown}");
}
