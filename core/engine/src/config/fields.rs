//! Reading typed fields out of a JSON object while collecting everything that is wrong.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::Problem;

/// Longest rendering of a value in a message.
const SHOWN: usize = 80;

/// Problems and warnings of one reading, shared by the objects of a file.
#[derive(Default)]
pub(crate) struct Findings {
    problems: RefCell<Vec<Problem>>,
    warnings: RefCell<Vec<String>>,
}

impl Findings {
    /// Notes something that cannot be run.
    pub(crate) fn problem(&self, field: impl Into<String>, value: &str, supported: impl Into<String>) {
        let problem = Problem { field: field.into(), value: value.to_owned(), supported: supported.into() };
        let mut problems = self.problems.borrow_mut();
        // A flat file is read as top level and as text model.
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }

    /// Notes something that runs but that the operator must hear of.
    pub(crate) fn warn(&self, text: String) {
        self.warnings.borrow_mut().push(text);
    }

    pub(crate) fn into_parts(self) -> (Vec<Problem>, Vec<String>) {
        (self.problems.into_inner(), self.warnings.into_inner())
    }
}

/// One JSON object under its dotted path.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    scope: &'a str,
    findings: &'a Findings,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>, scope: &'a str, findings: &'a Findings) -> Self {
        Self { map, scope, findings }
    }

    /// Where problems of this file are noted.
    pub(crate) fn findings(&self) -> &'a Findings {
        self.findings
    }

    /// Whether this is the file's outermost object.
    pub(crate) fn is_top(&self) -> bool {
        self.scope.is_empty()
    }

    /// `name` with the path of its object before it.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.scope.is_empty() { name.to_owned() } else { format!("{}.{name}", self.scope) }
    }

    /// The value of a field; JSON's `null` is the same as absent.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// Whether the field is written as `null`.
    pub(crate) fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    /// A nested object, or nothing (and a problem if it is something else).
    pub(crate) fn object(&self, name: &str) -> Option<&'a Map<String, Value>> {
        let value = self.get(name)?;
        let found = value.as_object();
        if found.is_none() {
            self.refuse(name, "an object");
        }
        found
    }

    /// Notes that the value of `name` cannot be run.
    pub(crate) fn refuse(&self, name: &str, supported: impl Into<String>) {
        let shown = self.map.get(name).map_or_else(|| "absent".to_owned(), show);
        self.findings.problem(self.path(name), &shown, supported);
    }

    /// A whole number within `range`, or `default` when absent. A refused value gives `default` too, so that
    /// reading can go on and find the other problems.
    pub(crate) fn size(&self, name: &str, default: usize, range: RangeInclusive<usize>) -> usize {
        self.size_opt(name, range).unwrap_or(default)
    }

    /// A whole number within `range`, if present and acceptable.
    pub(crate) fn size_opt(&self, name: &str, range: RangeInclusive<usize>) -> Option<usize> {
        let value = self.get(name)?;
        // Some writers store whole numbers as 4.0.
        let whole = value
            .as_u64()
            .or_else(|| {
                value.as_f64().filter(|v| v.fract() == 0.0 && (0.0..9e15).contains(v)).map(|v| v as u64)
            })
            .and_then(|v| usize::try_from(v).ok())
            .filter(|v| range.contains(v));
        if whole.is_none() {
            self.refuse(name, format!("a whole number from {} to {}", range.start(), range.end()));
        }
        whole
    }

    /// A size whose transformers default differs from the published value: its absence is reported.
    pub(crate) fn size_warned(
        &self,
        name: &str,
        default: usize,
        published: usize,
        range: RangeInclusive<usize>,
    ) -> usize {
        if self.get(name).is_none() {
            self.findings.warn(format!(
                "{} is absent: using {default}, the default of transformers; the published GLM-5.3-Flash says \
                 {published}",
                self.path(name)
            ));
        }
        self.size(name, default, range)
    }

    /// A finite number accepted by `accept`, or `default` when absent or refused.
    pub(crate) fn number(&self, name: &str, default: f64, accept: fn(f64) -> bool, supported: &str) -> f64 {
        let Some(value) = self.get(name) else { return default };
        // What counts is the f32 that the engine computes with.
        if let Some(v) = value.as_f64().filter(|v| (*v as f32).is_finite() && accept(f64::from(*v as f32))) {
            return v;
        }
        self.refuse(name, supported);
        default
    }

    /// `true` or `false`, or `default` when absent or refused.
    pub(crate) fn flag(&self, name: &str, default: bool) -> bool {
        let Some(value) = self.get(name) else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.refuse(name, "true or false");
            default
        })
    }

    /// A field for which only one value can be run; its absence means that value.
    pub(crate) fn only(&self, name: &str, value: &Value) {
        if self.get(name).is_some_and(|found| found != value) {
            self.refuse(name, format!("only {value}"));
        }
    }

    /// A list of strings, if present.
    pub(crate) fn strings(&self, name: &str) -> Option<Vec<&'a str>> {
        let value = self.get(name)?;
        let list: Option<Vec<&str>> =
            value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        if list.is_none() {
            self.refuse(name, "a list of strings");
        }
        list
    }

    /// A list of whole numbers, if present.
    pub(crate) fn sizes(&self, name: &str) -> Option<Vec<usize>> {
        let value = self.get(name)?;
        let list: Option<Vec<usize>> = value
            .as_array()
            .and_then(|list| list.iter().map(|v| v.as_u64().and_then(|v| usize::try_from(v).ok())).collect());
        if list.is_none() {
            self.refuse(name, "a list of whole numbers");
        }
        list
    }

    /// A token id below 2³², if present.
    pub(crate) fn id(&self, name: &str) -> Option<u32> {
        let value = self.get(name)?;
        let id = value.as_u64().and_then(|v| u32::try_from(v).ok());
        if id.is_none() {
            self.refuse(name, "a token id");
        }
        id
    }

    /// One token id or a list of them.
    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        let Some(value) = self.get(name) else { return Vec::new() };
        let one = std::slice::from_ref(value);
        let list = value.as_array().map_or(one, Vec::as_slice);
        let ids: Option<Vec<u32>> =
            list.iter().map(|v| v.as_u64().and_then(|v| u32::try_from(v).ok())).collect();
        ids.unwrap_or_else(|| {
            self.refuse(name, "a token id or a list of token ids");
            Vec::new()
        })
    }
}

/// A value as JSON, cut to a readable length.
pub(crate) fn show(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
