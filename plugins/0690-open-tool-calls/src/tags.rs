//! What is mended in the markup of calls, as far as it is certain what was meant.

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const TAGS: [&str; 4] = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"];

/// Where an ASCII tag stands at or after a byte, in any case of letters.
fn find(text: &str, tag: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes().get(from..)?;
    let at = bytes.windows(tag.len()).position(|w| w.eq_ignore_ascii_case(tag.as_bytes()))?;
    Some(from + at)
}

/// The text with the keys of every complete block mended.
pub fn with_keys(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut from = 0;
    while let Some(start) = find(text, OPEN, from) {
        let body = start + OPEN.len();
        let Some(end) = find(text, CLOSE, body) else { break };
        out.push_str(&text[from..body]);
        out.push_str(&keys(&text[body..end]));
        from = end;
    }
    out.push_str(&text[from..]);
    out
}

/// A block's body with an opening tag before every key that has a closing one only. A body in which that is not certain
/// comes back as it is.
pub fn keys(body: &str) -> String {
    if body.matches(TAGS[1]).count() <= body.matches(TAGS[0]).count() {
        return body.to_owned();
    }
    let mut out = String::with_capacity(body.len() + TAGS[0].len());
    let (mut at, mut before) = (0, None);
    while let Some((start, tag)) =
        TAGS.iter().filter_map(|tag| Some((at + body[at..].find(tag)?, *tag))).min_by_key(|(start, _)| *start)
    {
        let text = &body[at..start];
        if tag == TAGS[1] && matches!(before, None | Some("</arg_value>")) {
            let word = text.trim_end();
            let word_at = word
                .rfind(char::is_whitespace)
                .map_or(0, |space| space + word[space..].chars().next().map_or(0, char::len_utf8));
            let nameless = before.is_none() && word[..word_at].trim().is_empty();
            if word[word_at..].is_empty() || nameless {
                return body.to_owned();
            }
            out.push_str(&text[..word_at]);
            out.push_str(TAGS[0]);
            out.push_str(&text[word_at..]);
        } else {
            out.push_str(text);
        }
        out.push_str(tag);
        before = Some(tag);
        at = start + tag.len();
    }
    out.push_str(&body[at..]);
    out
}

/// What a tool of a request demands of a call.
pub struct Tool {
    /// Its name.
    pub name: String,
    /// Parameters that a call must have.
    pub required: Vec<String>,
}

/// The answer with its last block closed, if that lacks nothing but its closing tag. A value is never closed for the model:
/// a command or a path that was cut must not run.
pub fn closed(answer: &str, tools: &[Tool], mend_keys: bool) -> Option<String> {
    let mut start = find(answer, OPEN, 0)?;
    while let Some(next) = find(answer, OPEN, start + 1) {
        start = next;
    }
    let body_at = start + OPEN.len();
    let body = &answer[body_at..];
    if find(body, CLOSE, 0).is_some() || body.contains("</think>") {
        return None;
    }
    let opened = body.rfind(TAGS[2]);
    if opened.is_some_and(|at| body.rfind(TAGS[3]).is_none_or(|closed| closed < at)) {
        return None;
    }
    let body = if mend_keys { keys(body) } else { body.to_owned() };
    let given = whole(&body, tools)?;
    given.then(|| format!("{}{body}{CLOSE}", &answer[..body_at]))
}

/// Whether a body is one whole call of an offered tool with all that it requires; `None` when it is no call.
fn whole(body: &str, tools: &[Tool]) -> Option<bool> {
    let (name, mut rest) = body.find(TAGS[0]).map_or((body, ""), |at| body.split_at(at));
    let name = name.trim();
    let tool = tools.iter().find(|tool| tool.name.to_lowercase() == name.to_lowercase())?;
    let mut keys = Vec::new();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Some(tool.required.iter().all(|key| keys.contains(&key.as_str())));
        }
        let (key, after) = rest.strip_prefix(TAGS[0])?.split_once(TAGS[1])?;
        let (_, after) = after.trim_start().strip_prefix(TAGS[2])?.split_once(TAGS[3])?;
        if key.contains('<') {
            return None;
        }
        keys.push(key.trim());
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_without_their_opening_tag() {
        for (body, mended) in [
            (
                "read path</arg_key><arg_value>x</arg_value>",
                "read <arg_key>path</arg_key><arg_value>x</arg_value>",
            ),
            (
                "read\n<arg_key>path</arg_key><arg_value>x</arg_value>\nlimit</arg_key><arg_value>5</arg_value>",
                "read\n<arg_key>path</arg_key><arg_value>x</arg_value>\n<arg_key>limit</arg_key><arg_value>5</arg_value>",
            ),
            (
                "read path</arg_key><arg_value>a b</arg_value>limit</arg_key><arg_value>5</arg_value>",
                "read <arg_key>path</arg_key><arg_value>a b</arg_value><arg_key>limit</arg_key><arg_value>5</arg_value>",
            ),
            ("read é</arg_key><arg_value>x</arg_value>", "read <arg_key>é</arg_key><arg_value>x</arg_value>"),
        ] {
            assert_eq!(keys(body), mended);
            assert_eq!(keys(mended), mended, "what is well formed stays");
        }
        for body in [
            "path</arg_key><arg_value>x</arg_value>",
            " </arg_key><arg_value>x</arg_value>",
            "read <arg_key>a</arg_key><arg_value>1</arg_value></arg_key><arg_value>2</arg_value>",
            "read",
            "read <arg_key>path</arg_key><arg_value>x</arg_value>",
        ] {
            assert_eq!(keys(body), body);
        }
        let text = "a b</arg_key> <TOOL_CALL>read path</arg_key><arg_value>x</arg_value></tool_call> <tool_call>f k</arg_key>";
        let mended = with_keys(text);
        assert_eq!(mended.matches("<arg_key>").count(), 1, "in complete blocks only: {mended}");
    }

    fn tools() -> Vec<Tool> {
        let tool = |name: &str, required: &[&str]| Tool {
            name: name.into(),
            required: required.iter().map(|r| (*r).to_owned()).collect(),
        };
        vec![tool("read", &["path"]), tool("List", &[])]
    }

    #[test]
    fn a_whole_call_without_its_closing_tag() {
        let pair =
            |key: &str, value: &str| format!("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>");
        for (answer, mend_keys) in [
            (format!("So: <tool_call>read{}", pair("path", "a")), false),
            (format!("<tool_call>READ\n{}\n{}\n", pair("limit", "1"), pair("path", "<b>")), false),
            ("<tool_call>list".to_owned(), false),
            (format!("<tool_call>list</tool_call><tool_call>list{}", pair("x", "")), false),
        ] {
            assert_eq!(closed(&answer, &tools(), mend_keys), Some(format!("{answer}</tool_call>")));
        }
        let broken = "<tool_call>read path</arg_key><arg_value>x</arg_value>";
        assert_eq!(closed(broken, &tools(), false), None);
        let mended = "<tool_call>read <arg_key>path</arg_key><arg_value>x</arg_value></tool_call>";
        assert_eq!(closed(broken, &tools(), true).as_deref(), Some(mended));
    }

    #[test]
    fn what_is_not_certain_stays_text() {
        for answer in [
            "no call at all",
            "<tool_call>read<arg_key>path</arg_key><arg_value>rm -rf /tmp/x",
            "<tool_call>read<arg_key>path</arg_key><arg_value>a</arg_value><arg_key>limit</arg_key><arg_value>1",
            "<tool_call>read<arg_key>path</arg_key>",
            "<tool_call>read<arg_key>pa",
            "<tool_call>read",
            "<tool_call>read<arg_key>limit</arg_key><arg_value>1</arg_value>",
            "<tool_call>write<arg_key>path</arg_key><arg_value>1</arg_value>",
            "<tool_call>read<arg_key>path</arg_key><arg_value>1</arg_value> and so on",
            "<tool_call>read<arg_key>path</arg_key><arg_value>1</arg_value></think>",
            "<tool_call>list</tool_call>",
            "<tool_call>",
        ] {
            assert_eq!(closed(answer, &tools(), true), None, "{answer}");
        }
    }
}
