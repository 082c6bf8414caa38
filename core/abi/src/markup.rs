//! Rules of the model's markup that the server and plugins have to read alike.

/// Adds the closing brackets that a JSON text lacks; `None` when it lacks none, or is wrong in another way.
pub fn close_brackets(text: &str) -> Option<String> {
    let mut open = Vec::new();
    let (mut in_string, mut escaped) = (false, false);
    for c in text.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            _ if in_string => {}
            '[' => open.push(']'),
            '{' => open.push('}'),
            ']' | '}' if open.pop() != Some(c) => return None,
            _ => {}
        }
    }
    (!in_string && !open.is_empty()).then(|| text.chars().chain(open.into_iter().rev()).collect())
}

#[cfg(test)]
mod tests {
    use super::close_brackets;

    #[test]
    fn only_what_lacks_nothing_else_is_closed() {
        for (text, closed) in [
            ("[1, {\"a\": [2", Some("[1, {\"a\": [2]}]")),
            ("{\"a\": \"]}\\\"\"", Some("{\"a\": \"]}\\\"\"}")),
            ("[1]", None),
            ("plain", None),
            ("[\"open", None),
            ("[1}", None),
            ("]", None),
        ] {
            assert_eq!(close_brackets(text).as_deref(), closed, "{text}");
        }
    }
}
