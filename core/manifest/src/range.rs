//! Ranges: `1..64`, `0..`, `(0..1]`, `1..window_rows-1`, `2/4/8`; for tuples one a place, or the tuples themselves.

use serde::{Deserialize, Serialize};

use crate::expr::{Cursor, Expr, Names};

/// What numbers are allowed at one place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Set {
    /// Between two bounds, each perhaps missing; the flags say that the bound itself is out.
    Span { low: Option<Expr>, above: bool, high: Option<Expr>, below: bool },
    /// One of a few.
    OneOf(Vec<f64>),
}

/// The numbers that a knob takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Range(Inner);

#[derive(Clone, Debug, PartialEq)]
enum Inner {
    /// A set a place; numbers and lists of them have one.
    Places(Vec<Set>),
    /// Whole tuples.
    Tuples(Vec<Vec<i64>>),
}

impl Range {
    /// Reads a range.
    ///
    /// # Errors
    /// Says what was expected, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.contains(';') {
            let tuple = |part: &str| part.split(',').map(|n| n.trim().parse::<i64>()).collect();
            let tuples: Result<Vec<Vec<i64>>, _> = text.split(';').map(tuple).collect();
            let tuples =
                tuples.map_err(|_| format!("`{text}`: between `;` stand tuples of whole numbers"))?;
            return Ok(Self(Inner::Tuples(tuples)));
        }
        let mut cursor = Cursor::new(text)?;
        let mut places = vec![set(&mut cursor)?];
        while cursor.take(",") {
            places.push(set(&mut cursor)?);
        }
        cursor.end()?;
        Ok(Self(Inner::Places(places)))
    }

    /// How many places it speaks of.
    pub fn places(&self) -> usize {
        match &self.0 {
            Inner::Places(places) => places.len(),
            Inner::Tuples(tuples) => tuples.iter().map(Vec::len).max().unwrap_or(0),
        }
    }

    /// Whether numbers are in it, one a place; or all at the one place there is. A bound whose name has no number is no
    /// bound.
    pub fn holds(&self, numbers: &[f64], names: &dyn Names) -> bool {
        match &self.0 {
            Inner::Tuples(tuples) => {
                tuples.iter().any(|tuple| tuple.iter().map(|n| *n as f64).eq(numbers.iter().copied()))
            }
            Inner::Places(places) if places.len() == 1 => numbers.iter().all(|n| places[0].holds(*n, names)),
            Inner::Places(places) => numbers.iter().zip(places).all(|(n, set)| set.holds(*n, names)),
        }
    }

    /// The range in words, with the numbers of its names.
    pub fn describe(&self, names: &dyn Names) -> String {
        match &self.0 {
            Inner::Tuples(_) => {
                let text = self.to_string();
                text.split(';').map(str::trim).collect::<Vec<_>>().join(" or ")
            }
            Inner::Places(places) => {
                let places: Vec<String> = places.iter().map(|set| set.describe(names)).collect();
                places.join(", then ")
            }
        }
    }

    /// Every name in it.
    pub fn names(&self) -> Vec<&str> {
        let mut found = Vec::new();
        if let Inner::Places(places) = &self.0 {
            for set in places {
                if let Set::Span { low, high, .. } = set {
                    low.iter().chain(high).for_each(|expr| expr.names(&mut found));
                }
            }
        }
        found
    }
}

fn set(cursor: &mut Cursor<'_>) -> Result<Set, String> {
    let above = cursor.take("(");
    let low = if cursor.peek("..") { None } else { Some(cursor.expr(0)?) };
    if !above && cursor.peek("/") {
        let mut all = Vec::new();
        let Some(Expr::Number(first)) = low else {
            return Err(cursor.wanted("`..` (alternatives are numbers)"));
        };
        all.push(first);
        while cursor.take("/") {
            all.push(cursor.number().ok_or_else(|| cursor.wanted("a number"))?);
        }
        return Ok(Set::OneOf(all));
    }
    if !cursor.take("..") {
        return Err(cursor.wanted("`..`"));
    }
    let bare = cursor.done() || cursor.peek(",") || cursor.peek("]") || cursor.peek(")");
    let high = if bare { None } else { Some(cursor.expr(0)?) };
    let below = cursor.take(")");
    if !below {
        cursor.take("]");
    }
    Ok(Set::Span { low, above, high, below })
}

impl Set {
    fn holds(&self, number: f64, names: &dyn Names) -> bool {
        match self {
            Set::OneOf(all) => all.contains(&number),
            Set::Span { low, above, high, below } => {
                let bound = |expr: &Option<Expr>| expr.as_ref().and_then(|e| e.eval(names).ok());
                let over = bound(low).is_none_or(|b| if *above { number > b } else { number >= b });
                let under = bound(high).is_none_or(|b| if *below { number < b } else { number <= b });
                over && under
            }
        }
    }

    fn describe(&self, names: &dyn Names) -> String {
        match self {
            Set::OneOf(all) => {
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                match all.split_last() {
                    Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
                    _ => all.join(""),
                }
            }
            Set::Span { low, above, high, below } => {
                let number = |expr: &Expr| match (expr, expr.eval(names)) {
                    (Expr::Number(n), _) => n.to_string(),
                    (_, Ok(n)) => format!("{n} ({expr})"),
                    (_, Err(_)) => expr.to_string(),
                };
                match (low, high) {
                    (Some(low), Some(high)) if !above && !below => {
                        format!("from {} to {}", number(low), number(high))
                    }
                    (low, high) => {
                        let low = low.as_ref().map(|e| (if *above { "above" } else { "at least" }, e));
                        let high = high.as_ref().map(|e| (if *below { "below" } else { "at most" }, e));
                        let both: Vec<String> = low
                            .into_iter()
                            .chain(high)
                            .map(|(word, e)| format!("{word} {}", number(e)))
                            .collect();
                        if both.is_empty() { "any".to_owned() } else { both.join(" and ") }
                    }
                }
            }
        }
    }
}

impl std::fmt::Display for Set {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Set::OneOf(all) => {
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                f.write_str(&all.join("/"))
            }
            Set::Span { low, above, high, below } => {
                let show = |expr: &Option<Expr>| expr.as_ref().map(ToString::to_string).unwrap_or_default();
                let end = match (high, above, below) {
                    (_, _, true) => ")",
                    (Some(_), true, false) => "]",
                    _ => "",
                };
                write!(f, "{}{}..{}{end}", if *above { "(" } else { "" }, show(low), show(high))
            }
        }
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text: Vec<String> = match &self.0 {
            Inner::Places(places) => places.iter().map(ToString::to_string).collect(),
            Inner::Tuples(tuples) => {
                let tuple = |t: &Vec<i64>| t.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
                return f.write_str(&tuples.iter().map(tuple).collect::<Vec<_>>().join(";"));
            }
        };
        f.write_str(&text.join(","))
    }
}

impl TryFrom<String> for Range {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text).map_err(|problem| format!("range {problem}"))
    }
}

impl From<Range> for String {
    fn from(range: Range) -> Self {
        range.to_string()
    }
}
