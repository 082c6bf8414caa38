//! Which JSON value an argument's text stands for, by the whole schema of its parameter.

use plugfold_abi::markup::close_brackets;
use serde_json::{Number, Value};

/// Levels of a schema that are looked into.
const DEPTH: usize = 16;

/// The value of an argument.
///
/// Where a string may stand the text is taken as it is (`null` alone is null where that may stand too). Elsewhere it is JSON of
/// a type that the schema allows: as written, with missing closing brackets, out of quotes, in Python's words, or a whole
/// number written as a fraction. What is none of these stays text. Without any type in the schema: JSON, else text.
pub fn value(schema: &Value, text: &str) -> Value {
    let Some(types) = types(schema, DEPTH) else { return untyped(text) };
    let allows = |name: &str| types.iter().any(|t| t == name);
    if allows("string") {
        let null = text.trim() == "null" && allows("null");
        return if null { Value::Null } else { Value::String(text.to_owned()) };
    }
    let fits = |value: Value| fitting(value, &allows);
    let written = serde_json::from_str::<Value>(text).ok();
    let quoted = match &written {
        Some(Value::String(inner)) => serde_json::from_str::<Value>(inner).ok(),
        _ => None,
    };
    let closed = || closed(text).filter(|v| v.is_array() || v.is_object());
    let found = written
        .and_then(fits)
        .or_else(|| closed().and_then(fits))
        .or_else(|| quoted.filter(|v| v.is_number() || v.is_boolean()).and_then(fits))
        .or_else(|| python(text).and_then(fits));
    found.unwrap_or_else(|| Value::String(text.to_owned()))
}

fn untyped(text: &str) -> Value {
    let json = serde_json::from_str(text).ok().or_else(|| closed(text));
    json.unwrap_or_else(|| Value::String(text.to_owned()))
}

/// The types that a schema allows; `None` where it does not say.
fn types(schema: &Value, depth: usize) -> Option<Vec<String>> {
    let depth = depth.checked_sub(1)?;
    match &schema["type"] {
        Value::String(one) => return Some(vec![one.clone()]),
        Value::Array(list) => return list.iter().map(|t| t.as_str().map(str::to_owned)).collect(),
        _ => {}
    }
    for name in ["anyOf", "oneOf"] {
        if let Value::Array(branches) = &schema[name] {
            let all: Option<Vec<Vec<String>>> = branches.iter().map(|branch| types(branch, depth)).collect();
            return all.map(|all| all.concat()).filter(|all| !all.is_empty());
        }
    }
    if let Value::Array(values) = &schema["enum"] {
        return (!values.is_empty()).then(|| values.iter().map(|v| type_of(v).to_owned()).collect());
    }
    schema.get("const").map(|value| vec![type_of(value).to_owned()])
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The value, if its type is allowed; a fraction without a remainder is a whole number too.
fn fitting(value: Value, allows: &impl Fn(&str) -> bool) -> Option<Value> {
    let name = type_of(&value);
    if allows(name) || (name == "integer" && allows("number")) {
        return Some(value);
    }
    let whole = value.as_f64().filter(|n| name == "number" && n.fract() == 0.0 && n.abs() < 9e15);
    whole.filter(|_| allows("integer")).map(|n| Value::Number(Number::from(n as i64)))
}

/// Python's words for three values.
fn python(text: &str) -> Option<Value> {
    match text.trim() {
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        "None" => Some(Value::Null),
        _ => None,
    }
}

/// The JSON of a text that lacks nothing but closing brackets.
fn closed(text: &str) -> Option<Value> {
    serde_json::from_str(&close_brackets(text)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_are_typed_by_the_whole_schema() {
        let nullable = json!({"type": ["string", "null"]});
        let any = json!({"anyOf": [{"type": "integer"}, {"type": "null"}]});
        for (schema, text, expected) in [
            (nullable.clone(), "123", json!("123")),
            (nullable.clone(), "null", json!(null)),
            (nullable, " null me", json!(" null me")),
            (json!({"type": "string"}), "null", json!("null")),
            (json!({"type": "string"}), "{\"a\": 1}\n", json!("{\"a\": 1}\n")),
            (json!({"type": "integer"}), "\"5\"", json!(5)),
            (json!({"type": "integer"}), "3.0", json!(3)),
            (json!({"type": "integer"}), "3.5", json!("3.5")),
            (json!({"type": "integer"}), "1e300", json!("1e300")),
            (json!({"type": "number"}), "3.0", json!(3.0)),
            (json!({"type": "number"}), "3", json!(3)),
            (json!({"type": "number"}), "\"2.5\"", json!(2.5)),
            (json!({"type": "boolean"}), "True", json!(true)),
            (json!({"type": "boolean"}), "\"false\"", json!(false)),
            (json!({"type": "boolean"}), "yes", json!("yes")),
            (json!({"type": "boolean"}), "1", json!("1")),
            (json!({"type": ["boolean", "null"]}), "None", json!(null)),
            (any.clone(), "7", json!(7)),
            (any.clone(), "null", json!(null)),
            (any, "x", json!("x")),
            (json!({"oneOf": [{"type": "string"}, {"type": "integer"}]}), "7", json!("7")),
            (json!({"anyOf": [{"type": "integer"}, {}]}), "[1", json!([1])),
            (json!({"enum": [1, 2]}), "\"2\"", json!(2)),
            (json!({"enum": ["1", "2"]}), "2", json!("2")),
            (json!({"const": true}), "True", json!(true)),
            (json!({"type": "array"}), "[{\"a\": \"]\"", json!([{"a": "]"}])),
            (json!({"type": "array"}), "{\"a\": 1", json!("{\"a\": 1")),
            (json!({"type": "object"}), "{\"a\": [1", json!({"a": [1]})),
            (json!({}), "true", json!(true)),
            (json!({}), "{\"a\": [1", json!({"a": [1]})),
            (json!(null), "plain text", json!("plain text")),
            (json!({"$ref": "#/x"}), "1", json!(1)),
            (json!({"type": 5}), "1", json!(1)),
            (json!({"type": []}), "1", json!("1")),
        ] {
            assert_eq!(value(&schema, text), expected, "{schema} {text}");
        }
        let mut deep = json!({"type": "integer"});
        for _ in 0..100 {
            deep = json!({"anyOf": [deep]});
        }
        assert_eq!(value(&deep, "True"), json!("True"), "too deep to be typed");
    }
}
