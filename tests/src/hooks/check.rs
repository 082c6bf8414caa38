//! What must hold in the map.

use std::collections::{BTreeMap, BTreeSet};

use super::{Bits, Entry, Knob, Map, Need, POINTS, Phase, Scope};

/// Names of the operations in the table of `core/abi/src/ops.rs`, read from its page.
pub fn table_operations(source: &str) -> BTreeSet<String> {
    source
        .lines()
        .filter_map(|line| line.strip_prefix("//! | `"))
        .filter_map(|rest| rest.split_once('`'))
        .map(|(op, _)| op.to_owned())
        .collect()
}

/// Ids that are missing, doubled or unknown against the catalogue's list.
pub fn catalogue_problems(map: &Map, catalogue: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for id in catalogue {
        match map.entries.iter().filter(|entry| entry.id == *id).count() {
            1 => {}
            0 => found.push(format!("{id}: missing")),
            times => found.push(format!("{id}: written {times} times")),
        }
    }
    for entry in &map.entries {
        if !catalogue.contains(&entry.id.as_str()) {
            found.push(format!("{}: not in the catalogue", entry.id));
        }
    }
    found
}

/// Everything that is wrong with a map; `table` holds the operations of the core.
pub fn problems(map: &Map, table: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    manifests(map, &mut found);
    unique_names(map, &mut found);
    references(map, &mut found);
    operations(map, table, &mut found);
    knobs(map, &mut found);
    services(map, &mut found);
    arithmetics(map, &mut found);
    classes(map, &mut found);
    if let Some(cycle) = cycle(map) {
        found.push(format!("order: {} wait for each other by requires, extends and over", cycle.join(", ")));
    }
    found
}

fn once<'a>(what: &str, names: impl Iterator<Item = (&'a str, String)>, found: &mut Vec<String>) {
    let mut first: BTreeMap<String, &str> = BTreeMap::new();
    for (owner, name) in names {
        if let Some(other) = first.get(&name) {
            found.push(format!("{owner}: {what} `{name}` is {other}'s already"));
        } else {
            first.insert(name, owner);
        }
    }
}

fn unique_names(map: &Map, found: &mut Vec<String>) {
    fn names<'a, T: 'a>(
        map: &'a Map,
        list: impl Fn(&'a Entry) -> &'a [T] + 'a,
        name: impl Fn(&'a T) -> String + Copy + 'a,
    ) -> impl Iterator<Item = (&'a str, String)> + 'a {
        map.all().flat_map(move |entry| list(entry).iter().map(move |item| (entry.id.as_str(), name(item))))
    }
    once("id", map.all().map(|entry| ("the map", entry.id.clone())), found);
    once("hole", map.holes.iter().map(|hole| ("the map", hole.id.clone())), found);
    once("operation", names(map, |e| &e.defines, |d| d.op.clone()), found);
    once("pass", names(map, |e| &e.passes, |p| p.name.clone()), found);
    once("part", names(map, |e| &e.parts, |p| p.id.clone()), found);
    once("section", names(map, |e| &e.sections, |s| s.name.clone()), found);
    once("rider", names(map, |e| &e.riders, |r| r.name.clone()), found);
    once("round-table field", names(map, |e| &e.fields, |f| f.name.clone()), found);
    once("word", names(map, |e| &e.words, |w| w.name.clone()), found);
    once("header", names(map, |e| &e.headers, |h| format!("{} {}", h.kind, h.name)), found);
    once("service", names(map, |e| &e.offers, |o| o.service.clone()), found);
    once("named choice", names(map, |e| &e.by_name, |b| format!("{} {}", b.kind, b.name)), found);
    once("policy form", names(map, |e| &e.policies, |p| p.forms.join(" ")), found);
    once("body field", names(map, |e| &e.body, |b| b.field.clone()), found);
    once("route", names(map, |e| &e.routes, Clone::clone), found);
    once("subcommand", names(map, |e| &e.commands, Clone::clone), found);
    once(
        "knob",
        names(map, |e| &e.knobs, |k| k.key.clone()).map(|(id, key)| (id, format!("{id}.{key}"))),
        found,
    );
    let env = map.all().flat_map(|entry| {
        entry.knobs.iter().flat_map(|knob| knob.env.iter().map(|env| (entry.id.as_str(), env.clone())))
    });
    once("environment name", env, found);
    let requests = map.all().flat_map(|entry| {
        let own = entry.knobs.iter().filter_map(|knob| knob.request_key.clone());
        let extended = entry.extends_knobs.iter().filter_map(|knob| knob.request_key.clone());
        own.chain(extended).map(|key| (entry.id.as_str(), key))
    });
    once("request key", requests, found);
}

fn references(map: &Map, found: &mut Vec<String>) {
    let holes: BTreeSet<&str> = map.holes.iter().map(|hole| hole.id.as_str()).collect();
    for entry in map.all() {
        let lists = [
            ("requires", &entry.requires),
            ("extends", &entry.extends),
            ("over", &entry.over),
            ("conflicts", &entry.conflicts),
        ];
        for (list, ids) in lists {
            for id in ids {
                if map.get(id).is_none() {
                    found.push(format!("{}: {list} names `{id}`, which does not exist", entry.id));
                } else if *id == entry.id {
                    found.push(format!("{}: {list} names itself", entry.id));
                }
            }
        }
        for name in &entry.points {
            if !POINTS.iter().any(|point| point.name == name) {
                found.push(format!("{}: `{name}` is no hook point", entry.id));
            }
        }
        for by in &entry.by_name {
            if !entry.points.contains(&by.kind) {
                found
                    .push(format!("{}: brings {} `{}` without using that point", entry.id, by.kind, by.name));
            }
        }
        let needs_point = [
            ("program", entry.passes.is_empty()),
            ("cache.layout", entry.layout.is_empty()),
            ("limits", entry.raises.is_empty()),
            ("route", entry.routes.is_empty()),
            ("subcommand", entry.commands.is_empty()),
            ("request.prepare", entry.attachments.is_empty()),
        ];
        for (point, unused) in needs_point {
            if !unused && !entry.points.iter().any(|name| name == point) {
                found.push(format!("{}: needs the point `{point}` and does not list it", entry.id));
            }
        }
        for field in &entry.fields {
            if !["row", "seq", "slot", "once"].contains(&field.per.as_str()) {
                found.push(format!("{}: field `{}` is per `{}`", entry.id, field.name, field.per));
            }
            if !["early", "late"].contains(&field.when.as_str()) {
                found.push(format!("{}: field `{}` is filled `{}`", entry.id, field.name, field.when));
            }
        }
        for hole in &entry.holes {
            if !holes.contains(hole.as_str()) {
                found.push(format!("{}: hole `{hole}` is not described", entry.id));
            }
        }
        if entry.uses.len() < 40 {
            found.push(format!("{}: does not say how it uses the points", entry.id));
        }
    }
    for paper in &map.papers {
        if map.get(&paper.id).is_none() {
            found.push(format!("paper `{}`: there is no such entry", paper.id));
        }
    }
    for hole in &map.holes {
        if !map.all().any(|entry| entry.holes.contains(&hole.id)) {
            found.push(format!("hole `{}`: no entry needs it", hole.id));
        }
    }
}

fn operations(map: &Map, table: &BTreeSet<String>, found: &mut Vec<String>) {
    let defined: BTreeSet<&str> = map.all().flat_map(|e| e.defines.iter().map(|d| d.op.as_str())).collect();
    for entry in &map.entries {
        for definition in &entry.defines {
            if table.contains(&definition.op) {
                found.push(format!("{}: defines `{}`, which the core has", entry.id, definition.op));
            }
        }
    }
    for entry in map.all() {
        let claimed = entry.claims.iter().map(|claim| (&claim.op, &claim.phases));
        let covered = entry.covers.iter().flat_map(|c| c.ops.iter().map(|op| (op, &c.phases)));
        for (op, phases) in claimed.chain(covered) {
            if !table.contains(op) && !defined.contains(op.as_str()) {
                found.push(format!("{}: operation `{op}` is in no table and no entry defines it", entry.id));
            }
            if phases.is_empty() {
                found.push(format!("{}: the claim on `{op}` names no phase", entry.id));
            }
        }
        for cover in entry.covers.iter().filter(|cover| cover.ops.len() < 2) {
            found.push(format!("{}: a cover of {:?} covers nothing but itself", entry.id, cover.ops));
        }
    }
}

fn knobs(map: &Map, found: &mut Vec<String>) {
    for entry in map.all() {
        for knob in &entry.knobs {
            for problem in knob_problems(knob) {
                found.push(format!("{}.{}: {problem}", entry.id, knob.key));
            }
        }
        for extension in &entry.extends_knobs {
            let owner = extension.knob.split_once('.');
            let target = owner.and_then(|(id, key)| {
                let owner = map.get(id)?;
                owner.knobs.iter().find(|knob| knob.key == key).map(|knob| (owner, knob))
            });
            let Some((owner, knob)) = target else {
                found.push(format!("{}: extends knob `{}`, which nobody owns", entry.id, extension.knob));
                continue;
            };
            let known = !owner.title.is_empty()
                || entry.extends.contains(&owner.id)
                || closure(map, entry).contains(owner.id.as_str());
            if !known {
                found.push(format!(
                    "{}: extends knob `{}` of a plugin that it neither requires nor extends",
                    entry.id, extension.knob
                ));
            }
            if extension.choices.iter().any(|choice| knob.choices.contains(choice)) {
                found.push(format!("{}: `{}` has one of these choices already", entry.id, extension.knob));
            }
            let wider = matches!(extension.scope, Some(Scope::Both | Scope::Request));
            if wider && (extension.fold.is_none() || extension.request_key.is_none()) {
                found.push(format!(
                    "{}: `{}` per request needs fold and request_key",
                    entry.id, extension.knob
                ));
            }
        }
    }
}

/// What the map asks of a knob beyond what a manifest does.
fn knob_problems(knob: &Knob) -> Vec<String> {
    let mut found = Vec::new();
    if knob.effect.is_none() {
        found.push("no effect".to_owned());
    }
    if knob.place.is_none() {
        found.push("no place (where)".to_owned());
    }
    if knob.scope == Scope::Load && knob.env.is_empty() {
        found.push("no environment name".to_owned());
    }
    found
}

/// What every manifest must hold to by itself; the map describes plugins, not releases of them.
fn manifests(map: &Map, found: &mut Vec<String>) {
    for entry in map.all() {
        let mut manifest = entry.manifest.clone();
        "1.0.0".clone_into(&mut manifest.version);
        if manifest.title.is_empty() {
            "an entry of the map".clone_into(&mut manifest.title);
        }
        let built_in = ["engine", "server", "launch"].contains(&entry.id.as_str());
        let about_plugins = |problem: &String| problem.starts_with("id ") || problem.starts_with("name ");
        let problems =
            manifest.problems().into_iter().filter(|problem| !(built_in && about_plugins(problem)));
        found.extend(problems.map(|problem| format!("{}: {problem}", entry.id)));
    }
}

/// What must be loaded whenever an entry is.
fn closure<'a>(map: &'a Map, entry: &'a Entry) -> BTreeSet<&'a str> {
    let mut all = BTreeSet::new();
    let mut open: Vec<&str> = entry.requires.iter().map(String::as_str).collect();
    while let Some(id) = open.pop() {
        if all.insert(id) {
            open.extend(map.get(id).into_iter().flat_map(|next| next.requires.iter().map(String::as_str)));
        }
    }
    all
}

fn services(map: &Map, found: &mut Vec<String>) {
    for entry in map.all() {
        for want in &entry.wants {
            let Some(provider) = map.all().find(|e| e.offers.iter().any(|o| o.service == want.service))
            else {
                found.push(format!("{}: wants service `{}`, which nobody offers", entry.id, want.service));
                continue;
            };
            let base = !provider.title.is_empty();
            // What the server does is always there.
            let there = base || provider.in_server;
            if want.need == Need::Required && !there && !closure(map, entry).contains(provider.id.as_str()) {
                found.push(format!(
                    "{}: needs service `{}` of {} and does not require it",
                    entry.id, want.service, provider.id
                ));
            }
        }
    }
}

/// A claim's side of the question whether two arithmetics can meet on a call.
struct Side<'a> {
    entry: &'a Entry,
    op: &'a str,
    bits: &'a Bits,
    phases: &'a [Phase],
    weight: &'a [String],
    cache: &'a [String],
}

fn sides(map: &Map) -> Vec<Side<'_>> {
    let mut sides = Vec::new();
    for entry in map.all() {
        for claim in &entry.claims {
            sides.push(Side {
                entry,
                op: &claim.op,
                bits: &claim.bits,
                phases: &claim.phases,
                weight: &claim.weight,
                cache: &claim.cache,
            });
        }
        for cover in &entry.covers {
            for op in &cover.ops {
                let (bits, phases, weight) = (&cover.bits, &cover.phases, &cover.weight);
                sides.push(Side { entry, op, bits, phases, weight, cache: &[] });
            }
        }
    }
    sides
}

fn formats_meet(a: &[String], b: &[String]) -> bool {
    let fits =
        |pattern: &str, name: &str| pattern.strip_suffix('*').is_some_and(|start| name.starts_with(start));
    a.is_empty() || b.is_empty() || a.iter().any(|x| b.iter().any(|y| x == y || fits(x, y) || fits(y, x)))
}

fn stands_over(map: &Map, upper: &Entry, lower: &str, seen: &mut BTreeSet<String>) -> bool {
    upper.over.iter().any(|id| {
        id == lower
            || (seen.insert(id.clone())
                && map.get(id).is_some_and(|between| stands_over(map, between, lower, seen)))
    })
}

/// Two arithmetics on one call of which neither is over the other refuse to start; so must the map.
fn arithmetics(map: &Map, found: &mut Vec<String>) {
    let sides = sides(map);
    let own: BTreeSet<&str> = sides
        .iter()
        .filter_map(|side| if let Bits::Own(name) = side.bits { Some(name.as_str()) } else { None })
        .collect();
    for side in &sides {
        if let Bits::Of(name) = side.bits
            && name != "ref"
            && !own.contains(name.as_str())
        {
            found.push(format!("{}: `{}` of `{name}`, which nobody has", side.entry.id, side.op));
        }
    }
    let mut told = BTreeSet::new();
    for (index, a) in sides.iter().enumerate() {
        for b in &sides[index + 1..] {
            let (Bits::Own(mine), Bits::Own(theirs)) = (a.bits, b.bits) else { continue };
            let meets = a.op == b.op
                && mine != theirs
                && a.entry.id != b.entry.id
                && a.phases.iter().any(|phase| b.phases.contains(phase))
                && formats_meet(a.weight, b.weight)
                && formats_meet(a.cache, b.cache)
                && !a.entry.conflicts.contains(&b.entry.id)
                && !b.entry.conflicts.contains(&a.entry.id);
            let over = |upper: &Entry, lower: &str| stands_over(map, upper, lower, &mut BTreeSet::new());
            if meets
                && !over(a.entry, &b.entry.id)
                && !over(b.entry, &a.entry.id)
                && told.insert((a.op, &a.entry.id, &b.entry.id))
            {
                found.push(format!(
                    "{} and {}: `{}` by `{mine}` and by `{theirs}`, and neither is over the other",
                    a.entry.id, b.entry.id, a.op
                ));
            }
        }
    }
}

fn classes(map: &Map, found: &mut Vec<String>) {
    for entry in &map.entries {
        let Some(class) = entry.class else {
            found.push(format!("{}: no class", entry.id));
            continue;
        };
        let claimed = entry.manifest.class();
        if claimed > class && entry.class_why.is_none() {
            found.push(format!("{}: shown as {class:?}, but a claim is {claimed:?}", entry.id));
        }
        if claimed <= class && entry.class_why.is_some() {
            found.push(format!("{}: explains a class that its claims agree with", entry.id));
        }
    }
}

/// Entries that can never be put into an order.
fn cycle(map: &Map) -> Option<Vec<String>> {
    let mut left: BTreeMap<&str, BTreeSet<&str>> = map
        .all()
        .map(|entry| {
            let before = entry.requires.iter().chain(&entry.extends).chain(&entry.over);
            (entry.id.as_str(), before.map(String::as_str).filter(|id| map.get(id).is_some()).collect())
        })
        .collect();
    loop {
        let free: Vec<&str> =
            left.iter().filter(|(_, before)| before.is_empty()).map(|(id, _)| *id).collect();
        if free.is_empty() {
            break;
        }
        for id in &free {
            left.remove(id);
        }
        for before in left.values_mut() {
            before.retain(|id| !free.contains(id));
        }
    }
    if left.is_empty() { None } else { Some(left.keys().map(|id| (*id).to_owned()).collect()) }
}
