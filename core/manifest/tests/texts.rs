//! What manifests, expressions and values may look like, and what is said about those that may not.

#![allow(clippy::unwrap_used)]

use plugfold_abi::KnobValue;
use plugfold_manifest::{Class, Expr, KnobSchema, Loaded, Manifest, Range, Raw, env_name};
use proptest::prelude::*;

const GOOD: &str = r#"
id = "0003"
name = "prefill-rows"
title = "Rows of a prefill chunk"
version = "1.0.0"
points = ["plan.spans", "limits"]

[[raise]]
limit = "prefill_rows"
to = "rows an exact chunk may have"
knob = "prefill_rows"

[[knob]]
key = "prefill_rows"
env = ["GLM53_TF_PREFILL_ROWS"]
type = "int"
range = "1..prefill_rows_max"
default = "64"
scope = "both"
effect = "schedule"
where = "all"
fold = "split"
request_key = "prefill_rows"
help = "Rows that a prefill chunk commits at once."

[[claim]]
op = "moe.up"
phases = ["W", "P"]
bits = "of(ref)"
"#;

#[test]
fn a_good_manifest() {
    let manifest = Manifest::parse(GOOD, "plugin.toml").unwrap();
    assert_eq!(
        (manifest.label().as_str(), manifest.library().as_str()),
        ("0003-prefill-rows", "plugfold_0003_prefill_rows")
    );
    assert_eq!(manifest.class(), Class::SameBits);
    assert!(
        manifest.is_called("0003")
            && manifest.is_called("0003-prefill-rows")
            && !manifest.is_called("prefill-rows")
    );
    assert_eq!(env_name("base-mtp", "chain"), "PLUGFOLD_BASE_MTP_CHAIN");
    assert_eq!(Manifest::parse(&manifest.print().unwrap(), "again").unwrap(), manifest);
}

#[test]
fn mistakes_name_place_field_and_mend() {
    let faults = [
        ("title = ", "titel = ", "plugin.toml:4: unknown field `titel`; did you mean `title`?"),
        ("type = \"int\"", "type = \"integer\"", "`integer` is unknown here; did you mean `int`?"),
        ("phases = [\"W\", \"P\"]", "phases = [\"X\"]", "`X` is no phase; valid are W, D, P"),
        ("bits = \"of(ref)\"", "bits = \"ref\"", "bits `ref`: write own(name) or of(name)"),
        ("scope = \"both\"", "scope = \"bath\"", "`bath` is no scope; did you mean `both`?"),
        ("scope = \"both\"\n", "", "missing field `scope`"),
        (
            "id = \"0003\"",
            "id = \"3\"",
            "plugin.toml (3-prefill-rows): id `3`: write four digits, or base-NAME",
        ),
        ("name = \"prefill-rows\"", "name = \"Prefill\"", "name `Prefill`"),
        ("version = \"1.0.0\"", "version = \"1.0\"", "version `1.0`: write three numbers"),
        ("\"plan.spans\"", "\"plan.span\"", "`plan.span` is no hook point; did you mean `plan.spans`?"),
        ("limit = \"prefill_rows\"", "limit = \"prefil_rows\"", "did you mean `prefill_rows`?"),
        ("knob = \"prefill_rows\"", "knob = \"rows\"", "by knob `rows`, which is not declared"),
        ("phases = [\"W\", \"P\"]", "phases = []", "the claim on `moe.up` names no phase"),
        (
            "1..prefill_rows_max",
            "1..window_row",
            "`window_row` is no limit and no knob of this plugin; did you mean `window_rows`?",
        ),
        ("1..prefill_rows_max", "1...4", "where a number or a name was expected"),
        ("default = \"64\"", "default = \"0\"", "its default is 0; it must be a whole number from 1"),
        ("default = \"64\"\n", "", "it needs a `default`, or `unset`"),
        ("fold = \"split\"\n", "", "per request it needs `fold` and `request_key`"),
        (
            "fold = \"split\"\n",
            "fold = \"all\"\nload_only = \"x\"\n",
            "`load_only` says why a request cannot set it",
        ),
        ("effect = \"schedule\"\n", "", "and its claim on `moe.up` holds outside prefill"),
        ("effect = \"schedule\"\n", "effect = \"bits\"\n", "a request may change bits in prefill only"),
        ("scope = \"both\"", "scope = \"load\"", "it is load only, but says how requests set it"),
        ("range = \"1..prefill_rows_max\"\n", "", "a number needs a `range`"),
        ("key = \"prefill_rows\"", "key = \"Rows\"", "the key must be small letters"),
    ];
    let own = GOOD.replace("bits = \"of(ref)\"", "bits = \"own(x)\"");
    for (from, to, expected) in faults {
        let text = if expected.contains("prefill only") || expected.contains("outside prefill") {
            own.as_str()
        } else {
            GOOD
        };
        assert!(text.contains(from), "{from}");
        let error = Manifest::parse(&text.replacen(from, to, 1), "plugin.toml").unwrap_err().to_string();
        assert!(error.contains(expected), "{from:?} -> {to:?}: expected {expected:?}, was told {error:?}");
    }
    // A claim that stands behind another knob is not the request's to change.
    let behind = own
        .replace("bits = \"own(x)\"", "bits = \"own(x)\"\nknob = \"on\"")
        .replace("effect = \"schedule\"\n", "");
    let other = "\n[[knob]]\nkey = \"on\"\ntype = \"bool\"\ndefault = \"0\"\nscope = \"load\"\n";
    let manifest = Manifest::parse(&format!("{behind}{other}"), "plugin.toml").unwrap();
    assert_eq!(manifest.class(), Class::NewArithmetic);
    assert_eq!(manifest.class_with(|_| false), Class::SameBits);
}

fn knob(text: &str) -> KnobSchema {
    let text = format!("id = \"0001\"\n[[knob]]\nkey = \"k\"\nscope = \"load\"\n{text}");
    Manifest::read(&text, "test").unwrap().knobs.remove(0)
}

#[test]
fn values_of_every_type() {
    let text = |t: &str| KnobValue::text(t);
    let list = |items: &[&str]| KnobValue::List(items.iter().map(|i| (*i).to_owned().into()).collect());
    let plain = |t: &str| Raw::Plain(t.to_owned());
    let quoted = |t: &str| Raw::Text(t.to_owned());
    let bool = knob("type = \"bool\"\ndefault = \"0\"");
    let int = knob("type = \"int\"\nrange = \"1..64\"\ndefault = \"4\"\nwords = [\"auto\"]");
    let float = knob("type = \"float\"\nrange = \"(0..1]\"\ndefault = \"0.5\"");
    let pick = knob("type = \"enum\"\nchoices = [\"1\", \"0\", \"cost\"]\ndefault = \"1\"");
    let some = knob(
        "type = \"list\"\nchoices = [\"a\", \"b\", \"c\", \"ll[:MB]\"]\nnot_in_all = [\"c\", \"ll[:MB]\"]\n\
         words = [\"all\", \"off\", \"1\"]\ndefault = \"off\"",
    );
    let ints = knob("type = \"ints\"\nrange = \"1..8\"\nwords = [\"off\"]\ndefault = \"off\"");
    let tuple = knob(
        "type = \"tuple\"\nplaces = [\"m\", \"n\", \"k?\"]\nrange = \"1..4,2/4,0..\"\ndefault = \"1,2\"",
    );
    let path = knob("type = \"path\"\nunset = \"none\"");
    for (schema, raw, value) in [
        (&bool, plain("yes"), Some(KnobValue::Bool(true))),
        (&bool, Raw::Int(0), Some(KnobValue::Bool(false))),
        (&bool, Raw::Bool(true), Some(KnobValue::Bool(true))),
        (&bool, Raw::Int(2), None),
        (&bool, quoted("1"), None),
        (&int, plain("12"), Some(KnobValue::Int(12))),
        (&int, Raw::Bool(true), Some(KnobValue::Int(1))),
        (&int, quoted("auto"), Some(text("auto"))),
        (&int, quoted("12"), None),
        (&int, Raw::Float(3.0), None),
        (&int, plain("1.5"), None),
        (&int, Raw::Other("null"), None),
        (&float, Raw::Int(1), Some(KnobValue::float(1.0))),
        (&float, plain("nan"), None),
        (&float, plain("1e999"), None),
        (&pick, quoted("COST"), Some(text("cost"))),
        (&pick, plain("on"), Some(text("1"))),
        (&pick, Raw::Int(0), Some(text("0"))),
        (&pick, quoted("costs"), None),
        (&some, plain("a, b"), Some(list(&["a", "b"]))),
        (&some, Raw::List(vec!["ll:8".into()]), Some(list(&["ll:8"]))),
        (&some, plain("all"), Some(list(&["a", "b"]))),
        (&some, plain("off"), Some(list(&[]))),
        (&some, Raw::Int(1), Some(text("1"))),
        (&some, plain("ll:x"), None),
        (&some, plain("a,z"), None),
        (&ints, plain("2 4"), Some(list(&["2", "4"]))),
        (&ints, plain("2,x"), None),
        (&tuple, plain("4,2"), Some(list(&["4", "2"]))),
        (&tuple, plain("4,2,9"), Some(list(&["4", "2", "9"]))),
        (&tuple, plain("4"), None),
        (&path, plain("/a b"), Some(text("/a b"))),
        (&path, plain(""), Some(text(""))),
        (&path, Raw::List(vec![]), None),
    ] {
        let read = schema.parse(&raw);
        assert_eq!(read.clone().ok(), value, "{raw}: {read:?}");
    }
    let none = |_: &str| None;
    for (schema, good, bad) in [
        (&int, "64", "65"),
        (&int, "auto", "0"),
        (&float, "1", "0"),
        (&ints, "1,8", "1,9"),
        (&tuple, "1,4,0", "1,3,0"),
    ] {
        let check = |t: &str| schema.check(&schema.parse(&plain(t)).unwrap(), &none);
        assert_eq!(check(good), Ok(()), "{good}");
        assert!(check(bad).unwrap_err().to_string().contains("it must be"), "{bad}");
    }
    assert!(int.parse(&plain(&"9".repeat(5000))).unwrap_err().to_string().contains("the limit is 4096"));
    assert_eq!(int.allowed(&none), "a whole number from 1 to 64, or auto");
    assert_eq!(float.allowed(&none), "a number above 0 and at most 1");
}

#[test]
fn ranges_follow_names() {
    let names = |name: &str| (name == "window_rows").then_some(8.0);
    let range = Range::parse("1..window_rows-1").unwrap();
    assert!(range.holds(&[7.0], &names) && !range.holds(&[8.0], &names));
    assert_eq!(range.describe(&names), "from 1 to 7 (window_rows-1)");
    let tuples = Range::parse("4,2;8,1").unwrap();
    assert!(tuples.holds(&[8.0, 1.0], &names) && !tuples.holds(&[8.0, 2.0], &names));
    assert_eq!(Expr::parse("min(7, window_rows-1)").unwrap().eval(&names), Ok(7.0));
    assert_eq!(Expr::parse("rows or 64").unwrap().eval(&names), Ok(64.0));
    assert_eq!(Expr::parse("2+3*-4").unwrap().eval(&names), Ok(-10.0));
    assert_eq!(Expr::parse("rows").unwrap().eval(&names), Err("rows".to_owned()));
    for bad in ["", "1..", "(1", "1 2", "min(", "min()", "1+", "or", "((((((((((((((((((1"] {
        assert!(Expr::parse(bad).is_err(), "{bad}");
    }
    for bad in ["", "5", "1,2", "a/b", "1..2..3", "1;x", "1..2,"] {
        assert!(Range::parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn two_plugins_may_not_bring_one_name() {
    let one = Manifest::parse(GOOD, "a").unwrap();
    let other = |from: &str, to: &str| {
        let text = GOOD.replace("id = \"0003\"", "id = \"0004\"").replace(from, to);
        Loaded::new(vec![one.clone(), Manifest::parse(&text, "b").unwrap()]).unwrap_err().to_string()
    };
    let error = other("xx", "");
    assert!(error.contains("knobs `0003.prefill_rows` and `0004.prefill_rows` both have the environment name `GLM53_TF_PREFILL_ROWS`"), "{error}");
    assert!(error.contains("the request key `prefill_rows`"), "{error}");
    let error = other("points = [\"plan.spans\", \"limits\"]", "points = [\"route\"]\nroutes = [\"GET /x\"]");
    assert!(!error.contains("route"), "{error}");
    let twice = Loaded::new(vec![one.clone(), one.clone()]).unwrap_err().to_string();
    assert!(twice.contains("both bring the id `0003`"), "{twice}");
}

#[test]
fn knobs_are_extended_by_name() {
    let one = Manifest::parse(GOOD, "a").unwrap();
    let by = |text: &str| {
        let head = "id = \"0085\"\nname = \"x\"\ntitle = \"t\"\nversion = \"1.0.0\"\nextends = [\"0003\"]\n";
        let manifest = Manifest::parse(&format!("{head}[[extend]]\n{text}"), "b").unwrap();
        Loaded::new(vec![one.clone(), manifest])
    };
    let loaded = by("knob = \"0003.prefill_rows\"\nwords = [\"auto\"]").unwrap();
    let knob = loaded.find("0003", "prefill_rows").unwrap();
    assert_eq!(
        (knob.schema.words.as_slice(), knob.extended_by.as_slice()),
        (&["auto".to_owned()][..], &["0085".to_owned()][..])
    );
    let error = by("knob = \"0003.prefil_rows\"").unwrap_err().to_string();
    assert!(error.contains("which no loaded plugin owns; did you mean `0003.prefill_rows`?"), "{error}");
    let error = by("knob = \"0003.prefill_rows\"\nrange = \"100..\"").unwrap_err().to_string();
    assert!(
        error.contains("its extension of knob `0003.prefill_rows` is wrong: its default is 64"),
        "{error}"
    );
    by("knob = \"0009.gone\"\nwords = [\"auto\"]").unwrap();
}

fn expr() -> impl Strategy<Value = Expr> {
    let leaf = prop_oneof![
        (0u32..5000).prop_map(|n| Expr::Number(f64::from(n))),
        "[a-z][a-z_]{0,8}"
            .prop_filter("words of the grammar", |w| !["or", "min", "max"].contains(&w.as_str()))
            .prop_map(Expr::Name),
        Just(Expr::Name("0003.prefill_rows".into())),
    ];
    leaf.prop_recursive(3, 16, 3, |inner| {
        let pair = || (inner.clone().prop_map(Box::new), inner.clone().prop_map(Box::new));
        prop_oneof![
            pair().prop_map(|(a, b)| Expr::Add(a, b)),
            pair().prop_map(|(a, b)| Expr::Sub(a, b)),
            pair().prop_map(|(a, b)| Expr::Mul(a, b)),
            pair().prop_map(|(a, b)| Expr::Or(a, b)),
            inner.clone().prop_map(|a| Expr::Neg(Box::new(a))),
            prop::collection::vec(inner.clone(), 1..3).prop_map(Expr::Min),
            prop::collection::vec(inner, 1..3).prop_map(Expr::Max),
        ]
    })
}

proptest! {
    #[test]
    fn expressions_read_as_they_print(expr in expr()) {
        let text = expr.to_string();
        prop_assert_eq!(Expr::parse(&text).map_err(|e| format!("{text}: {e}")), Ok(expr));
    }

    #[test]
    fn ranges_read_as_they_print(low in prop::option::of(expr()), high in prop::option::of(expr()), above: bool, below: bool) {
        let show = |e: &Option<Expr>| e.as_ref().map(ToString::to_string).unwrap_or_default();
        // An open bound is the bracket itself; an expression in brackets cannot begin a range.
        prop_assume!(!show(&low).starts_with('('));
        let open = if above { "(" } else { "" };
        let text = format!("{open}{}..{}{}", show(&low), show(&high), if below { ")" } else { "" });
        let range = Range::parse(&text).map_err(|e| format!("{text}: {e}"));
        let printed = range.as_ref().map(ToString::to_string);
        prop_assert_eq!(printed.map(|p| Range::parse(&p)).map_err(Clone::clone), Ok(range.clone()));
    }

    #[test]
    fn no_text_breaks_the_readers(text in "[ -~]{0,60}") {
        let _ = Expr::parse(&text);
        let _ = Range::parse(&text);
        let _ = Manifest::parse(&text, "x");
    }

    #[test]
    fn numbers_in_range_and_no_others(low in -50i64..50, width in 0i64..50, n in -120i64..120) {
        let schema = knob(&format!("type = \"int\"\nrange = \"{low}..{}\"\ndefault = \"{low}\"", low + width));
        let value = schema.parse(&Raw::Int(n)).unwrap();
        prop_assert_eq!(schema.check(&value, &|_: &str| None).is_ok(), (low..=low + width).contains(&n));
        prop_assert_eq!(schema.parse(&Raw::Plain(value.to_string())), Ok(value));
    }
}
