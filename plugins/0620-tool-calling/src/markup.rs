//! Blocks of tool calls in text, with the texts of their arguments.

/// A call as it is written.
#[derive(Debug, PartialEq, Eq)]
pub struct Block<'t> {
    /// Byte at which its opening tag begins.
    pub start: usize,
    /// Byte behind its closing tag.
    pub end: usize,
    /// The name, as the model wrote it.
    pub name: &'t str,
    /// Keys with the texts of their values, in order; `None` for a body of JSON, whose values have types.
    pub pairs: Option<Vec<(&'t str, &'t str)>>,
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Where an ASCII tag stands at or after a byte, in any case of letters.
fn find(text: &str, tag: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes().get(from..)?;
    let at = bytes.windows(tag.len()).position(|w| w.eq_ignore_ascii_case(tag.as_bytes()))?;
    Some(from + at)
}

/// All complete blocks of a text whose bodies can be read.
pub fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut from = 0;
    while let Some(start) = find(text, OPEN, from) {
        let Some(close) = find(text, CLOSE, start + OPEN.len()) else { break };
        from = close + CLOSE.len();
        let body = text[start + OPEN.len()..close].trim();
        if let Some((name, pairs)) = json(body).or_else(|| qwen(body)).or_else(|| glm(body)) {
            blocks.push(Block { start, end: from, name, pairs });
        }
    }
    blocks
}

type Read<'t> = Option<(&'t str, Option<Vec<(&'t str, &'t str)>>)>;

/// The name in a body of JSON.
fn json(body: &str) -> Read<'_> {
    let value: serde_json::Value = serde_json::from_str(body).ok()?;
    let name = value.get("name")?.as_str()?;
    // The value is gone in a moment; the name stands in the body, unless it is written with escapes.
    let at = body.find(name)?;
    Some((&body[at..at + name.len()], None))
}

/// `<function=NAME><parameter=KEY>VALUE</parameter></function>`
fn qwen(body: &str) -> Read<'_> {
    let (name, mut rest) = body.strip_prefix("<function=")?.split_once('>')?;
    let mut pairs = Vec::new();
    while let Some((_, after)) = rest.split_once("<parameter=") {
        let (key, after) = after.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        pairs.push((key.trim(), value.strip_suffix('\n').unwrap_or(value)));
        rest = after;
    }
    Some((name.trim(), Some(pairs)))
}

/// `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`
fn glm(body: &str) -> Read<'_> {
    let (name, mut rest) = body.find("<arg_key>").map_or((body, ""), |at| body.split_at(at));
    let name = name.trim();
    if name.is_empty() || name.contains(['<', '\n']) {
        return None;
    }
    let mut pairs = Vec::new();
    while let Some((_, after)) = rest.split_once("<arg_key>") {
        let Some((key, value)) = after.split_once("</arg_key>") else { break };
        rest = after;
        let Some(value) = value.trim_start().strip_prefix("<arg_value>") else { continue };
        let Some((value, after)) = value.split_once("</arg_value>") else { break };
        pairs.push((key.trim(), value));
        rest = after;
    }
    Some((name, Some(pairs)))
}

/// The blocks at the end of a text, with nothing but white space between and behind them.
pub fn trailing(text: &str) -> Vec<Block<'_>> {
    let mut all = blocks(text);
    let mut end = text.trim_end().len();
    let mut first = all.len();
    while first > 0 && all[first - 1].end == end {
        first -= 1;
        end = text[..all[first].start].trim_end().len();
    }
    all.split_off(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_in_all_forms() {
        let text = "a<tool_call>f<arg_key>k</arg_key>\n<arg_value> v\n</arg_value></tool_call><TOOL_CALL>g</tool_call>\
                    <tool_call>{\"name\":\"h\",\"arguments\":{}}</tool_call><tool_call><b></tool_call>\
                    <tool_call><function=i>\n<parameter=p>\nx\n</parameter></function></tool_call><tool_call>open";
        let read: Vec<_> = blocks(text).into_iter().map(|b| (b.name, b.pairs)).collect();
        assert_eq!(
            read,
            [
                ("f", Some(vec![("k", " v\n")])),
                ("g", Some(vec![])),
                ("h", None),
                ("i", Some(vec![("p", "x")])),
            ]
        );
    }

    #[test]
    fn trailing_blocks_end_the_text() {
        let names = |text: &str| trailing(text).iter().map(|b| b.name.to_owned()).collect::<Vec<_>>();
        assert_eq!(names("x<tool_call>f</tool_call>\n <tool_call>g</tool_call>\n"), ["f", "g"]);
        assert_eq!(names("<tool_call>f</tool_call> and <tool_call>g</tool_call>"), ["g"]);
        assert!(names("<tool_call>f</tool_call> and so on").is_empty());
        assert!(names("<tool_call>f</tool_call><tool_call><b></tool_call>").is_empty());
        assert!(names("").is_empty());
    }
}
