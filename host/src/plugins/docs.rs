//! Pages about plugins, from their manifests alone: `plugins inspect` and `plugins docs`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use plugfold_manifest::{KnobSchema, Manifest};

use super::PluginError;

/// The table of operations of the core, as its source has it.
const OPERATIONS: &str = include_str!("../../../core/abi/src/ops.rs");
const MADE: &str = "<!-- Made by `plugfold plugins docs`. -->\n\n";

fn list(text: &mut String, what: &str, items: &[String]) {
    if !items.is_empty() {
        let _ = writeln!(text, "- {what}: {}", items.join(", "));
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// What a plugin claims, needs, brings and can be set to.
pub fn page(manifest: &Manifest) -> String {
    let mut text = format!("# {}: {}\n\n", manifest.label(), manifest.title);
    let _ = writeln!(text, "- class: {}\n- version: {}", manifest.class(), manifest.version);
    list(&mut text, "requires", &manifest.requires);
    list(&mut text, "extends", &manifest.extends);
    list(&mut text, "over", &manifest.over);
    list(&mut text, "conflicts with", &manifest.conflicts);
    list(&mut text, "devices", &manifest.devices);
    list(&mut text, "hook points", &manifest.points);
    list(&mut text, "state parts", &names(&manifest.parts, |p| &p.id));
    list(&mut text, "plan sections", &names(&manifest.sections, |s| &s.name));
    list(&mut text, "riders", &names(&manifest.riders, |r| &r.name));
    list(&mut text, "round-table fields", &names(&manifest.fields, |f| &f.name));
    list(&mut text, "shape words", &names(&manifest.words, |w| &w.name));
    list(&mut text, "services offered", &names(&manifest.offers, |o| &o.service));
    list(&mut text, "services wanted", &names(&manifest.wants, |w| &w.service));
    list(&mut text, "limits raised", &names(&manifest.raises, |r| &r.limit));
    list(&mut text, "routes", &manifest.routes);
    list(&mut text, "subcommands", &manifest.commands);
    for pass in &manifest.passes {
        let _ = writeln!(text, "- pass `{}`: {}", pass.name, pass.what);
    }
    for edit in &manifest.layout {
        let _ = writeln!(text, "- cache table, {}: {}", edit.family, edit.edit);
    }
    if let Some(memory) = &manifest.memory {
        let _ = writeln!(text, "- memory: {memory}");
    }
    claims(&mut text, manifest);
    if !manifest.knobs.is_empty() {
        text += "\n## Knobs\n\n| key | values | default | scope | effect | request key | names |\n| --- | --- | --- | --- | --- | --- | --- |\n";
        manifest.knobs.iter().for_each(|knob| row(&mut text, knob, &manifest.id));
        for knob in manifest.knobs.iter().filter(|k| k.help.is_some() || k.load_only.is_some()) {
            let help = knob.help.as_deref().unwrap_or_default();
            let why =
                knob.load_only.as_ref().map(|why| format!(" At start only: {why}.")).unwrap_or_default();
            let _ = writeln!(text, "\n`{}`: {help}{why}", knob.key);
        }
    }
    for extension in &manifest.extends_knobs {
        let _ = writeln!(text, "\nExtends the knob `{}`.", extension.knob);
    }
    if let Some(notice) = &manifest.notice {
        let _ = writeln!(text, "\n{notice}");
    }
    text
}

fn names<T>(items: &[T], name: impl Fn(&T) -> &String) -> Vec<String> {
    items.iter().map(|item| name(item).clone()).collect()
}

fn claims(text: &mut String, manifest: &Manifest) {
    if manifest.claims.is_empty() && manifest.covers.is_empty() {
        return;
    }
    *text += "\n## Operations\n\n| operation | phases | bits | when |\n| --- | --- | --- | --- |\n";
    let phases = |phases: &[plugfold_manifest::Phase]| {
        phases.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    for claim in &manifest.claims {
        let when = [claim.when.clone(), claim.knob.as_ref().map(|k| format!("knob `{k}`"))];
        let when: Vec<String> = when.into_iter().flatten().collect();
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} |",
            claim.op,
            phases(&claim.phases),
            claim.bits,
            cell(&when.join("; "))
        );
    }
    for cover in &manifest.covers {
        let ops = cover.ops.iter().map(|op| format!("`{op}`")).collect::<Vec<_>>().join(" + ");
        let when = cover.when.clone().unwrap_or_default();
        let _ = writeln!(text, "| {ops} | {} | {} | {} |", phases(&cover.phases), cover.bits, cell(&when));
    }
}

fn row(text: &mut String, knob: &KnobSchema, owner: &str) {
    let values = cell(&knob.allowed(&|_: &str| None));
    let default =
        knob.default.as_deref().map_or_else(|| knob.unset.clone().unwrap_or_default(), |d| format!("`{d}`"));
    let request =
        knob.request_key.as_ref().map(|key| format!("`{key}`, {}", knob.fold())).unwrap_or_default();
    let mut known = vec![plugfold_manifest::env_name(owner, &knob.key)];
    known.extend(knob.env.iter().cloned());
    let known: Vec<String> = known.iter().map(|name| format!("`{name}`")).collect();
    let _ = writeln!(
        text,
        "| `{}` | {values} | {} | {} | {}, {} | {request} | {} |",
        knob.key,
        cell(&default),
        knob.scope,
        knob.effect(),
        knob.place(),
        known.join(" ")
    );
}

/// The manifests of a source tree's plugins, by name. Numbers from 9000 are nobody's but their author's.
///
/// # Errors
/// A folder that cannot be read, a manifest that is wrong.
pub fn manifests(root: &Path) -> Result<Vec<Manifest>, PluginError> {
    let told = |path: &Path, e: std::io::Error| PluginError::general(format!("{}: {e}", path.display()));
    let folder = root.join("plugins");
    let entries = std::fs::read_dir(&folder).map_err(|e| told(&folder, e))?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path().join("plugin.toml"))).collect();
    paths.retain(|path| path.is_file());
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).map_err(|e| told(&path, e))?;
        let manifest = Manifest::parse(&text, &path.display().to_string());
        all.push(manifest.map_err(|e| PluginError::general(e.to_string()))?);
    }
    all.retain(|manifest| !manifest.id.starts_with('9'));
    Ok(all)
}

/// All pages, by their places under `docs/`.
pub fn pages(manifests: &[Manifest]) -> Vec<(String, String)> {
    let all: Vec<&Manifest> = manifests.iter().collect();
    let mut pages: Vec<(String, String)> =
        all.iter().map(|m| (format!("plugins/{}.md", m.label()), file(m))).collect();
    pages.push(("plugins/README.md".into(), summary(&all)));
    pages.push(("OPS.md".into(), operations(&all)));
    pages
}

/// A file of `docs/plugins/`.
fn file(manifest: &Manifest) -> String {
    format!("{MADE}{}", page(manifest))
}

/// One table of all plugins.
fn summary(manifests: &[&Manifest]) -> String {
    let mut text = format!(
        "{MADE}# Plugins\n\n| plugin | class | what | operations | knobs |\n| --- | --- | --- | --- | --- |\n"
    );
    for manifest in manifests {
        let ops = manifest.claims.iter().map(|c| c.op.as_str());
        let ops = ops.chain(manifest.covers.iter().flat_map(|c| c.ops.iter().map(String::as_str)));
        let ops: Vec<String> = ops.map(|op| format!("`{op}`")).collect();
        let knobs: Vec<String> = manifest.knobs.iter().map(|k| format!("`{}`", k.key)).collect();
        let label = manifest.label();
        let _ = writeln!(
            text,
            "| [{label}]({label}.md) | {} | {} | {} | {} |",
            manifest.class(),
            cell(&manifest.title),
            ops.join(" "),
            knobs.join(" ")
        );
    }
    text
}

/// The table of operations, with those that plugins define and who claims which.
fn operations(manifests: &[&Manifest]) -> String {
    let page: Vec<&str> = OPERATIONS
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .collect();
    let mut text = format!("{MADE}# Operations\n\n{}\n", page.join("\n"));
    let defined = manifests.iter().flat_map(|m| m.defines.iter().map(move |d| (m, d)));
    let defined: Vec<String> =
        defined.map(|(m, d)| format!("| `{}` | {} | {} |", d.op, m.label(), cell(&d.what))).collect();
    if !defined.is_empty() {
        let _ = writeln!(
            text,
            "\n## Defined by plugins\n\n| operation | plugin | operands |\n| --- | --- | --- |"
        );
        let _ = writeln!(text, "{}", defined.join("\n"));
    }
    let mut claimed: Vec<(String, String)> = Vec::new();
    for manifest in manifests {
        let label = manifest.label();
        let own = manifest.claims.iter().map(|c| (c.op.clone(), format!("{label} ({})", c.bits)));
        let covers = manifest.covers.iter().flat_map(|c| {
            let label = &label;
            c.ops.iter().map(move |op| (op.clone(), format!("{label} ({}, covered)", c.bits)))
        });
        claimed.extend(own.chain(covers));
    }
    claimed.sort();
    if !claimed.is_empty() {
        text += "\n## Claimed by plugins\n\n| operation | plugin |\n| --- | --- |\n";
        for (op, who) in &claimed {
            let _ = writeln!(text, "| `{op}` | {who} |");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        id = "0006"
        name = "loop"
        title = "Reads once | for all"
        version = "1.0.0"
        over = ["0001"]
        defines = [{ op = "moe.new", what = "rows -> rows" }]
        claims = [{ op = "moe.up", phases = ["W", "P"], bits = "of(ref)", knob = "on", when = "large" }]
        [[knob]]
        key = "on"
        type = "bool"
        default = "1"
        env = ["OLD_ON"]
        scope = "load"
        effect = "speed"
        help = "Whether it runs."
    "#;

    #[test]
    fn a_page_says_all_that_a_manifest_does() {
        let manifest = Manifest::read(TEXT, "test").unwrap();
        let page = page(&manifest);
        for words in [
            "# 0006-loop: Reads once | for all",
            "- class: same-bits",
            "- over: 0001",
            "| `moe.up` | W P | of `ref` | large; knob `on` |",
            "| `on` | 0 or 1 | `1` | load | speed, all |  | `PLUGFOLD_0006_ON` `OLD_ON` |",
            "`on`: Whether it runs.",
        ] {
            assert!(page.contains(words), "no {words:?} in {page}");
        }
        let summary = summary(&[&manifest]);
        assert!(summary.contains(
            "| [0006-loop](0006-loop.md) | same-bits | Reads once \\| for all | `moe.up` | `on` |"
        ));
    }

    #[test]
    fn the_operations_are_those_of_the_core_and_of_plugins() {
        let manifest = Manifest::read(TEXT, "test").unwrap();
        let text = operations(&[&manifest]);
        for words in [
            "| `embed` |",
            "| `sample.candidates` |",
            "| `moe.new` | 0006-loop |",
            "| `moe.up` | 0006-loop (of `ref`) |",
        ] {
            assert!(text.contains(words), "no {words:?} in {text}");
        }
        assert!(!operations(&[]).contains("Defined by plugins"));
    }
}
