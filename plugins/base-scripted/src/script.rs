//! What the file says: scripts by a mark in the prompt, each a list of chunks, pauses and faults.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use crate::vocabulary::Vocabulary;

/// Longest reply of a script, in tokens: repetitions are written out.
const MOST: usize = 1 << 20;
/// Longest pause of a step.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// What goes wrong, in place of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The call fails: the request ends.
    Error,
    /// The call panics: the request ends.
    Panic,
    /// Logits that are no numbers: the request ends.
    Nan,
    /// The call fails as one that leaves the ranks out of step: the engine ends.
    Fatal,
    /// The process of the rank aborts.
    Abort,
}

/// Tokens that leave in one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Places in the reply.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// Before the round.
    pub pause: Duration,
    /// In place of its first token, on this rank.
    pub fault: Option<(Fault, u32)>,
}

/// One reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// What a prompt has to contain.
    pub when: Vec<u8>,
    /// The whole reply, its end included.
    pub tokens: Vec<u32>,
    /// How it is cut, in order, without gaps.
    pub chunks: Vec<Chunk>,
}

impl Script {
    /// The token at a place of the reply: past the last one the end again, since a client may go on after it.
    pub fn token(&self, at: usize) -> Option<u32> {
        self.tokens.get(at).or(self.tokens.last()).copied()
    }

    /// The chunk that holds a place.
    pub fn chunk(&self, at: usize) -> Option<&Chunk> {
        let found = self.chunks.partition_point(|c| c.end <= at);
        self.chunks.get(found)
    }

    fn push(&mut self, tokens: &[u32], size: usize, pause: Duration) {
        for part in tokens.chunks(size) {
            let start = self.tokens.len();
            self.tokens.extend_from_slice(part);
            self.chunks.push(Chunk { start, end: self.tokens.len(), pause, fault: None });
        }
    }
}

/// All scripts of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scripts {
    /// In the order of the file.
    pub all: Vec<Script>,
    /// How prompts are read.
    pub vocabulary: Vocabulary,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    end: Token,
    tokenizer: Option<String>,
    #[serde(default)]
    script: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Id(u32),
    Text(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(default)]
    when: String,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    text: Option<String>,
    bytes: Option<Vec<u8>>,
    ids: Option<Vec<u32>>,
    #[serde(default = "one")]
    times: usize,
    #[serde(default = "one")]
    chunk: usize,
    #[serde(default)]
    delay_ms: f64,
    fault: Option<Fault>,
    #[serde(default)]
    rank: u32,
}

fn one() -> usize {
    1
}

impl Step {
    fn ids(&self, vocabulary: &Vocabulary) -> Result<Vec<u32>, String> {
        match (&self.text, &self.bytes, &self.ids, self.fault) {
            (Some(text), None, None, None) => Ok(vocabulary.ids(text)),
            (None, Some(bytes), None, None) => Ok(bytes.iter().map(|b| vocabulary.byte(*b)).collect()),
            (None, None, Some(ids), None) => Ok(ids.clone()),
            (None, None, None, Some(_)) => Ok(Vec::new()),
            _ => Err("give it one of text, bytes, ids or fault".into()),
        }
    }

    fn add(&self, script: &mut Script, vocabulary: &Vocabulary) -> Result<(), String> {
        let ids = self.ids(vocabulary)?;
        if self.chunk == 0 || self.times == 0 {
            return Err("chunk and times are at least 1".into());
        }
        if ids.len().saturating_mul(self.times) > MOST - script.tokens.len().min(MOST) {
            return Err(format!("a reply has at most {MOST} tokens"));
        }
        let pause = Duration::try_from_secs_f64(self.delay_ms / 1000.0).ok().filter(|d| *d <= LONGEST_PAUSE);
        let pause = pause.ok_or_else(|| {
            format!("delay_ms is {}: give 0 to {}", self.delay_ms, LONGEST_PAUSE.as_millis())
        })?;
        let whole = ids.repeat(self.times);
        script.push(&whole, self.chunk, pause);
        if let Some(fault) = self.fault {
            // A place of its own, that no token ever leaves from.
            script.push(&[0], 1, pause);
            if let Some(chunk) = script.chunks.last_mut() {
                chunk.fault = Some((fault, self.rank));
            }
        }
        Ok(())
    }
}

impl Scripts {
    /// Reads a file; the tokenizer's path is meant from its folder.
    ///
    /// # Errors
    /// What is wrong with it, with the number of the script and the step.
    pub fn read(path: &Path) -> Result<Self, String> {
        let at = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let text = std::fs::read_to_string(path).map_err(|e| at(&e))?;
        Self::parse(&text, path.parent().unwrap_or(Path::new("."))).map_err(|e| at(&e))
    }

    /// Reads the text of a file that lies in `folder`.
    ///
    /// # Errors
    /// As [`Scripts::read`].
    pub fn parse(text: &str, folder: &Path) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|e| e.to_string())?;
        let vocabulary = match &file.tokenizer {
            Some(path) => Vocabulary::read(&folder.join(path))?,
            None => Vocabulary::default(),
        };
        let end = match &file.end {
            Token::Id(id) => *id,
            Token::Text(text) => {
                vocabulary.token(text).ok_or_else(|| format!("end is {text:?}, which is not one token"))?
            }
        };
        let mut all = Vec::with_capacity(file.script.len());
        for (i, entry) in file.script.iter().enumerate() {
            let mut script = Script { when: entry.when.clone().into_bytes(), ..Script::default() };
            for (k, step) in entry.steps.iter().enumerate() {
                let added = step.add(&mut script, &vocabulary);
                added.map_err(|e| format!("script {}, step {}: {e}", i + 1, k + 1))?;
            }
            script.push(&[end], 1, Duration::ZERO);
            all.push(script);
        }
        Ok(Self { all, vocabulary })
    }

    /// The script of a prompt: the first whose mark it contains.
    pub fn of(&self, prompt: &[u32]) -> Option<usize> {
        let text = self.vocabulary.bytes(prompt);
        let contains = |mark: &[u8]| mark.is_empty() || text.windows(mark.len()).any(|w| w == mark);
        self.all.iter().position(|s| contains(&s.when))
    }

    /// Tokens of the largest chunk.
    pub fn largest_chunk(&self) -> usize {
        let sizes = self.all.iter().flat_map(|s| s.chunks.iter().map(|c| c.end - c.start));
        sizes.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Scripts, String> {
        Scripts::parse(text, Path::new("."))
    }

    #[test]
    fn steps_are_chunks_with_pauses_and_faults() {
        let all = read(
            r#"
            end = 300
            [[script]]
            when = "go"
            steps = [
              { text = "abcde", chunk = 2, delay_ms = 1.5 },
              { bytes = [255, 0], times = 2 },
              { ids = [400] },
              { fault = "panic", rank = 1 },
            ]
            "#,
        )
        .unwrap();
        let s = &all.all[0];
        assert_eq!(s.tokens, [97, 98, 99, 100, 101, 255, 0, 255, 0, 400, 0, 300]);
        let sizes: Vec<usize> = s.chunks.iter().map(|c| c.end - c.start).collect();
        assert_eq!(sizes, [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!((s.chunks[1].pause, s.chunks[3].pause), (Duration::from_micros(1500), Duration::ZERO));
        assert_eq!((s.chunks[8].start, s.chunks[8].fault), (10, Some((Fault::Panic, 1))));
        assert_eq!(s.chunk(3).map(|c| (c.start, c.end)), Some((2, 4)));
        assert_eq!((s.token(0), s.token(11), s.token(99)), (Some(97), Some(300), Some(300)));
        assert_eq!(s.chunk(12), None);
        assert_eq!(all.largest_chunk(), 2);
    }

    #[test]
    fn the_first_script_whose_mark_is_in_the_prompt_speaks() {
        let all = read("end = 1\n[[script]]\nwhen = \"é!\"\nsteps = []\n[[script]]\nsteps = []").unwrap();
        assert_eq!(all.of(&[0x20, 0xc3, 0xa9, 0x21, 900]), Some(0));
        assert_eq!(all.of(&[0xc3, 0xa9]), Some(1), "every prompt contains nothing");
        assert_eq!(read("end = 1\n[[script]]\nwhen = \"x\"\nsteps = []").unwrap().of(&[1]), None);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        let step = |step: &str| {
            let text = format!("end = 1\n[[script]]\nsteps = [{{ text = \"a\" }}, {{ {step} }}]");
            read(&text).unwrap_err()
        };
        for (given, said) in [
            ("text = \"a\", ids = [1]", "script 1, step 2: give it one of"),
            ("chunk = 2", "script 1, step 2: give it one of"),
            ("text = \"a\", chunk = 0", "at least 1"),
            ("text = \"a\", times = 0", "at least 1"),
            ("ids = [1, 2], times = 600000", "at most 1048576 tokens"),
            ("text = \"a\", delay_ms = -1", "delay_ms is -1"),
            ("text = \"a\", delay_ms = nan", "delay_ms is NaN"),
            ("text = \"a\", delay_ms = 1e9", "delay_ms is 1000000000"),
            ("fault = \"sulk\"", "sulk"),
            ("text = \"a\", colour = 1", "colour"),
        ] {
            let told = step(given);
            assert!(told.contains(said), "{given}: {told}");
        }
        assert!(read("").unwrap_err().contains("end"));
        assert!(read("end = \"two\"").unwrap_err().contains("\"two\", which is not one token"));
        assert!(read("end = 1\ntokenizer = \"nowhere.json\"").unwrap_err().contains("nowhere.json"));
    }
}
