//! What each side of a comparison does when asked: requests of one run, measured.

use std::fmt::{self, Write as _};
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold::text::ChatRequest;
use plugfold_engine::service::{Event, Handle, Request, RequestStats, Service as _};
use plugfold_manifest::{Class, Manifest};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::cli::compare::made_up;
use crate::cli::{ModelArgs, model};

/// Tokens that continue a conversation.
const TURN: usize = 16;

/// The requests of a run.
#[derive(Args, Clone, Debug)]
pub struct Work {
    /// Tokens of each prompt, made up, another prompt in every run.
    #[arg(long, default_value_t = 256, value_name = "N")]
    prompt_tokens: usize,
    /// Instead of made-up prompts: a file with a chat a line, one after another: a user's message as text, or a JSON
    /// object with `messages` (or with `request`, which has them). No thinking, no tools.
    #[arg(long, value_name = "FILE")]
    messages: Option<PathBuf>,
    /// Tokens to generate; replies to messages end where the model ends them.
    #[arg(long, default_value_t = 64, value_name = "N")]
    tokens: usize,
    /// Conversations of a run: each is begun, not measured, then all are continued by 16 tokens, measured.
    #[arg(long, default_value_t = 1, value_name = "N")]
    sessions: usize,
    /// Requests that are asked at once.
    #[arg(long, default_value_t = 1, value_name = "N")]
    together: usize,
}

/// What a side says when it is loaded.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ready {
    /// Ids of the plugins that are compared.
    pub ids: Vec<String>,
    /// Their class: the strongest.
    pub class: String,
    /// Whether replies must be equal.
    pub equal: bool,
    /// All plugins in force, by name.
    pub plugins: Vec<String>,
    /// Name of the model's folder.
    pub model: String,
    /// Threads of the kernels.
    pub threads: usize,
    /// The work, in words.
    pub work: String,
}

/// What one run took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ran {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Of them resumed.
    pub cached_tokens: usize,
    /// Seconds of prefill.
    pub prefill_s: f64,
    /// Tokens after the first of each reply.
    pub decode_tokens: usize,
    /// Seconds of decode.
    pub decode_s: f64,
    /// Seconds from the first request's submission to the last reply's end.
    pub wall_s: f64,
    /// Generated tokens.
    pub tokens: usize,
    /// Decode rounds.
    pub rounds: usize,
    /// Drafts verified.
    pub drafted: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// Hash of all replies' ids, in order.
    pub hash: String,
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "prefill {:.1}, decode {:.1} tokens/s", self.prefill(), self.decode())
    }
}

impl Ran {
    /// Prompt tokens a second, the resumed ones counted: what a client sees.
    pub fn prefill(&self) -> f64 {
        self.prompt_tokens as f64 / self.prefill_s
    }
    /// Tokens a second of a reply, after its first.
    pub fn decode(&self) -> f64 {
        self.decode_tokens as f64 / self.decode_s
    }
    /// Generated tokens a second, everything counted.
    pub fn whole(&self) -> f64 {
        self.tokens as f64 / self.wall_s
    }
}

impl Work {
    fn words(&self) -> String {
        let prompt = match &self.messages {
            Some(path) => format!("messages of {}", path.display()),
            None => format!("made-up prompts of {} tokens", self.prompt_tokens),
        };
        let mut words = format!("{prompt}, up to {} new tokens, greedy", self.tokens);
        if self.sessions > 1 {
            let _ = write!(words, ", {} conversations continued by {TURN} tokens", self.sessions);
        }
        if self.together > 1 {
            let _ = write!(words, ", {} requests at once", self.together);
        }
        words
    }
}

/// What prompts come from.
enum Prompts {
    MadeUp { length: usize, vocab: usize },
    Messages(Vec<Vec<u32>>),
}

impl Prompts {
    fn get(&self, number: usize) -> Vec<u32> {
        match self {
            Self::MadeUp { length, vocab } => made_up(number, *length, *vocab),
            Self::Messages(all) => all[number % all.len()].clone(),
        }
    }
}

/// Loads one side and runs what standard input asks for, a number a line, until it ends.
pub fn serve(args: &ModelArgs, work: &Work) -> anyhow::Result<()> {
    if work.tokens < 2 || work.prompt_tokens == 0 || work.sessions == 0 || work.together == 0 {
        bail!("--tokens must be at least 2, --prompt-tokens, --sessions and --together at least 1");
    }
    let slots = if args.slots.is_some() { json!({}) } else { json!({"slots": work.together}) };
    let setup = args.setup(slots)?;
    let folder = setup.settings().model_dir()?;
    let messages = match &work.messages {
        None => None,
        Some(path) => {
            let lines =
                std::fs::read_to_string(path).with_context(|| format!("--messages {}", path.display()))?;
            let text = model::text(&folder)?;
            let encode = |line: &str| {
                let (variables, tools) = (Map::new(), Vec::new());
                let messages = messages_of(line);
                Ok(text
                    .encode_chat(ChatRequest { messages, tools, variables, thinking: false, places: None })?
                    .ids)
            };
            let ids: Vec<Vec<u32>> =
                lines.lines().filter(|l| !l.is_empty()).map(encode).collect::<anyhow::Result<_>>()?;
            if ids.is_empty() {
                bail!("--messages {}: give at least one line", path.display());
            }
            Some(ids)
        }
    };
    let compared: Vec<&Manifest> = setup
        .chosen
        .iter()
        .map(|c| &c.library.manifest)
        .filter(|m| args.further.iter().any(|name| plugfold::plugins::same_plugin(name, &m.label())))
        .collect();
    let class = compared.iter().map(|m| m.class()).max().unwrap_or(Class::HostOnly);
    let ready = Ready {
        ids: compared.iter().map(|m| m.id.clone()).collect(),
        class: class.to_string(),
        equal: class != Class::NewArithmetic,
        plugins: setup.chosen.iter().map(|c| c.library.manifest.label()).collect(),
        model: folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        threads: 0,
        work: work.words(),
    };
    let (engine, others) = model::engine(&setup)?;
    let info = engine.info().clone();
    let prompts = match messages {
        Some(all) => Prompts::Messages(all),
        None => Prompts::MadeUp { length: work.prompt_tokens, vocab: info.vocab_size },
    };
    let stop_ids = if work.messages.is_some() { info.eos_ids.clone() } else { Vec::new() };
    say(&Ready { threads: rayon::current_num_threads(), ..ready })?;
    for line in std::io::stdin().lock().lines() {
        let number: usize = line?.trim().parse().context("a run's number on standard input")?;
        let ran = run(work, &prompts, number, &stop_ids, |request| Ok(engine.submit(request)?))?;
        say(&ran)?;
    }
    drop(engine);
    others.finish();
    Ok(())
}

/// The chat of a line.
fn messages_of(line: &str) -> Vec<Value> {
    let given = serde_json::from_str::<Map<String, Value>>(line).ok().and_then(|object| {
        let holder = object.get("request").unwrap_or(&Value::Null);
        object.get("messages").or_else(|| holder.get("messages"))?.as_array().cloned()
    });
    given.unwrap_or_else(|| vec![json!({"role": "user", "content": line})])
}

fn say(what: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(what)?);
    Ok(std::io::stdout().flush()?)
}

/// One run: conversations begun where asked, then the measured requests.
fn run(
    work: &Work,
    prompts: &Prompts,
    number: usize,
    stop_ids: &[u32],
    submit: impl Fn(Request) -> anyhow::Result<Handle>,
) -> anyhow::Result<Ran> {
    let count = work.sessions.max(work.together);
    let request =
        |ids, max_tokens| Request { ids, max_tokens, stop_ids: stop_ids.to_vec(), ..Request::default() };
    let mut asked: Vec<Vec<u32>> = (0..count).map(|i| prompts.get(number * count + i)).collect();
    if work.sessions > 1 {
        for ids in &mut asked {
            let (reply, _) = receive(&submit(request(ids.clone(), 2))?)?;
            ids.extend(reply);
            // What comes next is no part of a prompt that was made up before.
            let turn: Vec<u32> = ids.iter().rev().take(TURN).copied().collect();
            ids.extend(turn);
        }
    }
    let mut ran = Ran {
        prompt_tokens: 0,
        cached_tokens: 0,
        prefill_s: 0.0,
        decode_tokens: 0,
        decode_s: 0.0,
        wall_s: 0.0,
        tokens: 0,
        rounds: 0,
        drafted: 0,
        accepted: 0,
        hash: String::new(),
    };
    let mut hash = Sha256::new();
    let started = Instant::now();
    for batch in asked.chunks(work.together) {
        let each = |ids: &Vec<u32>| submit(request(ids.clone(), work.tokens));
        let handles: Vec<Handle> = batch.iter().map(each).collect::<anyhow::Result<_>>()?;
        for (handle, ids) in handles.iter().zip(batch) {
            let (reply, stats) = receive(handle)?;
            for id in &reply {
                hash.update(id.to_le_bytes());
            }
            hash.update(u32::MAX.to_le_bytes());
            ran.prompt_tokens += ids.len();
            ran.cached_tokens += stats.cached_tokens;
            ran.prefill_s += stats.prefill_s;
            ran.decode_tokens += reply.len().saturating_sub(1);
            ran.decode_s += stats.decode_s;
            ran.tokens += reply.len();
            ran.rounds += stats.rounds;
            ran.drafted += stats.drafted;
            ran.accepted += stats.accepted;
        }
    }
    ran.wall_s = started.elapsed().as_secs_f64();
    let digest = hash.finalize();
    for byte in &digest[..8] {
        let _ = write!(ran.hash, "{byte:02x}");
    }
    Ok(ran)
}

fn receive(handle: &Handle) -> anyhow::Result<(Vec<u32>, RequestStats)> {
    let mut reply = Vec::new();
    loop {
        match handle.events.recv().context("the engine dropped the request")? {
            Event::Tokens(ids) => reply.extend(ids),
            Event::Prefill { .. } | Event::Logprobs(_) => {}
            Event::Done { stats, .. } => return Ok((reply, stats)),
            Event::Error(error) => bail!("{error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_message_or_a_chat() {
        let chat = json!([{"role": "user", "content": "hello"}]);
        let chat = chat.as_array().cloned().unwrap_or_default();
        for line in ["hello", r#"{"messages": [{"role": "user", "content": "hello"}]}"#] {
            assert_eq!(messages_of(line), chat);
        }
        assert_eq!(messages_of(r#"{"request": {"messages": [{"role": "user", "content": "hello"}]}}"#), chat);
        assert_eq!(messages_of("{no json")[0]["content"], "{no json");
    }
}
