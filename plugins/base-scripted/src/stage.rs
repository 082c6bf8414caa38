//! Who says what now: the script of each slot, and where in its reply the slot is.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::script::{Chunk, Script, Scripts};

/// A sequence in a slot.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Its script; `None`: no script is for its prompt.
    script: Option<usize>,
    /// Tokens of its prompt: the reply begins after them.
    prompt: usize,
}

#[derive(Default)]
struct State {
    scripts: Scripts,
    slots: BTreeMap<u32, Part>,
}

/// The scripts and the slots. Every rank has one, told of the same sequences, so all say the same.
#[derive(Default)]
pub struct Stage(Mutex<State>);

/// What a row has to say.
pub enum Line {
    /// This token; where it begins a chunk, the chunk.
    Token(u32, Option<Chunk>),
    /// Nothing: why not.
    Nothing(String),
}

impl Stage {
    /// These scripts, and nobody in the slots.
    pub fn new(scripts: Scripts) -> Self {
        Self(Mutex::new(State { scripts, slots: BTreeMap::new() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Other scripts from now on, for sequences that begin now; for tests in this process.
    pub fn set(&self, scripts: Scripts) {
        let mut state = self.state();
        state.scripts = scripts;
        state.slots.clear();
    }

    /// Tokens of the largest chunk.
    pub fn largest_chunk(&self) -> usize {
        self.state().scripts.largest_chunk()
    }

    pub(crate) fn begin(&self, slot: u32, prompt: &[u32]) {
        let mut state = self.state();
        let script = state.scripts.of(prompt);
        state.slots.insert(slot, Part { script, prompt: prompt.len() });
    }

    pub(crate) fn end(&self, slot: u32) {
        self.state().slots.remove(&slot);
    }

    /// What follows the row at a position.
    pub(crate) fn line(&self, slot: u32, position: usize) -> Line {
        let state = self.state();
        let Some((script, at)) = state.place(slot, position + 1) else {
            let why = if state.slots.contains_key(&slot) {
                "no script is for this prompt: add one whose `when` it contains, or one without `when`"
            } else {
                "no sequence began in this slot: a scripted model has no logits of its own"
            };
            return Line::Nothing(why.into());
        };
        let begins = script.chunk(at).filter(|c| c.start == at).copied();
        script
            .token(at)
            .map_or_else(|| Line::Nothing("an empty script".into()), |token| Line::Token(token, begins))
    }

    /// Drafts that make the coming window a whole chunk: what follows the token at `length` up to the chunk's last but one.
    pub(crate) fn drafts(&self, slot: u32, length: usize, most: usize) -> Vec<u32> {
        let state = self.state();
        let Some((script, at)) = state.place(slot, length + 1) else { return Vec::new() };
        let end = script.chunk(at).map_or(at, |c| c.end - 1);
        script.tokens.get(at..end).map_or_else(Vec::new, |t| t[..t.len().min(most)].to_vec())
    }

    /// Whether a slot has a script.
    pub(crate) fn plays(&self, slot: u32) -> bool {
        self.state().slots.get(&slot).is_some_and(|p| p.script.is_some())
    }
}

impl State {
    /// The script of a slot, and the place in its reply of the token at a position.
    fn place(&self, slot: u32, position: usize) -> Option<(&Script, usize)> {
        let part = self.slots.get(&slot)?;
        Some((self.scripts.all.get(part.script?)?, position.checked_sub(part.prompt)?))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_window_is_the_pending_token_and_the_rest_of_its_chunk() {
        let text = "end = 9\n[[script]]\nsteps = [{ text = \"abcdefg\", chunk = 3 }]";
        let stage = Stage::new(Scripts::parse(text, Path::new(".")).unwrap());
        stage.begin(2, &[1, 2, 3, 4]);
        let token = |position| match stage.line(2, position) {
            Line::Token(token, begins) => (token, begins.map(|c| c.end - c.start)),
            Line::Nothing(why) => panic!("{why}"),
        };
        // The row at position 3 is the prompt's last.
        let said = [
            (97, Some(3)),
            (98, None),
            (99, None),
            (100, Some(3)),
            (101, None),
            (102, None),
            (103, Some(1)),
            (9, Some(1)),
        ];
        for (i, want) in said.into_iter().enumerate() {
            assert_eq!(token(3 + i), want, "{i}");
        }
        // `a` came with the prompt: the rest of its chunk follows, then whole chunks.
        assert_eq!(stage.drafts(2, 4, 7), [98], "b drafted, c drawn");
        assert_eq!(stage.drafts(2, 6, 7), [100, 101]);
        assert_eq!(stage.drafts(2, 6, 1), [100]);
        assert_eq!(stage.drafts(2, 9, 7), [0; 0]);
        assert_eq!(stage.drafts(2, 50, 7), [0; 0]);
        assert!(stage.plays(2) && !stage.plays(1));
        stage.end(2);
        assert!(matches!(stage.line(2, 3), Line::Nothing(why) if why.contains("no sequence")));
    }

    #[test]
    fn a_prompt_that_no_script_is_for_says_so() {
        let stage = Stage::new(
            Scripts::parse("end = 9\n[[script]]\nwhen = \"x\"\nsteps = []", Path::new(".")).unwrap(),
        );
        stage.begin(0, &[1]);
        assert!(matches!(stage.line(0, 0), Line::Nothing(why) if why.contains("`when`")));
        assert!(stage.drafts(0, 1, 7).is_empty() && !stage.plays(0));
    }
}
