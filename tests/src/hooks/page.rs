//! `docs/HOOKS.md` and `host/assets/catalogue.toml`, written from the map.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::{Entry, Kind, Knob, Map, Need, POINTS, Phase};

/// Command that writes both files anew.
pub const RENEW: &str = "cargo run -p plugfold-tests --bin hooks-doc";

fn code(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("`{}`", name.as_ref())).collect();
    names.join(", ")
}

fn plain(ids: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    ids.into_iter().map(|id| id.as_ref().to_owned()).collect::<Vec<_>>().join(", ")
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn phases(phases: &[Phase]) -> String {
    let letter = |phase: &Phase| match phase {
        Phase::W => 'W',
        Phase::D => 'D',
        Phase::P => 'P',
    };
    phases.iter().map(letter).collect()
}

/// The readable map.
pub fn hooks_page(map: &Map) -> String {
    let mut page = String::new();
    page.push_str("<!-- Written from docs/hooks.toml by `");
    page.push_str(RENEW);
    page.push_str("`; a test fails while it is stale. -->\n\n");
    page.push_str(HEAD);
    points(map, &mut page);
    operations(map, &mut page);
    registers(map, &mut page);
    page.push_str("\n## Entries\n");
    for entry in &map.entries {
        section(map, entry, &mut page);
    }
    page.push_str("\n## What the entries build on\n");
    for base in &map.bases {
        section(map, base, &mut page);
    }
    papers(map, &mut page);
    holes(map, &mut page);
    page
}

const HEAD: &str = "\
# Hook points: the map of all entries

Every optimization of the catalogue, the hook points it uses, what it needs from them and why it fits. The data are in
`docs/hooks.toml`; a plugin's manifest has to agree with its entry. Points and the rules by which plugins combine are
explained in `docs/ARCHITECTURE.md`.

W window (decode and verify), D draft, P prefill. *own* bits are an arithmetic of their own; *of* a name means proven
equal to that arithmetic, `ref` being the reference. A knob's effect says what it can change: bits, schedule, drafts,
speed or host; what is not declared counts as bits.
";

fn table(page: &mut String, title: &str, head: &[&str], rows: Vec<Vec<String>>) {
    if rows.is_empty() {
        return;
    }
    let _ = write!(page, "\n{title}\n\n| {} |\n|{}\n", head.join(" | "), " --- |".repeat(head.len()));
    for row in rows {
        let cells: Vec<String> = row.iter().map(|text| cell(text)).collect();
        let _ = writeln!(page, "| {} |", cells.join(" | "));
    }
}

fn points(map: &Map, page: &mut String) {
    page.push_str("\n## Points and who uses them\n");
    for kind in Kind::ALL {
        let rows = POINTS
            .iter()
            .filter(|point| point.kind == kind)
            .map(|point| {
                let users = map.all().filter(|entry| entry.points.iter().any(|name| name == point.name));
                vec![format!("`{}`", point.name), plain(users.map(|entry| &entry.id))]
            })
            .collect();
        table(page, &format!("### {}", kind.title()), &["point", "entries"], rows);
    }
}

fn operations(map: &Map, page: &mut String) {
    let mut users: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut definers: BTreeMap<&str, &str> = BTreeMap::new();
    for entry in map.all() {
        for definition in &entry.defines {
            definers.insert(&definition.op, &entry.id);
            users.entry(&definition.op).or_default();
        }
        let mut seen = BTreeSet::new();
        for claim in &entry.claims {
            let text = format!("{} {} {}", entry.id, phases(&claim.phases), claim.bits);
            if seen.insert((&claim.op, text.clone())) {
                users.entry(&claim.op).or_default().push(text);
            }
        }
        for cover in &entry.covers {
            let ops: BTreeSet<&String> = cover.ops.iter().collect();
            for op in ops {
                let text = format!("{} {} {} (cover)", entry.id, phases(&cover.phases), cover.bits);
                if seen.insert((op, text.clone())) {
                    users.entry(op).or_default().push(text);
                }
            }
        }
    }
    let rows = users
        .iter()
        .map(|(op, users)| {
            let definer = definers.get(op).copied().unwrap_or("core");
            vec![format!("`{op}`"), definer.to_owned(), users.join("; ")]
        })
        .collect();
    table(page, "### Operations", &["operation", "defined by", "claimed by"], rows);
}

fn registers(map: &Map, page: &mut String) {
    fn rows<T>(
        map: &Map,
        list: impl Fn(&Entry) -> &[T],
        row: impl Fn(&Entry, &T) -> Vec<String>,
    ) -> Vec<Vec<String>> {
        map.all()
            .flat_map(|entry| list(entry).iter().map(|item| row(entry, item)).collect::<Vec<_>>())
            .collect()
    }
    page.push_str("\n## Registers\n");
    let named =
        |entry: &Entry, name: &str, what: &str| vec![format!("`{name}`"), entry.id.clone(), what.to_owned()];
    let three = ["name", "entry", "meaning"];
    let fields = rows(
        map,
        |e| &e.fields,
        |e, f| {
            vec![
                format!("`{}`", f.name),
                e.id.clone(),
                format!("{} a {}", f.dtype, f.per),
                f.when.clone(),
                f.what.clone(),
            ]
        },
    );
    let head = ["field", "entry", "element", "filled", "meaning"];
    table(page, "### Round-table fields", &head, fields);
    table(page, "### Shape words", &three, rows(map, |e| &e.words, |e, w| named(e, &w.name, &w.what)));
    let services = rows(
        map,
        |e| &e.offers,
        |e, offer| {
            let wants = map.all().filter_map(|other| {
                let want = other.wants.iter().find(|want| want.service == offer.service)?;
                Some(match want.need {
                    Need::Required => other.id.clone(),
                    Need::Optional => format!("({})", other.id),
                })
            });
            vec![format!("`{}`", offer.service), e.id.clone(), plain(wants), offer.what.clone()]
        },
    );
    let head = ["service", "offered by", "wanted by (optional)", "meaning"];
    table(page, "### Services", &head, services);
    let lists: [(&str, Vec<Vec<String>>); 11] = [
        ("Passes", rows(map, |e| &e.passes, |e, p| named(e, &p.name, &p.what))),
        ("Cache table edits", rows(map, |e| &e.layout, |e, l| named(e, &l.family, &l.edit))),
        ("State parts", rows(map, |e| &e.parts, |e, p| named(e, &p.id, &p.what))),
        ("Plan sections", rows(map, |e| &e.sections, |e, s| named(e, &s.name, &s.what))),
        ("Riders", rows(map, |e| &e.riders, |e, r| named(e, &r.name, &r.what))),
        ("Attachments", rows(map, |e| &e.attachments, |e, a| named(e, &a.name, &a.what))),
        ("Device headers", rows(map, |e| &e.headers, |e, h| named(e, &h.name, &h.what))),
        ("Limits raised", rows(map, |e| &e.raises, |e, r| named(e, &r.limit, &r.to))),
        ("Chosen by name", rows(map, |e| &e.by_name, |e, b| named(e, &b.name, &b.kind))),
        ("Draft policy forms", rows(map, |e| &e.policies, |e, p| named(e, &p.forms.join("`, `"), &p.what))),
        ("Body fields", rows(map, |e| &e.body, |e, b| named(e, &b.field, &b.what))),
    ];
    for (title, rows) in lists {
        table(page, &format!("### {title}"), &three, rows);
    }
}

fn line(page: &mut String, label: &str, text: &str) {
    if !text.is_empty() {
        let _ = writeln!(page, "- {label}: {text}");
    }
}

fn with_note(text: String, note: Option<&str>) -> String {
    match note {
        Some(note) => format!("{text} ({note})"),
        None => text,
    }
}

fn section(map: &Map, entry: &Entry, page: &mut String) {
    let name = if entry.name.is_empty() { &entry.title } else { &entry.name };
    let _ = writeln!(page, "\n### {} {}\n", entry.id, name);
    if let Some(class) = entry.class {
        let _ = write!(page, "*{}*", class.word());
        if !entry.status.is_empty() {
            let _ = write!(page, " · upstream {}", entry.status);
        }
        if entry.in_server {
            page.push_str(" · done by the server, without a plugin");
        }
        page.push_str("\n\n");
    }
    let _ = writeln!(page, "{}\n", entry.uses);
    line(page, "requires", &plain(&entry.requires));
    line(page, "extends", &plain(&entry.extends));
    line(page, "over", &plain(&entry.over));
    line(page, "conflicts", &plain(&entry.conflicts));
    line(page, "class", entry.class_why.as_deref().unwrap_or_default());
    line(page, "points", &code(&entry.points));
    for definition in &entry.defines {
        line(page, "defines", &format!("`{}`: {}", definition.op, definition.what));
    }
    for claim in &entry.claims {
        let mut text = format!("`{}` {} {}", claim.op, phases(&claim.phases), claim.bits);
        if !claim.weight.is_empty() {
            let _ = write!(text, ", weights {}", code(&claim.weight));
        }
        if !claim.cache.is_empty() {
            let _ = write!(text, ", rows {}", code(&claim.cache));
        }
        if let Some(addressing) = &claim.addressing {
            let _ = write!(text, ", addressing `{addressing}`");
        }
        line(page, "claims", &with_note(text, claim.when.as_deref()));
    }
    for cover in &entry.covers {
        let text = format!("{} {} {}", code(&cover.ops), phases(&cover.phases), cover.bits);
        line(page, "covers", &with_note(text, cover.when.as_deref()));
    }
    for family in &entry.families {
        line(page, "family", &format!("`{}`: {}", family.knob, code(&family.values)));
    }
    for pass in &entry.passes {
        line(page, "pass", &format!("`{}` {}: {}", pass.name, phases(&pass.phases), pass.what));
    }
    for edit in &entry.layout {
        line(page, "cache table", &format!("`{}`: {}", edit.family, edit.edit));
    }
    for part in &entry.parts {
        line(page, "part", &format!("`{}`: {}", part.id, part.what));
    }
    let groups = [
        ("plan section", &entry.sections),
        ("rider", &entry.riders),
        ("word", &entry.words),
        ("attachment", &entry.attachments),
        ("collective", &entry.collectives),
    ];
    for (label, list) in groups {
        for item in list {
            line(page, label, &format!("`{}`: {}", item.name, item.what));
        }
    }
    for field in &entry.fields {
        let text =
            format!("`{}` {} a {}, {}: {}", field.name, field.dtype, field.per, field.when, field.what);
        line(page, "field", &text);
    }
    for header in &entry.headers {
        line(page, "header", &format!("{} `{}`: {}", header.kind, header.name, header.what));
    }
    for offer in &entry.offers {
        line(page, "offers", &format!("`{}`: {}", offer.service, offer.what));
    }
    for want in &entry.wants {
        let need = if want.need == Need::Required { "needs" } else { "uses if there" };
        let by = map.all().find(|e| e.offers.iter().any(|o| o.service == want.service));
        let by = by.map_or("nobody", |e| e.id.as_str());
        line(page, need, &format!("`{}` of {by}: {}", want.service, want.what));
    }
    for raise in &entry.raises {
        line(page, "limit", &format!("`{}`: {}", raise.limit, raise.to));
    }
    for by in &entry.by_name {
        line(page, "brings", &format!("{} `{}`", by.kind, by.name));
    }
    for policy in &entry.policies {
        line(page, "policy", &format!("{}: {}", code(&policy.forms), policy.what));
    }
    for field in &entry.body {
        line(page, "body", &format!("`{}`: {}", field.field, field.what));
    }
    line(page, "routes", &code(&entry.routes));
    line(page, "subcommands", &code(&entry.commands));
    for extension in &entry.extends_knobs {
        let mut parts = Vec::new();
        if !extension.choices.is_empty() {
            parts.push(format!("choices {}", code(&extension.choices)));
        }
        if !extension.words.is_empty() {
            parts.push(format!("words {}", code(&extension.words)));
        }
        if let (Some(fold), Some(key)) = (extension.fold, &extension.request_key) {
            parts.push(format!("per request as `{key}`, fold {fold}"));
        }
        let text = format!("`{}`: {}", extension.knob, parts.join("; "));
        line(page, "extends knob", &with_note(text, extension.note.as_deref()));
    }
    let holes: Vec<&str> = map
        .holes
        .iter()
        .map(|hole| hole.id.as_str())
        .filter(|id| entry.holes.iter().any(|h| h == id))
        .collect();
    let links: Vec<String> = holes.iter().map(|id| format!("[{id}](#hole-{id})")).collect();
    line(page, "waits for", &links.join(", "));
    knob_table(entry, page);
}

fn knob_table(entry: &Entry, page: &mut String) {
    if entry.knobs.is_empty() {
        return;
    }
    page.push_str("\n| knob | environment | values | default | scope | effect | where |\n");
    page.push_str("| --- | --- | --- | --- | --- | --- | --- |\n");
    for knob in &entry.knobs {
        let scope = match (&knob.request_key, knob.fold) {
            (Some(key), Some(fold)) => format!("{}, `{key}`, fold {}", knob.scope, fold),
            _ => knob.scope.to_string(),
        };
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} | {scope} | {} | {} |",
            knob.key,
            code(&knob.env),
            cell(&values(knob)),
            cell(knob.default.as_ref().or(knob.unset.as_ref()).map_or("", String::as_str)),
            knob.effect(),
            knob.place(),
        );
    }
}

fn values(knob: &Knob) -> String {
    let mut text = format!("{:?}", knob.type_).to_lowercase();
    if !knob.choices.is_empty() {
        let _ = write!(text, " {}", knob.choices.join(", "));
    }
    if !knob.places.is_empty() {
        let _ = write!(text, " {}", knob.places.join(","));
    }
    if let Some(range) = &knob.range {
        let _ = write!(text, " {range}");
    }
    if let Some(form) = &knob.form {
        let _ = write!(text, ": {form}");
    }
    if let Some(step) = knob.step {
        let _ = write!(text, ", multiples of {step}");
    }
    if let Some(rule) = &knob.rule {
        let _ = write!(text, ", {rule}");
    }
    if !knob.words.is_empty() {
        let _ = write!(text, "; or {}", knob.words.join(", "));
    }
    if !knob.not_in_all.is_empty() {
        let _ = write!(text, "; all leaves out {}", knob.not_in_all.join(", "));
    }
    text
}

fn papers(map: &Map, page: &mut String) {
    if map.papers.is_empty() {
        return;
    }
    page.push_str("\n## Walked through on paper\n");
    for paper in &map.papers {
        let _ = write!(page, "\n### {} {}\n\n{}", paper.id, paper.title, paper.text.trim_start());
    }
}

fn holes(map: &Map, page: &mut String) {
    page.push_str("\n## What the ABI still needs\n\nMost important first; in brackets who needs it.\n");
    for hole in &map.holes {
        let users = map.all().filter(|entry| entry.holes.contains(&hole.id)).map(|entry| &entry.id);
        let _ = write!(
            page,
            "\n<a id=\"hole-{}\"></a>\n### {}\n\n[{}]\n\n{}",
            hole.id,
            hole.title,
            plain(users),
            hole.need.trim_start()
        );
    }
}

/// What the program knows of every plugin: original environment names, request keys, names, switches.
pub fn catalogue_page(map: &Map) -> String {
    let mut page = format!(
        "# What is known of every plugin of the catalogue, for messages and for importing shell profiles; written from\n\
         # docs/hooks.toml by `{RENEW}`.\n\n\
         # Environment names and the knobs they stand for. A name that ends in * stands for all that begin so and have no\n\
         # line.\n[aliases]\n"
    );
    for (env, knob) in map.aliases() {
        let _ = writeln!(page, "\"{env}\" = \"{knob}\"");
    }
    page.push_str("\n# Request keys.\n[requests]\n");
    let own = map.all().flat_map(|entry| {
        let keys = entry.knobs.iter().filter_map(|knob| Some((knob.request_key.clone()?, &knob.key)));
        keys.map(|(request, key)| (request, format!("{}.{key}", entry.id)))
    });
    let extended = map.all().flat_map(|entry| &entry.extends_knobs);
    let extended = extended.filter_map(|e| Some((e.request_key.clone()?, e.knob.clone())));
    for (request, knob) in own.chain(extended).collect::<BTreeMap<_, _>>() {
        let _ = writeln!(page, "\"{request}\" = \"{knob}\"");
    }
    for entry in map.all() {
        owner(map, entry, &mut page);
    }
    page
}

fn owner(map: &Map, entry: &Entry, page: &mut String) {
    let list =
        |names: Vec<&str>| names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
    let _ = writeln!(page, "\n[owners.\"{}\"]", entry.id);
    for (key, value) in [("name", &entry.name), ("status", &entry.status)] {
        if !value.is_empty() {
            let _ = writeln!(page, "{key} = \"{value}\"");
        }
    }
    if entry.in_server {
        page.push_str("in_server = true\n");
    }
    if !entry.requires.is_empty() {
        let _ = writeln!(page, "requires = [{}]", list(entry.requires.iter().map(String::as_str).collect()));
    }
    if !entry.knobs.is_empty() {
        let _ =
            writeln!(page, "keys = [{}]", list(entry.knobs.iter().map(|knob| knob.key.as_str()).collect()));
    }
    let adds = entry
        .extends_knobs
        .iter()
        .flat_map(|e| e.choices.iter().chain(&e.words).map(move |value| format!("{}={value}", e.knob)));
    let adds: Vec<String> = adds.collect();
    if !adds.is_empty() {
        let _ = writeln!(page, "adds = [{}]", list(adds.iter().map(String::as_str).collect()));
    }
    let Some(switch) = entry.switch.as_ref().or(entry.knobs.first().map(|knob| &knob.key)) else { return };
    let _ = writeln!(page, "switch = \"{switch}\"");
    let path = switch.split_once('=').map_or(switch.as_str(), |(path, _)| path.trim_end_matches('!'));
    let (id, key) = path.split_once('.').unwrap_or((&entry.id, path));
    let knob = map.get(id).and_then(|owner| owner.knob(key));
    if let Some(default) = knob.and_then(|knob| knob.default.as_ref()) {
        let _ = writeln!(page, "default = \"{default}\"");
    }
}
