//! `plugfold generate` and `plugfold tokenize`.

use std::io::Write as _;

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold::chains::Chains;
use plugfold::reply::stop::StopStrings;
use plugfold::reply::{ChatParser, Piece, ReplyParser, ReplyReader, Verbatim};
use plugfold::text::{ChatRequest, TextModel};
use plugfold_engine::service::{Event, Finish, Request, RequestStats, Sampling, Service as _};
use serde_json::{Map, json};

use super::progress::Prefilling;
use super::{ModelArgs, ids, model};

/// The prompt, in one of three forms.
#[derive(Args)]
#[group(required = true, multiple = false)]
#[allow(clippy::struct_field_names)] // the flags' names
pub struct Prompt {
    /// Text as it is.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Token ids, as 1,2,3.
    #[arg(long, value_name = "IDS")]
    ids: Option<String>,
    /// A user's message, through the chat template.
    #[arg(long, value_name = "TEXT")]
    chat: Option<String>,
}

impl Prompt {
    fn encode(&self, text: Option<&TextModel>, thinking: bool) -> anyhow::Result<Vec<u32>> {
        if let Some(list) = &self.ids {
            return ids(list);
        }
        let text = text.context("this model has no tokenizer.json; give --ids")?;
        if let Some(prompt) = &self.prompt {
            return Ok(text.tokenizer.encode(prompt)?);
        }
        let messages = vec![json!({"role": "user", "content": self.chat})];
        let request =
            ChatRequest { messages, tools: Vec::new(), variables: Map::new(), thinking, places: None };
        Ok(text.encode_chat(request)?.ids)
    }
}

/// Continue one prompt.
#[derive(Args)]
pub struct Generate {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: Prompt,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 256, value_name = "N")]
    max_tokens: usize,
    /// Divides the logits; 0 takes the largest.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f64,
    /// Largest logits kept; 0 keeps all.
    #[arg(long, default_value_t = 20)]
    top_k: u32,
    /// Probability kept.
    #[arg(long, default_value_t = 0.95)]
    top_p: f64,
    /// Key of the noise; without it derived from the prompt.
    #[arg(long)]
    seed: Option<u64>,
    /// Go on after a stop token.
    #[arg(long)]
    ignore_eos: bool,
    /// Chat without a think block.
    #[arg(long)]
    no_thinking: bool,
    /// Print one JSON object with ids, text and everything measured.
    #[arg(long)]
    json: bool,
}

/// The text model, where the folder has a tokenizer.
fn text_of(folder: &std::path::Path) -> anyhow::Result<Option<TextModel>> {
    folder.join("tokenizer.json").exists().then(|| model::text(folder)).transpose()
}

impl Generate {
    /// Runs the prompt.
    pub fn run(self) -> anyhow::Result<()> {
        let setup = self.model.setup(json!({"slots": 1}))?;
        let settings = setup.settings();
        let folder = settings.model_dir()?;
        // A prompt that cannot be read is found before the model is loaded.
        let mut text = text_of(&folder)?;
        let prompt = self.prompt.encode(text.as_ref(), !self.no_thinking)?;
        let (engine, others) = model::engine(&setup)?;
        let info = engine.info().clone();
        if let Some(text) = &mut text {
            text.add_stop_ids(&info.eos_ids);
            let ends = Chains::new(others.hooks()).start(&text.tokenizer)?;
            text.add_stop_ids(&ends);
        }
        let stop_ids = match &text {
            _ if self.ignore_eos => Vec::new(),
            Some(text) => text.stop_ids.clone(),
            None => info.eos_ids.clone(),
        };
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: 0.0,
            seed: self.seed,
        };
        let request = Request {
            ids: prompt.clone(),
            sampling,
            max_tokens: self.max_tokens.min(info.context.saturating_sub(prompt.len()).max(1)),
            stop_ids,
            ..Request::default()
        };
        let handle = engine.submit(request)?;
        let thinking = text.as_ref().is_some_and(|t| t.thinking_is_open(&prompt));
        let parser: Box<dyn ReplyParser> = if self.prompt.chat.is_some() {
            Box::new(ChatParser::new(thinking, Vec::new()))
        } else {
            Box::new(Verbatim)
        };
        let mut reply = Reply::new(parser, !self.json);
        let bar = Prefilling::start(prompt.len());
        let (finish, stats) = loop {
            match handle.events.recv().context("the engine dropped the request")? {
                Event::Prefill { done, .. } => bar.at(done),
                Event::Logprobs(_) => {}
                Event::Tokens(ids) => {
                    bar.done();
                    reply.take(&ids, text.as_ref())?;
                }
                Event::Done { finish, stats } => break (finish, stats),
                Event::Error(error) => bail!("{error}"),
            }
        };
        reply.end(text.as_ref())?;
        if self.json {
            println!("{}", report(&prompt, &reply, finish, &stats));
        } else {
            println!();
        }
        drop(handle);
        drop(engine);
        others.finish();
        Ok(())
    }
}

fn report(prompt: &[u32], reply: &Reply, finish: Finish, stats: &RequestStats) -> serde_json::Value {
    let finish = match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Cancelled => "cancelled",
    };
    let rate = |tokens: usize, seconds: f64| if seconds > 0.0 { Some(tokens as f64 / seconds) } else { None };
    json!({
        "prompt_tokens": prompt.len(), "prompt_ids": prompt, "ids": reply.ids, "text": reply.content,
        "reasoning": reply.reasoning, "finish_reason": finish, "seed": stats.seed,
        "cached_tokens": stats.cached_tokens, "queued_s": stats.queued_s,
        "prefill_s": stats.prefill_s, "prefill_tokens_per_s": rate(prompt.len(), stats.prefill_s),
        "decode_s": stats.decode_s, "decode_tokens_per_s": rate(reply.ids.len().saturating_sub(1), stats.decode_s),
        "rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted,
    })
}

/// A reply as it grows; the answer goes to standard output, reasoning to standard error.
struct Reply {
    reader: ReplyReader,
    shown: bool,
    ids: Vec<u32>,
    content: String,
    reasoning: String,
}

impl Reply {
    fn new(parser: Box<dyn ReplyParser>, shown: bool) -> Self {
        let reader = ReplyReader::new(parser, StopStrings::default());
        Self { reader, shown, ids: Vec::new(), content: String::new(), reasoning: String::new() }
    }

    fn take(&mut self, ids: &[u32], text: Option<&TextModel>) -> anyhow::Result<()> {
        self.ids.extend_from_slice(ids);
        let mut pieces = Vec::new();
        match text {
            Some(text) => {
                for id in ids {
                    self.reader.push(text.tokenizer.token_bytes(*id), &mut pieces);
                }
            }
            None if self.shown => {
                let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
                print!("{},", ids.join(","));
                std::io::stdout().flush()?;
            }
            None => {}
        }
        self.show(pieces)
    }

    fn end(&mut self, text: Option<&TextModel>) -> anyhow::Result<()> {
        let mut pieces = Vec::new();
        if text.is_some() {
            self.reader.finish(&mut pieces);
        }
        self.show(pieces)
    }

    fn show(&mut self, pieces: Vec<Piece>) -> anyhow::Result<()> {
        for piece in pieces {
            match piece {
                Piece::Content(text) => {
                    if self.shown {
                        print!("{text}");
                        std::io::stdout().flush()?;
                    }
                    self.content.push_str(&text);
                }
                Piece::Reasoning(text) => {
                    if self.shown {
                        eprint!("{text}");
                    }
                    self.reasoning.push_str(&text);
                }
                Piece::Call(call) => bail!("a call of {} without tools", call.name),
            }
        }
        Ok(())
    }
}

/// Print token ids.
#[derive(Args)]
pub struct Tokenize {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: Prompt,
    /// Chat without a think block.
    #[arg(long)]
    no_thinking: bool,
    /// Print one JSON object with count, ids and the text of each.
    #[arg(long)]
    json: bool,
}

impl Tokenize {
    /// Encodes the prompt.
    pub fn run(self) -> anyhow::Result<()> {
        let folder = self.model.settings(json!({}))?.model_dir()?;
        let text = model::text(&folder)?;
        let ids = self.prompt.encode(Some(&text), !self.no_thinking)?;
        if self.json {
            let texts: Vec<String> = ids
                .iter()
                .map(|id| String::from_utf8_lossy(text.tokenizer.token_bytes(*id)).into_owned())
                .collect();
            println!("{}", json!({"count": ids.len(), "tokens": ids, "texts": texts}));
        } else {
            let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
            println!("{}", ids.join(","));
        }
        Ok(())
    }
}
