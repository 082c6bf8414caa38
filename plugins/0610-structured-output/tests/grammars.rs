//! What is compiled allows what it should and nothing else; what cannot be enforced is refused by its place.
#![allow(clippy::unwrap_used)]

mod support;

use plugfold::reply::tools::{ToolCallReader, ToolSpec};
use plugfold::reply::{Piece, ReplyParser as _};
use plugfold_0610_structured_output::asked::{Calls, wanted};
use plugfold_0610_structured_output::compiler::Compiler;
use plugfold_0610_structured_output::schema::{Problem, Rules};
use plugfold_0610_structured_output::{Settings, ebnf};
use serde_json::{Value, json};
use support::{ENDS, asked, babble, compiler, compiler_of, open, patient, schema, tracker};

fn lenient() -> Settings {
    let mut settings = patient();
    settings.bounds.rules.lenient = true;
    settings
}

/// Says whether a value is valid, by another implementation.
fn valid(schema: &Value, text: &str) -> Result<(), String> {
    let value: Value = serde_json::from_str(text).map_err(|e| format!("{text}: {e}"))?;
    let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
    validator.validate(&value).map_err(|e| format!("{text}: {e}"))
}

/// Random replies under a schema are all valid, and some of them end.
fn holds(compiler: &std::sync::Arc<Compiler>, wanted: &Value) {
    let compiled = compiler.within(&schema(wanted)).unwrap_or_else(|e| panic!("{wanted}: {e}"));
    let mut ended = 0;
    for seed in 1..9 {
        let (_, text) = babble(compiler, &compiled, seed, 400);
        if let Some(text) = text {
            valid(wanted, &text).unwrap_or_else(|e| panic!("{wanted}: {e}"));
            ended += 1;
        }
    }
    assert!(ended > 2, "{wanted}: {ended} replies of 8 came to an end");
}

fn refusal(compiler: &std::sync::Arc<Compiler>, wanted: &Value) -> Problem {
    match compiler.within(&schema(wanted)) {
        Ok(_) => panic!("{wanted} is not refused"),
        Err(problem) => problem,
    }
}

#[test]
fn every_reply_under_a_schema_is_valid_under_it() {
    let compiler = compiler();
    let name = json!({"type": "string", "maxLength": 12});
    for schema in [
        json!({"type": "object", "properties": {"name": name, "age": {"type": "integer"}}, "required": ["name", "age"]}),
        json!({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"type": "number"}}}),
        json!({"type": "object", "properties": {"a": name}, "additionalProperties": {"type": "integer"}}),
        json!({"type": "array", "items": {"enum": ["red", 1, null, [1], {"a": 2}]}, "minItems": 1, "maxItems": 4}),
        json!({"type": "array", "prefixItems": [{"const": 1}, name], "items": false}),
        json!({"type": ["string", "null"], "maxLength": 5, "minLength": 2}),
        json!({"anyOf": [{"type": "integer", "minimum": 3, "exclusiveMaximum": 9}, {"const": "none"}]}),
        json!({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]}),
        json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                         {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}],
               "additionalProperties": true}),
        json!({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}),
        json!({"type": "number", "minimum": -1.5, "maximum": 2.5}),
        json!({"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$", "maxLength": 12}),
        json!({"type": "string", "pattern": "b+c", "maxLength": 9}),
        json!({"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}, "additionalProperties": false,
               "maxProperties": 3}),
        json!({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {
            "leaf": {"type": "integer"}, "twigs": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
            "required": ["leaf"]}}}),
        json!({"type": "object", "properties": {"when": {"type": "string", "format": "date-time"},
            "day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"},
            "ip": {"type": "string", "format": "ipv4"}}, "required": ["when", "day", "id", "ip"]}),
        json!({"const": {"a": [1, "x"], "b": null}}),
        json!({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "boolean"}}, "type": "object", "required": ["a"]}),
        json!({"type": "object", "properties": {"a~b/c": {"type": "integer"}, "é\"": {"type": "boolean"}},
               "required": ["a~b/c", "é\""]}),
        json!({}),
        json!({"type": "object"}),
    ] {
        holds(&compiler, &schema);
    }
}

#[test]
fn objects_are_closed_unless_their_schema_says_otherwise() {
    let compiler = compiler();
    for (schema, more) in [
        (json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}), false),
        (
            json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": true}),
            true,
        ),
        (json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}), true),
        (json!({"type": "object"}), true),
    ] {
        let compiled = compiler.within(&support::schema(&schema)).unwrap();
        let mut tracker = tracker(&compiler, &compiled);
        let text: &[u8] = if schema["required"].is_null() { b"{" } else { b"{\"a\":1," };
        for byte in text {
            let token = compiler.tokens.env.tok_trie().token_id(&[*byte]).unwrap();
            let taken = tracker.accept(token).unwrap();
            assert!(taken || (*byte == b',' && !more), "{schema}: {}", *byte as char);
            if *byte == b',' {
                assert_eq!(taken, more, "{schema}");
            }
        }
    }
}

#[test]
fn case_13_keywords_are_enforced_or_refused_by_their_place() {
    let compiler = compiler();
    let at = |schema: Value| json!({"type": "object", "properties": {"v": schema}, "required": ["v"]});
    for enforced in [
        json!({"type": "string", "minLength": 3, "maxLength": 6}),
        json!({"type": "string", "maxLength": 10000, "pattern": "^a+$"}),
        json!({"type": "string", "pattern": "^x[yz]+$"}),
        json!({"type": "integer", "minimum": 17}),
        json!({"type": "number", "exclusiveMaximum": 4, "minimum": 0}),
        json!({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}),
        json!({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5}),
        json!({"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}}),
        json!({"type": "object", "patternProperties": {"^k": {"type": "integer"}}, "additionalProperties": false}),
        json!({"type": "string", "format": "date-time"}),
        json!({"const": "only"}),
        json!({"enum": ["a", 2, null, true]}),
        json!({"oneOf": [{"type": "integer"}, {"type": "null"}]}),
        json!({"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": false}),
    ] {
        holds(&compiler, &at(enforced));
    }
    for (keyword, value, more) in [
        ("uniqueItems", json!(true), json!({"type": "array"})),
        ("contains", json!({"const": 1}), json!({"type": "array"})),
        ("dependentRequired", json!({"a": ["b"]}), json!({"type": "object"})),
        ("not", json!({"type": "string"}), json!({})),
        ("if", json!({"type": "string"}), json!({})),
        ("propertyNames", json!({"maxLength": 3}), json!({"type": "object"})),
        ("unevaluatedProperties", json!(false), json!({"type": "object"})),
        ("format", json!("postal-code"), json!({"type": "string"})),
        ("maxLenght", json!(3), json!({"type": "string"})),
        ("minProperties", json!(2), json!({"type": "object"})),
        ("maxProperties", json!(1), json!({"type": "object", "properties": {"a": {}, "b": {}}})),
    ] {
        let mut inner = more;
        inner[keyword] = value;
        let whole = at(inner);
        let problem = refusal(&compiler, &whole);
        assert_eq!(problem.at, format!("/guided_json/properties/v/{keyword}"), "{problem}");
        assert!(problem.what.contains(keyword) || keyword == "format", "{problem}");
        assert!(problem.what.contains("unenforced = \"warn\""), "{problem}");
        // With the knob, the reply says it instead.
        let lenient = compiler_of(lenient());
        let compiled = lenient.within(&schema(&whole)).unwrap();
        assert_eq!(compiled.unenforced, [format!("/guided_json/properties/v/{keyword}")]);
    }
    // Two schemas of which a value may be valid under both: one of them too many.
    let both = at(json!({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}));
    let problem = refusal(&compiler, &both);
    assert!(problem.at.ends_with("/properties/v/oneOf"), "{problem}");
    assert_eq!(compiler_of(lenient()).within(&schema(&both)).unwrap().unenforced.len(), 1);
}

#[test]
fn case_11_a_bad_regex_is_refused_by_its_place_each_time() {
    let compiler = compiler();
    let long = format!("{}a", "(a|".repeat(350_000));
    for (pattern, may_run) in [
        ("[", false),
        ("(?=a)b", false),
        (r"\p{Nope}", false),
        ("^(|.*)$", true),
        ("(a{1,1000}){1,1000}", true),
        ("^(a|b)*a(a|b){20}$", true),
        (long.as_str(), false),
    ] {
        let wanted = json!({"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}}, "required": ["p"]});
        let said = |_: i32| match compiler.within(&schema(&wanted)) {
            Ok(compiled) => {
                if let (_, Some(text)) = babble(&compiler, &compiled, 3, 300) {
                    valid(&wanted, &text).unwrap();
                }
                None
            }
            Err(problem) => Some(problem),
        };
        let twice = [0, 1].map(said);
        assert_eq!(twice[0], twice[1], "the second identical request");
        match &twice[0] {
            None => assert!(may_run, "{pattern:.40}"),
            Some(problem) => {
                let place =
                    if pattern.len() > 1000 { "/guided_json" } else { "/guided_json/properties/p/pattern" };
                assert!(problem.at == place, "{pattern:.40}: {problem}");
                assert!(problem.what.len() < 1000 && !problem.what.contains('\n'), "{problem}");
            }
        }
        // The compiler goes on.
        compiler.within(&schema(&json!({"type": "integer"}))).unwrap();
    }
}

#[test]
fn case_12_recursion_is_a_grammar_and_empty_circles_are_refused() {
    let compiler = compiler();
    holds(
        &compiler,
        &json!({"type": "object", "properties": {
        "name": {"type": "string", "pattern": "^(x|yy|zzz)$"},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}, "required": ["name", "children"]}),
    );
    for circle in [
        json!({"$ref": "#"}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        json!({"anyOf": [{"type": "string"}, {"$ref": "#"}]}),
        json!({"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}}),
    ] {
        let problem = refusal(&compiler, &circle);
        assert!(problem.what.contains("refers to itself"), "{problem}");
    }
    for (reference, word) in
        [("#/$defs/none", "no schema"), ("http://x/y", "JSON pointer"), ("#name", "JSON pointer")]
    {
        let problem = refusal(&compiler, &json!({"type": "array", "items": {"$ref": reference}}));
        assert!(problem.at == "/guided_json/items/$ref" && problem.what.contains(word), "{problem}");
    }
}

#[test]
fn hostile_schemas_are_refused_by_the_limit_or_run() {
    let compiler = compiler();
    for levels in [70, 300] {
        let deep =
            (0..levels).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
        assert!(refusal(&compiler, &deep).what.contains("64 levels (knob depth)"));
    }
    let many: Vec<String> = (0..1_000_000).map(|i| format!("v{i}")).collect();
    assert!(refusal(&compiler, &json!({"enum": many})).what.contains("knob schema_kib"));
    let choices = compiler.within(&asked(&json!({"guided_choice": many})));
    assert!(choices.is_err_and(|problem| problem.what.contains("knob schema_kib")));
    let nested = json!({"guided_regex": format!("{}a{}", "(".repeat(500), ")".repeat(500))});
    assert!(compiler.within(&asked(&nested)).is_err_and(|p| p.what.contains("knob depth")));
    let nested = json!({"guided_grammar": format!("root ::= {}\"a\"{}", "(".repeat(500), ")".repeat(500))});
    assert!(compiler.within(&asked(&nested)).is_err_and(|p| p.what.contains("knob depth")));
    // Bounds that would be huge if they were written out.
    for large in [
        json!({"type": "string", "maxLength": 1_000_000_000}),
        json!({"type": "array", "items": {"type": "integer"}, "maxItems": 1_000_000_000}),
        json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
        json!({"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1_000_000}),
        json!({"type": "string", "pattern": "^((((a{1,99}){1,99}){1,99}){1,99})$"}),
    ] {
        match compiler.within(&schema(&large)) {
            Ok(compiled) => drop(babble(&compiler, &compiled, 1, 20)),
            Err(problem) => assert!(!problem.what.is_empty(), "{large}"),
        }
    }
    // Less room than the grammar needs.
    let mut narrow = patient();
    narrow.bounds.mib = 1;
    let names: Vec<String> = (0..4000).map(|i| format!("name {i} {}", i * 7919)).collect();
    let problem = refusal(&compiler_of(narrow), &json!({"enum": names}));
    assert!(!problem.what.contains("panic"), "{problem}");
    // No time at all.
    let mut hasty = patient();
    hasty.bounds.time = std::time::Duration::ZERO;
    assert!(refusal(&compiler_of(hasty), &json!({"type": "integer"})).what.contains("knob compile_s"));
    // A key with which the library's own settings could be changed is a note like any other.
    assert!(
        compiler
            .within(&schema(&json!({"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}})))
            .is_err()
    );
}

#[test]
fn malformed_schemas_say_where() {
    let compiler = compiler();
    for (wanted, at, word) in [
        (json!({"type": "strin"}), "/type", "must be one or a list"),
        (json!({"properties": {"a": 3}}), "/properties/a", "must be a schema"),
        (json!({"required": "a"}), "/required", "list of names"),
        (json!({"enum": []}), "/enum", "at least one value"),
        (json!({"anyOf": []}), "/anyOf", "at least one schema"),
        (json!({"minLength": -1}), "/minLength", "whole number"),
        (json!({"pattern": 1}), "/pattern", "must be a string"),
        (json!({"const": 9_007_199_254_740_993_u64}), "/const", "beyond 2^53"),
        (json!({"items": {"maximum": "3"}}), "/items/maximum", "must be a number"),
        (json!({"type": "integer", "minimum": 4, "maximum": 3}), "", ""),
    ] {
        let problem = refusal(&compiler, &wanted);
        assert_eq!(problem.at, format!("/guided_json{at}"), "{wanted}: {problem}");
        assert!(problem.what.contains(word), "{wanted}: {problem}");
    }
}

#[test]
fn fields_that_are_malformed_are_named() {
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    for (body, field) in [
        (json!({"response_format": {"type": "yaml"}}), "response_format"),
        (json!({"response_format": "json"}), "response_format"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": false}}}),
            "response_format.json_schema.schema",
        ),
        (json!({"guided_json": false}), "guided_json"),
        (json!({"guided_json": "{"}), "guided_json"),
        (json!({"guided_json": "3"}), "guided_json"),
        (json!({"guided_regex": ""}), "guided_regex"),
        (json!({"guided_regex": 3}), "guided_regex"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_choice": ["a", ""]}), "guided_choice"),
        (json!({"guided_grammar": ["root"]}), "guided_grammar"),
        (json!({"structured_outputs": []}), "structured_outputs"),
        (json!({"structured_outputs": {"yaml": "a"}}), "structured_outputs"),
        (json!({"structured_outputs": {"regex": 3}}), "structured_outputs.regex"),
        (json!({"tools": [tool], "tool_choice": "some"}), "tool_choice"),
        (json!({"tools": [tool], "tool_choice": {"function": {}}}), "tool_choice"),
        (json!({"tools": [{"type": "function", "function": {}}]}), "tools"),
        (json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}), "tools"),
        (json!({"tools": [tool], "tool_choice": "required", "guided_regex": "a"}), "tool_choice"),
        // A wrong one is told also where another wins.
        (json!({"response_format": {"type": "json_object"}, "guided_choice": []}), "guided_choice"),
    ] {
        let wrong = wanted(&body, true, false).unwrap_err();
        assert_eq!(wrong.field, field, "{body}: {}", wrong.what);
    }
}

#[test]
fn the_first_output_field_wins_and_absent_ones_ask_for_nothing() {
    let strict = json!({"type": "function", "function": {"name": "f", "strict": true}});
    let plain = json!({"type": "function", "function": {"name": "f"}});
    let at = |body: Value| wanted(&body, true, false).unwrap().map(|asked| asked.at);
    for (body, place) in [
        (json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}), Some("/response_format")),
        (
            json!({"response_format": {"type": "text"}, "guided_regex": "a", "guided_choice": ["b"]}),
            Some("/guided_regex"),
        ),
        (json!({"guided_json": {}, "guided_grammar": "root ::= \"a\""}), Some("/guided_json")),
        (
            json!({"structured_outputs": {"regex": "a", "choice": ["b"], "json_object": true}}),
            Some("/structured_outputs/choice"),
        ),
        (
            json!({"structured_outputs": {"json_object": true, "regex": null, "json": false}}),
            Some("/structured_outputs/json_object"),
        ),
        (json!({"structured_outputs": {"json": null, "whitespace": false}}), None),
        (json!({"response_format": {"type": "text"}}), None),
        (json!({"response_format": null, "guided_json": null}), None),
        (json!({"tools": [plain]}), None),
        (json!({"tools": [plain], "tool_choice": "auto"}), None),
        (json!({"tools": [strict], "tool_choice": "none"}), None),
        (json!({"tools": [strict]}), Some("/tools")),
        (json!({"tools": [plain], "tool_choice": "required"}), Some("/tools")),
        (json!({"tools": [strict], "guided_regex": "a"}), Some("/guided_regex")),
        (json!({"guided_json": "{\"type\": \"integer\"}"}), Some("/guided_json")),
        (json!({"guided_json": true}), Some("/guided_json")),
    ] {
        assert_eq!(at(body.clone()).as_deref(), place, "{body}");
    }
    assert!(wanted(&json!({"tools": [plain]}), true, true).unwrap().is_some(), "all tools count as strict");
    assert!(wanted(&json!({"tools": [strict]}), false, true).unwrap().is_none(), "raw prompts have no tools");
    let named = json!({"tools": [plain, strict], "tool_choice": {"function": {"name": "f"}}});
    let calls: Calls = serde_json::from_str(&asked(&named).text).unwrap();
    assert!(calls.named && calls.required && !calls.parallel);
}

#[test]
fn regexes_choices_and_grammars_are_followed() {
    let compiler = compiler();
    let arithmetic =
        "root ::= term ([-+*/] term)*  # sums\nterm ::= number | \"(\" root \")\"\nnumber ::= [0-9]{1,3}";
    for (body, whole) in [
        (json!({"guided_regex": "[ab]{2,5}c?"}), r"^[ab]{2,5}c?$"),
        (json!({"guided_regex": "^(yes|no)$"}), r"^(yes|no)$"),
        (json!({"guided_regex": r"\d+/\d+"}), r"^[0-9]+/[0-9]+$"),
        (
            json!({"guided_choice": ["Oslo", "New \"York\"\n", "a|b", "Zürich"]}),
            "^(Oslo|New \"York\"\n|a\\|b|Zürich)$",
        ),
        (
            json!({"guided_grammar": "root ::= greeting \" \" name\ngreeting ::= \"hi\" | \"hello\"\nname ::= [A-Z] [a-z]+"}),
            "^(hi|hello) [A-Z][a-z]+$",
        ),
        (json!({"guided_grammar": arithmetic}), r"^[-+*/()0-9]+$"),
        (
            json!({"structured_outputs": {"grammar": "root ::= [^\\n\"] \"\\u00e9\" \"x\"{2}"}}),
            "^[^\n\"]éxx$",
        ),
    ] {
        let compiled = compiler.within(&asked(&body)).unwrap_or_else(|e| panic!("{body}: {e}"));
        let mut ended = 0;
        for seed in 1..9 {
            if let (ids, Some(text)) = babble(&compiler, &compiled, seed, 300) {
                valid(&json!({"pattern": whole}), &json!(text).to_string())
                    .unwrap_or_else(|e| panic!("{body}: {e}"));
                assert!(
                    ENDS.contains(ids.last().unwrap())
                        && !ids[..ids.len() - 1].iter().any(|id| ENDS.contains(id))
                );
                if whole.contains("()") {
                    assert_eq!(text.matches('(').count(), text.matches(')').count(), "{text}");
                }
                ended += 1;
            }
        }
        assert!(ended > 2, "{body}: {ended}");
    }
}

#[test]
fn grammars_that_are_wrong_say_by_line_and_column() {
    for (text, word) in [
        ("", "no rule root"),
        ("root ::= other", "names other, which is no rule"),
        ("root ::= \"a", "line 1, column 12: a string is not closed"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2, column 13: the rule root is there twice"),
        ("root ::= (\"a\"", "a bracket is not closed"),
        ("root ::= \"a\")", "a bracket is closed that was not opened"),
        ("root ::= [b-a]", "upside down"),
        ("root ::= []", "is empty"),
        ("root ::= \"a\"{3,2}", "fewer than the least"),
        ("root ::= \"a\"{9999999999}", "repetitions from 0 to"),
        ("root ::= (?=\"a\")", "looking ahead"),
        ("root = \"a\"", "comes ::="),
        ("root ::= \"\\q\"", "no escape"),
        ("root ::= \"\\ud800\"", "names no character"),
        ("::= \"a\"", "the name of a rule"),
    ] {
        let told = ebnf::translate(text, 64).unwrap_err();
        assert!(told.contains(word), "{text:?}: {told}");
    }
}

#[test]
fn nothing_but_text_is_in_json_and_ends_stand_at_ends() {
    let compiler = compiler();
    let wanted = json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a", "b"]});
    let compiled = compiler.within(&schema(&wanted)).unwrap();
    for seed in 1..20 {
        let mut tracker = tracker(&compiler, &compiled);
        let mut dice = support::Dice::new(seed);
        let mut mask = vec![0; compiler.tokens.words()];
        let mut text = Vec::new();
        for step in 0..80 {
            tracker.mask(&mut mask).unwrap();
            let added: Vec<u32> = open(&mask).into_iter().filter(|id| (4064..4096).contains(id)).collect();
            let whole = serde_json::from_slice::<Value>(&text).is_ok();
            assert_eq!(
                added,
                if whole { ENDS.to_vec() } else { Vec::new() },
                "{}",
                String::from_utf8_lossy(&text)
            );
            let id = support::choose(&compiler, &mask, step, &mut dice);
            if ENDS.contains(&id) {
                break;
            }
            assert!(tracker.accept(id).unwrap());
            text.extend_from_slice(compiler.tokens.env.tok_trie().token(id));
        }
    }
}

/// The calls of a text, as the server reads them.
fn calls(tools: &Value, text: &str) -> (Vec<(String, Value)>, String) {
    let spec = |tool: &Value| ToolSpec {
        name: tool["function"]["name"].as_str().unwrap().into(),
        parameters: tool["function"]["parameters"].clone(),
    };
    let mut reader = ToolCallReader::new(tools.as_array().unwrap().iter().map(spec).collect());
    let mut pieces = Vec::new();
    reader.push(text, &mut pieces);
    reader.finish(&mut pieces);
    let (mut calls, mut rest) = (Vec::new(), String::new());
    for piece in pieces {
        match piece {
            Piece::Call(call) => calls.push((call.name, serde_json::from_str(&call.arguments).unwrap())),
            Piece::Content(text) => rest.push_str(&text),
            Piece::Reasoning(text) => panic!("{text:?} is no reasoning"),
        }
    }
    (calls, rest)
}

fn weather() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "strict": true, "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": ["C", "F"]}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
            "required": ["city", "days"]}}},
        {"type": "function", "function": {"name": "get", "strict": true, "parameters": {"type": "object", "properties": {
            "id": {"type": "string", "pattern": "^[a-z]+[0-9]$", "maxLength": 8}}, "required": ["id"]}}},
        {"type": "function", "function": {"name": "free"}}
    ])
}

#[test]
fn calls_are_read_back_valid_and_as_many_as_wanted() {
    let compiler = compiler();
    let tools = weather();
    for (more, least, most) in [
        (json!({}), 0, usize::MAX),
        (json!({"tool_choice": "required"}), 1, usize::MAX),
        (json!({"tool_choice": "required", "parallel_tool_calls": false}), 1, 1),
        (json!({"parallel_tool_calls": false}), 0, 1),
        (json!({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}), 1, 1),
        (json!({"tool_choice": {"type": "function", "function": {"name": "get"}}}), 1, 1),
    ] {
        let mut body = json!({"tools": tools});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let compiled = compiler.within(&asked(&body)).unwrap_or_else(|e| panic!("{body}: {e}"));
        let (mut ended, mut called) = (0, 0);
        for seed in 1..17 {
            let (_, Some(text)) = babble(&compiler, &compiled, seed, 600) else { continue };
            let (calls, rest) = calls(&tools, &text);
            assert!(calls.len() >= least && calls.len() <= most, "{more}: {text:?}");
            assert!(!rest.contains("arg_key") || text.contains("arg_key"), "{rest:?}");
            for (name, arguments) in &calls {
                let all = tools.as_array().unwrap();
                let tool = all.iter().find(|t| t["function"]["name"] == name.as_str()).unwrap();
                let schema = &tool["function"]["parameters"];
                if schema.is_object() {
                    valid(schema, &arguments.to_string()).unwrap_or_else(|e| panic!("{more}: {text:?}: {e}"));
                }
                let wanted = more["tool_choice"]["function"]["name"].as_str();
                assert!(wanted.is_none_or(|wanted| wanted == name), "{text:?}");
            }
            assert_eq!(text.matches("<tool_call>").count(), calls.len(), "every call is read: {text:?}");
            ended += 1;
            called += calls.len();
        }
        assert!(ended > 2 && (called > 0 || least == 0), "{more}: {ended} ended, {called} calls");
    }
}

#[test]
fn a_call_with_an_argument_of_the_wrong_type_is_not_accepted() {
    let compiler = compiler();
    let body = json!({"tools": weather(), "tool_choice": "required"});
    let compiled = compiler.within(&asked(&body)).unwrap();
    let trie = compiler.tokens.env.tok_trie();
    let spell = |text: &str| -> Vec<u32> {
        let mut ids = Vec::new();
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let tag =
                ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
                    .into_iter()
                    .find(|tag| rest.starts_with(tag));
            let len = tag.map_or(c.len_utf8(), str::len);
            match tag {
                Some(tag) => ids.push(trie.get_special_token(tag).unwrap()),
                None => ids.extend(rest.as_bytes()[..len].iter().map(|b| trie.token_id(&[*b]).unwrap())),
            }
            rest = &rest[len..];
        }
        ids
    };
    let call = |arguments: &[(&str, &str)]| {
        let pairs =
            arguments.iter().map(|(k, v)| format!("<arg_key>{k}</arg_key><arg_value>{v}</arg_value>"));
        format!("<tool_call>get_weather{}</tool_call>", pairs.collect::<String>())
    };
    for (text, good) in [
        (call(&[("city", "Oslo"), ("days", "3")]), true),
        (call(&[("city", "Oslo"), ("days", "3"), ("unit", "C"), ("tags", "[\"a\"]")]), true),
        (call(&[("city", "O<b>"), ("days", "1")]), true),
        (format!("Let me look.{}", call(&[("city", "Oslo"), ("days", "1")])), false),
        (call(&[("city", "Oslo"), ("days", "three")]), false),
        (call(&[("city", "Oslo"), ("days", "0")]), false),
        (call(&[("city", "Oslo")]), false),
        (call(&[("days", "3"), ("city", "Oslo")]), false),
        (call(&[("city", "Oslo"), ("days", "3"), ("unit", "K")]), false),
        (call(&[("city", ""), ("days", "3")]), false),
        (call(&[("city", "Oslo"), ("days", "3"), ("more", "1")]), false),
        ("<tool_call>unknown</tool_call>".into(), false),
        ("no call".into(), false),
    ] {
        let mut tracker = tracker(&compiler, &compiled);
        let taken = spell(&text).into_iter().all(|id| tracker.accept(id).unwrap())
            && tracker.accept(ENDS[2]).unwrap();
        assert_eq!(taken, good, "{text}");
    }
    // What looks like markup and is only letters is no text either: the server would take it for a call.
    let mut tracker = tracker(&compiler, &compiled);
    let mut letters = "<tool_call>".bytes().map(|b| trie.token_id(&[b]).unwrap());
    assert!(!letters.all(|id| tracker.accept(id).unwrap()));
}

#[test]
fn strict_tools_that_cannot_be_enforced_are_refused_by_their_place() {
    let compiler = compiler();
    let tool = |parameters: Value| json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": parameters}}]});
    for (parameters, at) in [
        (
            json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}),
            "/properties/a/uniqueItems",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "string", "format": "color"}}}),
            "/properties/a/format",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}),
            "/properties/a/pattern",
        ),
        (json!({"anyOf": [{"type": "object"}]}), "/anyOf"),
        (json!({"type": "object", "properties": {}, "minProperties": 1}), "/minProperties"),
        (json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}), "/required"),
        (json!({"type": "object", "properties": {"a<": {"type": "integer"}}}), "/properties/a<"),
    ] {
        let problem = compiler.within(&asked(&tool(parameters.clone()))).map(|_| ()).unwrap_err();
        assert_eq!(problem.at, format!("/tools/0/function/parameters{at}"), "{parameters}: {problem}");
    }
    // References into definitions of the parameters, and arguments that are not named.
    let defined = json!({"type": "object", "$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"], "additionalProperties": {"type": "boolean"}});
    let body = tool(defined.clone());
    let compiled =
        compiler.within(&asked(&json!({"tools": body["tools"], "tool_choice": "required"}))).unwrap();
    let mut seen = 0;
    for seed in 1..9 {
        if let (_, Some(text)) = babble(&compiler, &compiled, seed, 400) {
            for (_, arguments) in calls(&body["tools"], &text).0 {
                valid(&defined, &arguments.to_string()).unwrap();
                seen += 1;
            }
        }
    }
    assert!(seen > 0);
}

#[test]
fn compiled_grammars_are_kept_within_their_bounds() {
    let mut settings = patient();
    settings.bounds.entries = 2;
    let compiler = compiler_of(settings);
    let grammars: Vec<_> = (0..3).map(|i| schema(&json!({"const": i}))).collect();
    for grammar in &grammars {
        compiler.within(grammar).unwrap();
    }
    assert!(compiler.known(&grammars[0]).is_none());
    assert!(compiler.known(&grammars[1]).is_some() && compiler.known(&grammars[2]).is_some());
    // The one that was used last stays.
    compiler.known(&grammars[1]).unwrap();
    compiler.within(&grammars[0]).unwrap();
    assert!(compiler.known(&grammars[2]).is_none() && compiler.known(&grammars[1]).is_some());
    assert_eq!(Rules { depth: 64, lenient: false }.depth, compiler.bounds.rules.depth);
}
