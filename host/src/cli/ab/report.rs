//! What a comparison found: on the screen and as a file.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::work::{Ran, Ready};
use crate::cli::compare::{Spread, machine};
use crate::cli::write_whole;

/// One rate on both sides, and what a pair gained.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Rate {
    /// Tokens a second without.
    pub without: Spread,
    /// Tokens a second with.
    pub with: Spread,
    /// With over without, pair by pair.
    pub gain: Spread,
}

/// A comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Ids of the plugins that are compared.
    pub ids: Vec<String>,
    /// Their class.
    pub class: String,
    /// Day.
    pub date: String,
    /// The arguments that measured it.
    pub command: String,
    /// What was asked.
    pub work: String,
    /// Name of the model's folder.
    pub model: String,
    /// All plugins of the side with.
    pub plugins: Vec<String>,
    /// All plugins of the side without.
    pub plugins_without: Vec<String>,
    /// Threads of the kernels.
    pub threads: usize,
    /// The machine.
    pub machine: Value,
    /// Prompt tokens a second, resumed ones counted.
    pub prefill: Rate,
    /// Tokens a second of a reply, after its first.
    pub decode: Rate,
    /// Generated tokens a second of a whole run.
    pub whole: Rate,
    /// Whether replies must be equal by the class.
    pub must_be_equal: bool,
    /// Pairs with equal replies.
    pub equal_pairs: usize,
    /// What was measured: without, with.
    pub pairs: Vec<[Ran; 2]>,
}

fn rate(pairs: &[[Ran; 2]], of: impl Fn(&Ran) -> f64) -> anyhow::Result<Rate> {
    let side = |i: usize| Spread::of(pairs.iter().map(|p| of(&p[i])));
    let gain = Spread::of(pairs.iter().map(|p| of(&p[1]) / of(&p[0])));
    match (side(0), side(1), gain) {
        (Some(without), Some(with), Some(gain)) => Ok(Rate { without, with, gain }),
        _ => {
            bail!("a run took no time: give more --tokens, or messages that are answered with more than one")
        }
    }
}

impl Report {
    /// From what both sides measured.
    ///
    /// # Errors
    /// A rate that is none.
    pub fn new(
        with: &Ready,
        without: &Ready,
        command: &[String],
        pairs: &[[Ran; 2]],
    ) -> anyhow::Result<Self> {
        Ok(Self {
            ids: with.ids.clone(),
            class: with.class.clone(),
            date: chrono::Local::now().format("%Y-%m-%d").to_string(),
            command: format!("plugfold {}", command.join(" ")),
            work: with.work.clone(),
            model: with.model.clone(),
            plugins: with.plugins.clone(),
            plugins_without: without.plugins.clone(),
            threads: with.threads,
            machine: machine(),
            prefill: rate(pairs, Ran::prefill)?,
            decode: rate(pairs, Ran::decode)?,
            whole: rate(pairs, Ran::whole)?,
            must_be_equal: with.equal,
            equal_pairs: pairs.iter().filter(|p| p[0].hash == p[1].hash).count(),
            pairs: pairs.to_vec(),
        })
    }

    /// The plugins, as a folder's name.
    pub fn label(&self) -> String {
        self.ids.join("+")
    }

    /// Pairs whose replies differ.
    pub fn differing(&self) -> usize {
        self.pairs.len() - self.equal_pairs
    }

    /// Whether replies differ that must not.
    pub fn broken(&self) -> bool {
        self.must_be_equal && self.differing() > 0
    }

    /// The gain in one line, for tables.
    pub fn gain(&self) -> String {
        let one = |name: &str, rate: &Rate| {
            let s = rate.gain;
            format!("{name} x{:.2} ({:.2} to {:.2})", s.median, s.low, s.high)
        };
        [one("prefill", &self.prefill), one("decode", &self.decode), one("whole", &self.whole)].join(", ")
    }

    /// Whether replies were equal, in words.
    pub fn replies(&self) -> String {
        match (self.differing(), self.must_be_equal) {
            (0, _) => "replies equal".into(),
            (n, true) => format!("replies differ in {n} of {} pairs, which they must not", self.pairs.len()),
            (n, false) => format!("replies differ in {n} of {} pairs, as they may", self.pairs.len()),
        }
    }

    /// Prints a table.
    pub fn print(&self) {
        println!("{} ({}): {}", self.label(), self.class, self.work);
        println!("{:<22} {:>26} {:>26} {:>22}", "tokens a second", "without", "with", "gain of a pair");
        let cell = |s: Spread, digits: usize| {
            format!("{:.digits$} ({:.digits$} to {:.digits$})", s.median, s.low, s.high)
        };
        for (name, rate) in
            [("prefill", self.prefill), ("decode", self.decode), ("whole run, generated", self.whole)]
        {
            println!(
                "{name:<22} {:>26} {:>26} {:>22}",
                cell(rate.without, 1),
                cell(rate.with, 1),
                cell(rate.gain, 3)
            );
        }
        let sum = |i: usize, of: fn(&Ran) -> usize| -> usize { self.pairs.iter().map(|p| of(&p[i])).sum() };
        println!(
            "medians and quartiles of {} pairs; {}; resumed tokens {} / {}, drafts accepted {} of {} / {} of {}",
            self.pairs.len(),
            self.replies(),
            sum(0, |r| r.cached_tokens),
            sum(1, |r| r.cached_tokens),
            sum(0, |r| r.accepted),
            sum(0, |r| r.drafted),
            sum(1, |r| r.accepted),
            sum(1, |r| r.drafted),
        );
    }

    /// Writes `ID/DATE.json`, or `ID/DATE-N.json` where the day has one already.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn write(&self, out: &Path) -> anyhow::Result<PathBuf> {
        let folder = out.join(self.label());
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let name = |n: usize| match n {
            1 => folder.join(format!("{}.json", self.date)),
            n => folder.join(format!("{}-{n:02}.json", self.date)),
        };
        let path = (1..100).map(name).find(|path| !path.exists());
        let path =
            path.with_context(|| format!("{} is full of this day's results: move some", folder.display()))?;
        write_whole(&path, |path| Ok(std::fs::write(path, serde_json::to_string_pretty(self)? + "\n")?))?;
        Ok(path)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A report on plugins, of made-up figures.
    pub(crate) fn of_made_up(ids: &[&str], hashes: &[[&str; 2]], equal: bool) -> Report {
        let ready = Ready {
            ids: ids.iter().map(ToString::to_string).collect(),
            class: if equal { "same-bits" } else { "new-arithmetic" }.into(),
            equal,
            plugins: Vec::new(),
            model: "demo".into(),
            threads: 1,
            work: "work".into(),
        };
        let ran = |hash: &str, decode_s: f64| Ran {
            prompt_tokens: 100,
            cached_tokens: 0,
            prefill_s: 2.0,
            decode_tokens: 10,
            decode_s,
            wall_s: 2.0 + decode_s,
            tokens: 11,
            rounds: 10,
            drafted: 0,
            accepted: 0,
            hash: hash.into(),
        };
        let pairs: Vec<[Ran; 2]> = hashes.iter().map(|[a, b]| [ran(a, 2.0), ran(b, 1.0)]).collect();
        Report::new(&ready, &ready, &["ab".into()], &pairs).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn gains_are_of_pairs_and_replies_are_compared() {
        let same = of_made_up(&["0020"], &[["a", "a"], ["b", "b"]], true);
        assert!(
            (same.decode.gain.median - 2.0).abs() < 1e-12 && (same.prefill.gain.median - 1.0).abs() < 1e-12
        );
        assert!(!same.broken());
        assert!(same.gain().contains("decode x2.00 (2.00 to 2.00)"), "{}", same.gain());
        let differs = of_made_up(&["0020"], &[["a", "a"], ["b", "c"]], true);
        assert!(differs.broken());
        assert_eq!(differs.replies(), "replies differ in 1 of 2 pairs, which they must not");
        assert!(!of_made_up(&["0020"], &[["b", "c"]], false).broken(), "a new arithmetic may differ");
    }

    #[test]
    fn a_second_comparison_of_a_day_replaces_nothing() {
        let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let one = of_made_up(&["base-mtp", "base-auto"], &[["a", "a"]], true);
        let paths = [1, 2].map(|_| one.write(folder.path()).unwrap_or_else(|e| panic!("{e}")));
        assert!(paths[0].ends_with(format!("base-mtp+base-auto/{}.json", one.date)));
        assert!(paths[1].ends_with(format!("{}-02.json", one.date)));
    }
}
