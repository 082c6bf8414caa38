//! The same in words: `docs/API.md` and `/docs`.

use std::fmt::Write as _;

use serde_json::Value;

use super::Body;
use super::limits::LIMITS;
use super::values::VALUES;
use crate::http::Limits;
use crate::http::routes::{ROUTES, Route};

/// One table: its heading row and its rows.
type Table = (Vec<String>, Vec<Vec<String>>);

/// A part of the page.
enum Part {
    Title(u8, String),
    Words(String),
    Table(Table),
}

/// The page as Markdown.
pub fn markdown() -> String {
    let mut out = String::from(
        "<!-- Written from the route table of the server: `cargo run -p plugfold-tests --bin api-doc`. -->\n\n",
    );
    for part in parts() {
        match part {
            Part::Title(level, text) => {
                let _ = write!(out, "{} {text}\n\n", "#".repeat(level.into()));
            }
            Part::Words(text) => {
                let _ = write!(out, "{text}\n\n");
            }
            Part::Table((head, rows)) => {
                let row = |cells: &[String]| {
                    let cells: Vec<String> = cells.iter().map(|c| c.replace('|', "\\|")).collect();
                    format!("| {} |\n", cells.join(" | "))
                };
                out += &row(&head);
                out += &row(&vec!["---".to_owned(); head.len()]);
                for cells in &rows {
                    out += &row(cells);
                }
                out.push('\n');
            }
        }
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

/// The page as HTML, without anything from elsewhere.
pub fn html() -> String {
    let mut out = String::from(HEAD);
    for part in parts() {
        match part {
            Part::Title(level, text) => {
                let _ = writeln!(out, "<h{level}>{}</h{level}>", marked(&text));
            }
            Part::Words(text) => {
                let _ = writeln!(out, "<p>{}</p>", marked(&text));
            }
            Part::Table((head, rows)) => {
                let row = |cells: &[String], tag: &str| {
                    let cell = |out: String, cell: &String| format!("{out}<{tag}>{}</{tag}>", marked(cell));
                    let cells = cells.iter().fold(String::new(), cell);
                    format!("<tr>{cells}</tr>\n")
                };
                out += "<div class=\"table\"><table>\n";
                out += &row(&head, "th");
                for cells in &rows {
                    out += &row(cells, "td");
                }
                out += "</table></div>\n";
            }
        }
    }
    out + "</main></html>\n"
}

const HEAD: &str = "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" \
                    content=\"width=device-width,initial-scale=1\"><title>Plugfold API</title>\n<style>\n\
                    body{font:16px/1.5 system-ui,sans-serif;margin:0;color:#1d2330;background:#fff}\n\
                    main{max-width:60rem;margin:0 auto;padding:1rem}\n\
                    h2{margin-top:2.5rem;border-bottom:1px solid #d5d9e2}\n\
                    code{font:0.9em ui-monospace,monospace;background:#eef0f5;padding:0.1em 0.3em;border-radius:0.2em}\n\
                    .table{overflow-x:auto}table{border-collapse:collapse;width:100%}\n\
                    th,td{text-align:left;vertical-align:top;padding:0.3rem 0.7rem 0.3rem 0;border-bottom:1px solid #e4e7ee}\n\
                    @media(prefers-color-scheme:dark){body{color:#dfe3ec;background:#14171f}code{background:#242936}\
                    th,td,h2{border-color:#333a4a}}\n\
                    </style>\n<main>\n";

/// Text with `code` marks as HTML.
fn marked(text: &str) -> String {
    let safe = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let mut out = String::with_capacity(safe.len());
    for (at, part) in safe.split('`').enumerate() {
        out += match at % 2 {
            1 => "<code>",
            _ if at > 0 => "</code>",
            _ => "",
        };
        out += part;
    }
    out
}

fn parts() -> Vec<Part> {
    let mut parts = vec![
        Part::Title(1, "API".into()),
        Part::Words(
            "Requests and replies are JSON. Unknown fields of a request are ignored, `null` counts as absent, integers and \
             numbers may be sent as text. Every check runs before the first byte of a stream, so a bad request with \
             `stream` gets an error like any other. Errors are `{\"error\": {\"message\", \"type\", \"param\", \"code\"}}`; \
             those of Messages have Anthropic's form. The same is served by a running server as `/docs`, and for programs \
             as `/openapi.json`."
                .into(),
        ),
        Part::Words(
            "With API keys (`api_key_file`, or `PLUGFOLD_API_KEY`) every route but `/health` wants one, as \
             `Authorization: Bearer KEY` or `x-api-key: KEY`; without it the answer is 401. Browsers may send it as the \
             password of basic authentication."
                .into(),
        ),
        Part::Title(2, "Routes".into()),
    ];
    let rows = ROUTES.iter().map(|route| {
        let paths: Vec<String> = route.paths.shown().iter().map(|path| format!("`{path}`")).collect();
        vec![route.method.to_string(), paths.join(", "), route.purpose.to_owned()]
    });
    let head = ["Method", "Paths", "Purpose"].map(str::to_owned).to_vec();
    parts.push(Part::Table((head, rows.collect())));
    for route in &ROUTES {
        of_route(route, &mut parts);
    }
    parts.push(Part::Title(2, "Odd values".into()));
    parts.push(Part::Words("Values of a chat completion's fields, and what they give.".into()));
    let head = ["Field", "Value", "Status", "Why"].map(str::to_owned).to_vec();
    let rows = VALUES.iter().map(|(field, value, status, why)| {
        vec![format!("`{field}`"), format!("`{value}`"), status.to_string(), (*why).to_owned()]
    });
    parts.push(Part::Table((head, rows.collect())));
    parts.push(Part::Title(2, "Limits".into()));
    parts.push(Part::Words(
        "Keys of the `[limits]` table of a profile; as a variable `PLUGFOLD_LIMITS_<KEY>`.".into(),
    ));
    let defaults = serde_json::to_value(Limits::default()).unwrap_or_default();
    let shown = |name: &str| match &defaults[name] {
        // The machine's, not the same everywhere.
        _ if name == "text_workers" => "cores".to_owned(),
        Value::Number(number) => number.to_string(),
        other => other.to_string(),
    };
    let rows = LIMITS.iter().map(|(name, what)| vec![format!("`{name}`"), shown(name), (*what).to_owned()]);
    let head = ["Key", "Default", "Meaning"].map(str::to_owned).to_vec();
    parts.push(Part::Table((head, rows.collect())));
    parts
}

fn of_route(route: &Route, parts: &mut Vec<Part>) {
    let Some(usual) = route.paths.shown().first().copied() else { return };
    parts.push(Part::Title(2, format!("{} {usual}", route.method)));
    parts.push(Part::Words(route.detail.into()));
    if let Some(body) = route.body {
        parts.push(Part::Table(fields(body)));
    }
    for answer in route.answers {
        parts.push(Part::Words(format!("Answers with `{}`: {}", answer.kind, answer.what)));
    }
}

fn fields(body: &Body) -> Table {
    let row = |field: &super::Field| {
        let name = if body.required.contains(&field.name) {
            format!("`{}` (required)", field.name)
        } else {
            format!("`{}`", field.name)
        };
        vec![name, field.kind.words(), field.default.to_owned(), field.note.to_owned()]
    };
    let head = ["Field", "Form", "Default", "Meaning"].map(str::to_owned).to_vec();
    (head, body.all().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_marks_become_tags_and_text_is_escaped() {
        assert_eq!(marked("a `b<c` d & `e`"), "a <code>b&lt;c</code> d &amp; <code>e</code>");
        let page = html();
        assert!(page.contains("<h2>POST /v1/chat/completions</h2>"));
        assert!(!page.contains("http://") && !page.contains("https://"), "nothing from elsewhere");
    }
}
