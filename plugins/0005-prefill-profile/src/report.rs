//! What a prefill took, and how it is told.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Instant;

use plugfold_abi::points::OpDone;

use crate::names::{group, name};

/// One prefill that is timed.
pub(crate) struct Session {
    tokens: u32,
    cached: u32,
    rows: u32,
    chunks: u32,
    began: Instant,
    ms: BTreeMap<String, f64>,
}

impl Session {
    pub(crate) fn new(tokens: u32, cached: u32) -> Self {
        Self { tokens, cached, rows: 0, chunks: 0, began: Instant::now(), ms: BTreeMap::new() }
    }

    pub(crate) fn add(&mut self, done: &OpDone<'_>) {
        *self.ms.entry(name(done)).or_default() += done.seconds * 1e3;
    }

    pub(crate) fn chunk(&mut self, rows: u32) {
        self.rows += rows;
        self.chunks += 1;
    }

    fn total(&self) -> f64 {
        self.ms.values().sum()
    }

    /// A header, a line a group by falling time, a line of details.
    pub(crate) fn table(&self) -> String {
        let (total, wall) = (self.total(), self.began.elapsed().as_secs_f64());
        let mut text = format!(
            "prefill of {} tokens, {} resumed, {} rows in {} chunks: {total:.1} ms of operations, {:.1} ms in all, {:.0} tokens/s",
            self.tokens,
            self.cached,
            self.rows,
            self.chunks,
            wall * 1e3,
            f64::from(self.rows) / wall.max(1e-9)
        );
        let mut groups: BTreeMap<&str, f64> = BTreeMap::new();
        for (name, ms) in &self.ms {
            *groups.entry(group(name)).or_default() += ms;
        }
        let mut groups: Vec<(&str, f64)> = groups.into_iter().collect();
        groups.sort_by(|a, b| b.1.total_cmp(&a.1));
        for (name, ms) in groups {
            let (a_chunk, share) = (ms / f64::from(self.chunks.max(1)), 100.0 * ms / total.max(1e-9));
            let _ = write!(text, "\n  {name:28} {ms:10.2} ms {a_chunk:10.2} ms a chunk {share:5.1} %");
        }
        let details: Vec<String> = self.ms.iter().map(|(n, ms)| format!("{n} {ms:.2}")).collect();
        let _ = write!(text, "\n  {}", details.join(", "));
        text
    }

    /// The same for programs.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "tokens": self.tokens,
            "cached": self.cached,
            "rows": self.rows,
            "chunks": self.chunks,
            "wall_s": self.began.elapsed().as_secs_f64(),
            "ms_total": self.total(),
            "ms": self.ms,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::{Phase, Text};

    #[test]
    fn names_sum_to_the_total_and_the_table_is_sorted() {
        let mut session = Session::new(700, 0);
        for (op, program, site, seconds) in [
            ("kda.mix", "forward", 0, 0.004),
            ("dense", "forward", 0, 0.010),
            ("dense", "mtp", 1, 0.002),
            ("new.op", "forward", 0, 0.001),
        ] {
            session.add(&OpDone {
                op: Text::from(op),
                program: Text::from(program),
                phase: Phase::Prefill,
                layer: 1,
                site,
                rows: 512,
                seconds,
            });
        }
        session.chunk(512);
        session.chunk(188);
        let json = session.json();
        assert_eq!((&json["tokens"], &json["rows"], &json["chunks"]), (&700.into(), &700.into(), &2.into()));
        let sum: f64 = json["ms"].as_object().unwrap().values().map(|v| v.as_f64().unwrap()).sum();
        assert!((sum - json["ms_total"].as_f64().unwrap()).abs() < 1e-9);
        assert_eq!(json["ms"]["mtp.mlp.dense"], 2.0);
        assert_eq!(json["ms"]["new.op"], 1.0);
        let table = session.table();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[1].contains("attention projections") && lines[2].contains("KDA block"), "{table}");
    }
}
