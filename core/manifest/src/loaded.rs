//! The manifests of one start together.

use std::collections::BTreeMap;

use crate::check::{BUILT_IN, knob_problems};
use crate::{Effect, KnobExtension, KnobSchema, Manifest, ManifestError, did_you_mean};

/// A knob with its owner, after all extensions.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedKnob {
    /// Id of the plugin, or `engine`, `server`, `limits`, `launch`.
    pub owner: String,
    /// The schema in force.
    pub schema: KnobSchema,
    /// Plugins that extended it.
    pub extended_by: Vec<String>,
}

impl OwnedKnob {
    /// `owner.key`.
    pub fn path(&self) -> String {
        format!("{}.{}", self.owner, self.schema.key)
    }

    /// Every environment name, its own first.
    pub fn env(&self) -> Vec<String> {
        let own = env_name(&self.owner, &self.schema.key);
        let aliases = self.schema.env.iter().filter(|name| **name != own).cloned();
        std::iter::once(own.clone()).chain(aliases).collect()
    }
}

/// The environment name of a knob: `PLUGFOLD_0003_PREFILL_ROWS`, `PLUGFOLD_BASE_MTP_CHAIN`.
pub fn env_name(owner: &str, key: &str) -> String {
    format!("PLUGFOLD_{owner}_{key}").replace('-', "_").to_ascii_uppercase()
}

/// The manifests of the plugins of a start, in their order, with what follows from all of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loaded {
    manifests: Vec<Manifest>,
    knobs: Vec<OwnedKnob>,
}

impl Loaded {
    /// Puts manifests together, in the order of the list.
    ///
    /// # Errors
    /// Two plugins that bring one name, or two knobs with one environment name or request key; an extension of a knob
    /// that nobody owns, or that makes its schema wrong. Each problem names both sides.
    pub fn new(manifests: Vec<Manifest>) -> Result<Self, ManifestError> {
        let mut problems = Vec::new();
        names(&manifests, &mut problems);
        let mut knobs: Vec<OwnedKnob> = Vec::new();
        for manifest in &manifests {
            let owner = manifest.id.clone();
            knobs.extend(manifest.knobs.iter().map(|schema| OwnedKnob {
                owner: owner.clone(),
                schema: schema.clone(),
                extended_by: Vec::new(),
            }));
        }
        for manifest in &manifests {
            for extension in &manifest.extends_knobs {
                extend(&mut knobs, manifest, extension, &manifests, &mut problems);
            }
        }
        knob_names(&knobs, &mut problems);
        if problems.is_empty() {
            return Ok(Self { manifests, knobs });
        }
        Err(ManifestError { place: "plugins".to_owned(), problems })
    }

    /// The manifests.
    pub fn manifests(&self) -> &[Manifest] {
        &self.manifests
    }

    /// All knobs: by plugin, then as their manifest lists them.
    pub fn knobs(&self) -> &[OwnedKnob] {
        &self.knobs
    }

    /// A knob by owner and key.
    pub fn find(&self, owner: &str, key: &str) -> Option<&OwnedKnob> {
        self.knobs.iter().find(|knob| knob.owner == owner && knob.schema.key == key)
    }

    /// The plugin that a name in a profile means.
    pub fn plugin(&self, name: &str) -> Option<&Manifest> {
        self.manifests.iter().find(|manifest| manifest.is_called(name))
    }
}

fn extend(
    knobs: &mut [OwnedKnob],
    by: &Manifest,
    extension: &KnobExtension,
    manifests: &[Manifest],
    problems: &mut Vec<String>,
) {
    let name = &extension.knob;
    let owner = name.split_once('.').map_or(name.as_str(), |(owner, _)| owner);
    let Some(index) = knobs.iter().position(|knob| knob.path() == *name) else {
        // A plugin that may be missing takes the extension with it.
        let absent = !manifests.iter().any(|manifest| manifest.id == owner) && !BUILT_IN.contains(&owner);
        if !absent || by.requires.iter().any(|id| id == owner) {
            let paths: Vec<String> = knobs.iter().map(OwnedKnob::path).collect();
            let mend = did_you_mean(name, paths.iter().map(String::as_str));
            problems
                .push(format!("{} extends knob `{name}`, which no loaded plugin owns; {mend}", by.label()));
        }
        return;
    };
    if !BUILT_IN.contains(&owner) && !knows(manifests, by, owner) {
        problems.push(format!(
            "{} extends knob `{name}` of a plugin that it neither requires nor extends: its knobs may come later",
            by.label()
        ));
    }
    let knob = &mut knobs[index];
    let schema = &mut knob.schema;
    for choice in &extension.choices {
        if schema.choices.contains(choice) {
            problems.push(format!("{}: knob `{name}` has the choice `{choice}` already", by.label()));
        } else {
            schema.choices.push(choice.clone());
        }
    }
    for word in
        extension.words.iter().filter(|word| !schema.words.contains(word)).cloned().collect::<Vec<_>>()
    {
        schema.words.push(word);
    }
    if let Some(range) = &extension.range {
        schema.range = Some(range.clone());
    }
    if let Some(scope) = extension.scope {
        schema.scope = scope;
        schema.load_only = None;
    }
    let set = |to: &mut Option<String>, from: &Option<String>| {
        if from.is_some() {
            to.clone_from(from);
        }
    };
    set(&mut schema.request_key, &extension.request_key);
    set(&mut schema.request_on, &extension.request_on);
    set(&mut schema.request_off, &extension.request_off);
    schema.fold = extension.fold.or(schema.fold);
    schema.at_most_loaded |= extension.at_most_loaded;
    for problem in knob_problems(schema) {
        problems.push(format!("{}: its extension of knob `{name}` is wrong: {problem}", by.label()));
    }
    knob.extended_by.push(by.id.clone());
}

/// Whether a plugin names another in `requires` or `extends`, itself or through what it requires.
fn knows(manifests: &[Manifest], by: &Manifest, owner: &str) -> bool {
    let mut open = vec![by];
    let mut seen: Vec<&str> = Vec::new();
    while let Some(manifest) = open.pop() {
        if manifest.requires.iter().chain(&manifest.extends).any(|id| id == owner) {
            return true;
        }
        if !seen.contains(&manifest.id.as_str()) {
            seen.push(&manifest.id);
            open.extend(manifests.iter().filter(|other| manifest.requires.contains(&other.id)));
        }
    }
    // What base plugins bring is there for everybody.
    owner.starts_with("base-")
}

/// Finds names that two bring; remembers who brought each first.
struct Once<'p> {
    first: BTreeMap<String, String>,
    problems: &'p mut Vec<String>,
}

impl Once<'_> {
    fn take(&mut self, what: &str, name: &str, owner: &str) {
        let key = format!("{what} `{name}`");
        match self.first.get(&key) {
            Some(other) => {
                self.problems.push(format!("{other} and {owner} both bring {key}: load one of them"));
            }
            None => {
                self.first.insert(key, owner.to_owned());
            }
        }
    }
}

fn names(manifests: &[Manifest], problems: &mut Vec<String>) {
    let mut once = Once { first: BTreeMap::new(), problems };
    for manifest in manifests {
        let owner = manifest.label();
        let mut take = |what: &str, name: &str| once.take(what, name, &owner);
        take("the id", &manifest.id);
        manifest.defines.iter().for_each(|d| take("operation", &d.op));
        manifest.passes.iter().for_each(|p| take("pass", &p.name));
        manifest.parts.iter().for_each(|p| take("part", &p.id));
        manifest.sections.iter().for_each(|s| take("section", &s.name));
        manifest.riders.iter().for_each(|r| take("rider", &r.name));
        manifest.fields.iter().for_each(|f| take("round-table field", &f.name));
        manifest.words.iter().for_each(|w| take("word", &w.name));
        manifest.headers.iter().for_each(|h| take("header", &format!("{} {}", h.kind, h.name)));
        manifest.offers.iter().for_each(|o| take("service", &o.service));
        manifest.by_name.iter().for_each(|b| take(&b.kind, &b.name));
        manifest.policies.iter().flat_map(|p| &p.forms).for_each(|form| take("policy form", form));
        manifest.body.iter().for_each(|b| take("body field", &b.field));
        manifest.routes.iter().for_each(|r| take("route", r));
        manifest.commands.iter().for_each(|c| take("subcommand", c));
    }
}

fn knob_names(knobs: &[OwnedKnob], problems: &mut Vec<String>) {
    let mut first: BTreeMap<String, String> = BTreeMap::new();
    for knob in knobs {
        let request = knob.schema.request_key.iter().map(|key| format!("the request key `{key}`"));
        let env = knob.env().into_iter().map(|name| format!("the environment name `{name}`"));
        for name in env.chain(request) {
            if let Some(other) = first.get(&name) {
                problems.push(format!(
                    "knobs `{other}` and `{}` both have {name}: load one of them",
                    knob.path()
                ));
            } else {
                first.insert(name, knob.path());
            }
        }
    }
}

impl OwnedKnob {
    /// Whether its value at load must be equal on all ranks.
    pub fn in_digest(&self) -> bool {
        let decides = matches!(self.schema.effect(), Effect::Bits | Effect::Schedule | Effect::Drafts);
        decides && self.schema.place() == crate::Place::All
    }
}
