//! The grammar of tool calls, in the markup that the model was trained on:
//! `<tool_call>NAME<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`. An argument whose schema is a plain string is
//! written as it is, any other as JSON, as the server reads them.

use std::fmt::Write as _;

use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};

use crate::asked::{Calls, Tool};
use crate::ebnf::quoted;
use crate::grammar::{self, Source};
use crate::schema::{Checked, Problem, Rules};
use crate::tokens::Markup;

/// Text in which nothing looks like the beginning of a call.
const TEXT: &str = r"TEXT: /(?s:.+)/ & ~/(?s:.*)(?i:<tool_call>)(?s:.*)/";
/// Text of an argument: it holds nothing that the server would take for its end, or for the end of the call.
const RAW: &str = r"/(?s:.*)/ & ~/(?s:.*)(<\/arg_value>|(?i:<\/tool_call>))(?s:.*)/";
/// What a plain string may be bound by.
const BOUNDS: [&str; 6] = ["minLength", "maxLength", "pattern", "enum", "const", "format"];

/// Formats of plain strings, as regular expressions over the whole text.
const FORMATS: [(&str, &str); 6] = [
    (
        "date",
        r"[0-9]{4}-(((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01]))|((0[469]|11)-(0[1-9]|[12][0-9]|30))|(02-(0[1-9]|1[0-9]|2[0-8])))",
    ),
    ("time", r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"),
    (
        "date-time",
        r"[0-9]{4}-(((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01]))|((0[469]|11)-(0[1-9]|[12][0-9]|30))|(02-(0[1-9]|1[0-9]|2[0-8])))T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    ),
    ("uuid", r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"),
    (
        "ipv4",
        r"((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])",
    ),
    (
        "email",
        r"[A-Za-z0-9_+-]{1,32}(\.[A-Za-z0-9_+-]{1,16}){0,2}@[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?){1,4}",
    ),
];

struct Writer {
    rules: Rules,
    markup: Markup,
    lark: String,
    unenforced: Vec<String>,
    parts: Vec<(String, Value)>,
    terminals: usize,
}

fn problem<T>(at: &str, what: impl Into<String>) -> Result<T, Problem> {
    Err(Problem { at: at.to_owned(), what: what.into() })
}

/// A regular expression in the library's language.
fn slashed(regex: &str) -> String {
    let mut out = String::with_capacity(regex.len() + 2);
    out.push('/');
    let mut escaped = false;
    for c in regex.chars() {
        if c == '/' && !escaped {
            out.push('\\');
        }
        if c == '\n' {
            out.push_str(r"\n");
        } else {
            out.push(c);
        }
        escaped = c == '\\' && !escaped;
    }
    out.push('/');
    out
}

/// The choices of a regular expression at its outermost level.
fn choices(regex: &str) -> Vec<&str> {
    let (mut all, mut from, mut level) = (Vec::new(), 0, 0usize);
    let (mut escaped, mut class) = (false, false);
    for (at, c) in regex.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '[' if !class => class = true,
            ']' if class => class = false,
            '(' if !class => level += 1,
            ')' if !class => level = level.saturating_sub(1),
            '|' if !class && level == 0 => {
                all.push(&regex[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    all.push(&regex[from..]);
    all
}

/// A pattern, which may match anywhere, as an expression over the whole text.
fn anywhere(pattern: &str) -> String {
    let one = |choice: &str| {
        let (choice, before) = match choice.strip_prefix('^') {
            Some(rest) => (rest, ""),
            None => (choice, "(?s:.*)"),
        };
        let ends = choice.ends_with('$')
            && choice[..choice.len() - 1].chars().rev().take_while(|c| *c == '\\').count() % 2 == 0;
        let (choice, after) = if ends { (&choice[..choice.len() - 1], "") } else { (choice, "(?s:.*)") };
        format!("{before}({}){after}", llguidance::regex_to_lark(choice, "dw"))
    };
    let all: Vec<String> = choices(pattern).into_iter().map(one).collect();
    // The library's rewriting escapes slashes already.
    format!("/{}/", all.join("|").replace('\n', r"\n"))
}

impl Writer {
    /// Takes note of a keyword that is not enforced, or refuses it.
    fn loose(&mut self, at: &str, what: &str) -> Result<(), Problem> {
        if self.rules.lenient {
            self.unenforced.push(at.to_owned());
            return Ok(());
        }
        problem(at, format!("{what}: leave it out, or let the server run with unenforced = \"warn\""))
    }

    /// Text of a plain string under its schema, as an expression of the grammar.
    fn raw(&mut self, schema: &Map<String, Value>, at: &str) -> Result<String, Problem> {
        let mut bounds = vec![RAW.to_owned()];
        let mut empty = true;
        let length = |key: &str| schema.get(key).and_then(Value::as_u64);
        let (least, most) = (length("minLength").unwrap_or(0), length("maxLength"));
        if least > 0 || most.is_some() {
            let most = most.map_or(String::new(), |n| n.to_string());
            bounds.push(format!("/(?s:.{{{least},{most}}})/"));
            empty = least == 0;
        }
        if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
            grammar::regex_depth(pattern, &format!("{at}/pattern"), self.rules)?;
            bounds.push(anywhere(pattern));
            // Whether it matches nothing at all is not known: then the text is written.
            empty = false;
            self.parts.push((format!("{at}/pattern"), json!({"type": "string", "pattern": pattern})));
        }
        if let Some(name) = schema.get("format").and_then(Value::as_str) {
            match FORMATS.iter().find(|(known, _)| *known == name) {
                Some((_, regex)) => {
                    bounds.push(slashed(regex));
                    empty = false;
                }
                None => self.loose(
                    &format!("{at}/format"),
                    &format!("the format {name:?} cannot be enforced in an argument"),
                )?,
            }
        }
        let listed = schema.get("enum").and_then(Value::as_array).cloned();
        let listed = match (listed, schema.get("const")) {
            (Some(list), Some(one)) => Some(list.into_iter().filter(|value| value == one).collect()),
            (list, one) => list.or_else(|| one.map(|value| vec![value.clone()])),
        };
        if let Some(values) = listed {
            let texts: Vec<&str> = values.iter().filter_map(Value::as_str).collect();
            if texts.is_empty() {
                return problem(at, "no text is among its values");
            }
            empty = empty && texts.contains(&"");
            let texts: Vec<String> = texts.into_iter().filter(|t| !t.is_empty()).map(quoted).collect();
            if texts.is_empty() {
                return Ok("\"\"".into());
            }
            bounds.push(format!("({})", texts.join(" | ")));
        }
        let name = format!("RAW{}", self.terminals);
        self.terminals += 1;
        // No text at all is no token of a grammar: it is left out instead.
        bounds.push("/(?s:.+)/".into());
        let _ = writeln!(self.lark, "{name}: {}", bounds.join(" & "));
        Ok(if empty { format!("{name}?") } else { name })
    }

    /// The value of an argument.
    fn value(&mut self, schema: &Value, defs: &Map<String, Value>, at: &str) -> Result<String, Problem> {
        // What the server reads as it is.
        if schema["type"] == "string"
            && let Some(map) = schema.as_object()
        {
            let Checked { schema, unenforced } = grammar::checked(schema, at, self.rules)?;
            self.unenforced.extend(unenforced);
            let other = ["$ref", "allOf", "anyOf", "oneOf"].iter().find(|key| map.contains_key(**key));
            if let Some(other) = other {
                self.loose(
                    &format!("{at}/{other}"),
                    &format!("{other} beside the type string cannot be enforced in an argument"),
                )?;
            }
            let mut kept = schema.as_object().cloned().unwrap_or_default();
            kept.retain(|key, _| BOUNDS.contains(&key.as_str()));
            return self.raw(&kept, at);
        }
        let mut whole = match schema {
            Value::Bool(_) => json!({}),
            _ => schema.clone(),
        };
        if schema == &Value::Bool(false) {
            return problem(at, "no value is valid under it");
        }
        if let Value::Object(map) = &mut whole {
            for (key, value) in defs {
                map.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
        let checked = grammar::checked(&whole, at, self.rules)?;
        self.unenforced.extend(checked.unenforced);
        self.parts.extend(grammar::parts(&checked.schema, at));
        Ok(format!("%json {}", grammar::settled(checked.schema, self.rules.lenient)))
    }

    fn argument(&self, key: &str, value: &str) -> String {
        let Markup { key: open, key_end, value: value_open, value_end, .. } = self.markup;
        format!("<[{open}]> {key} <[{key_end}]> <[{value_open}]> {value} <[{value_end}]>")
    }

    /// Any argument whose name is none of these.
    fn others(&mut self, names: &[&String], value: &str) -> String {
        let key = format!("KEY{}", self.terminals);
        self.terminals += 1;
        let mut bounds = String::from(r"/[^<\r\n]+/");
        if !names.is_empty() {
            let names: Vec<String> = names.iter().map(|name| quoted(name)).collect();
            let _ = write!(bounds, " & ~({})", names.join(" | "));
        }
        let _ = writeln!(self.lark, "{key}: {bounds}");
        self.argument(&key, value)
    }

    /// Arguments that are not held to a schema; strings are written as the server reads them all the same.
    fn free(&mut self, properties: &Map<String, Value>) -> Result<String, Problem> {
        let any = format!("%json {}", grammar::settled(json!({}), false));
        let mut kinds = Vec::new();
        let plain: Vec<&String> = properties
            .iter()
            .filter(|(_, schema)| schema["type"] == "string")
            .map(|(name, _)| name)
            .collect();
        if !plain.is_empty() {
            let value = self.raw(&Map::new(), "")?;
            let names: Vec<String> = plain.iter().map(|name| quoted(name)).collect();
            kinds.push(self.argument(&format!("({})", names.join(" | ")), &value));
        }
        kinds.push(self.others(&plain, &any));
        Ok(format!("({})*", kinds.join(" | ")))
    }

    /// Arguments under a schema, in its order.
    fn held(&mut self, parameters: &Map<String, Value>, at: &str) -> Result<String, Problem> {
        let mut defs = Map::new();
        let mut open = Value::Bool(false);
        let empty = Map::new();
        for (key, value) in parameters {
            let place = format!("{at}/{key}");
            match key.as_str() {
                // Notes, and what is read below.
                "properties" | "required" | "title" | "description" | "$schema" | "$id" | "$comment"
                | "examples" | "default" => {}
                "$defs" | "definitions" => drop(defs.insert(key.clone(), value.clone())),
                "type" if value == "object" => {}
                "additionalProperties" => open = value.clone(),
                key if key.starts_with("x-") => {}
                key => {
                    self.loose(&place, &format!("{key:?} cannot be enforced of a whole list of arguments"))?;
                }
            }
        }
        // References of an argument lead into the schema that it stands in: it is looked at as a whole too.
        let properties = parameters.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let required: Vec<&str> = match parameters.get("required") {
            None => Vec::new(),
            Some(Value::Array(names)) if names.iter().all(Value::is_string) => {
                names.iter().filter_map(Value::as_str).collect()
            }
            Some(_) => return problem(&format!("{at}/required"), "must be a list of names"),
        };
        if let Some(missing) = required.iter().find(|name| !properties.contains_key(**name)) {
            let what = format!("names {missing:?}, which is not among the properties");
            return problem(&format!("{at}/required"), what);
        }
        let mut arguments = Vec::new();
        for (name, schema) in properties {
            let place = format!("{at}/properties/{}", name.replace('~', "~0").replace('/', "~1"));
            if name.is_empty() || name.contains(['<', '\n', '\r']) || name.trim() != name {
                return problem(&place, "this name of an argument cannot be written in the markup of calls");
            }
            let value = self.value(schema, &defs, &place)?;
            let argument = self.argument(&quoted(name), &value);
            let optional = if required.contains(&name.as_str()) { "" } else { "?" };
            arguments.push(format!("({argument}){optional}"));
        }
        if open != Value::Bool(false) {
            let names: Vec<&String> = properties.keys().collect();
            // Of a name that the schema does not give, the server reads JSON.
            let schema = if open["type"] == "string" { json!({"anyOf": [open]}) } else { open };
            let value = self.value(&schema, &defs, &format!("{at}/additionalProperties"))?;
            let other = self.others(&names, &value);
            arguments.push(format!("({other})*"));
        }
        Ok(if arguments.is_empty() { "\"\"".into() } else { arguments.join(" ") })
    }

    fn tool(&mut self, tool: &Tool) -> Result<(), Problem> {
        let at = format!("/tools/{}/function/parameters", tool.at);
        if tool.name.contains(['<', '\n', '\r']) || tool.name.trim() != tool.name {
            return problem(
                &at,
                format!("the name {:?} cannot be written in the markup of calls", tool.name),
            );
        }
        let empty = Map::new();
        let arguments = match &tool.parameters {
            Value::Object(parameters) if tool.held => self.held(parameters, &at)?,
            parameters => self.free(parameters["properties"].as_object().unwrap_or(&empty))?,
        };
        let Markup { call, call_end, .. } = self.markup;
        let _ = writeln!(
            self.lark,
            "call_{}: <[{call}]> {} {arguments} <[{call_end}]>",
            tool.at,
            quoted(&tool.name)
        );
        Ok(())
    }
}

/// The grammar of the calls that a request wants.
///
/// # Errors
/// A schema that cannot be enforced, and where.
pub fn source(calls: &Calls, markup: Markup, rules: Rules) -> Result<Source, Problem> {
    let mut writer = Writer {
        rules,
        markup,
        lark: String::new(),
        unenforced: Vec::new(),
        parts: Vec::new(),
        terminals: 0,
    };
    for tool in &calls.tools {
        writer.tool(tool)?;
    }
    let any: Vec<String> = calls.tools.iter().map(|tool| format!("call_{}", tool.at)).collect();
    // Who wants a call gets it at once: a model that would rather talk could talk until its budget is used up.
    let start = match (calls.named, calls.required, calls.parallel) {
        (true, _, _) | (false, true, false) => "call",
        (false, true, true) => "call+",
        (false, false, true) => "TEXT? (call TEXT?)*",
        (false, false, false) => "TEXT? call?",
    };
    let lark = format!("start: {start}\ncall: {}\n{TEXT}\n{}", any.join(" | "), writer.lark);
    Ok(Source {
        grammar: TopLevelGrammar::from_lark(lark),
        unenforced: writer.unenforced,
        parts: writer.parts,
    })
}
