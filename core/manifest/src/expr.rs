//! Expressions of ranges and defaults: numbers, names of limits and knobs, `+ - *`, `min`, `max`, `or`.

/// Longest expression, in characters, and deepest nesting: manifests are read before they are trusted.
const LONGEST: usize = 500;
const DEEPEST: usize = 16;

/// Gives names their numbers.
pub trait Names {
    /// The number of a limit or a knob; `None` where it is unknown, or has a word instead of a number.
    fn number(&self, name: &str) -> Option<f64>;
}

impl<F: Fn(&str) -> Option<f64>> Names for F {
    fn number(&self, name: &str) -> Option<f64> {
        self(name)
    }
}

/// An expression.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// A number.
    Number(f64),
    /// A limit, a knob of the same plugin, or `NNNN.key`.
    Name(String),
    /// `a + b`.
    Add(Box<Expr>, Box<Expr>),
    /// `a - b`.
    Sub(Box<Expr>, Box<Expr>),
    /// `a * b`.
    Mul(Box<Expr>, Box<Expr>),
    /// `-a`.
    Neg(Box<Expr>),
    /// `min(a, b, ...)`.
    Min(Vec<Expr>),
    /// `max(a, b, ...)`.
    Max(Vec<Expr>),
    /// `a or b`: b where a has a name without a number.
    Or(Box<Expr>, Box<Expr>),
}

impl Expr {
    /// Reads an expression.
    ///
    /// # Errors
    /// Says what was expected, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut cursor = Cursor::new(text)?;
        let expr = cursor.expr(0)?;
        cursor.end()?;
        Ok(expr)
    }

    /// Its value; the error is the first name that has no number.
    ///
    /// # Errors
    /// A name without a number.
    pub fn eval(&self, names: &dyn Names) -> Result<f64, String> {
        Ok(match self {
            Expr::Number(number) => *number,
            Expr::Name(name) => names.number(name).ok_or_else(|| name.clone())?,
            Expr::Add(a, b) => a.eval(names)? + b.eval(names)?,
            Expr::Sub(a, b) => a.eval(names)? - b.eval(names)?,
            Expr::Mul(a, b) => a.eval(names)? * b.eval(names)?,
            Expr::Neg(a) => -a.eval(names)?,
            Expr::Min(all) => fold(all, names, f64::min)?,
            Expr::Max(all) => fold(all, names, f64::max)?,
            Expr::Or(a, b) => match a.eval(names) {
                Ok(value) => value,
                Err(_) => b.eval(names)?,
            },
        })
    }

    /// Every name in it.
    pub fn names<'e>(&'e self, found: &mut Vec<&'e str>) {
        match self {
            Expr::Number(_) => {}
            Expr::Name(name) => found.push(name),
            Expr::Neg(a) => a.names(found),
            Expr::Add(a, b) | Expr::Sub(a, b) | Expr::Mul(a, b) | Expr::Or(a, b) => {
                a.names(found);
                b.names(found);
            }
            Expr::Min(all) | Expr::Max(all) => all.iter().for_each(|expr| expr.names(found)),
        }
    }

    /// How tightly it binds, for printing.
    fn rank(&self) -> u8 {
        match self {
            Expr::Or(..) => 0,
            Expr::Add(..) | Expr::Sub(..) => 1,
            Expr::Mul(..) => 2,
            Expr::Number(_) | Expr::Name(_) | Expr::Neg(_) | Expr::Min(_) | Expr::Max(_) => 3,
        }
    }

    fn print(&self, f: &mut std::fmt::Formatter<'_>, least: u8) -> std::fmt::Result {
        if self.rank() < least {
            write!(f, "(")?;
            self.print(f, 0)?;
            return write!(f, ")");
        }
        let mut pair = |a: &Expr, sign: &str, b: &Expr, rank: u8| {
            a.print(f, rank)?;
            write!(f, "{sign}")?;
            b.print(f, rank + 1)
        };
        match self {
            Expr::Add(a, b) => pair(a, "+", b, 1),
            Expr::Sub(a, b) => pair(a, "-", b, 1),
            Expr::Mul(a, b) => pair(a, "*", b, 2),
            Expr::Or(a, b) => pair(a, " or ", b, 0),
            Expr::Number(number) => write!(f, "{number}"),
            Expr::Name(name) => write!(f, "{name}"),
            Expr::Neg(a) => {
                write!(f, "-")?;
                a.print(f, 3)
            }
            Expr::Min(all) | Expr::Max(all) => {
                write!(f, "{}(", if matches!(self, Expr::Min(_)) { "min" } else { "max" })?;
                for (index, expr) in all.iter().enumerate() {
                    write!(f, "{}", if index == 0 { "" } else { ", " })?;
                    expr.print(f, 0)?;
                }
                write!(f, ")")
            }
        }
    }
}

impl std::fmt::Display for Expr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.print(f, 0)
    }
}

fn fold(all: &[Expr], names: &dyn Names, pick: fn(f64, f64) -> f64) -> Result<f64, String> {
    let values: Result<Vec<f64>, String> = all.iter().map(|expr| expr.eval(names)).collect();
    values?.into_iter().reduce(pick).ok_or_else(|| "nothing".to_owned())
}

/// Reads expressions and what stands around them in ranges.
pub(crate) struct Cursor<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Cursor<'t> {
    pub(crate) fn new(text: &'t str) -> Result<Self, String> {
        if text.chars().count() > LONGEST {
            return Err(format!("is longer than {LONGEST} characters"));
        }
        Ok(Self { text, at: 0 })
    }

    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn blanks(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// Takes a sign if it is next.
    pub(crate) fn take(&mut self, sign: &str) -> bool {
        self.blanks();
        let found = self.rest().starts_with(sign);
        if found {
            self.at += sign.len();
        }
        found
    }

    pub(crate) fn peek(&mut self, sign: &str) -> bool {
        self.blanks();
        self.rest().starts_with(sign)
    }

    pub(crate) fn done(&mut self) -> bool {
        self.blanks();
        self.rest().is_empty()
    }

    pub(crate) fn end(&mut self) -> Result<(), String> {
        if self.done() { Ok(()) } else { Err(self.wanted("the end")) }
    }

    pub(crate) fn wanted(&mut self, what: &str) -> String {
        self.blanks();
        let rest = self.rest();
        if rest.is_empty() {
            format!("`{}` ends where {what} was expected", self.text)
        } else {
            format!("`{}` has `{rest}` where {what} was expected", self.text)
        }
    }

    fn word(&mut self) -> &'t str {
        self.blanks();
        let rest = self.rest();
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
        &rest[..end]
    }

    /// A number without a sign; the dots of a range are not part of it.
    pub(crate) fn number(&mut self) -> Option<f64> {
        self.blanks();
        let rest = self.rest();
        let whole = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        if whole == 0 {
            return None;
        }
        let mut end = whole;
        if let Some(part) = rest[whole..].strip_prefix('.') {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            if digits > 0 {
                end = whole + 1 + digits;
            }
        }
        let number = rest[..end].parse().ok();
        self.at += end;
        number
    }

    pub(crate) fn expr(&mut self, depth: usize) -> Result<Expr, String> {
        if depth > DEEPEST {
            return Err(format!("`{}` is nested deeper than {DEEPEST}", self.text));
        }
        let mut left = self.sum(depth)?;
        while self.word() == "or" {
            self.at += "or".len();
            left = Expr::Or(Box::new(left), Box::new(self.sum(depth)?));
        }
        Ok(left)
    }

    fn sum(&mut self, depth: usize) -> Result<Expr, String> {
        let mut left = self.product(depth)?;
        loop {
            if self.take("+") {
                left = Expr::Add(Box::new(left), Box::new(self.product(depth)?));
            } else if self.take("-") {
                left = Expr::Sub(Box::new(left), Box::new(self.product(depth)?));
            } else {
                return Ok(left);
            }
        }
    }

    fn product(&mut self, depth: usize) -> Result<Expr, String> {
        let mut left = self.atom(depth)?;
        while self.take("*") {
            left = Expr::Mul(Box::new(left), Box::new(self.atom(depth)?));
        }
        Ok(left)
    }

    fn atom(&mut self, depth: usize) -> Result<Expr, String> {
        if depth > DEEPEST {
            return Err(format!("`{}` is nested deeper than {DEEPEST}", self.text));
        }
        if self.take("-") {
            return Ok(Expr::Neg(Box::new(self.atom(depth + 1)?)));
        }
        if self.take("(") {
            let inner = self.expr(depth + 1)?;
            return if self.take(")") { Ok(inner) } else { Err(self.wanted("`)`")) };
        }
        let word = self.word();
        let after = &self.rest()[word.len()..];
        let owned = word.len() == 4
            && word.bytes().all(|b| b.is_ascii_digit())
            && after.strip_prefix('.').is_some_and(|key| key.starts_with(|c: char| c.is_ascii_lowercase()));
        if owned {
            self.at += word.len() + 1;
            let key = self.word();
            self.at += key.len();
            return Ok(Expr::Name(format!("{word}.{key}")));
        }
        if let Some(number) = self.number() {
            return Ok(Expr::Number(number));
        }
        if word.is_empty() || word == "or" {
            return Err(self.wanted("a number or a name"));
        }
        self.at += word.len();
        if matches!(word, "min" | "max") && self.take("(") {
            let mut all = vec![self.expr(depth + 1)?];
            while self.take(",") {
                all.push(self.expr(depth + 1)?);
            }
            if !self.take(")") {
                return Err(self.wanted("`)`"));
            }
            return Ok(if word == "min" { Expr::Min(all) } else { Expr::Max(all) });
        }
        Ok(Expr::Name(word.to_owned()))
    }
}
