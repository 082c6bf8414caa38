//! Shell-style files of `KEY=value` lines.

/// Largest file.
const LONGEST: usize = 1 << 20;

/// The assignments of a file, in order; a later one of a name stands in its place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnvFile {
    /// Name, value, line.
    pub values: Vec<(String, String, usize)>,
}

/// A line that is no plain assignment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct EnvFileError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong, and the mend.
    pub problem: String,
}

impl EnvFile {
    /// Reads a file's text: blank lines, `#` comments, `KEY=value` with or without `export`, quotes. Nothing is expanded:
    /// a value with `$` or a backquote outside single quotes is refused.
    ///
    /// # Errors
    /// A line that is something else.
    pub fn parse(text: &str) -> Result<Self, EnvFileError> {
        let mut file = Self::default();
        if text.len() > LONGEST {
            return Err(EnvFileError {
                line: 1,
                problem: format!("the file is larger than {LONGEST} bytes"),
            });
        }
        for (index, line) in text.lines().enumerate() {
            let number = index + 1;
            let wrong = |problem: String| EnvFileError { line: number, problem };
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let line = line.strip_prefix("export ").unwrap_or(line).trim_start();
            let Some((name, value)) = line.split_once('=') else {
                return Err(wrong(format!("`{}` is no KEY=value", short(line))));
            };
            let good = |c: char| c.is_ascii_alphanumeric() || c == '_';
            if name.is_empty() || !name.chars().all(good) || name.starts_with(|c: char| c.is_ascii_digit()) {
                return Err(wrong(format!("`{}` is no name of a variable", short(name))));
            }
            let value = unquote(value).map_err(|problem| wrong(format!("{name}: {problem}")))?;
            file.values.retain(|(other, _, _)| other != name);
            file.values.push((name.to_owned(), value, number));
        }
        Ok(file)
    }

    /// The value of a name, if it is set and not empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        let found = self.values.iter().find(|(other, _, _)| other == name);
        found.map(|(_, value, _)| value.as_str()).filter(|value| !value.is_empty())
    }
}

fn short(text: &str) -> String {
    text.chars().take(40).collect()
}

fn unquote(text: &str) -> Result<String, String> {
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    let mut quote = None;
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '\'' | '"') => quote = Some(c),
            (None | Some('"'), '$' | '`') => {
                return Err(format!(
                    "`{c}` is not expanded here: write the value itself, or quote it with '"
                ));
            }
            (None | Some('"'), '\\') => match chars.next() {
                Some(next) => out.push(next),
                None => return Err("ends in a backslash: write the value on one line".to_owned()),
            },
            (None, c) if c.is_whitespace() => {
                let rest: String = chars.collect();
                let rest = rest.trim_start();
                if rest.is_empty() || rest.starts_with('#') {
                    return Ok(out);
                }
                return Err(format!(
                    "`{}` stands behind the value: put quotes around all of it",
                    short(rest)
                ));
            }
            (None, ';' | '&' | '|' | '<' | '>' | '(' | ')') => {
                return Err(format!("`{c}` means something to a shell: put quotes around the value"));
            }
            (_, c) => out.push(c),
        }
    }
    match quote {
        Some(q) => Err(format!("the quote {q} is not closed on its line")),
        None => Ok(out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_as_shells_read_them() {
        let text = "# note\n\nA=1\nexport B='a $b'\nC=\"4096 16384\" # lengths\nD=\nE=a\\ b'c'\"d\"\nA=2\n";
        let file = EnvFile::parse(text).unwrap();
        let pairs: Vec<_> = file.values.iter().map(|(n, v, l)| (n.as_str(), v.as_str(), *l)).collect();
        assert_eq!(
            pairs,
            [("B", "a $b", 4), ("C", "4096 16384", 5), ("D", "", 6), ("E", "a bcd", 7), ("A", "2", 8)]
        );
        assert_eq!((file.get("A"), file.get("D"), file.get("Z")), (Some("2"), None, None));
    }

    #[test]
    fn what_only_a_shell_can_read_is_refused() {
        for (text, problem) in [
            ("A", "no KEY=value"),
            ("1A=3", "no name of a variable"),
            ("A=1\nB=$A", "line 2: B: `$` is not expanded"),
            ("A=\"`date`\"", "is not expanded"),
            ("A='x", "is not closed"),
            ("A=a b", "`b` stands behind the value"),
            ("A=a;b", "means something to a shell"),
            ("A=<user>", "means something to a shell"),
            ("A=a\\", "backslash"),
        ] {
            let error = EnvFile::parse(text).unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn single_quotes_keep_everything(value in "[^'\n\r]{0,40}") {
            let file = EnvFile::parse(&format!("A='{value}'")).unwrap();
            prop_assert_eq!(&file.values[0].1, &value);
        }
        #[test]
        fn no_text_breaks_it(text in "[ -~\n]{0,200}") {
            let _ = EnvFile::parse(&text);
        }
    }
}
