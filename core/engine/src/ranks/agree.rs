//! Agreements: values that every rank must know, or must have alike, before any goes on.

use std::collections::HashMap;
use std::sync::Arc;

use super::control::Control;
use super::{Difference, EndKind, RankError, World};

/// A line's name, which of the lines of this name, and each rank's value.
type Row<'a> = (&'a str, usize, Vec<Option<String>>);

impl World {
    /// Every rank's bytes, in rank order, on every rank. `label` names the step: ranks at different steps end with an
    /// error that names both.
    ///
    /// # Errors
    /// [`RankError::Ended`].
    pub fn gather_to_all(&self, label: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        self.control.gather(label, mine)
    }

    /// The bytes of rank `from` on every rank; what the others give is not sent.
    ///
    /// # Errors
    /// [`RankError::Ended`].
    pub fn share(&self, label: &str, from: usize, mine: &[u8]) -> Result<Vec<u8>, RankError> {
        if from >= self.ranks() {
            return Err(self.misuse("share", "the sender must be one of the ranks"));
        }
        let mine = if self.rank() == from { mine } else { &[] };
        Ok(self.control.gather(label, mine)?.swap_remove(from))
    }

    /// Whether all ranks say yes.
    ///
    /// # Errors
    /// [`RankError::Ended`].
    pub fn agree_all(&self, label: &str, yes: bool) -> Result<bool, RankError> {
        Ok(self.agree_min(label, u64::from(yes))? == 1)
    }

    /// The least value of all ranks.
    ///
    /// # Errors
    /// [`RankError::Ended`].
    pub fn agree_min(&self, label: &str, value: u64) -> Result<u64, RankError> {
        Ok(self.numbers(label, value)?.into_iter().fold(value, u64::min))
    }

    /// The greatest value of all ranks.
    ///
    /// # Errors
    /// [`RankError::Ended`].
    pub fn agree_max(&self, label: &str, value: u64) -> Result<u64, RankError> {
        Ok(self.numbers(label, value)?.into_iter().fold(value, u64::max))
    }

    /// Compares named lines over all ranks; every rank gets the same answer. Order does not count: where it matters,
    /// names carry a number. A name that comes twice is compared in its order.
    ///
    /// # Errors
    /// [`RankError::Differ`] with every line that is not the same everywhere, first difference first.
    pub fn agree_equal(
        &self,
        label: &str,
        lines: &[(String, String)],
        mend: &'static str,
    ) -> Result<(), RankError> {
        let mine = serde_json::to_vec(lines).map_err(|error| self.fail(error.to_string()))?;
        let parts = self.control.gather(label, &mine)?;
        let mut all = Vec::with_capacity(parts.len());
        for (rank, part) in parts.iter().enumerate() {
            all.push(
                serde_json::from_slice(part).map_err(|error| self.unread(rank, label, &error.to_string()))?,
            );
        }
        let differences = differences(&all);
        if differences.is_empty() { Ok(()) } else { Err(RankError::Differ { differences, mend }) }
    }

    fn numbers(&self, label: &str, value: u64) -> Result<Vec<u64>, RankError> {
        let read = |(rank, part): (usize, Vec<u8>)| {
            let bytes = part.try_into().map_err(|_| self.unread(rank, label, "not eight bytes"))?;
            Ok(u64::from_le_bytes(bytes))
        };
        self.control.gather(label, &value.to_le_bytes())?.into_iter().enumerate().map(read).collect()
    }

    fn unread(&self, rank: usize, label: &str, why: &str) -> RankError {
        let reason = format!("rank {rank}'s part of agreement `{label}` is of another kind ({why})");
        self.fate.blame(rank, EndKind::OutOfStep, reason)
    }
}

/// A world's agreements, for who does not hold the world: what plugins agree on while they start.
#[derive(Clone)]
pub struct Agreements(Arc<Control>);

impl Agreements {
    pub(super) fn new(control: &Arc<Control>) -> Self {
        Self(Arc::clone(control))
    }

    /// As [`World::gather_to_all`].
    ///
    /// # Errors
    /// [`RankError::Ended`].
    pub fn gather(&self, label: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        self.0.gather(label, mine)
    }
}

/// What all ranks must have alike before the first round, as named lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettingsDigest {
    /// Names and values: engine, interfaces, checkpoint, plugins in order, knobs, limits, tables.
    pub lines: Vec<(String, String)>,
}

impl SettingsDigest {
    /// Adds a line.
    pub fn add(&mut self, name: impl Into<String>, value: &(impl ToString + ?Sized)) {
        self.lines.push((name.into(), value.to_string()));
    }

    /// Compares with all ranks.
    ///
    /// # Errors
    /// [`RankError::Differ`] with every differing line, each rank's value and the mend.
    pub fn compare(&self, world: &World) -> Result<(), RankError> {
        world.agree_equal(
            "settings",
            &self.lines,
            "start every rank with the same build, checkpoint, plugins and settings",
        )
    }
}

/// Lines that are not the same on all ranks, in the order in which they first come.
fn differences(all: &[Vec<(String, String)>]) -> Vec<Difference> {
    let mut table: Vec<Row<'_>> = Vec::new();
    let mut places = HashMap::new();
    for (rank, lines) in all.iter().enumerate() {
        let mut times = HashMap::new();
        for (name, value) in lines {
            let time = times.entry(name.as_str()).or_insert(0_usize);
            let place = *places.entry((name.as_str(), *time)).or_insert(table.len());
            if place == table.len() {
                table.push((name, *time, vec![None; all.len()]));
            }
            table[place].2[rank] = Some(value.clone());
            *time += 1;
        }
    }
    table
        .into_iter()
        .filter(|(.., values)| values.iter().any(|value| value != &values[0]))
        .map(|(name, time, values)| {
            let name = if time == 0 { name.to_owned() } else { format!("{name} ({})", time + 1) };
            Difference { name, values }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<(String, String)> {
        let pair = |item: &str| {
            let (name, value) = item.split_once('=').unwrap();
            (name.to_owned(), value.to_owned())
        };
        text.split_whitespace().map(pair).collect()
    }

    #[test]
    fn differences_name_each_line_and_rank() {
        let cases: &[(&[&str], &[&str])] = &[
            (&["a=1 b=2", "b=2 a=1"], &[]),
            (&["a=1", "a=2"], &["a: rank 0 has `1`, rank 1 has `2`"]),
            (&["a=1", "a=1 b=2"], &["b: rank 0 has no such line, rank 1 has `2`"]),
            (&["p=x p=y", "p=x p=z"], &["p (2): rank 0 has `y`, rank 1 has `z`"]),
            (&["a=1", "a=2", "a=1"], &["a: ranks 0, 2 have `1`, rank 1 has `2`"]),
            (
                &["a=1 b=1", "a=2 b=2"],
                &["a: rank 0 has `1`, rank 1 has `2`", "b: rank 0 has `1`, rank 1 has `2`"],
            ),
        ];
        for (ranks, expected) in cases {
            let all: Vec<_> = ranks.iter().map(|text| lines(text)).collect();
            let found: Vec<String> = differences(&all).iter().map(ToString::to_string).collect();
            assert_eq!(&found, expected, "{ranks:?}");
        }
    }
}
