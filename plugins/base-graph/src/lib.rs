//! Executor `graph`: a program's launches are recorded once and sent to the device in one go from then on.

mod kept;

use std::sync::{Mutex, PoisonError};

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{
    Capture, CaptureFacts, CaptureObject, Executor, ExecutorObject, Graphs, GraphsObject, Host, HostObject,
    Launch, Level, Mode, Steps, StepsObject,
};
use plugfold_abi::{ErrorKind, List, OpError, Phase, Program, Reach, Text, TextBuf, ops};

use kept::{Found, Kept, Key, Stretch};

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin.
pub struct Graph;

impl Plugin for Graph {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let on = setup.knobs.text("batch_graphs")? == "1";
        let rows = u32::try_from(setup.knobs.int("graph_rows")?).unwrap_or(u32::MAX);
        let most = usize::try_from(setup.knobs.int("max_graphs")?).unwrap_or(usize::MAX);
        if setup.device_class.get_str() == "cpu" {
            let text = "the CPU records nothing: every step runs by itself";
            setup.host.log(Level::Warn, Text::from(text))?;
        }
        Ok(hooks(on, rows, most, Some(setup.host())))
    }
}

/// The hooks, as a start with these settings would have them.
pub fn hooks(on: bool, rows: u32, most: usize, host: Option<&'static HostObject>) -> List<Offer> {
    let executor = Recorder { kept: Mutex::new(Kept::new(most)), host };
    List::from(vec![
        Offer::of(ExecutorObject::new(executor)),
        Offer::of(CaptureObject::new(Policy { on: on && most > 0, rows })),
    ])
}

/// Which forwards are recorded: windows, drafts and commits of few rows. Chunks of prompts gain nothing.
struct Policy {
    on: bool,
    rows: u32,
}

impl Capture for Policy {
    fn mode(&self, facts: &CaptureFacts<'_>, mode: &mut Mode) -> Result<(), OpError> {
        if self.on && facts.shape.phase != Phase::Prefill && facts.shape.rows <= self.rows {
            // The first run of a shape takes what memory it needs, which moves.
            *mode = match (facts.sightings, facts.captured) {
                (0, _) => Mode::Eager,
                (_, false) => Mode::Capture,
                (_, true) => Mode::Replay,
            };
        }
        Ok(())
    }
}

struct Recorder {
    kept: Mutex<Kept>,
    host: Option<&'static HostObject>,
}

/// Whether other ranks take part in a step.
fn is_exchange(program: &Program, step: usize) -> bool {
    let step = &program.steps[step];
    step.reach == Reach::Exchange || ops::is_collective(&step.op)
}

/// Whether other ranks wait for a step of this one: a sum of one part has no others.
fn is_waited_for(program: &Program, step: usize) -> bool {
    is_exchange(program, step) && program.steps[step].dims[1] != 1
}

/// Where stretches that are recorded end, and where single steps that are not.
fn cuts(all: usize, is_exchange: impl Fn(usize) -> bool) -> Vec<(u32, bool)> {
    let mut cuts = Vec::new();
    let mut begun = 0;
    for step in (0..all).filter(|step| is_exchange(*step)) {
        if step > begun {
            cuts.push((step as u32, true));
        }
        cuts.push((step as u32 + 1, false));
        begun = step + 1;
    }
    if all > begun {
        cuts.push((all as u32, true));
    }
    cuts
}

impl Recorder {
    fn count(&self, name: &str) -> Result<(), OpError> {
        self.host.map_or(Ok(()), |host| host.count(Text::from(name), 1.0))
    }

    /// Records what the steps ask for and has it done, a stretch after another.
    fn record(
        launch: &Launch<'_>,
        graphs: &GraphsObject,
        steps: &StepsObject,
    ) -> Result<Option<Vec<Stretch>>, OpError> {
        let mut stretches = Vec::new();
        // What waits for other ranks on the host is not recorded.
        let stop = |step| !launch.exchanges && is_exchange(launch.program, step);
        let cuts = cuts(launch.program.steps.len(), stop);
        let mut begun = 0;
        for (end, recorded) in cuts {
            if !recorded {
                if !steps.run(end)? {
                    return Ok(None);
                }
                stretches.push(Stretch { end, recording: None });
                begun = end as usize;
                continue;
            }
            // Exchanges that were recorded count as made. They must be made, or the other ranks wait for them.
            let exchanges = (begun..end as usize).any(|step| is_waited_for(launch.program, step));
            let owed = move |error: OpError| {
                if exchanges { OpError { kind: ErrorKind::Fatal, ..error } } else { error }
            };
            begun = end as usize;
            graphs.begin(launch.round)?;
            let fine = steps.run(end);
            // Whatever became of the steps: the device must not go on recording.
            let number = graphs.end().map_err(owed)?;
            if !fine? {
                // After a step that failed only exchanges were recorded.
                let made = if exchanges { graphs.launch(number, launch.round) } else { Ok(()) };
                graphs.forget(number)?;
                made.map_err(owed)?;
                return Ok(None);
            }
            graphs.launch(number, launch.round).map_err(owed)?;
            stretches.push(Stretch { end, recording: Some(number) });
        }
        Ok(Some(stretches))
    }
}

impl Executor for Recorder {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("graph".into())
    }

    fn run(&self, launch: &Launch<'_>, steps: &StepsObject) -> Result<Mode, OpError> {
        let all = launch.program.steps.len() as u32;
        let Some(graphs) = launch.graphs.filter(|_| launch.mode != Mode::Eager) else {
            steps.run(all)?;
            return Ok(Mode::Eager);
        };
        let key = Key { program: launch.number, memory: launch.memory, round: graphs.key(launch.round)? };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.find(key) {
            Found::Stretches(stretches) => {
                for Stretch { end, recording } in stretches.iter() {
                    match recording {
                        Some(number) => {
                            graphs.launch(*number, launch.round)?;
                            steps.ran(*end)?;
                        }
                        None if steps.run(*end)? => {}
                        None => break,
                    }
                }
                Ok(Mode::Replay)
            }
            Found::New => {
                // Other rows of the shape, or memory that has moved: it runs once as it is, and settles.
                steps.run(all)?;
                Ok(Mode::Eager)
            }
            Found::Seen => {
                let made = Self::record(launch, graphs, steps);
                if let Ok(Some(stretches)) = &made {
                    self.count("recorded")?;
                    for gone in kept.keep(key, stretches) {
                        graphs.forget(gone)?;
                    }
                } else {
                    // It would fail again: from now on its steps run one by one.
                    kept.never(key);
                }
                made.map(|_| Mode::Capture)
            }
            Found::Never => {
                steps.run(all)?;
                Ok(Mode::Eager)
            }
        }
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: Graph);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_records_all_and_several_stop_at_exchanges() {
        assert_eq!(cuts(6, |_| false), [(6, true)]);
        let several = cuts(6, |step| [0, 3, 5].contains(&step));
        assert_eq!(several, [(1, false), (3, true), (4, false), (5, true), (6, false)]);
    }
}
