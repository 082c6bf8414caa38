//! What a request asks its reply to be held to.

use plugfold_abi::OpError;
use plugfold_abi::points::{Document as _, DocumentObject};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// What kind of grammar it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Any JSON object.
    Json,
    /// JSON under a schema.
    Schema,
    /// A regular expression.
    Regex,
    /// One of some texts.
    Choice,
    /// EBNF.
    Grammar,
    /// Calls of tools.
    Tools,
}

/// A grammar that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Asked {
    /// Its kind.
    pub kind: Kind,
    /// The schema, the expression, the list, the grammar or the tools.
    pub text: String,
    /// Where it stands in the body, as a JSON pointer.
    pub at: String,
}

/// A field that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// The field.
    pub field: String,
    /// What is wrong with it, and the mend.
    pub what: String,
}

fn wrong<T>(field: &str, what: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong { field: field.to_owned(), what: what.into() })
}

/// Fields of a body that this plugin obeys.
pub const FIELDS: [&str; 6] = [
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
];

/// A value of a body.
///
/// # Errors
/// The host fails.
fn value(body: &DocumentObject, field: &str) -> Result<Value, OpError> {
    let json = body.get(format!("/{field}").as_str().into())?;
    let json = json.into_option().map(|text| serde_json::from_str(&text));
    json.transpose().map(Option::unwrap_or_default).map_err(|e| OpError::new(format!("{field}: {e}")))
}

/// What a body asks for.
///
/// # Errors
/// Outer: the host fails. Inner: the field that is wrong.
pub fn read(body: &DocumentObject, all_strict: bool) -> Result<Result<Option<Asked>, Wrong>, OpError> {
    let mut all = Map::new();
    for field in FIELDS.into_iter().chain(["tools", "tool_choice", "parallel_tool_calls"]) {
        // Most requests have none of them, and tools may be large.
        if !body.kind(format!("/{field}").as_str().into())?.is_empty() {
            all.insert(field.to_owned(), value(body, field)?);
        }
    }
    let chat = !body.kind("/messages".into())?.is_empty();
    Ok(wanted(&Value::Object(all), chat, all_strict))
}

/// What these fields ask for.
///
/// # Errors
/// The field that is wrong.
pub fn wanted(body: &Value, chat: bool, all_strict: bool) -> Result<Option<Asked>, Wrong> {
    // All are read, so that a wrong one is told also where another wins.
    let formats = [
        response_format(&body["response_format"])?,
        guided_json(&body["guided_json"])?,
        text(&body["guided_regex"], "guided_regex", Kind::Regex)?,
        choice(&body["guided_choice"], "guided_choice")?,
        text(&body["guided_grammar"], "guided_grammar", Kind::Grammar)?,
        structured(&body["structured_outputs"])?,
    ];
    let format = formats.into_iter().flatten().next();
    let tools = if chat { tools(body, all_strict)? } else { None };
    match (format, tools) {
        (Some(format), Some((_, true))) => {
            let field = format.at.split('/').nth(1).unwrap_or_default();
            wrong("tool_choice", format!("asks for a call and {field} for something else: give one of them"))
        }
        (Some(format), _) => Ok(Some(format)),
        (None, tools) => Ok(tools.map(|(asked, _)| asked)),
    }
}

/// A schema: an object, true, or JSON text of either.
fn schema(value: &Value, field: &str) -> Result<Value, Wrong> {
    match value {
        Value::Object(_) => Ok(value.clone()),
        Value::Bool(true) => Ok(json!({})),
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(map)) => Ok(Value::Object(map)),
            Ok(Value::Bool(true)) => Ok(json!({})),
            Ok(_) => {
                wrong(field, "is text, but not of a JSON schema: give an object, its JSON text, or true")
            }
            Err(e) => {
                wrong(field, format!("is text that is no JSON ({e}): give a schema, its JSON text, or true"))
            }
        },
        _ => wrong(field, "must be a JSON schema: an object, its JSON text, or true"),
    }
}

fn of_schema(value: &Value, field: &str, at: &str) -> Result<Option<Asked>, Wrong> {
    let schema = schema(value, field)?;
    Ok(Some(Asked { kind: Kind::Schema, text: schema.to_string(), at: at.to_owned() }))
}

fn object(at: &str) -> Asked {
    Asked { kind: Kind::Json, text: String::new(), at: at.to_owned() }
}

fn response_format(value: &Value) -> Result<Option<Asked>, Wrong> {
    const FIELD: &str = "response_format";
    if value.is_null() {
        return Ok(None);
    }
    match value["type"].as_str().filter(|_| value.is_object()) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(object("/response_format"))),
        Some("json_schema") => {
            let inner = &value["json_schema"];
            if !inner.is_object() || inner["schema"].is_null() {
                return wrong(FIELD, "of the type json_schema needs json_schema.schema");
            }
            of_schema(
                &inner["schema"],
                "response_format.json_schema.schema",
                "/response_format/json_schema/schema",
            )
        }
        _ => wrong(FIELD, "must be an object whose type is text, json_object or json_schema"),
    }
}

fn guided_json(value: &Value) -> Result<Option<Asked>, Wrong> {
    match value {
        Value::Null => Ok(None),
        Value::Bool(true) => Ok(Some(object("/guided_json"))),
        value => of_schema(value, "guided_json", "/guided_json"),
    }
}

fn text(value: &Value, field: &str, kind: Kind) -> Result<Option<Asked>, Wrong> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) if !text.is_empty() => {
            Ok(Some(Asked { kind, text: text.clone(), at: format!("/{}", field.replace('.', "/")) }))
        }
        _ => wrong(field, "must be a text that is not empty"),
    }
}

fn choice(value: &Value, field: &str) -> Result<Option<Asked>, Wrong> {
    let good = |v: &Value| v.as_str().is_some_and(|text| !text.is_empty());
    match value {
        Value::Null => Ok(None),
        Value::Array(list) if !list.is_empty() && list.iter().all(good) => {
            let at = format!("/{}", field.replace('.', "/"));
            Ok(Some(Asked { kind: Kind::Choice, text: value.to_string(), at }))
        }
        _ => wrong(field, "must be a list of at least one text, none of them empty"),
    }
}

fn structured(value: &Value) -> Result<Option<Asked>, Wrong> {
    const FIELD: &str = "structured_outputs";
    const KEYS: [&str; 5] = ["choice", "grammar", "json", "json_object", "regex"];
    let map = match value {
        Value::Null => return Ok(None),
        Value::Object(map) => map,
        _ => {
            return wrong(
                FIELD,
                "must be an object with one of json, json_object, regex, choice and grammar",
            );
        }
    };
    let given = |key: &str| map.get(key).filter(|v| !v.is_null() && **v != Value::Bool(false));
    if let Some(key) = map.keys().find(|key| !KEYS.contains(&key.as_str()) && given(key).is_some()) {
        return wrong(
            FIELD,
            format!("has the key {key:?}; there are json, json_object, regex, choice and grammar"),
        );
    }
    let none = Value::Null;
    let of = |key: &str| given(key).unwrap_or(&none);
    let json = match of("json") {
        Value::Null => None,
        value => of_schema(value, "structured_outputs.json", "/structured_outputs/json")?,
    };
    let any = match of("json_object") {
        Value::Null => None,
        Value::Bool(_) => Some(object("/structured_outputs/json_object")),
        _ => return wrong("structured_outputs.json_object", "must be true, false or null"),
    };
    let all = [
        choice(of("choice"), "structured_outputs.choice")?,
        text(of("grammar"), "structured_outputs.grammar", Kind::Grammar)?,
        json,
        text(of("regex"), "structured_outputs.regex", Kind::Regex)?,
        any,
    ];
    Ok(all.into_iter().flatten().next())
}

/// A tool as the grammar of calls sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The schema of its arguments, or null.
    pub parameters: Value,
    /// Whether its arguments are held to the schema.
    pub held: bool,
    /// Its place among the tools of the request.
    pub at: usize,
}

/// The calls that a request wants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calls {
    /// The tools that may be called.
    pub tools: Vec<Tool>,
    /// There must be a call.
    pub required: bool,
    /// The first token begins it: one tool was named.
    pub named: bool,
    /// There may be several.
    pub parallel: bool,
}

/// The calls that a body wants, and whether there must be one.
fn tools(body: &Value, all_strict: bool) -> Result<Option<(Asked, bool)>, Wrong> {
    let parallel = match &body["parallel_tool_calls"] {
        Value::Null => true,
        Value::Bool(parallel) => *parallel,
        _ => return wrong("parallel_tool_calls", "must be true or false"),
    };
    let given = match &body["tools"] {
        Value::Null => return Ok(None),
        Value::Array(list) => list,
        _ => return wrong("tools", "must be a list of functions"),
    };
    let mut tools = Vec::with_capacity(given.len());
    let mut strict = false;
    let mut loose = Vec::with_capacity(given.len());
    for (at, tool) in given.iter().enumerate() {
        let function = if tool["function"].is_object() { &tool["function"] } else { tool };
        let Some(name) = function["name"].as_str().filter(|name| !name.is_empty()) else {
            return wrong("tools", format!("[{at}] must be a function with a name"));
        };
        if !matches!(function["parameters"], Value::Null | Value::Object(_)) {
            return wrong("tools", format!("[{at}].function.parameters must be an object"));
        }
        let said = function["strict"].as_bool().or_else(|| tool["strict"].as_bool());
        let held = said == Some(true) || all_strict;
        strict |= held;
        loose.push(said == Some(false) && !all_strict);
        tools.push(Tool { name: name.to_owned(), parameters: function["parameters"].clone(), held, at });
    }
    let (required, named) = match &body["tool_choice"] {
        Value::Null => (false, None),
        Value::String(choice) => match choice.as_str() {
            "auto" => (false, None),
            "none" => return Ok(None),
            "required" => (true, None),
            _ => return wrong("tool_choice", "must be auto, none, required or a function by its name"),
        },
        choice => match choice["function"]["name"].as_str() {
            Some(name) => (true, Some(name.to_owned())),
            None => return wrong("tool_choice", "must be auto, none, required or a function by its name"),
        },
    };
    if tools.is_empty() || !(required || strict) {
        return Ok(None);
    }
    if required {
        // Who wants a call wants one that the tool can take, unless the tool says that it takes anything.
        tools.iter_mut().zip(&loose).for_each(|(tool, loose)| tool.held = !loose);
    }
    if let Some(name) = &named {
        tools.retain(|tool| tool.name == *name);
        if tools.is_empty() {
            return wrong("tool_choice", format!("names {name:?}, which is not among the tools"));
        }
    }
    let named = named.is_some();
    let calls = Calls { tools, required, named, parallel: parallel && !named };
    let text = serde_json::to_string(&calls).unwrap_or_default();
    Ok(Some((Asked { kind: Kind::Tools, text, at: "/tools".into() }, required)))
}
