//! `plugfold ab`: a profile with and without plugins, in interleaved pairs.
//!
//! Each side is a process of its own, so that nothing of one side's plugins is in the other. Both load first; then one
//! works while the other waits for its turn.

mod report;
mod work;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use plugfold::plugins::plugin_id;
use serde::de::DeserializeOwned;

use super::ModelArgs;
pub use report::Report;
#[cfg(test)]
pub(super) use report::tests::of_made_up;
use work::{Ran, Ready};

/// Which half of a comparison a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Side {
    /// The profile with the plugins.
    With,
    /// The profile without them.
    Without,
}

/// What to compare, and how.
#[derive(Args)]
pub struct Ab {
    #[command(flatten)]
    model: ModelArgs,
    /// A knob of the plugin, on its side only; of several plugins as OWNER.KEY=VALUE. May be given more than once.
    #[arg(long = "knob", value_name = "KEY=VALUE")]
    knobs: Vec<String>,
    /// Measured pairs, after one that is not.
    #[arg(long, default_value_t = 10, value_name = "N")]
    pairs: usize,
    #[command(flatten)]
    work: work::Work,
    /// Folder of the results; each comparison gets ID/DATE.json in it.
    #[arg(long, value_name = "DIR", default_value = "results/ab")]
    out: PathBuf,
    /// Be one side: run what standard input asks for.
    #[arg(long, hide = true)]
    side: Option<Side>,
}

impl Ab {
    /// Compares.
    pub fn run(mut self) -> anyhow::Result<ExitCode> {
        if self.model.further.is_empty() {
            bail!("--plugin: name the plugin to compare with and without");
        }
        if self.pairs == 0 {
            bail!("--pairs 0: measure at least once");
        }
        let knobs = self.knobs()?;
        if let Some(side) = self.side {
            if side == Side::With {
                self.model.sets.extend(knobs);
            }
            self.model.side = Some(side);
            work::serve(&self.model, &self.work)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut sides = [Process::start(Side::Without)?, Process::start(Side::With)?];
        let ready: Vec<Ready> = sides.iter_mut().map(Process::hear).collect::<anyhow::Result<_>>()?;
        let mut pairs = Vec::with_capacity(self.pairs);
        for number in 0..=self.pairs {
            // Every other pair backwards, so that a machine that gets busier favours nobody.
            let (first, second) = if number % 2 == 0 { (0, 1) } else { (1, 0) };
            let one = sides[first].ask(number)?;
            let other = sides[second].ask(number)?;
            let pair = if first == 0 { [one, other] } else { [other, one] };
            if number > 0 {
                eprintln!("pair {number} of {}: {} / {}", self.pairs, pair[0], pair[1]);
                pairs.push(pair);
            }
        }
        for side in sides {
            side.end()?;
        }
        let command: Vec<String> = std::env::args().skip(1).collect();
        let report = Report::new(&ready[1], &ready[0], &command, &pairs)?;
        report.print();
        let path = report.write(&self.out)?;
        println!("wrote {}", path.display());
        if report.broken() {
            println!(
                "{} is {}: its replies must be those without it, and {} of {} pairs differ",
                report.label(),
                ready[1].class,
                report.differing(),
                pairs.len()
            );
            return Ok(ExitCode::FAILURE);
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The knobs as settings, each with its plugin.
    fn knobs(&self) -> anyhow::Result<Vec<String>> {
        let named = |knob: &String| {
            let Some((key, _)) = knob.split_once('=') else {
                bail!("--knob {knob:?}: give KEY=VALUE");
            };
            match (key.contains('.'), &self.model.further[..]) {
                (true, _) => Ok(knob.clone()),
                (false, [one]) => Ok(format!("{}.{knob}", plugin_id(one))),
                (false, _) => {
                    bail!("--knob {knob:?}: of several plugins, say whose knob it is, as OWNER.{knob}")
                }
            }
        };
        self.knobs.iter().map(named).collect()
    }
}

/// One side's process.
struct Process {
    side: Side,
    child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Process {
    /// Starts this program once more, as one side, with the same arguments.
    fn start(side: Side) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("the path of this program")?;
        let name = if side == Side::With { "with" } else { "without" };
        let mut child = Command::new(program)
            .args(std::env::args_os().skip(1))
            .args(["--side", name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("the side {name} the plugin does not start"))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (asks, answers) = pipes.context("a side without pipes")?;
        Ok(Self { side, child, asks, answers: BufReader::new(answers) })
    }

    fn hear<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            let status = self.child.wait()?;
            bail!("the side {:?} the plugin ended ({status}); its reason is above", self.side);
        }
        serde_json::from_str(&line).with_context(|| format!("a side said {line:?}"))
    }

    fn ask(&mut self, number: usize) -> anyhow::Result<Ran> {
        writeln!(self.asks, "{number}").context("a side does not listen any more")?;
        self.hear()
    }

    fn end(mut self) -> anyhow::Result<()> {
        drop(self.asks);
        let status = self.child.wait()?;
        if !status.success() {
            bail!("the side {:?} the plugin ended with {status}", self.side);
        }
        Ok(())
    }
}
