//! Hugging Face chat templates through minijinja.
//!
//! Templates are written for Python's Jinja; where the two differ, Python's way is restored: `tojson` in the separators
//! and number forms of `json.dumps`, `None` / `True` / `False` when printed, string and dict methods.

use std::error::Error as _;
use std::fmt::Write as _;
use std::path::Path;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::Serialize as _;

use super::TextError;

/// Instructions one rendering may take: about a second. A conversation of a million short messages takes less.
const FUEL: u64 = 50_000_000;
/// Nested macro calls and includes.
const RECURSION: usize = 64;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
}

/// A refusal by the template's own `raise_exception`, carried through minijinja's error as its source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

const NAME: &str = "chat_template.jinja";

impl ChatTemplate {
    /// Reads `chat_template.jinja` of a model folder, or `chat_template` of `tokenizer_config.json`.
    ///
    /// # Errors
    /// When a file exists but cannot be read, or the template has a syntax error.
    pub fn load(dir: &Path) -> Result<Option<Self>, TextError> {
        let read = |name: &str| match std::fs::read_to_string(dir.join(name)) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(TextError::Load(format!("{}: {e}", dir.join(name).display()))),
        };
        let config = match read("tokenizer_config.json")? {
            Some(text) => serde_json::from_str(&text).map_err(|e| {
                TextError::Load(format!("{}: {e}", dir.join("tokenizer_config.json").display()))
            })?,
            None => serde_json::Value::Null,
        };
        let source = match read(NAME)? {
            Some(source) => source,
            None => match config["chat_template"].as_str() {
                Some(source) => source.to_owned(),
                None => return Ok(None),
            },
        };
        Self::new(&source, Some(&config)).map(Some)
    }

    /// Compiles a template. `config` is `tokenizer_config.json`, whose special tokens become variables.
    ///
    /// # Errors
    /// When the template has a syntax error.
    pub fn new(source: &str, config: Option<&serde_json::Value>) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| match value.kind() {
            ValueKind::None => Ok(out.write_str("None")?),
            ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
            _ => Ok(write!(out, "{value}")?),
        });
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Refusal(message)))
        });
        environment.add_function("strftime_now", strftime_now);
        for name in ["bos_token", "eos_token", "pad_token", "unk_token"] {
            let Some(config) = config else { continue };
            let token = config[name].as_str().or_else(|| config[name]["content"].as_str());
            if let Some(token) = token {
                environment.add_global(name, Value::from(token));
            }
        }
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|e| TextError::Load(format!("{NAME}: {}", describe(&e))))?;
        Ok(Self { environment, source: source.to_owned() })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders with the given variables.
    ///
    /// # Errors
    /// [`TextError::Rejected`] for the template's own refusals, [`TextError::Template`] for everything else.
    pub fn render(
        &self,
        variables: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        let template = self.environment.get_template(NAME).map_err(|e| TextError::Template(describe(&e)))?;
        template.render(Value::from_serialize(variables)).map_err(|error| refusal_of(&error))
    }
}

fn refusal_of(error: &Error) -> TextError {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(refusal) = inner.downcast_ref::<Refusal>() {
            return TextError::Rejected(refusal.0.clone());
        }
        cause = inner.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::Template("it takes more than the allowed number of steps".into());
    }
    TextError::Template(describe(error))
}

fn describe(error: &Error) -> String {
    let what = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}

/// `datetime.now().strftime(format)`.
fn strftime_now(format: &str) -> Result<String, Error> {
    let mut out = String::new();
    write!(out, "{}", chrono::Local::now().format(format))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, "strftime_now: the format is not valid"))?;
    Ok(out)
}

/// `json.dumps(value, ensure_ascii=False, indent=..., separators=..., sort_keys=...)`.
#[allow(clippy::needless_pass_by_value)] // minijinja hands keyword arguments over by value
fn tojson(_: &State, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let bad = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    let mut document = serde_json::to_value(value).map_err(bad)?;
    if sort == Some(true) {
        document.sort_all_objects();
    }
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (item.to_owned(), ": ".to_owned()),
    };
    let mut out = Vec::new();
    let style = PythonJson { item, key, indent, depth: 0, filled: false, ascii: ascii == Some(true) };
    document.serialize(&mut serde_json::Serializer::with_formatter(&mut out, style)).map_err(bad)?;
    String::from_utf8(out)
        .map(Value::from)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// JSON as Python's `json` module writes it.
struct PythonJson {
    item: String,
    key: String,
    indent: Option<usize>,
    depth: usize,
    /// The innermost list or object has items, so its closing bracket gets its own line.
    filled: bool,
    ascii: bool,
}

impl PythonJson {
    fn line<W: ?Sized + std::io::Write>(&self, out: &mut W) -> std::io::Result<()> {
        match self.indent {
            Some(width) => write!(out, "\n{}", " ".repeat(width * self.depth)),
            None => Ok(()),
        }
    }

    fn open<W: ?Sized + std::io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> std::io::Result<()> {
        self.depth += 1;
        self.filled = false;
        out.write_all(bracket)
    }

    fn close<W: ?Sized + std::io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> std::io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.line(out)?;
        }
        self.filled = true;
        out.write_all(bracket)
    }

    fn next<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.line(out)
    }
}

impl serde_json::ser::Formatter for PythonJson {
    fn begin_array<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.open(out, b"[")
    }

    fn begin_object<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.open(out, b"{")
    }

    fn end_array<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.close(out, b"]")
    }

    fn end_object<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(self.key.as_bytes())
    }

    fn end_array_value<W: ?Sized + std::io::Write>(&mut self, _: &mut W) -> std::io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn end_object_value<W: ?Sized + std::io::Write>(&mut self, _: &mut W) -> std::io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn write_f64<W: ?Sized + std::io::Write>(&mut self, out: &mut W, value: f64) -> std::io::Result<()> {
        out.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        text: &str,
    ) -> std::io::Result<()> {
        if !self.ascii {
            return out.write_all(text.as_bytes());
        }
        for c in text.chars() {
            if c.is_ascii() {
                write!(out, "{c}")?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}

/// `repr(float)`: the shortest digits, an exponent from 1e16 on and below 1e-4, with a sign and two digits.
fn python_float(value: f64) -> String {
    let size = value.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(rest) => ('-', rest),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[allow(clippy::needless_pass_by_value)]
    fn render(source: &str, variables: serde_json::Value) -> Result<String, TextError> {
        ChatTemplate::new(source, None)?.render(variables.as_object().unwrap())
    }

    #[test]
    fn values_print_as_in_python() {
        let out = render(
            "{{ a }} {{ b }} {{ c }} {{ d }} {{ e }}",
            json!({"a": null, "b": true, "c": 1.0, "d": 7, "e": "é"}),
        );
        assert_eq!(out.unwrap(), "None True 1.0 7 é");
    }

    #[test]
    fn tojson_writes_what_python_writes() {
        // Expected texts are those of json.dumps(value, ensure_ascii=False).
        let cases = [
            (
                json!({"b": 1, "a": [1, 2.0, null, true, "é\n\"\\"]}),
                r#"{"b": 1, "a": [1, 2.0, null, true, "é\n\"\\"]}"#,
            ),
            (
                json!([1e20, 1.5e-7, 0.0001, 1e16, 123_456_789.25]),
                "[1e+20, 1.5e-07, 0.0001, 1e+16, 123456789.25]",
            ),
            (json!({"x": {}, "y": []}), r#"{"x": {}, "y": []}"#),
            (json!("<|user|> & 'x' \u{1} \u{7f}"), "\"<|user|> & 'x' \\u0001 \u{7f}\""),
        ];
        for (value, expected) in cases {
            assert_eq!(render("{{ v | tojson }}", json!({"v": value})).unwrap(), expected);
        }
        let v = json!({"v": {"b": [1, "é"], "a": 2}});
        assert_eq!(
            render("{{ v|tojson(ensure_ascii=true) }}", v.clone()).unwrap(),
            r#"{"b": [1, "\u00e9"], "a": 2}"#
        );
        let sorted = render("{{ v|tojson(indent=2, sort_keys=true) }}", v.clone()).unwrap();
        assert_eq!(sorted, "{\n  \"a\": 2,\n  \"b\": [\n    1,\n    \"é\"\n  ]\n}");
        assert_eq!(render("{{ v|tojson(separators=(',', ':')) }}", v).unwrap(), r#"{"b":[1,"é"],"a":2}"#);
        assert!(render("{{ nothing | tojson }}", json!({})).is_err());
    }

    #[test]
    fn what_chat_templates_use() {
        let source = "{%- set ns = namespace(n=0) %}\n{% for m in messages %}\n    {% if m.role == 'stop' %}\n        \
                      {% break %}\n    {% elif m.role == 'skip' %}{% continue %}{% endif %}\n{% set ns.n = ns.n + 1 \
                      %}\n{{ m['text'].strip().split('|')[-1].lstrip('x') }};\n{% endfor %}\n{{ ns.n }}\
                      {%- macro twice(t) %}{{ t }}{{ t }}{% endmacro %}{{ twice('a') }}{{ messages[::-1][0].role }}";
        let out = render(
            source,
            json!({"messages": [{"role": "a", "text": " u|xv "}, {"role": "skip"}, {"role": "stop"}, {"role": "a"}]}),
        );
        assert_eq!(out.unwrap(), "v;\n1aaa");
    }

    #[test]
    fn refusals_and_failures_are_told_apart() {
        let error =
            render("{% if x %}{{ raise_exception('no ' ~ x) }}{% endif %}", json!({"x": "way"})).unwrap_err();
        assert_eq!(error.to_string(), "the chat template rejected the request: no way");
        let error = render("{{ a.b.c }}", json!({})).unwrap_err();
        assert!(matches!(error, TextError::Template(_)), "{error}");
        let error = ChatTemplate::new("{% for %}", None).unwrap_err();
        assert!(error.to_string().contains("line 1"), "{error}");
    }

    #[test]
    fn endless_templates_end() {
        let error = render(
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}",
            json!({}),
        );
        assert!(matches!(error.unwrap_err(), TextError::Template(m) if m.contains("number of steps")));
        assert!(render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", json!({})).is_err());
    }

    #[test]
    fn the_date_is_printed_by_format() {
        let year = render("{{ strftime_now('%Y') }}", json!({})).unwrap();
        assert!(year.len() == 4 && year.starts_with("20"), "{year}");
        assert!(render("{{ strftime_now('%!') }}", json!({})).is_err());
    }
}
