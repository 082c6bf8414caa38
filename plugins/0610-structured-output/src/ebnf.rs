//! Grammars in EBNF (`root ::= "a" [0-9]+ | other`), rewritten into the library's own language.
//!
//! Rules that lead to no circle describe a regular language and become terminals: one automaton each, exact. What is left is a
//! context-free grammar over those terminals.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// A part of a rule.
#[derive(Clone, Debug, PartialEq)]
enum Expr {
    Literal(String),
    /// Ranges of characters, and whether they are those that are not meant.
    Class(Vec<(char, char)>, bool),
    Rule(String),
    Sequence(Vec<Expr>),
    Choice(Vec<Expr>),
    Repeat(Box<Expr>, u32, Option<u32>),
}

/// Most repetitions that may be asked for.
const REPEATS: u32 = 1_000_000;

struct Parser<'t> {
    text: &'t str,
    at: usize,
    depth: usize,
    deepest: usize,
}

impl Parser<'_> {
    fn error<T>(&self, what: &str) -> Result<T, String> {
        let before = &self.text[..self.at.min(self.text.len())];
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        Err(format!("line {line}, column {column}: {what}"))
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    fn blank(&mut self) {
        while let Some(c) = self.peek() {
            if c == '#' {
                while self.peek().is_some_and(|c| c != '\n') {
                    self.take();
                }
            } else if c.is_whitespace() {
                self.take();
            } else {
                return;
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let length = self.rest().find(|c| !good(c)).unwrap_or(self.rest().len());
        let name = &self.rest()[..length];
        let begins = name.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        let name = begins.then(|| name.to_owned())?;
        self.at += length;
        Some(name)
    }

    /// Whether a new rule begins here.
    fn begins_rule(&mut self) -> bool {
        let from = self.at;
        let found = self.name().is_some() && {
            self.blank();
            self.rest().starts_with("::=")
        };
        self.at = from;
        found
    }

    fn escaped(&mut self) -> Result<char, String> {
        let Some(c) = self.take() else { return self.error("the text ends in a backslash") };
        let digits = match c {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c if !c.is_alphanumeric() => return Ok(c),
            c => {
                return self
                    .error(&format!("\\{c} is no escape; there are \\n \\r \\t \\xNN \\uNNNN \\UNNNNNNNN"));
            }
        };
        let code = self.rest().get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        match code.and_then(char::from_u32) {
            Some(c) => {
                self.at += digits;
                Ok(c)
            }
            None => self.error("this escape names no character"),
        }
    }

    fn literal(&mut self) -> Result<Expr, String> {
        let mut text = String::new();
        loop {
            match self.take() {
                None | Some('\n') => return self.error("a string is not closed"),
                Some('"') => return Ok(Expr::Literal(text)),
                Some('\\') => text.push(self.escaped()?),
                Some(c) => text.push(c),
            }
        }
    }

    fn class(&mut self) -> Result<Expr, String> {
        let not = self.eat("^");
        let mut ranges = Vec::new();
        loop {
            let from = match self.take() {
                None | Some('\n') => return self.error("a character class is not closed"),
                Some(']') if ranges.is_empty() && !not => return self.error("a character class is empty"),
                Some(']') => return Ok(Expr::Class(ranges, not)),
                Some('\\') => self.escaped()?,
                Some(c) => c,
            };
            let range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let to = if range {
                self.take();
                match self.take() {
                    Some('\\') => self.escaped()?,
                    Some(c) if c != '\n' => c,
                    _ => return self.error("a character class is not closed"),
                }
            } else {
                from
            };
            if to < from {
                return self.error(&format!("the range {from:?} to {to:?} is upside down"));
            }
            ranges.push((from, to));
        }
    }

    fn number(&mut self) -> Result<u32, String> {
        let length = self.rest().find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest().len());
        let number = self.rest()[..length].parse::<u32>().ok().filter(|n| *n <= REPEATS);
        match number {
            Some(number) => {
                self.at += length;
                Ok(number)
            }
            None => self.error(&format!("give a number of repetitions from 0 to {REPEATS}")),
        }
    }

    fn repeated(&mut self, item: Expr) -> Result<Expr, String> {
        let mut item = item;
        loop {
            let (least, most) = if self.eat("*") {
                (0, None)
            } else if self.eat("+") {
                (1, None)
            } else if self.eat("?") {
                (0, Some(1))
            } else if self.eat("{") {
                self.blank();
                let least = self.number()?;
                self.blank();
                let most = if self.eat(",") {
                    self.blank();
                    if self.peek() == Some('}') { None } else { Some(self.number()?) }
                } else {
                    Some(least)
                };
                self.blank();
                if !self.eat("}") {
                    return self.error("repetitions are not closed by }");
                }
                if most.is_some_and(|most| most < least) {
                    return self.error("the most repetitions are fewer than the least");
                }
                (least, most)
            } else {
                return Ok(item);
            };
            // Repetitions of repetitions, one level each.
            self.depth += 1;
            if self.depth > self.deepest {
                return self.error(&format!("nested deeper than {} levels (knob depth)", self.deepest));
            }
            item = Expr::Repeat(Box::new(item), least, most);
        }
    }

    fn choice(&mut self) -> Result<Expr, String> {
        self.depth += 1;
        if self.depth > self.deepest {
            return self.error(&format!("nested deeper than {} levels (knob depth)", self.deepest));
        }
        let mut choices = Vec::new();
        loop {
            let mut items = Vec::new();
            loop {
                self.blank();
                match self.peek() {
                    None | Some('|' | ')') => break,
                    _ if self.begins_rule() => break,
                    _ => {}
                }
                let before = self.depth;
                let item = self.item()?;
                let item = self.repeated(item)?;
                self.depth = before;
                items.push(item);
            }
            choices.push(if items.len() == 1 { items.remove(0) } else { Expr::Sequence(items) });
            if !self.eat("|") {
                break;
            }
        }
        self.depth -= 1;
        Ok(if choices.len() == 1 { choices.remove(0) } else { Expr::Choice(choices) })
    }

    fn item(&mut self) -> Result<Expr, String> {
        if self.eat("\"") {
            return self.literal();
        }
        if self.eat("[") {
            return self.class();
        }
        if self.eat("(") {
            if self.rest().starts_with('?') {
                return self.error("looking ahead is not supported");
            }
            let inner = self.choice()?;
            self.blank();
            return if self.eat(")") { Ok(inner) } else { self.error("a bracket is not closed") };
        }
        if self.eat(".") {
            return Ok(Expr::Class(Vec::new(), true));
        }
        match self.name() {
            Some(name) => Ok(Expr::Rule(name)),
            None => self.error("here should be a string, a class, a bracket or the name of a rule"),
        }
    }
}

fn parse(text: &str, deepest: usize) -> Result<BTreeMap<String, Expr>, String> {
    let mut parser = Parser { text, at: 0, depth: 0, deepest };
    let mut rules = BTreeMap::new();
    loop {
        parser.blank();
        if parser.peek().is_none() {
            return Ok(rules);
        }
        let Some(name) = parser.name() else { return parser.error("here should be the name of a rule") };
        parser.blank();
        if !parser.eat("::=") {
            return parser.error("after the name of a rule comes ::=");
        }
        let expr = parser.choice()?;
        if rules.insert(name.clone(), expr).is_some() {
            return parser.error(&format!("the rule {name} is there twice"));
        }
        parser.blank();
        if parser.peek() == Some(')') {
            return parser.error("a bracket is closed that was not opened");
        }
    }
}

fn names<'e>(expr: &'e Expr, found: &mut BTreeSet<&'e str>) {
    match expr {
        Expr::Rule(name) => drop(found.insert(name)),
        Expr::Sequence(items) | Expr::Choice(items) => items.iter().for_each(|item| names(item, found)),
        Expr::Repeat(item, ..) => names(item, found),
        Expr::Literal(_) | Expr::Class(..) => {}
    }
}

/// The rules from which no circle can be reached.
fn regular(rules: &BTreeMap<String, Expr>) -> BTreeSet<String> {
    let needs: BTreeMap<&str, BTreeSet<&str>> = rules
        .iter()
        .map(|(name, expr)| {
            let mut found = BTreeSet::new();
            names(expr, &mut found);
            (name.as_str(), found)
        })
        .collect();
    let mut regular: BTreeSet<String> = BTreeSet::new();
    loop {
        let more: Vec<&str> = needs
            .iter()
            .filter(|(name, needs)| !regular.contains(**name) && needs.iter().all(|n| regular.contains(*n)))
            .map(|(name, _)| *name)
            .collect();
        if more.is_empty() {
            return regular;
        }
        regular.extend(more.into_iter().map(str::to_owned));
    }
}

/// A character as a regular expression in the library's language writes it.
fn character(out: &mut String, c: char) {
    let _ = write!(out, "\\u{{{:x}}}", c as u32);
}

fn class(ranges: &[(char, char)], not: bool) -> String {
    if ranges.is_empty() {
        return "/(?s:.)/".into();
    }
    let mut out = String::from(if not { "/[^" } else { "/[" });
    for (from, to) in ranges {
        character(&mut out, *from);
        if to != from {
            out.push('-');
            character(&mut out, *to);
        }
    }
    out + "]/"
}

/// A text as a string of the library's language.
pub fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

struct Writer<'r> {
    rules: &'r BTreeMap<String, Expr>,
    regular: BTreeSet<String>,
    numbers: BTreeMap<&'r str, usize>,
    /// Terminals made of parts of rules.
    extra: String,
    count: usize,
}

impl Writer<'_> {
    fn is_regular(&self, expr: &Expr) -> bool {
        let mut found = BTreeSet::new();
        names(expr, &mut found);
        found.iter().all(|name| self.regular.contains(*name))
    }

    fn can_be_empty(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Literal(text) => text.is_empty(),
            Expr::Class(..) => false,
            // Of regular rules only: no circles.
            Expr::Rule(name) => self.regular.contains(name) && self.can_be_empty(&self.rules[name]),
            Expr::Sequence(items) => items.iter().all(|item| self.can_be_empty(item)),
            Expr::Choice(items) => items.iter().any(|item| self.can_be_empty(item)),
            Expr::Repeat(item, least, _) => *least == 0 || self.can_be_empty(item),
        }
    }

    /// An expression inside of a terminal.
    fn terminal(&self, expr: &Expr, out: &mut String) {
        match expr {
            Expr::Literal(text) => out.push_str(&quoted(text)),
            Expr::Class(ranges, not) => out.push_str(&class(ranges, *not)),
            Expr::Rule(name) => {
                let _ = write!(out, "T{}", self.numbers[name.as_str()]);
            }
            Expr::Sequence(items) if items.is_empty() => out.push_str("\"\""),
            Expr::Sequence(items) => self.joined(items, " ", out),
            Expr::Choice(items) => self.joined(items, " | ", out),
            Expr::Repeat(item, least, most) => {
                out.push('(');
                self.terminal(item, out);
                out.push(')');
                out.push_str(&times(*least, *most));
            }
        }
    }

    fn joined(&self, items: &[Expr], with: &str, out: &mut String) {
        out.push('(');
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(with);
            }
            self.terminal(item, out);
        }
        out.push(')');
    }

    /// A regular part of a rule, as a terminal of its own.
    fn lifted(&mut self, expr: &Expr, out: &mut String) {
        if matches!(expr, Expr::Literal(text) if text.is_empty())
            || matches!(expr, Expr::Sequence(items) if items.is_empty())
        {
            out.push_str("\"\"");
            return;
        }
        let mut body = String::new();
        self.terminal(expr, &mut body);
        let name = format!("P{}", self.count);
        self.count += 1;
        // Nothing at all is no token of a grammar: it may be left out instead.
        if self.can_be_empty(expr) {
            let _ = writeln!(self.extra, "{name}: {body} & /(?s:.+)/");
            let _ = write!(out, "{name}?");
        } else {
            let _ = writeln!(self.extra, "{name}: {body}");
            out.push_str(&name);
        }
    }

    /// An expression of a rule.
    fn rule(&mut self, expr: &Expr, out: &mut String) {
        if self.is_regular(expr) {
            self.lifted(expr, out);
            return;
        }
        match expr {
            Expr::Rule(name) => {
                let _ = write!(out, "r{}", self.numbers[name.as_str()]);
            }
            Expr::Sequence(items) => {
                out.push('(');
                let mut run: Vec<Expr> = Vec::new();
                for item in items {
                    if self.is_regular(item) {
                        run.push(item.clone());
                        continue;
                    }
                    self.run(&mut run, out);
                    self.rule(item, out);
                    out.push(' ');
                }
                self.run(&mut run, out);
                out.push(')');
            }
            Expr::Choice(items) => {
                out.push('(');
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        out.push_str(" | ");
                    }
                    self.rule(item, out);
                }
                out.push(')');
            }
            Expr::Repeat(item, least, most) => {
                out.push('(');
                self.rule(item, out);
                out.push(')');
                out.push_str(&times(*least, *most));
            }
            Expr::Literal(_) | Expr::Class(..) => self.lifted(expr, out),
        }
    }

    fn run(&mut self, run: &mut Vec<Expr>, out: &mut String) {
        if run.is_empty() {
            return;
        }
        let whole = if run.len() == 1 { run.remove(0) } else { Expr::Sequence(std::mem::take(run)) };
        run.clear();
        self.lifted(&whole, out);
        out.push(' ');
    }
}

fn times(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (0, Some(1)) => "?".into(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

/// The grammar in the library's language; `root` is where it begins.
///
/// # Errors
/// What is wrong, by line and column.
pub fn translate(text: &str, depth: usize) -> Result<String, String> {
    let rules = parse(text, depth)?;
    if !rules.contains_key("root") {
        return Err("there is no rule root, where a grammar begins".into());
    }
    for (name, expr) in &rules {
        let mut found = BTreeSet::new();
        names(expr, &mut found);
        if let Some(missing) = found.iter().find(|n| !rules.contains_key(**n)) {
            return Err(format!("rule {name} names {missing}, which is no rule"));
        }
    }
    let numbers = rules.keys().enumerate().map(|(i, name)| (name.as_str(), i)).collect();
    let mut writer =
        Writer { rules: &rules, regular: regular(&rules), numbers, extra: String::new(), count: 0 };
    let mut out = String::new();
    let root = Expr::Rule("root".into());
    let mut start = String::new();
    writer.rule(&root, &mut start);
    let _ = writeln!(out, "start: {start}");
    for (name, expr) in &rules {
        let mut body = String::new();
        let number = writer.numbers[name.as_str()];
        if writer.regular.contains(name) {
            writer.terminal(expr, &mut body);
            let _ = writeln!(out, "T{number}: {body}");
        } else {
            writer.rule(expr, &mut body);
            let _ = writeln!(out, "r{number}: {body}");
        }
    }
    Ok(out + &writer.extra)
}
