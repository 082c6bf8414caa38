//! What can be wrong with a manifest by itself.

use std::collections::BTreeSet;

use crate::value::Default;
use crate::{
    Bits, Effect, Expr, Fold, KnobSchema, KnobType, LIMITS, Manifest, ManifestError, POINTS, Phase, Scope,
    did_you_mean,
};

/// Owners of knobs that are no plugins.
pub(crate) const BUILT_IN: [&str; 4] = ["engine", "server", "limits", "launch"];

/// Says where a text does not parse, and which name would be right.
pub(crate) fn explain(error: &toml::de::Error, text: &str, place: &str) -> ManifestError {
    let line = error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
    let place = line.map_or_else(|| place.to_owned(), |line| format!("{place}:{line}"));
    let message = error.message().trim();
    // serde lists valid names in backquotes behind the one it did not know.
    let mut names = message.split('`').skip(1).step_by(2);
    let problem = match (message.starts_with("unknown field"), names.next()) {
        (true, Some(given)) => {
            let valid: Vec<&str> = names.collect();
            format!("unknown field `{given}`; {}", did_you_mean(given, valid))
        }
        (false, Some(given)) if message.starts_with("unknown variant") => {
            let valid: Vec<&str> = names.collect();
            format!("`{given}` is unknown here; {}", did_you_mean(given, valid))
        }
        _ => message.to_owned(),
    };
    ManifestError { place, problems: vec![problem] }
}

/// Whether an id is four digits, or `base-` and a name.
fn is_id(id: &str) -> bool {
    let digits = id.len() == 4 && id.bytes().all(|b| b.is_ascii_digit());
    digits || id.strip_prefix("base-").is_some_and(|name| is_name(name, '-'))
}

fn is_name(name: &str, between: char) -> bool {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == between;
    !name.is_empty() && name.chars().all(good) && !name.starts_with(between) && !name.ends_with(between)
}

pub(crate) fn problems(manifest: &Manifest) -> Vec<String> {
    let mut found = Vec::new();
    identity(manifest, &mut found);
    relations(manifest, &mut found);
    points(manifest, &mut found);
    claims(manifest, &mut found);
    tables(manifest, &mut found);
    knobs(manifest, &mut found);
    found
}

fn identity(manifest: &Manifest, found: &mut Vec<String>) {
    let Manifest { id, name, title, version, .. } = manifest;
    if id.is_empty() {
        found.push("`id` is missing: four digits, or base-NAME".to_owned());
    } else if !is_id(id) {
        found.push(format!("id `{id}`: write four digits, or base-NAME in small letters"));
    }
    let base = id.starts_with("base-");
    if !base && !is_name(name, '-') {
        found.push(format!("name `{name}`: write small letters, digits and `-`, as prefill-rows"));
    }
    if base && !name.is_empty() {
        found.push(format!("name `{name}`: the id of a base plugin is its name; leave it out"));
    }
    if title.is_empty() {
        found.push("`title` is missing: one line that says what it does".to_owned());
    }
    let numbers: Vec<&str> = version.split('.').collect();
    if numbers.len() != 3 || numbers.iter().any(|n| n.parse::<u32>().is_err()) {
        found.push(format!("version `{version}`: write three numbers, as 1.0.0"));
    }
}

fn relations(manifest: &Manifest, found: &mut Vec<String>) {
    let lists = [
        ("requires", &manifest.requires),
        ("extends", &manifest.extends),
        ("over", &manifest.over),
        ("conflicts", &manifest.conflicts),
    ];
    for (list, ids) in lists {
        for id in ids {
            if *id == manifest.id {
                found.push(format!("{list} names the plugin itself"));
            } else if !is_id(id) {
                found
                    .push(format!("{list} names `{id}`: write the id of a plugin, four digits or base-NAME"));
            }
        }
        once(list, ids.iter().map(String::as_str), found);
    }
    for id in &manifest.conflicts {
        if manifest.requires.contains(id) {
            found.push(format!("requires `{id}` and conflicts with it"));
        }
    }
}

fn once<'a>(what: &str, names: impl Iterator<Item = &'a str>, found: &mut Vec<String>) {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            found.push(format!("{what} has `{name}` twice"));
        }
    }
}

fn points(manifest: &Manifest, found: &mut Vec<String>) {
    for name in &manifest.points {
        if !POINTS.iter().any(|point| point.name == name) {
            let mend = did_you_mean(name, POINTS.iter().map(|point| point.name));
            found.push(format!("`{name}` is no hook point; {mend}"));
        }
    }
    once("points", manifest.points.iter().map(String::as_str), found);
    for by in &manifest.by_name {
        if !manifest.points.contains(&by.kind) {
            found.push(format!("brings {} `{}` and does not list the point `{}`", by.kind, by.name, by.kind));
        }
    }
    for (list, point, empty) in [
        ("routes", "route", manifest.routes.is_empty()),
        ("commands", "subcommand", manifest.commands.is_empty()),
        ("passes", "program", manifest.passes.is_empty()),
        ("layout", "cache.layout", manifest.layout.is_empty()),
    ] {
        if !empty && !manifest.points.iter().any(|name| name == point) {
            found.push(format!("has {list} and does not list the point `{point}`"));
        }
    }
}

fn claims(manifest: &Manifest, found: &mut Vec<String>) {
    let known = |knob: &Option<String>, what: &str, found: &mut Vec<String>| {
        if let Some(key) = knob
            && manifest.knob(key).is_none()
        {
            let mend = did_you_mean(key, manifest.knobs.iter().map(|knob| knob.key.as_str()));
            found.push(format!("{what} stands behind knob `{key}`, which is not declared; {mend}"));
        }
    };
    known(&manifest.off_by, "the plugin", found);
    for claim in &manifest.claims {
        if claim.phases.is_empty() {
            found.push(format!("the claim on `{}` names no phase", claim.op));
        }
        known(&claim.knob, &format!("the claim on `{}`", claim.op), found);
    }
    for cover in &manifest.covers {
        if cover.phases.is_empty() {
            found.push(format!("the cover of {} names no phase", cover.ops.join(", ")));
        }
        if cover.ops.len() < 2 {
            found.push(format!("a cover of {:?} covers nothing but itself: make it a claim", cover.ops));
        }
        known(&cover.knob, &format!("the cover of {}", cover.ops.join(", ")), found);
    }
    once("defines", manifest.defines.iter().map(|d| d.op.as_str()), found);
}

fn tables(manifest: &Manifest, found: &mut Vec<String>) {
    let mut one_of = |what: String, given: &str, valid: &[&str]| {
        if !valid.contains(&given) {
            found.push(format!("{what} is `{given}`; {}", did_you_mean(given, valid.iter().copied())));
        }
    };
    for field in &manifest.fields {
        one_of(format!("field `{}`: per", field.name), &field.per, &["row", "seq", "slot", "once"]);
        one_of(format!("field `{}`: when", field.name), &field.when, &["early", "late"]);
    }
    for header in &manifest.headers {
        one_of(format!("header `{}`: kind", header.name), &header.kind, &["weight", "row", "addressing"]);
    }
    for raise in &manifest.raises {
        one_of("a raised limit".to_owned(), &raise.limit, LIMITS);
    }
    for raise in &manifest.raises {
        if let Some(key) = &raise.knob
            && manifest.knob(key).is_none()
        {
            let mend = did_you_mean(key, manifest.knobs.iter().map(|knob| knob.key.as_str()));
            found.push(format!("raises `{}` by knob `{key}`, which is not declared; {mend}", raise.limit));
        }
    }
    for route in &manifest.routes {
        let good = route.split_once(' ').is_some_and(|(method, path)| {
            ["GET", "POST", "PUT", "DELETE"].contains(&method) && path.starts_with('/')
        });
        if !good {
            found.push(format!("route `{route}`: write METHOD /path"));
        }
    }
    once("passes", manifest.passes.iter().map(|p| p.name.as_str()), found);
    once("parts", manifest.parts.iter().map(|p| p.id.as_str()), found);
    once("sections", manifest.sections.iter().map(|s| s.name.as_str()), found);
    once("riders", manifest.riders.iter().map(|r| r.name.as_str()), found);
    once("fields", manifest.fields.iter().map(|f| f.name.as_str()), found);
    once("words", manifest.words.iter().map(|w| w.name.as_str()), found);
    once("offers", manifest.offers.iter().map(|o| o.service.as_str()), found);
    once("wants", manifest.wants.iter().map(|w| w.service.as_str()), found);
    once("body", manifest.body.iter().map(|b| b.field.as_str()), found);
    once("routes", manifest.routes.iter().map(String::as_str), found);
    once("commands", manifest.commands.iter().map(String::as_str), found);
}

fn knobs(manifest: &Manifest, found: &mut Vec<String>) {
    once("knobs", manifest.knobs.iter().map(|knob| knob.key.as_str()), found);
    for knob in &manifest.knobs {
        let key = &knob.key;
        for problem in knob_problems(knob) {
            found.push(format!("knob `{key}`: {problem}"));
        }
        for name in knob_names(knob) {
            let known = manifest.knob(name).is_some() || LIMITS.contains(&name) || name.contains('.');
            if !known {
                let own = manifest.knobs.iter().map(|knob| knob.key.as_str());
                let mend = did_you_mean(name, own.chain(LIMITS.iter().copied()));
                found.push(format!("knob `{key}`: `{name}` is no limit and no knob of this plugin; {mend}"));
            }
        }
        if knob.per_request() && knob.effect() == Effect::Bits {
            for (what, phases) in own_bits(manifest, key) {
                if phases.iter().any(|phase| *phase != Phase::P) {
                    found.push(format!(
                        "knob `{key}` changes bits per request, and {what} holds outside prefill: a request may change \
                         bits in prefill only (name the knob that a claim stands behind, or make this one load only)"
                    ));
                }
            }
        }
    }
    for extension in &manifest.extends_knobs {
        let knob = &extension.knob;
        let Some((owner, _)) = knob.split_once('.') else {
            found.push(format!("extends knob `{knob}`: write OWNER.KEY"));
            continue;
        };
        if owner == manifest.id {
            found.push(format!("extends its own knob `{knob}`"));
        }
        let wider = matches!(extension.scope, Some(Scope::Both | Scope::Request));
        if wider && (extension.fold.is_none() || extension.request_key.is_none()) {
            found.push(format!("knob `{knob}` per request needs `fold` and `request_key`"));
        }
    }
}

/// Claims with bits of their own that stand behind a knob, or behind none.
fn own_bits<'m>(manifest: &'m Manifest, key: &'m str) -> impl Iterator<Item = (String, &'m [Phase])> {
    let behind = move |knob: &Option<String>| knob.as_deref().is_none_or(|name| name == key);
    let claims = manifest.claims.iter().filter(move |c| behind(&c.knob) && matches!(c.bits, Bits::Own(_)));
    let covers = manifest.covers.iter().filter(move |c| behind(&c.knob) && matches!(c.bits, Bits::Own(_)));
    let claims = claims.map(|c| (format!("its claim on `{}`", c.op), c.phases.as_slice()));
    claims.chain(covers.map(|c| (format!("its cover of {}", c.ops.join(", ")), c.phases.as_slice())))
}

/// Names in the range and default of a knob.
fn knob_names(knob: &KnobSchema) -> Vec<&str> {
    let mut names = knob.range.as_ref().map(crate::Range::names).unwrap_or_default();
    if let Some(text) = &knob.default
        && let Ok(Default::Expr(_)) = knob.default_value()
    {
        // The expression is read again for its borrowed names; it is short.
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'));
        let name = |word: &&str| {
            word.starts_with(|c: char| c.is_ascii_lowercase()) && !["min", "max", "or"].contains(word)
        };
        names.extend(words.filter(name));
    }
    names
}

/// What is wrong with one schema.
pub(crate) fn knob_problems(knob: &KnobSchema) -> Vec<String> {
    let mut found = Vec::new();
    let mut say = |text: &str| found.push(text.to_owned());
    if !is_name(&knob.key, '_') || knob.key.starts_with(|c: char| c.is_ascii_digit()) {
        say("the key must be small letters, digits and `_`");
    }
    let type_ = knob.type_;
    if matches!(type_, KnobType::Enum | KnobType::List) && knob.choices.is_empty() {
        say("an enum or list needs `choices`");
    }
    if !matches!(type_, KnobType::Enum | KnobType::List | KnobType::Int) && !knob.choices.is_empty() {
        say("`choices` are for enums and lists");
    }
    if matches!(type_, KnobType::Int | KnobType::Float) && knob.range.is_none() {
        say("a number needs a `range`, as 1..64 or 0..");
    }
    let numbers = matches!(type_, KnobType::Int | KnobType::Float | KnobType::Ints | KnobType::Tuple);
    if !numbers && knob.range.is_some() {
        say("a `range` is for numbers");
    }
    if (type_ == KnobType::Tuple) == knob.places.is_empty() {
        say("`places` names the places of a tuple, and of nothing else");
    }
    if let Some(range) = &knob.range {
        let places = range.places();
        if type_ == KnobType::Tuple && places != knob.places.len() && places != 1 {
            say("its range has another number of places than `places`");
        }
        if matches!(type_, KnobType::Int | KnobType::Float | KnobType::Ints) && places != 1 {
            say("its range has more than one place");
        }
    }
    if type_ == KnobType::Custom && knob.form.is_none() {
        say("a custom text needs `form`, which says what it may look like");
    }
    if knob.not_in_all.iter().any(|name| !knob.choices.contains(name)) {
        say("`not_in_all` has a name that is no choice");
    }
    match (&knob.default, &knob.unset) {
        (None, None) => say("it needs a `default`, or `unset`, which says what happens without a value"),
        (Some(_), Some(_)) => say("it has both `default` and `unset`"),
        _ => {}
    }
    if knob.step == Some(0) {
        say("a `step` of 0");
    }
    let per_request = knob.per_request();
    if per_request && (knob.fold.is_none() || knob.request_key.is_none()) {
        say("per request it needs `fold` and `request_key`");
    }
    let forms = knob.request_on.is_some() || knob.request_off.is_some() || knob.at_most_loaded;
    if !per_request && (knob.fold.is_some() || knob.request_key.is_some() || forms) {
        say("it is load only, but says how requests set it");
    }
    if per_request && knob.load_only.is_some() {
        say("`load_only` says why a request cannot set it, but one can");
    }
    if knob.request_on.is_some() != knob.request_off.is_some() {
        say("`request_on` and `request_off` come together");
    }
    if per_request && knob.effect() == Effect::Bits && knob.fold() != Fold::Split {
        say(
            "it changes bits per request (an undeclared effect means bits): unequal rows must never share a call, so its \
             fold is split",
        );
    }
    let switch =
        matches!(knob.fold, Some(Fold::All | Fold::Any)) && !matches!(type_, KnobType::Bool | KnobType::Int);
    let order =
        matches!(knob.fold, Some(Fold::Min | Fold::Max)) && !matches!(type_, KnobType::Int | KnobType::Float);
    if switch || order {
        say("its fold does not fit its type (all, any: bool; min, max: numbers)");
    }
    match knob.default_value() {
        Err(problem) => say(&problem),
        Ok(Default::Value(value)) => {
            let literal = |name: &str| Expr::parse(name).ok().and_then(|e| e.eval(&|_: &str| None).ok());
            if let Err(error) = knob.check(&value, &literal) {
                say(&format!("its default {error}"));
            }
        }
        Ok(Default::Expr(_) | Default::Unset) => {}
    }
    for text in [&knob.request_on, &knob.request_off].into_iter().flatten() {
        if let Err(error) = knob.parse(&crate::Raw::Plain(text.clone())) {
            say(&format!("what a request's 1 or 0 stands for {error}"));
        }
    }
    found
}
