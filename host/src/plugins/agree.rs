//! Steps that all ranks take together: either every rank has taken one, or all know whose refusal ended the start.

use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_engine::ranks::{Agreements, World};
use serde::{Deserialize, Serialize};

/// Name of every agreement here, so that ranks at different steps find out what each was about to do.
const LABEL: &str = "plugins";

/// What a rank says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Word {
    /// It has taken a step.
    Taken { step: String, value: Vec<u8> },
    /// It cannot take a step.
    Refused { why: String },
    /// A plugin asks for every rank's bytes.
    Asked { plugin: String, what: String, bytes: Vec<u8> },
}

impl Word {
    fn doing(&self) -> String {
        match self {
            Word::Taken { step, .. } => format!("has taken step `{step}`"),
            Word::Refused { .. } => "refuses".into(),
            Word::Asked { plugin, what, .. } => format!("is at `{what}` of plugin {plugin}"),
        }
    }
}

/// Where the ranks meet while plugins start.
pub struct Desk {
    rank: u32,
    ranks: u32,
    names: Vec<String>,
    /// `None` alone, and once the start is over.
    agreements: Mutex<Option<Agreements>>,
    /// Why the start has ended, once it has.
    ended: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Desk {
    /// One rank.
    pub fn alone() -> Self {
        Self {
            rank: 0,
            ranks: 1,
            names: vec!["rank 0".into()],
            agreements: Mutex::new(None),
            ended: Mutex::new(None),
        }
    }

    /// The ranks of a world.
    pub fn of(world: &World) -> Self {
        let several = world.ranks() > 1;
        Self {
            rank: world.rank() as u32,
            ranks: world.ranks() as u32,
            names: (0..world.ranks()).map(|rank| world.who(rank).to_owned()).collect(),
            agreements: Mutex::new(several.then(|| world.agreements())),
            ended: Mutex::new(None),
        }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The start is over: from now on nothing can be agreed on.
    pub fn close(&self) {
        *lock(&self.agreements) = None;
        lock(&self.ended)
            .get_or_insert_with(|| "the start is over: ranks agree only while they start".into());
    }

    /// Takes a step, which this rank did with a value or could not. Gives every rank's value.
    ///
    /// # Errors
    /// This rank's reason, or another's with its name, or the connection's.
    pub fn step(&self, step: &str, mine: Result<Vec<u8>, String>) -> Result<Vec<Vec<u8>>, String> {
        let own = mine.as_ref().err().cloned();
        let word = match mine {
            Ok(value) => Word::Taken { step: step.into(), value },
            Err(why) => Word::Refused { why },
        };
        let values = self.say(word);
        // What went wrong here is told here, whatever else went wrong elsewhere.
        own.map_or(values, Err)
    }

    /// Every rank's bytes, for a plugin.
    ///
    /// # Errors
    /// Another rank's refusal, the connection, or the start is over.
    pub fn ask(&self, plugin: &str, what: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        self.say(Word::Asked { plugin: plugin.into(), what: what.into(), bytes: bytes.to_vec() })
    }

    fn say(&self, mine: Word) -> Result<Vec<Vec<u8>>, String> {
        if let Some(why) = lock(&self.ended).clone() {
            return Err(why);
        }
        let agreements = lock(&self.agreements).clone();
        let said = match agreements {
            None => Ok(vec![mine]),
            Some(agreements) => exchange(&agreements, &mine),
        };
        let values = said.and_then(|words| self.values(&words));
        if let Err(why) = &values {
            *lock(&self.ended) = Some(why.clone());
        }
        values
    }

    /// The values of words that all ranks said alike.
    fn values(&self, words: &[Word]) -> Result<Vec<Vec<u8>>, String> {
        let who = |rank: usize| self.names.get(rank).map_or("a rank", String::as_str);
        for (rank, word) in words.iter().enumerate() {
            if let Word::Refused { why } = word {
                return Err(format!("{} refuses: {why}", who(rank)));
            }
        }
        let differs = words.iter().position(|word| word.doing() != words[0].doing());
        if let Some(rank) = differs {
            return Err(format!(
                "{} {}, {} {}: plugins must take every step on all ranks alike",
                who(0),
                words[0].doing(),
                who(rank),
                words[rank].doing()
            ));
        }
        let bytes = words.iter().map(|word| match word {
            Word::Taken { value, .. } => value.clone(),
            Word::Asked { bytes, .. } => bytes.clone(),
            Word::Refused { .. } => Vec::new(),
        });
        Ok(bytes.collect())
    }
}

fn exchange(agreements: &Agreements, mine: &Word) -> Result<Vec<Word>, String> {
    let bytes = serde_json::to_vec(mine).map_err(|e| e.to_string())?;
    let all = agreements.gather(LABEL, &bytes).map_err(|e| e.to_string())?;
    let read = |(rank, bytes): (usize, &Vec<u8>)| {
        serde_json::from_slice(bytes)
            .map_err(|e| format!("rank {rank} runs another build ({e}): start all ranks from one build"))
    };
    all.iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each rank of two gets.
    fn two<T: Send>(run: impl Fn(&Desk) -> T + Sync) -> Vec<T> {
        let worlds = World::local(2).unwrap();
        std::thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> = worlds.iter().map(|w| scope.spawn(move || run(&Desk::of(w)))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_get_all_values() {
        let all = two(|desk| desk.step("describe", Ok(vec![desk.rank() as u8])));
        assert_eq!(all, vec![Ok(vec![vec![0], vec![1]]); 2]);
    }

    #[test]
    fn one_refusal_is_everybodys() {
        let all = two(|desk| {
            let mine = if desk.rank() == 1 { Err("plugin 0003 is not there".into()) } else { Ok(Vec::new()) };
            desk.step("describe", mine)
        });
        let here = all[1].clone().unwrap_err();
        assert_eq!(here, "plugin 0003 is not there");
        let there = all[0].clone().unwrap_err();
        assert!(
            there.starts_with("rank 1 of 2 (pid ") && there.ends_with("refuses: plugin 0003 is not there")
        );
    }

    #[test]
    fn a_plugin_that_waits_for_a_rank_that_refused_is_told() {
        let all = two(|desk| {
            if desk.rank() == 1 {
                return desk.step("configure", Err("no".into())).map(|_| ());
            }
            let asked = desk.ask("0003", "speed", &[1]);
            assert!(asked.as_ref().is_err_and(|e| e.ends_with("refuses: no")), "{asked:?}");
            // The plugin turns it into a refusal of its own, which nobody waits for.
            desk.step("configure", Err(asked.unwrap_err())).map(|_| ())
        });
        assert!(all.iter().all(Result::is_err));
    }

    #[test]
    fn ranks_at_different_steps_are_named() {
        let all = two(|desk| match desk.rank() {
            0 => desk.ask("0003", "speed", &[1]),
            _ => desk.step("memory", Ok(Vec::new())),
        });
        for told in all {
            let told = told.unwrap_err();
            assert!(told.contains("`speed` of plugin 0003") && told.contains("step `memory`"), "{told}");
        }
    }

    #[test]
    fn nothing_is_agreed_on_once_the_start_is_over() {
        let all = two(|desk| {
            desk.step("ready", Ok(Vec::new())).unwrap();
            desk.close();
            desk.ask("0003", "speed", &[1])
        });
        assert!(all.iter().all(|told| told.as_ref().is_err_and(|e| e.contains("start is over"))));
        let alone = Desk::alone();
        alone.close();
        assert!(alone.ask("0003", "speed", &[1]).is_err());
    }
}
