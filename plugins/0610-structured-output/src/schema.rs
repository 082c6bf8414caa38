//! JSON schemas before they are compiled: what can be enforced of them, and what cannot, by its place.
//!
//! The library enforces some keywords exactly and knows others only by name. Every keyword of a schema is looked at here, so that
//! none is passed over in silence, and so are the schemas that mean nothing (references in a circle) or too much (depth).

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::{Map, Value, json};

/// Keywords that are enforced as JSON Schema says.
const ENFORCED: [&str; 27] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
];
/// Keywords that say nothing about which values are valid.
const NOTES: [&str; 18] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "$vocabulary",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "deprecated",
    "description",
    "example",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];
/// Formats that are enforced.
const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];
/// Largest whole number that every JSON reader reads as it is written.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Something in a schema that keeps it from being enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// JSON pointer of the keyword.
    pub at: String,
    /// What is wrong, and the mend.
    pub what: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.at, self.what)
    }
}

/// A schema that can be compiled.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The schema, without what cannot be enforced, its objects closed.
    pub schema: Value,
    /// Pointers of keywords that are not enforced.
    pub unenforced: Vec<String>,
}

/// How schemas are looked at.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Levels that a schema may be nested.
    pub depth: usize,
    /// Takes out what cannot be enforced instead of refusing it.
    pub lenient: bool,
}

/// Looks at a schema. `at` is the pointer under which problems are named.
///
/// # Errors
/// The first problem.
pub fn check(schema: &Value, at: &str, rules: Rules) -> Result<Checked, Problem> {
    let mut walk = Walk {
        root: schema,
        at,
        rules,
        unenforced: Vec::new(),
        merged: BTreeSet::new(),
        steps: HashMap::new(),
    };
    walk.merged(schema, "", false, 0)?;
    walk.circles()?;
    let schema = walk.schema(schema, "", false, 0)?;
    Ok(Checked { schema, unenforced: walk.unenforced })
}

struct Walk<'s> {
    root: &'s Value,
    at: &'s str,
    rules: Rules,
    unenforced: Vec<String>,
    /// Pointers of schemas that others are merged with: closing them would forbid what the others ask for.
    merged: BTreeSet<String>,
    /// From a schema to those that speak of the same value.
    steps: HashMap<String, Vec<String>>,
}

/// Escapes a part of a JSON pointer.
fn part(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// Undoes the percent signs of a URI's fragment.
fn unescaped(fragment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

impl<'s> Walk<'s> {
    fn problem<T>(&self, at: &str, what: impl Into<String>) -> Result<T, Problem> {
        Err(Problem { at: format!("{}{at}", self.at), what: what.into() })
    }

    /// Refuses a keyword that cannot be enforced, or takes note of it.
    fn unenforced(&mut self, at: &str, key: &str, what: &str) -> Result<(), Problem> {
        let at = format!("{at}/{}", part(key));
        if self.rules.lenient {
            self.unenforced.push(format!("{}{at}", self.at));
            return Ok(());
        }
        self.problem(&at, format!("{what}: leave it out, or let the server run with unenforced = \"warn\""))
    }

    fn deep(&self, at: &str, depth: usize) -> Result<(), Problem> {
        if depth <= self.rules.depth {
            return Ok(());
        }
        self.problem(at, format!("schemas are nested deeper than {} levels (knob depth)", self.rules.depth))
    }

    /// The pointer that a reference names.
    fn target(&self, reference: &Value, at: &str) -> Result<String, Problem> {
        let Some(text) = reference.as_str() else { return self.problem(at, "must be a string") };
        let pointer = text.strip_prefix('#').and_then(unescaped);
        let Some(pointer) = pointer.filter(|p| p.is_empty() || p.starts_with('/')) else {
            return self.problem(
                at,
                format!(
                    "refers to {text:?}: give \"#\" or a JSON pointer into this schema, as \"#/$defs/name\""
                ),
            );
        };
        match self.root.pointer(&pointer) {
            Some(Value::Object(_) | Value::Bool(_)) => Ok(pointer),
            _ => self.problem(at, format!("refers to {text:?}, where no schema is")),
        }
    }

    /// Collects which schemas speak of the same value as others, and which of them are merged.
    fn merged(&mut self, schema: &'s Value, at: &str, beside: bool, depth: usize) -> Result<(), Problem> {
        self.deep(at, depth)?;
        let Value::Object(map) = schema else { return Ok(()) };
        let combined = ["$ref", "allOf", "anyOf", "oneOf"].iter().filter(|k| map.contains_key(**k)).count();
        let others = map.keys().any(|k| {
            ENFORCED.contains(&k.as_str()) && k != "$ref" && k != "anyOf" && k != "oneOf" && k != "type"
        });
        let beside = beside || map.contains_key("allOf") || combined > 1 || (combined > 0 && others);
        if beside && !self.merged.insert(at.to_owned()) {
            return Ok(());
        }
        let mut same = Vec::new();
        if let Some(reference) = map.get("$ref") {
            let target = self.target(reference, &format!("{at}/$ref"))?;
            if beside && !self.merged.contains(&target) {
                let root = self.root;
                if let Some(schema) = root.pointer(&target) {
                    self.merged(schema, &target, true, depth + 1)?;
                }
            }
            same.push(target);
        }
        for key in ["allOf", "anyOf", "oneOf"] {
            for (i, item) in map.get(key).and_then(Value::as_array).into_iter().flatten().enumerate() {
                let at = format!("{at}/{key}/{i}");
                self.merged(item, &at, beside, depth + 1)?;
                same.push(at);
            }
        }
        self.steps.insert(at.to_owned(), same);
        for (key, inner) in children(map) {
            if !matches!(key.split('/').next(), Some("allOf" | "anyOf" | "oneOf")) {
                self.merged(inner, &format!("{at}/{key}"), false, depth + 1)?;
            }
        }
        Ok(())
    }

    /// Finds schemas that say of a value only that it is valid under themselves.
    fn circles(&self) -> Result<(), Problem> {
        let mut done: HashSet<&str> = HashSet::new();
        let mut starts: Vec<&String> = self.steps.keys().collect();
        starts.sort_unstable();
        for start in starts {
            // Depth first without recursion: a chain of references may be long.
            let mut path: Vec<(&str, usize)> = vec![(start, 0)];
            let mut open: HashSet<&str> = HashSet::from([start.as_str()]);
            while let Some((at, next)) = path.last_mut() {
                let step = self.steps.get(*at).and_then(|steps| steps.get(*next));
                *next += 1;
                match step {
                    Some(to) if open.contains(to.as_str()) => {
                        return self
                            .problem(at, "refers to itself with nothing between: no value is described");
                    }
                    Some(to) if !done.contains(to.as_str()) => {
                        open.insert(to);
                        path.push((to, 0));
                    }
                    Some(_) => {}
                    None => {
                        open.remove(*at);
                        done.insert(at);
                        path.pop();
                    }
                }
            }
        }
        Ok(())
    }

    fn schema(&mut self, schema: &Value, at: &str, inside: bool, depth: usize) -> Result<Value, Problem> {
        self.deep(at, depth)?;
        let map = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(map) => map,
            _ => return self.problem(at, "must be a schema: an object, true or false"),
        };
        let mut out = Map::new();
        for (key, value) in map {
            if let Some(kept) = self.keyword(map, key, value, at, depth)? {
                out.insert(key.clone(), kept);
            }
        }
        if matches!(out.get("format").and_then(Value::as_str), Some("date-time" | "time")) {
            // The library also writes leap seconds, which are valid at few moments, and small letters.
            let all = out.entry("allOf").or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(all) = all {
                all.push(json!({"pattern": "^[^:tz]*:[0-9]{2}:[0-5][^tz]*$"}));
            }
        }
        if !inside && self.closes(&out, at) {
            out.insert("additionalProperties".into(), Value::Bool(false));
        }
        Ok(Value::Object(out))
    }

    /// Whether an object may hold nothing but what it names: strict, unless the schema says otherwise.
    fn closes(&self, map: &Map<String, Value>, at: &str) -> bool {
        let Some(properties) = map.get("properties").and_then(Value::as_object) else { return false };
        let named = |name: &Value| name.as_str().is_some_and(|name| properties.contains_key(name));
        let required = map.get("required").and_then(Value::as_array).into_iter().flatten();
        !["additionalProperties", "patternProperties", "minProperties"]
            .iter()
            .any(|key| map.contains_key(*key))
            && !self.merged.contains(at)
            && required.into_iter().all(named)
    }

    /// A keyword as it is compiled; nothing where it is left out.
    fn keyword(
        &mut self,
        map: &Map<String, Value>,
        key: &str,
        value: &Value,
        at: &str,
        depth: usize,
    ) -> Result<Option<Value>, Problem> {
        let place = format!("{at}/{}", part(key));
        if NOTES.contains(&key) || key.starts_with("x-") {
            // Definitions are looked at where they stand, since references lead there.
            return match key {
                "$defs" | "definitions" => self.schemas(value, &place, depth).map(Some),
                // They would change what references mean; none of them may leave this document.
                _ => Ok(None),
            };
        }
        if !ENFORCED.contains(&key) {
            let idle = matches!((key, value), ("uniqueItems" | "nullable", Value::Bool(false)))
                || matches!((key, value), ("dependentRequired" | "dependentSchemas" | "dependencies", Value::Object(m)) if m.is_empty())
                || matches!((key, value), ("minContains" | "maxContains", _) if !map.contains_key("contains"));
            if idle {
                return Ok(None);
            }
            // Its pointer has the whole name.
            let name: String = key.chars().take(64).collect();
            self.unenforced(at, key, &format!("the keyword {name:?} cannot be enforced"))?;
            return Ok(None);
        }
        match key {
            "additionalItems" | "additionalProperties" => {
                self.schema(value, &place, false, depth + 1).map(Some)
            }
            "items" if value.is_object() || value.is_boolean() => {
                self.schema(value, &place, false, depth + 1).map(Some)
            }
            "items" | "prefixItems" | "allOf" | "anyOf" | "oneOf" => {
                self.list(key, value, &place, depth).map(Some)
            }
            "properties" | "patternProperties" => self.schemas(value, &place, depth).map(Some),
            "$ref" => {
                self.target(value, &place)?;
                Ok(Some(value.clone()))
            }
            "format" => match value.as_str() {
                Some(name) if FORMATS.contains(&name) => Ok(Some(value.clone())),
                Some(name) => {
                    self.unenforced(at, key, &format!("the format {name:?} cannot be enforced"))?;
                    Ok(None)
                }
                None => self.problem(&place, "must be a string"),
            },
            "const" => self.numbers(value, &place, depth).map(|()| Some(value.clone())),
            "enum" => {
                if value.as_array().is_none_or(Vec::is_empty) {
                    return self.problem(&place, "must be a list of at least one value");
                }
                self.numbers(value, &place, depth).map(|()| Some(value.clone()))
            }
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                if key.starts_with("exclusive") && value.is_boolean() {
                    return Ok(Some(value.clone()));
                }
                if !value.is_number() || (key == "multipleOf" && value.as_f64().is_none_or(|n| n <= 0.0)) {
                    let above = if key == "multipleOf" { " above 0" } else { "" };
                    return self.problem(&place, format!("must be a number{above}"));
                }
                self.numbers(value, &place, depth).map(|()| Some(value.clone()))
            }
            "maxItems" | "maxLength" | "maxProperties" | "minItems" | "minLength" | "minProperties" => {
                // 3.0 is a whole number in JSON Schema.
                let count = value.as_u64().or_else(|| {
                    value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..EXACT).contains(n)).map(|n| n as u64)
                });
                let Some(count) = count else {
                    return self.problem(&place, "must be a whole number, 0 or more");
                };
                let required = map.get("required").and_then(Value::as_array);
                let named = |name: &String| required.into_iter().flatten().any(|r| r == name.as_str());
                let mut properties =
                    map.get("properties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
                if key.ends_with("Properties") && !properties.all(named) {
                    let what = format!("{key:?} cannot be enforced beside properties that are not required");
                    self.unenforced(at, key, &what)?;
                    return Ok(None);
                }
                // Names that the schema does not list may come twice, and then count once.
                let sure =
                    map.get("required").and_then(Value::as_array).map_or(1, |names| names.len().max(1));
                if key == "minProperties" && count > sure as u64 {
                    self.unenforced(at, key, &format!("\"minProperties\" of {count} cannot be enforced"))?;
                    return Ok(None);
                }
                Ok(Some(count.into()))
            }
            "pattern" if !value.is_string() => self.problem(&place, "must be a string"),
            "required" => match value.as_array() {
                Some(names) if names.iter().all(Value::is_string) => Ok(Some(value.clone())),
                _ => self.problem(&place, "must be a list of names"),
            },
            "type" => {
                const TYPES: [&str; 7] =
                    ["null", "boolean", "integer", "number", "string", "array", "object"];
                let known = |v: &Value| v.as_str().is_some_and(|t| TYPES.contains(&t));
                match value {
                    Value::Array(list) if !list.is_empty() && list.iter().all(known) => {
                        Ok(Some(value.clone()))
                    }
                    value if known(value) => Ok(Some(value.clone())),
                    _ => self.problem(&place, format!("must be one or a list of {}", TYPES.join(", "))),
                }
            }
            _ => Ok(Some(value.clone())),
        }
    }

    fn list(&mut self, key: &str, value: &Value, at: &str, depth: usize) -> Result<Value, Problem> {
        let Some(list) = value.as_array() else { return self.problem(at, "must be a list of schemas") };
        if list.is_empty() && key.ends_with("Of") {
            return self.problem(at, "must hold at least one schema");
        }
        let inside = key == "allOf";
        let one = |(i, item)| self.schema(item, &format!("{at}/{i}"), inside, depth + 1);
        list.iter().enumerate().map(one).collect::<Result<_, _>>().map(Value::Array)
    }

    fn schemas(&mut self, value: &Value, at: &str, depth: usize) -> Result<Value, Problem> {
        let Some(map) = value.as_object() else { return self.problem(at, "must be an object of schemas") };
        let mut out = Map::new();
        for (name, inner) in map {
            out.insert(name.clone(), self.schema(inner, &format!("{at}/{}", part(name)), false, depth + 1)?);
        }
        Ok(Value::Object(out))
    }

    /// Numbers are compared as doubles: a whole number that is none would be enforced as another.
    fn numbers(&self, value: &Value, at: &str, depth: usize) -> Result<(), Problem> {
        self.deep(at, depth)?;
        match value {
            Value::Number(n) => {
                let whole = n.as_u64().or_else(|| n.as_i64().map(i64::unsigned_abs));
                let exact = whole.map_or(n.as_f64().is_some_and(f64::is_finite), |n| n <= EXACT as u64);
                if exact {
                    return Ok(());
                }
                self.problem(at, format!("{n} is beyond 2^53 and cannot be enforced exactly"))
            }
            Value::Array(items) => items
                .iter()
                .enumerate()
                .try_for_each(|(i, v)| self.numbers(v, &format!("{at}/{i}"), depth + 1)),
            Value::Object(map) => {
                map.iter().try_for_each(|(k, v)| self.numbers(v, &format!("{at}/{}", part(k)), depth + 1))
            }
            _ => Ok(()),
        }
    }
}

/// The schemas right inside of one, with their pointers from there.
pub fn children(map: &Map<String, Value>) -> Vec<(String, &Value)> {
    let mut all = Vec::new();
    for (key, value) in map {
        match (key.as_str(), value) {
            ("$defs" | "definitions" | "properties" | "patternProperties", Value::Object(inner)) => {
                all.extend(inner.iter().map(|(name, schema)| (format!("{key}/{}", part(name)), schema)));
            }
            ("items" | "prefixItems" | "allOf" | "anyOf" | "oneOf", Value::Array(list)) => {
                all.extend(list.iter().enumerate().map(|(i, schema)| (format!("{key}/{i}"), schema)));
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => all.push((key.clone(), schema)),
            _ => {}
        }
    }
    all
}

/// Every schema that carries one of these keywords, with its pointer: where to look for what did not compile.
pub fn carriers<'v>(schema: &'v Value, keys: &[&str]) -> Vec<(String, &'v Value)> {
    let mut found = Vec::new();
    let mut open = vec![(String::new(), schema)];
    while let Some((at, schema)) = open.pop() {
        let Value::Object(map) = schema else { continue };
        for (key, value) in map {
            if keys.contains(&key.as_str()) {
                found.push((format!("{at}/{}", part(key)), value));
            }
        }
        open.extend(children(map).into_iter().map(|(key, inner)| (format!("{at}/{key}"), inner)));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}
