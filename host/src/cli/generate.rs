//! `plugfold generate` and `plugfold tokenize`.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use plugfold::http::completions;
use plugfold::http::pump::Update;
use plugfold::http::request::{self, Kind, NotReady};
use plugfold::http::{App, HttpSettings};
use plugfold::reply::Piece;
use plugfold::text::{ChatRequest, TextModel};
use plugfold_engine::engine::Engine;
use plugfold_engine::service::{Event, Finish, Handle, Request, RequestStats, Sampling, Service as _};
use serde_json::{Map, Value, json};
use tokio::sync::Notify;
use tracing::Span;

use super::progress::Prefilling;
use super::setup::Setup;
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
fn text_of(folder: &Path) -> anyhow::Result<Option<TextModel>> {
    folder.join("tokenizer.json").exists().then(|| model::text(folder)).transpose()
}

impl Generate {
    /// Runs the prompt.
    pub fn run(self) -> anyhow::Result<()> {
        let setup = self.model.setup(json!({"slots": 1}))?;
        let folder = setup.settings().model_dir()?;
        // A prompt that cannot be read is found before the model is loaded.
        let text = text_of(&folder)?;
        self.prompt.encode(text.as_ref(), !self.no_thinking)?;
        let (engine, others) = model::engine(&setup)?;
        let mut reply = Reply { shown: !self.json, ..Reply::default() };
        let ran = match text {
            Some(text) => self.through_the_server(&setup, &folder, text, &engine, &others, &mut reply),
            None => self.of_ids(&engine, &mut reply),
        };
        let (prompt, finish, stats) = ran?;
        if self.json {
            println!("{}", report(&prompt, &reply, finish, &stats));
        } else {
            println!();
        }
        drop(engine);
        others.finish();
        Ok(())
    }

    /// The way of a request that came over HTTP: all links of plugins, the settings in force, the same reader of replies.
    fn through_the_server(
        &self,
        setup: &Setup,
        folder: &Path,
        mut text: TextModel,
        engine: &Arc<Engine>,
        others: &model::Others,
        reply: &mut Reply,
    ) -> anyhow::Result<(Vec<u32>, Finish, RequestStats)> {
        text.add_stop_ids(&engine.info().eos_ids);
        let knobs = Arc::new(others.table(&setup.resolved));
        // A budget that nobody asks for is cut to what is left of the context.
        let http =
            HttpSettings { knobs, max_tokens: self.max_tokens.max(1), ..setup.settings().http(folder) };
        let app = App::new(engine.clone(), Arc::new(text), http).with_hooks(others.hooks())?;
        let app = Arc::new(app);
        let (kind, body) = self.body()?;
        let job = request::read(&app, kind, body).map_err(|stop| match stop {
            NotReady::Refused(error) => anyhow!("{}", error.message),
            NotReady::Images(_) => anyhow!("nothing is fetched here: give images as data: URLs"),
        })?;
        let prompt = job.request.ids.clone();
        let bar = Prefilling::start(prompt.len());
        let submit = |request: Request| Ok(watched(engine.submit(request)?, bar));
        let updates = completions::run(&app, job, Arc::<Notify>::default(), Span::none(), submit);
        let mut updates = updates.map_err(|error| anyhow!("{}", error.message))?;
        loop {
            match updates.wait().context("the engine dropped the request")? {
                Update::Part(part) => reply.show(part.pieces)?,
                Update::End(ending) => {
                    reply.ids = ending.ids;
                    return Ok((prompt, ending.finish, ending.stats));
                }
                Update::Failed(error) => bail!("{error}"),
            }
        }
    }

    /// The request in the words of a client.
    fn body(&self) -> anyhow::Result<(Kind, Map<String, Value>)> {
        let (kind, prompt) = match &self.prompt {
            Prompt { ids: Some(list), .. } => (Kind::Text, json!({"prompt": ids(list)?})),
            Prompt { prompt: Some(text), .. } => (Kind::Text, json!({"prompt": text})),
            Prompt { chat, .. } => (Kind::Chat, json!({"messages": [{"role": "user", "content": chat}]})),
        };
        let mut body = json!({
            "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed,
            "ignore_eos": self.ignore_eos, "stream": true,
        });
        if kind == Kind::Chat && self.no_thinking {
            body["chat_template_kwargs"] = json!({"enable_thinking": false});
        }
        let mut whole = Map::new();
        for part in [prompt, body] {
            if let Value::Object(part) = part {
                whole.extend(part);
            }
        }
        Ok((kind, whole))
    }

    /// A model without a tokenizer takes and gives ids.
    fn of_ids(
        &self,
        engine: &Arc<Engine>,
        reply: &mut Reply,
    ) -> anyhow::Result<(Vec<u32>, Finish, RequestStats)> {
        let prompt = self.prompt.encode(None, false)?;
        let info = engine.info();
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
            stop_ids: if self.ignore_eos { Vec::new() } else { info.eos_ids.clone() },
            ..Request::default()
        };
        let handle = watched(engine.submit(request)?, Prefilling::start(prompt.len()));
        loop {
            match handle.events.recv().context("the engine dropped the request")? {
                Event::Prefill { .. } | Event::Logprobs(_) => {}
                Event::Tokens(ids) => reply.take(&ids)?,
                Event::Done { finish, stats } => return Ok((prompt, finish, stats)),
                Event::Error(error) => bail!("{error}"),
            }
        }
    }
}

/// A request whose prefill a bar follows.
fn watched(handle: Handle, bar: Prefilling) -> Handle {
    let (sender, events) = channel();
    let watched = Handle { events, cancel: handle.cancel.clone(), satisfied: handle.satisfied.clone() };
    std::thread::spawn(move || {
        for event in &handle.events {
            match &event {
                Event::Prefill { done, .. } => bar.at(*done),
                _ => bar.done(),
            }
            if sender.send(event).is_err() {
                break;
            }
        }
    });
    watched
}

fn report(prompt: &[u32], reply: &Reply, finish: Finish, stats: &RequestStats) -> Value {
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
#[derive(Default)]
struct Reply {
    shown: bool,
    ids: Vec<u32>,
    content: String,
    reasoning: String,
}

impl Reply {
    /// Ids of a model without text.
    fn take(&mut self, ids: &[u32]) -> anyhow::Result<()> {
        self.ids.extend_from_slice(ids);
        if self.shown {
            let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
            print!("{},", ids.join(","));
            std::io::stdout().flush()?;
        }
        Ok(())
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
