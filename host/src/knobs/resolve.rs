//! From what was said to values.

use std::collections::BTreeMap;
use std::path::Path;

use plugfold_abi::{Knob, KnobValue, Maybe, TextBuf};
use plugfold_manifest::{Loaded, Manifest, OwnedKnob, Raw, Scope, did_you_mean};

use super::builtin::{LIMITS_OWNER, SETTINGS_OWNERS, manifests as builtin};
use super::sources::{Given, Listed, Origin, Sources, Target, setting_owner};
use super::{KnobTable, Numbers, catalogue};
use crate::config::{ConfigError, Settings};

/// Rounds in which defaults that follow from others are settled; one a step of the longest chain of them.
const ROUNDS: usize = 32;

/// A value and where it comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// The value; the empty text while nobody set a knob that has no default.
    pub value: KnobValue,
    /// Where it comes from.
    pub origin: Origin,
}

/// All settings and knobs of a start.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The program's own settings.
    pub settings: Settings,
    /// The plugins of the list, as they are listed.
    pub plugins: Vec<Listed>,
    /// Lines that a person should see: what was not used, and why.
    pub report: Vec<String>,
    loaded: Loaded,
    /// One a knob of `loaded`.
    values: Vec<Value>,
    numbers: Numbers,
}

impl Resolved {
    /// Resolves what the sources say for these plugins, in their order.
    ///
    /// # Errors
    /// Manifests that do not go together; names that nobody owns; values that a knob does not take. Each names its place
    /// and the mend.
    pub fn new(sources: &Sources, plugins: Vec<Manifest>) -> Result<Self, ConfigError> {
        for listed in &sources.plugins {
            if !plugins.iter().any(|plugin| plugin.is_called(&listed.name)) {
                let (name, place) = (&listed.name, &listed.place);
                return Err(ConfigError::Wrong(format!(
                    "{place}: plugin {name} is listed, but it was not found; remove it from `plugins`"
                )));
            }
        }
        let loaded = load(plugins)?;
        let mut report = sources.report.clone();
        let chosen = choose(sources, &loaded, &mut report)?;
        let mut values = Vec::with_capacity(loaded.knobs().len());
        for (index, knob) in loaded.knobs().iter().enumerate() {
            values.push(match chosen.get(&index) {
                None => None,
                Some(given) => match read(knob, given) {
                    Ok(value) => Some(Value { value, origin: given.origin.clone() }),
                    Err(error) => match added_by(knob, given, &loaded) {
                        Some(plugin) if given.imported => {
                            let (path, raw) = (knob.path(), &given.raw);
                            report.push(format!("not used: {path} = {raw}: plugin {plugin}, which adds that value, is not loaded"));
                            None
                        }
                        Some(plugin) => {
                            let mend = format!("{error}; plugin {plugin}, which adds that value, is not loaded");
                            return Err(ConfigError::Wrong(mend));
                        }
                        None => return Err(error),
                    },
                },
            });
        }
        let values = defaults(&loaded, values)?;
        let numbers = Numbers::new(&loaded, &|index| Some(values[index].value.clone()));
        for (knob, value) in loaded.knobs().iter().zip(&values) {
            knob.schema
                .check(&value.value, &numbers.of(&knob.owner))
                .map_err(|error| ConfigError::Wrong(format!("{}: {} {error}", value.origin, shown(knob))))?;
        }
        let settings = settings(&loaded, &values)?;
        Ok(Self { settings, plugins: sources.plugins.clone(), report, loaded, values, numbers })
    }

    /// Every knob with its value, the program's own first.
    pub fn all(&self) -> impl Iterator<Item = (&OwnedKnob, &Value)> {
        self.loaded.knobs().iter().zip(&self.values)
    }

    /// A value by owner (id) and key.
    pub fn get(&self, owner: &str, key: &str) -> Option<&Value> {
        self.all().find(|(knob, _)| knob.owner == owner && knob.schema.key == key).map(|(_, value)| value)
    }

    /// The manifests of all owners, with the extensions of their knobs.
    pub fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// What a plugin is configured with: its knobs, and as `owner.key` those that it extends.
    pub fn of_plugin(&self, id: &str, table: &KnobTable) -> Vec<Knob> {
        let mine = |knob: &OwnedKnob| {
            if knob.owner == id {
                Some(knob.schema.key.clone())
            } else {
                knob.extended_by.iter().any(|by| by == id).then(|| knob.path())
            }
        };
        let each = self.all().filter_map(|(knob, value)| {
            let id = table.number(&knob.owner, &knob.schema.key);
            let id = id.map_or(Maybe::RNone, Maybe::RSome);
            Some(Knob { key: mine(knob)?.into(), value: value.value.clone(), id })
        });
        each.collect()
    }

    /// The request knobs, numbered.
    pub fn table(&self) -> KnobTable {
        KnobTable::new(&self.loaded, &self.values, self.numbers.clone())
    }

    /// Lines that must be equal on all ranks: every knob that acts on all of them and changes more than time.
    pub fn digest(&self) -> Vec<(String, String)> {
        let plugins = self.all().filter(|(knob, _)| !is_own(&knob.owner) && knob.in_digest());
        plugins.map(|(knob, value)| (knob.path(), value.value.to_string())).collect()
    }

    /// The settings as people read them: a line each, with origins.
    pub fn show(&self) -> String {
        let rows: Vec<(String, String, String)> = self
            .all()
            .map(|(knob, value)| {
                let text = match &value.value {
                    KnobValue::Text(text) if knob.schema.secret && !text.as_str().is_empty() => {
                        "(not shown)".to_owned()
                    }
                    KnobValue::Text(text) if text.as_str().is_empty() => {
                        format!("({})", knob.schema.unset.as_deref().unwrap_or("empty"))
                    }
                    KnobValue::Bool(on) => u8::from(*on).to_string(),
                    value => value.to_string(),
                };
                (shown(knob), text, value.origin.to_string())
            })
            .collect();
        let width = |column: fn(&(String, String, String)) -> &String| {
            rows.iter().map(|row| column(row).chars().count()).max().unwrap_or(0).min(48)
        };
        let (names, values) = (width(|row| &row.0), width(|row| &row.1));
        let line = |(name, value, origin): &(String, String, String)| {
            format!("{name:names$} = {value:values$}  {origin}\n")
        };
        rows.iter().map(line).collect()
    }
}

/// How a knob is called in messages: the program's own settings by their keys.
fn shown(knob: &OwnedKnob) -> String {
    if SETTINGS_OWNERS.contains(&knob.owner.as_str()) { knob.schema.key.clone() } else { knob.path() }
}

fn is_own(owner: &str) -> bool {
    SETTINGS_OWNERS.contains(&owner) || owner == LIMITS_OWNER
}

/// The program's own manifests and those of the plugins. A plugin takes an environment name over from the program, which
/// does for the time being what the plugin of that name does later.
fn load(plugins: Vec<Manifest>) -> Result<Loaded, ConfigError> {
    let taken: Vec<&String> =
        plugins.iter().flat_map(|p| p.knobs.iter().flat_map(|knob| &knob.env)).collect();
    let mut all = builtin()?;
    for knob in all.iter_mut().flat_map(|owner| &mut owner.knobs) {
        knob.env.retain(|name| !taken.contains(&name));
    }
    all.extend(plugins);
    Loaded::new(all).map_err(|error| ConfigError::Wrong(error.to_string()))
}

/// The strongest value of every knob.
fn choose<'s>(
    sources: &'s Sources,
    loaded: &Loaded,
    report: &mut Vec<String>,
) -> Result<BTreeMap<usize, &'s Given>, ConfigError> {
    let mut chosen: BTreeMap<usize, &Given> = BTreeMap::new();
    let mut unused: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for layer in &sources.layers {
        let mut here: BTreeMap<usize, &Given> = BTreeMap::new();
        for given in layer {
            let index = match find(&given.target, loaded, &given.origin) {
                Ok(index) => index,
                Err(Missing { owner: Some((owner, key)), .. }) if given.imported => {
                    unused.entry(owner).or_default().push(key);
                    continue;
                }
                Err(missing) => return Err(missing.error),
            };
            let knob = &loaded.knobs()[index];
            let empty = matches!(&given.raw, Raw::Plain(text) if text.trim().is_empty());
            if empty && !knob.schema.words.iter().any(|word| word == "empty") {
                continue;
            }
            // `--set` may come after a flag of the same setting and wins; two variables have no order.
            let variable = |given: &Given| matches!(given.origin, Origin::Variable(_));
            if let Some(other) = here.get(&index)
                && variable(other)
                && variable(given)
                && other.raw != given.raw
            {
                // Without the values: they may be secrets.
                return Err(ConfigError::Wrong(format!(
                    "{} and {} are both {}, with different values: set one of them",
                    other.origin,
                    given.origin,
                    shown(knob)
                )));
            }
            here.insert(index, given);
        }
        chosen.extend(here);
    }
    for (owner, keys) in unused {
        let loaded = loaded.plugin(&owner).is_some();
        let label = catalogue().label(&owner);
        let why = match owner.as_str() {
            "engine" | "server" | "launch" => format!("this program has no such settings of its {owner}"),
            _ if loaded => format!("plugin {label} has no such knob"),
            id if catalogue().owners.get(id).is_some_and(|known| known.in_server) => {
                format!("this server does what {label} does, and has no such setting")
            }
            _ => format!("plugin {label} is not loaded"),
        };
        report.push(format!("not used: {why}: {}", keys.join(", ")));
    }
    Ok(chosen)
}

/// A name that nobody loaded owns.
struct Missing {
    /// Who would own it, where that is known.
    owner: Option<(String, String)>,
    error: ConfigError,
}

fn find(target: &Target, loaded: &Loaded, origin: &Origin) -> Result<usize, Missing> {
    let index = |owner: &str, key: &str| {
        loaded.knobs().iter().position(|knob| knob.owner == owner && knob.schema.key == key)
    };
    let place = origin.to_string();
    match target {
        Target::Setting(name) => {
            let owner = setting_owner(loaded, name);
            owner.and_then(|owner| index(&owner, name)).ok_or_else(|| {
                let error =
                    ConfigError::UnknownKey { place, key: name.clone(), mend: "it is no setting".into() };
                Missing { owner: None, error }
            })
        }
        Target::Knob(owner, key) => {
            let id = match loaded.plugin(owner) {
                Some(manifest) => manifest.id.clone(),
                None => return Err(not_loaded(owner, key, loaded, &place)),
            };
            index(&id, key).ok_or_else(|| {
                let keys = loaded.knobs().iter().filter(|knob| knob.owner == id);
                let mend = did_you_mean(key, keys.map(|knob| knob.schema.key.as_str()));
                let error = ConfigError::UnknownKey { place, key: format!("{owner}.{key}"), mend };
                Missing { owner: Some((id, key.clone())), error }
            })
        }
        Target::Variable(name) => {
            let named = |alias: &String| alias == name;
            let family =
                |alias: &String| alias.strip_suffix('*').is_some_and(|start| name.starts_with(start));
            let knobs = || loaded.knobs().iter().enumerate();
            let exact = knobs().find(|(_, knob)| knob.env().iter().any(named));
            let found = exact.or_else(|| knobs().find(|(_, knob)| knob.env().iter().any(family)));
            if let Some((index, _)) = found {
                return Ok(index);
            }
            if let Some((owner, key)) = catalogue().by_env(name)
                && loaded.plugin(&owner).is_none()
            {
                return Err(not_loaded(&owner, &key, loaded, &place));
            }
            let mut names: Vec<String> = loaded.knobs().iter().flat_map(OwnedKnob::env).collect();
            names.extend(catalogue().aliases.keys().cloned());
            let mend = did_you_mean(name, names.iter().map(String::as_str));
            Err(Missing {
                owner: None,
                error: ConfigError::UnknownKey { place: "environment".into(), key: name.clone(), mend },
            })
        }
    }
}

fn not_loaded(owner: &str, key: &str, loaded: &Loaded, place: &str) -> Missing {
    let known = catalogue().owner(owner).map(str::to_owned);
    if let Some(id) = known {
        let label = catalogue().label(&id);
        let error = match id.as_str() {
            "launch" | "engine" | "server" => ConfigError::Wrong(format!(
                "{place}: {owner}.{key} is a setting of the {owner} of another program; remove it"
            )),
            id if catalogue().owners.get(id).is_some_and(|known| known.in_server) => {
                ConfigError::Wrong(format!(
                    "{place}: {key} is a setting of {label}; this server does what that does without it: remove it"
                ))
            }
            _ => ConfigError::Wrong(format!(
                "{place}: {key} is a knob of plugin {label}, which is not loaded: add \"{label}\" to `plugins` in the profile, \
                 or remove the setting"
            )),
        };
        return Missing { owner: Some((id, key.to_owned())), error };
    }
    let mut owners: Vec<String> = loaded.manifests().iter().map(Manifest::label).collect();
    owners.extend(catalogue().owners.keys().cloned());
    let mend = did_you_mean(owner, owners.iter().map(String::as_str));
    let key = format!("{owner}.{key}");
    let error = ConfigError::UnknownKey {
        place: place.to_owned(),
        key,
        mend: format!("no plugin `{owner}` is loaded; {mend}"),
    };
    Missing { owner: None, error }
}

/// The plugin that would add a value which a knob does not take without it.
fn added_by(knob: &OwnedKnob, given: &Given, loaded: &Loaded) -> Option<String> {
    let (Raw::Text(text) | Raw::Plain(text)) = &given.raw else { return None };
    let added = format!("{}={}", knob.path(), text.trim());
    let mut owners = catalogue().owners.iter().filter(|(id, _)| loaded.plugin(id).is_none());
    owners.find(|(_, known)| known.adds.contains(&added)).map(|(id, _)| catalogue().label(id))
}

fn read(knob: &OwnedKnob, given: &Given) -> Result<KnobValue, ConfigError> {
    let wrong = |problem: String| ConfigError::Wrong(format!("{}: {} {problem}", given.origin, shown(knob)));
    if knob.schema.scope == Scope::Request {
        return Err(wrong("is set by requests only, in `tf_knobs`".to_owned()));
    }
    let value = knob.schema.parse(&given.raw).map_err(|error| wrong(error.to_string()))?;
    let is_path = knob.schema.type_ == plugfold_manifest::KnobType::Path;
    match (&value, &given.base) {
        (KnobValue::Text(text), Some(base))
            if is_path && !knob.schema.words.iter().any(|w| w == text.as_str()) =>
        {
            let path = Path::new(text.as_str());
            let whole = if text.as_str().is_empty() { path.to_path_buf() } else { base.join(path) };
            Ok(KnobValue::text(whole.to_string_lossy()))
        }
        _ => Ok(value),
    }
}

/// Settles the knobs that nobody set. Defaults that follow from others wait until those are settled.
fn defaults(loaded: &Loaded, mut values: Vec<Option<Value>>) -> Result<Vec<Value>, ConfigError> {
    let knobs = loaded.knobs();
    let fixed = |value: KnobValue| Some(Value { value, origin: Origin::Default });
    for (knob, value) in knobs.iter().zip(&mut values) {
        if value.is_none() && knob.schema.default_expr().is_none() {
            let text = knob.schema.default.clone();
            let read = text.map_or(Ok(KnobValue::text("")), |text| knob.schema.parse(&Raw::Plain(text)));
            let read = read.map_err(|e| ConfigError::Wrong(format!("the default of {} {e}", knob.path())))?;
            *value = fixed(read);
        }
    }
    for _ in 0..ROUNDS {
        let open: Vec<usize> = (0..values.len()).filter(|index| values[*index].is_none()).collect();
        if open.is_empty() {
            break;
        }
        let numbers = Numbers::new(loaded, &|index| values[index].as_ref().map(|value| value.value.clone()));
        let is_open = |path: &String| open.iter().any(|index| knobs[*index].path() == *path);
        let waits = |name: &str, knob: &OwnedKnob| {
            let path = if name.contains('.') { name.to_owned() } else { format!("{}.{name}", knob.owner) };
            if name.contains('.') || loaded.find(&knob.owner, name).is_some() {
                return is_open(&path);
            }
            let raises = loaded.manifests().iter().flat_map(|m| m.raises.iter().map(move |raise| (m, raise)));
            let by = raises.filter(|(_, raise)| raise.limit == name);
            let mut by = by.filter_map(|(m, raise)| Some(format!("{}.{}", m.id, raise.knob.as_ref()?)));
            // A knob that raises a limit may start from what the limit is without it.
            by.any(|path| path != knob.path() && is_open(&path))
        };
        let mut found = Vec::new();
        for &index in &open {
            let knob = &knobs[index];
            let Some(expr) = knob.schema.default_expr() else { continue };
            let mut names = Vec::new();
            expr.names(&mut names);
            if names.iter().any(|name| waits(name, knob)) {
                continue;
            }
            let number = expr.eval(&numbers.of(&knob.owner)).map_err(|name| {
                ConfigError::Wrong(format!(
                    "the default of {} is `{expr}`, and `{name}` has no number",
                    knob.path()
                ))
            })?;
            let whole = knob.schema.type_ == plugfold_manifest::KnobType::Int;
            found.push((index, if whole { KnobValue::Int(number as i64) } else { KnobValue::float(number) }));
        }
        for (index, value) in found {
            values[index] = fixed(value);
        }
    }
    let missing: Vec<String> =
        knobs.iter().zip(&values).filter(|(_, value)| value.is_none()).map(|(knob, _)| knob.path()).collect();
    if !missing.is_empty() {
        let all = missing.join(", ");
        return Err(ConfigError::Wrong(format!(
            "the defaults of {all} wait for each other: set one of them"
        )));
    }
    Ok(values.into_iter().flatten().collect())
}

/// The program's own settings as its parts read them.
fn settings(loaded: &Loaded, values: &[Value]) -> Result<Settings, ConfigError> {
    use serde_json::{Map, Value as Json, json};
    let mut map = Map::new();
    let mut limits = Map::new();
    for (knob, value) in loaded.knobs().iter().zip(values) {
        let json = match &value.value {
            KnobValue::Bool(on) => json!(on),
            KnobValue::Int(number) => json!(number),
            KnobValue::Float(bits) => json!(f64::from_bits(*bits)),
            KnobValue::Text(text) if text.as_str().is_empty() => continue,
            KnobValue::Text(text) => json!(text.as_str()),
            KnobValue::List(items) => json!(items.iter().map(TextBuf::as_str).collect::<Vec<_>>()),
        };
        if knob.owner == LIMITS_OWNER {
            limits.insert(knob.schema.key.clone(), json);
        } else if SETTINGS_OWNERS.contains(&knob.owner.as_str()) {
            map.insert(knob.schema.key.clone(), json);
        }
    }
    map.insert("limits".to_owned(), Json::Object(limits));
    Settings::from_values(&Json::Object(map))
}
