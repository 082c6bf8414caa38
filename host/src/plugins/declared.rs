//! What a manifest declares against what its plugin registers.

use std::collections::BTreeSet;

use plugfold_manifest::Manifest;

/// Interfaces that serve a point, any of them; no interface: nothing can be registered for it yet.
const SERVED_BY: &[(&str, &[&str])] = &[
    ("weight.source", &["weight-link"]),
    ("limits", &["limits"]),
    ("cache.layout", &["cache-layout", "mapper"]),
    ("program", &["pass"]),
    ("request.rewrite", &["request"]),
    ("request.check", &["request", "draft-policy"]),
    ("request.prepare", &["request"]),
    ("request.gate", &["request"]),
    ("prompt", &["prompt"]),
    ("drafts", &["drafts"]),
    ("stream", &["stream"]),
    ("reply.repair", &["reply"]),
    ("reply.parse", &["reply"]),
    ("reply.finish", &["reply"]),
    ("store", &["store"]),
    ("plan.place", &["planner"]),
    ("plan.admit", &["planner"]),
    ("plan.marks", &["planner"]),
    ("plan.pieces", &["planner"]),
    ("plan.spans", &["spans"]),
    ("draft", &["draft-policy"]),
    ("boot", &["observer"]),
    ("plan-made", &["observer", "section"]),
    ("round-done", &["observer"]),
    ("operation.begun", &["observer"]),
    ("operation.done", &["observer"]),
    ("request.begun", &["observer", "request", "stream"]),
    ("request.ended", &["observer", "stream", "reply"]),
    ("weight-builder", &["weight-builder"]),
    ("prepared-store", &["prepared-store"]),
    ("subcommand", &["command"]),
    ("drafter", &["drafter"]),
    ("transport", &["transport"]),
    ("executor", &["executor"]),
    ("capture", &["capture"]),
    ("plan-wait", &["plan-wait"]),
    ("round-driver", &["round-driver"]),
    ("logits", &["pass"]),
    ("launched", &["observer"]),
    ("thread.started", &["observer"]),
];
/// Drafters, stores, parts and policies are told of sequences without being observers.
const TOLD_OF_SEQUENCES: &[&str] = &["observer", "drafter", "draft-policy", "part", "store"];

/// Interfaces that serve a point.
fn served_by(point: &str) -> &'static [&'static str] {
    if point.starts_with("sequence.") {
        return TOLD_OF_SEQUENCES;
    }
    SERVED_BY.iter().find(|(name, _)| *name == point).map_or(&[], |(_, interfaces)| interfaces)
}

/// Names the first thing that is registered and not declared, or declared and not registered.
///
/// `interfaces` are those of the offers, `operations` those of its providers. A plugin that is `off` may register less.
pub fn compare(
    manifest: &Manifest,
    interfaces: &[&str],
    operations: &[String],
    off: bool,
) -> Result<(), String> {
    let registered: BTreeSet<&str> = interfaces.iter().copied().collect();
    let mut declared: BTreeSet<&str> = BTreeSet::new();
    for point in &manifest.points {
        let serving = served_by(point);
        declared.extend(serving);
        if !off && !serving.is_empty() && !serving.iter().any(|i| registered.contains(i)) {
            return Err(format!("it lists the point {point} and registers no {}", serving.join(" or ")));
        }
    }
    let lists = [
        ("part", "part", manifest.parts.is_empty()),
        ("section", "section", manifest.sections.is_empty()),
        ("rider", "rider", manifest.riders.is_empty()),
        ("round-table field", "field", manifest.fields.is_empty()),
        ("shape word", "words", manifest.words.is_empty()),
        ("edit of the cache table", "cache-layout", manifest.layout.is_empty()),
    ];
    for (what, interface, none) in lists {
        if none {
            continue;
        }
        declared.insert(interface);
        // Base plugins may describe families that the core lays out for them.
        if !off && interface != "cache-layout" && !registered.contains(interface) {
            return Err(format!("it lists a {what} and registers none"));
        }
    }
    let claimed: BTreeSet<&str> = manifest.claims.iter().map(|c| c.op.as_str()).collect();
    let covered: BTreeSet<&str> =
        manifest.covers.iter().filter_map(|c| c.ops.first()).map(String::as_str).collect();
    let defined: BTreeSet<&str> = manifest.defines.iter().map(|d| d.op.as_str()).collect();
    if !claimed.is_empty() || !covered.is_empty() || !defined.is_empty() {
        declared.insert("provider");
    }
    if let Some(extra) = registered.iter().find(|i| !declared.contains(*i)) {
        return Err(format!("it registers a hook of `{extra}`, which it does not list"));
    }
    let runs = |op: &str| operations.iter().any(|o| o == op);
    let known = |op: &str| claimed.contains(op) || covered.contains(op) || defined.contains(op);
    if let Some(extra) = operations.iter().find(|op| !known(op.as_str())) {
        return Err(format!("it registers a provider of `{extra}`, which it does not claim"));
    }
    let always = manifest.claims.iter().filter(|c| c.knob.is_none()).map(|c| c.op.as_str());
    let always = always.chain(
        manifest.covers.iter().filter(|c| c.knob.is_none()).filter_map(|c| c.ops.first()).map(String::as_str),
    );
    if let Some(missing) = always.into_iter().find(|op| !off && !runs(op)) {
        return Err(format!("it claims `{missing}` and registers no provider of it"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(manifest: &str, interfaces: &[&str], operations: &[&str]) -> String {
        let manifest = Manifest::read(manifest, "test").unwrap();
        let operations: Vec<String> = operations.iter().map(ToString::to_string).collect();
        compare(&manifest, interfaces, &operations, false).err().unwrap_or_default()
    }

    #[test]
    fn both_directions_are_compared() {
        let spans = "points = [\"plan.spans\", \"limits\"]";
        let claim = "claims = [{ op = \"dense\", phases = [\"P\"], bits = \"of(ref)\" }]";
        let part = "parts = [{ id = \"x\", what = \"y\" }]";
        let cases: &[(&str, &[&str], &[&str], &str)] = &[
            ("", &[], &[], ""),
            (spans, &["spans", "limits"], &[], ""),
            (spans, &["spans"], &[], "lists the point limits"),
            (spans, &["spans", "limits", "observer"], &[], "registers a hook of `observer`"),
            (claim, &["provider"], &["dense"], ""),
            (claim, &["provider"], &["dense", "head"], "registers a provider of `head`"),
            (claim, &[], &[], "claims `dense`"),
            ("", &["provider"], &["dense"], "registers a hook of `provider`"),
            (part, &[], &[], "lists a part"),
            (part, &["part"], &[], ""),
            ("points = [\"sequence.begun\"]", &["drafter"], &[], ""),
            ("points = [\"capture\"]", &[], &[], "registers no capture"),
            ("points = [\"capture\"]", &["capture"], &[], ""),
        ];
        for (manifest, interfaces, operations, expected) in cases {
            let told = told(manifest, interfaces, operations);
            assert!(told.contains(expected) && told.is_empty() == expected.is_empty(), "{manifest}: {told}");
        }
    }

    #[test]
    fn a_plugin_that_is_off_may_register_less_and_not_more() {
        let manifest =
            Manifest::read("points = [\"store\"]\nparts = [{ id = \"x\", what = \"y\" }]", "test").unwrap();
        assert!(compare(&manifest, &[], &[], false).is_err());
        assert_eq!(compare(&manifest, &[], &[], true), Ok(()));
        assert!(compare(&manifest, &["observer"], &[], true).is_err());
    }

    #[test]
    fn every_point_with_an_interface_is_a_point() {
        for (point, interfaces) in SERVED_BY {
            assert!(plugfold_manifest::POINTS.iter().any(|p| p.name == *point), "{point}");
            assert!(!interfaces.is_empty());
        }
    }
}
