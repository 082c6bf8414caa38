//! From what was asked for to a grammar that the library compiles.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use crate::asked::{Asked, Kind};
use crate::schema::{self, Checked, Problem, Rules};
use crate::tokens::Tokens;
use crate::{ebnf, tools};

/// Blanks between the tokens of JSON: 32 at most, so that a reply cannot go on with nothing else.
const BLANKS: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// A grammar before it is compiled.
pub struct Source {
    /// The grammar.
    pub grammar: TopLevelGrammar,
    /// Pointers of keywords that are not enforced.
    pub unenforced: Vec<String>,
    /// Parts that can be compiled alone, with their pointers: to name the one at fault.
    pub parts: Vec<(String, Value)>,
}

/// A schema with the library's settings for it.
pub fn settled(mut schema: Value, lenient: bool) -> Value {
    let settings = json!({"whitespace_pattern": BLANKS, "coerce_one_of": lenient});
    match &mut schema {
        Value::Object(map) => drop(map.insert("x-guidance".into(), settings)),
        Value::Bool(true) => schema = json!({"x-guidance": settings}),
        _ => {}
    }
    schema
}

fn nested(text: &str, depth: usize) -> Result<(), String> {
    let (mut level, mut escaped, mut class) = (0usize, false, false);
    for c in text.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '[' if !class => class = true,
            ']' if class => class = false,
            '(' if !class => {
                level += 1;
                if level > depth {
                    return Err(format!("groups are nested deeper than {depth} levels (knob depth)"));
                }
            }
            ')' if !class => level = level.saturating_sub(1),
            _ => {}
        }
    }
    Ok(())
}

/// Checks a regular expression as far as that needs no compiling.
///
/// # Errors
/// Groups that are nested too deep.
pub fn regex_depth(text: &str, at: &str, rules: Rules) -> Result<(), Problem> {
    nested(text, rules.depth).map_err(|what| Problem { at: at.to_owned(), what })
}

/// A regular expression that the whole text must match: anchors at its ends say nothing more.
fn whole(text: &str) -> &str {
    let text = text.strip_prefix('^').unwrap_or(text);
    match text.strip_suffix('$') {
        Some(rest) if rest.chars().rev().take_while(|c| *c == '\\').count() % 2 == 0 => rest,
        _ => text,
    }
}

/// A schema that was checked, with the depth of its patterns.
///
/// # Errors
/// The first problem.
pub fn checked(schema: &Value, at: &str, rules: Rules) -> Result<Checked, Problem> {
    let checked = schema::check(schema, at, rules)?;
    for (place, pattern) in schema::carriers(&checked.schema, &["pattern"]) {
        regex_depth(pattern.as_str().unwrap_or_default(), &format!("{at}{place}"), rules)?;
    }
    for (place, patterns) in schema::carriers(&checked.schema, &["patternProperties"]) {
        for pattern in patterns.as_object().into_iter().flat_map(|map| map.keys()) {
            regex_depth(pattern, &format!("{at}{place}/{pattern}"), rules)?;
        }
    }
    Ok(checked)
}

/// The parts of a schema that may fail to compile, as schemas of their own.
pub fn parts(schema: &Value, at: &str) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    for (place, value) in schema::carriers(schema, &["pattern", "oneOf", "patternProperties"]) {
        let key = place.rsplit('/').next().unwrap_or_default().to_owned();
        let mut alone = json!({});
        alone[&key] = value.clone();
        if key == "pattern" {
            alone["type"] = json!("string");
        }
        // References lead into the whole.
        for defs in ["$defs", "definitions"] {
            if let Some(defined) = schema.get(defs) {
                alone[defs] = defined.clone();
            }
        }
        all.push((format!("{at}{place}"), alone));
    }
    all
}

/// Makes the grammar of what was asked for.
///
/// # Errors
/// What cannot be enforced, and where.
pub fn source(asked: &Asked, tokens: &Tokens, rules: Rules) -> Result<Source, Problem> {
    let plain = |grammar| Source { grammar, unenforced: Vec::new(), parts: Vec::new() };
    let problem = |what: String| Problem { at: asked.at.clone(), what };
    let unreadable = |e: serde_json::Error| match e.to_string() {
        told if told.contains("recursion limit") => {
            problem(format!("is nested deeper than {} levels (knob depth)", rules.depth))
        }
        told => problem(format!("cannot be read again: {told}")),
    };
    match asked.kind {
        Kind::Json => {
            let schema = settled(json!({"type": "object"}), false);
            Ok(plain(TopLevelGrammar::from_json_schema(schema)))
        }
        Kind::Schema => {
            let schema: Value = serde_json::from_str(&asked.text).map_err(unreadable)?;
            let Checked { schema, unenforced } = checked(&schema, &asked.at, rules)?;
            let parts = parts(&schema, &asked.at);
            let grammar = TopLevelGrammar::from_json_schema(settled(schema, rules.lenient));
            Ok(Source { grammar, unenforced, parts })
        }
        Kind::Regex => {
            regex_depth(&asked.text, &asked.at, rules)?;
            let regex = llguidance::regex_to_lark(whole(&asked.text), "dw");
            Ok(plain(TopLevelGrammar::from_lark(format!("start: /{regex}/"))))
        }
        Kind::Choice => {
            let list: Vec<String> = serde_json::from_str(&asked.text).map_err(unreadable)?;
            let list: Vec<String> = list.iter().map(|text| ebnf::quoted(text)).collect();
            Ok(plain(TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}\n", list.join(" | ")))))
        }
        Kind::Grammar => {
            let lark = ebnf::translate(&asked.text, rules.depth).map_err(problem)?;
            Ok(plain(TopLevelGrammar::from_lark(lark)))
        }
        Kind::Tools => {
            let calls = serde_json::from_str(&asked.text).map_err(unreadable)?;
            let Some(markup) = tokens.markup else {
                return Err(problem("the checkpoint has no tokens for the markup of calls".into()));
            };
            tools::source(&calls, markup, rules)
        }
    }
}
