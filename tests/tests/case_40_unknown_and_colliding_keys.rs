//! Case 40: a key that nobody knows is refused with the nearest one that somebody does; what an orchestrator puts into the
//! environment is no setting; two owners of one name refuse to start.

#![allow(clippy::unwrap_used)]

use plugfold_tests::catalogue::{manifests, resolve};

use plugfold::knobs::{Asked, Resolved, Sources};

const PLUGINS: [&str; 3] = ["0003", "0020", "0090"];

fn refusal(profile: &str, variables: &[(&str, &str)], sets: &[&str]) -> String {
    resolve(&PLUGINS, profile, variables, sets).unwrap_err().to_string()
}

#[test]
fn unknown_keys_name_place_and_nearest() {
    let error = refusal("[knobs.0020]\nlokup = 4\n", &[], &[]);
    assert!(error.contains("profile.toml:2: unknown key \"0020.lokup\"; did you mean `lookup`?"), "{error}");
    let error = refusal("prot = 8080\n", &[], &[]);
    assert!(error.contains("profile.toml:1: unknown key \"prot\"; did you mean `port`?"), "{error}");
    let error = refusal("[knob.0020]\nlookup = 1\n", &[], &[]);
    assert!(error.contains("did you mean `knobs`?"), "{error}");
    let error = refusal("", &[("PLUGFOLD_0020_LOKUP", "1")], &[]);
    assert!(error.contains("did you mean `PLUGFOLD_0020_LOOKUP`?"), "{error}");
    let error = refusal("", &[], &["0020.lokup=1"]);
    assert!(error.contains("--set 0020.lokup: unknown key"), "{error}");
    let error = refusal("plugins = [\"0004\"]\n", &[], &[]);
    assert!(error.contains("profile.toml:1: plugin 0004 is listed"), "{error}");
}

#[test]
fn variables_of_an_orchestrator_are_ignored_and_said_so() {
    let variables = [
        ("PLUGFOLD_SERVICE_HOST", "10.0.0.1"),
        ("PLUGFOLD_SERVICE_PORT", "80"),
        ("PLUGFOLD_PORT", "tcp://10.0.0.1:80"),
        ("PLUGFOLD_PORT_80_TCP_ADDR", "10.0.0.1"),
    ];
    let resolved = resolve(&PLUGINS, "port = 8080\n", &variables, &[]).unwrap();
    assert_eq!(resolved.settings.port, 8080);
    for (name, _) in variables {
        assert!(resolved.report.iter().any(|line| line.starts_with(&format!("${name} "))), "{name}");
    }
    let error = refusal("", &[("PLUGFOLD_PORT", "http")], &[]);
    assert!(error.contains("$PLUGFOLD_PORT: port is \"http\"; it must be a whole number"), "{error}");
}

#[test]
fn two_owners_of_one_name_refuse_to_start() {
    let start = |edit: &dyn Fn(&mut plugfold_manifest::Manifest)| {
        let mut plugins = manifests(&PLUGINS);
        edit(&mut plugins[1]);
        let sources = Sources::read(&Asked::default()).unwrap();
        Resolved::new(&sources, plugins).map(|_| ()).map_err(|error| error.to_string())
    };
    start(&|_| ()).unwrap();
    let error = start(&|plugin| plugin.knobs[0].env = vec!["GLM53_TF_PREFILL_ROWS".into()]).unwrap_err();
    assert!(
        error.contains("knobs `0003.prefill_rows` and `0020.lookup` both have the environment name"),
        "{error}"
    );
    let error = start(&|plugin| plugin.knobs[0].request_key = Some("prefill_rows".into())).unwrap_err();
    assert!(error.contains("both have the request key `prefill_rows`: load one of them"), "{error}");
    let error = start(&|plugin| plugin.knobs[1].key = "lookup".into()).unwrap_err();
    assert!(error.contains("the environment name `PLUGFOLD_0020_LOOKUP`"), "{error}");
    let error = start(&|plugin| plugin.id = "0003".into()).unwrap_err();
    assert!(error.contains("0003-prefill-rows and 0003-suffix-drafter both bring the id `0003`"), "{error}");
}
