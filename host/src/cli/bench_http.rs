//! `plugfold bench http`: the server alone, on the loopback interface, before an engine that is scripted and takes no time.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use plugfold::http::{App, HttpSettings, Server};
use plugfold::scripted::{Gate, Script, ScriptedService, Step};
use plugfold::text::{TextModel, testing};
use plugfold_engine::service::Service as _;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::bench;
use super::compare::machine;

/// Milliseconds that the layer may add to the first text, at the median of the quiet streams.
const FIRST_MS: f64 = 2.0;
/// Milliseconds after which the slot of a client that left must be free.
const FREE_MS: f64 = 500.0;
/// Streams of the measurement of the first text.
const QUIET: usize = 4;
/// Its requests, a stream.
const QUIET_REQUESTS: usize = 250;
/// Disconnects of each phase.
const LEAVES: usize = 40;
/// How long anything may take before the bench gives up.
const PATIENCE: Duration = Duration::from_secs(30);
/// Ends a name in a prompt, from which its reply follows.
const END: char = ';';
/// What a reply repeats, and how often.
const REPEATS: usize = 40;

/// How to measure the server.
#[derive(Args)]
pub struct HttpArgs {
    /// Streams at once under load.
    #[arg(long, default_value_t = 200, value_name = "N")]
    streams: usize,
    /// Seconds of load.
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS")]
    seconds: f64,
    /// Folder with the tokenizer and the chat template; without it, tokens are bytes.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Write all numbers to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl HttpArgs {
    /// Measures and prints; fails when a byte was lost or mixed, or a slot not freed.
    pub fn run(self) -> anyhow::Result<()> {
        ensure!((1..=1000).contains(&self.streams), "--streams {}: give 1 to 1000", self.streams);
        ensure!(
            self.seconds > 0.0 && self.seconds <= 3600.0,
            "--seconds {}: give more than 0 and at most 3600",
            self.seconds
        );
        let runtime =
            tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the threads")?;
        let (first, leaves, load) = runtime.block_on(async {
            let bench = Bench::start(self.streams.max(QUIET), self.model.as_deref()).await?;
            let first = bench.first_text().await.context("the first text")?;
            let leaves = bench.leaves().await.context("clients that leave")?;
            let load =
                bench.load(self.streams, Duration::from_secs_f64(self.seconds)).await.context("load")?;
            anyhow::Ok((first, leaves, load))
        })?;
        let yes = |good: bool| if good { "yes" } else { "NO" };
        println!(
            "first text, {QUIET} streams: {:.3} ms median, {:.3} ms 99th of 100, {} requests; within {FIRST_MS} ms: {}",
            first.median,
            first.high,
            first.count,
            yes(first.median < FIRST_MS)
        );
        for (phase, times) in &leaves {
            println!(
                "slot free after a client left, {phase}: {:.2} ms median, {:.2} ms at most; within {FREE_MS} ms: {}",
                times.median,
                times.most,
                yes(times.most < FREE_MS)
            );
        }
        println!(
            "load, {} streams for {:.1} s: {} replies whole and their own, {} tokens, {:.0} tokens/s, first text {:.1} ms median",
            self.streams,
            load.seconds,
            load.first.count,
            load.tokens,
            load.tokens as f64 / load.seconds,
            load.first.median
        );
        let report = json!({
            "bench": "http", "machine": machine(), "streams": self.streams, "seconds": load.seconds,
            "replies": load.first.count, "tokens": load.tokens, "lost_or_mixed": 0,
            "first_text_under_load_ms": load.first.json(),
            "first_text_ms": first.json(), "first_text_streams": QUIET, "first_text_bound_ms": FIRST_MS,
            "slot_free_ms": leaves.iter().map(|(phase, t)| ((*phase).to_owned(), t.json())).collect::<serde_json::Map<_, _>>(),
            "slot_free_bound_ms": FREE_MS,
        });
        self.json.as_deref().map_or(Ok(()), |path| bench::save(path, &report))
    }
}

/// Milliseconds of many of one thing.
struct Times {
    count: usize,
    median: f64,
    /// The 99th of 100.
    high: f64,
    most: f64,
}

impl Times {
    fn of(mut times: Vec<Duration>) -> anyhow::Result<Self> {
        times.sort_unstable();
        let at = |place: usize| times.get(place.min(times.len() - 1)).map(|t| t.as_secs_f64() * 1e3);
        ensure!(!times.is_empty(), "nothing was measured");
        let (median, high, most) = (at(times.len() / 2), at(times.len() * 99 / 100), at(times.len()));
        let ms = |time: Option<f64>| time.unwrap_or_default();
        Ok(Self { count: times.len(), median: ms(median), high: ms(high), most: ms(most) })
    }

    fn json(&self) -> Value {
        json!({"count": self.count, "median": self.median, "p99": self.high, "most": self.most})
    }
}

/// What load gave.
struct Load {
    first: Times,
    tokens: usize,
    seconds: f64,
}

/// A server in this process, and what its clients need.
struct Bench {
    address: SocketAddr,
    engine: Arc<ScriptedService>,
    /// Scripts that wait, by name.
    waiting: Arc<Mutex<BTreeMap<String, Script>>>,
}

/// The name in a prompt: what stands between `#` and [`END`].
fn name(prompt: &str) -> Option<&str> {
    Some(prompt.rsplit_once('#')?.1.split_once(END)?.0)
}

/// What the reply to a name says.
fn says(name: &str) -> String {
    format!("{name} and ").repeat(REPEATS)
}

impl Bench {
    async fn start(slots: usize, model: Option<&std::path::Path>) -> anyhow::Result<Self> {
        let text = match model {
            Some(folder) => TextModel::load(folder, &[])?,
            None => testing::text_model(include_str!("../../assets/demo-model/chat_template.jinja"))?,
        };
        let text = Arc::new(text);
        let mut info = ScriptedService::info_for_tests(4096, slots);
        info.vocab_size = usize::try_from(u32::MAX)?;
        let waiting = Arc::<Mutex<BTreeMap<String, Script>>>::default();
        let (shared, scripts) = (Arc::clone(&text), Arc::clone(&waiting));
        let engine = Arc::new(ScriptedService::new(info, move |request| {
            let prompt = shared.tokenizer.decode(&request.ids);
            let Some(name) = name(&prompt) else { return Vec::new() };
            if let Some(script) = scripts.lock().unwrap_or_else(PoisonError::into_inner).get(name) {
                return script.clone();
            }
            let mut ids = shared.think_close.into_iter().collect::<Vec<_>>();
            ids.extend(shared.tokenizer.encode_plain(&says(name)).unwrap_or_default());
            ids.into_iter().map(|id| Step::Tokens(vec![id])).collect()
        }));
        let mut settings = HttpSettings::new("scripted");
        settings.limits.connections = settings.limits.connections.max(2 * slots);
        let app = Arc::new(App::new(engine.clone(), text, settings));
        let server = Server::bind("127.0.0.1", 0).await?;
        let address = server.address()?;
        tokio::spawn(async move {
            if let Err(error) = server.run(app, std::future::pending()).await {
                tracing::error!(%error, "the server does not serve");
            }
        });
        Ok(Self { address, engine, waiting })
    }

    /// Asks for a reply that is streamed.
    async fn ask(&self, name: &str) -> anyhow::Result<Response<Incoming>> {
        ask(self.address, name).await
    }

    /// Milliseconds from opening a connection to the first text of the reply, on few streams.
    async fn first_text(&self) -> anyhow::Result<Times> {
        let mut streams = JoinSet::new();
        for stream in 0..QUIET {
            let address = self.address;
            streams.spawn(async move {
                let mut times = Vec::new();
                for round in 0..QUIET_REQUESTS {
                    times.push(whole(address, &format!("{stream}.{round}")).await?.0);
                }
                anyhow::Ok(times)
            });
        }
        Times::of(joined(streams).await?.concat())
    }

    /// Many streams, one reply after another on each, every byte of each looked at.
    async fn load(&self, streams: usize, time: Duration) -> anyhow::Result<Load> {
        let begun = Instant::now();
        let mut running = JoinSet::new();
        for stream in 0..streams {
            let address = self.address;
            running.spawn(async move {
                let (mut times, mut tokens) = (Vec::new(), 0);
                while begun.elapsed() < time || times.is_empty() {
                    let (first, count) = whole(address, &format!("{stream}.{}", times.len())).await?;
                    times.push(first);
                    tokens += count;
                }
                anyhow::Ok((times, tokens))
            });
        }
        let each = joined(running).await?;
        let seconds = begun.elapsed().as_secs_f64();
        let tokens = each.iter().map(|(_, tokens)| tokens).sum();
        let first = Times::of(each.into_iter().flat_map(|(times, _)| times).collect())?;
        Ok(Load { first, tokens, seconds })
    }

    /// Milliseconds until the slot of a client that left is free, by phase. (One that waits for a slot holds none.)
    async fn leaves(&self) -> anyhow::Result<Vec<(&'static str, Times)>> {
        let wait = || Step::Wait(Gate::default());
        let word =
            |text: &str| text.bytes().map(|byte| Step::Tokens(vec![u32::from(byte)])).collect::<Vec<_>>();
        let phases = [
            ("in the prompt", vec![Step::Prefill(1), wait()], false),
            ("at the first token", [word("a"), vec![wait()]].concat(), true),
            ("at the fifth token", [word("words"), vec![wait()]].concat(), true),
            ("before the last token", [word(&"word ".repeat(100)), vec![wait()], word(".")].concat(), true),
        ];
        let mut all = Vec::new();
        for (phase, script, decodes) in phases {
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert("leave".into(), script);
            let mut times = Vec::with_capacity(LEAVES);
            for _ in 0..LEAVES {
                let reply = self.ask("leave").await?;
                self.until(phase, |s| (if decodes { s.decoding } else { s.prefilling }) == 1).await?;
                let left = Instant::now();
                drop(reply);
                self.until("the slot is free", |s| s.decoding + s.prefilling == 0).await?;
                times.push(left.elapsed());
            }
            all.push((phase, Times::of(times)?));
        }
        Ok(all)
    }

    async fn until(
        &self,
        what: &str,
        holds: impl Fn(&plugfold_engine::service::EngineStats) -> bool,
    ) -> anyhow::Result<()> {
        let begun = Instant::now();
        while !holds(&self.engine.stats()) {
            ensure!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}: {:?}", self.engine.stats());
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        Ok(())
    }
}

async fn joined<T: 'static>(mut tasks: JoinSet<anyhow::Result<T>>) -> anyhow::Result<Vec<T>> {
    let mut all = Vec::new();
    while let Some(task) = tasks.join_next().await {
        all.push(task.context("a stream's task")??);
    }
    Ok(all)
}

/// Opens a connection and asks for a streamed reply to a name. Dropping the response closes the connection.
async fn ask(address: SocketAddr, name: &str) -> anyhow::Result<Response<Incoming>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let body = json!({"messages": [{"role": "user", "content": format!("#{name}{END}")}], "stream": true,
                      "max_tokens": 2048, "stream_options": {"include_usage": true}});
    let request = Request::post("/v1/chat/completions")
        .header(header::HOST, "bench")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.to_string())))?;
    let response = sender.send_request(request).await?;
    ensure!(response.status() == StatusCode::OK, "the server answers with {}", response.status());
    Ok(response)
}

/// A whole reply to a name: the time to its first text, and its tokens. Fails when a byte of it is not its own.
async fn whole(address: SocketAddr, name: &str) -> anyhow::Result<(Duration, usize)> {
    let begun = Instant::now();
    let mut body = ask(address, name).await?.into_body();
    let (mut text, mut content, mut first, mut tokens) = (String::new(), String::new(), None, None);
    let mut done = false;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.context("a stream that ends early")?.into_data() else { continue };
        text += std::str::from_utf8(&data)?;
        while let Some(end) = text.find("\n\n") {
            let event: String = text.drain(..end + 2).collect();
            if event.starts_with(':') {
                continue;
            }
            let data = event.trim_end().strip_prefix("data: ");
            let data = data.with_context(|| format!("stream {name}: {event:?} is no event"))?;
            ensure!(!done, "stream {name}: {event:?} after its end");
            if data == "[DONE]" {
                done = true;
                continue;
            }
            let data: Value =
                serde_json::from_str(data).with_context(|| format!("stream {name}: {event:?}"))?;
            if let Some(more) = data["choices"][0]["delta"]["content"].as_str() {
                first.get_or_insert_with(|| begun.elapsed());
                content += more;
            }
            tokens = data["usage"]["completion_tokens"].as_u64().or(tokens);
        }
    }
    if !done || content != says(name) {
        bail!("stream {name}: lost or mixed bytes: {content:?}, ended: {done}");
    }
    Ok((first.context("no text")?, tokens.context("no usage")? as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_in_its_prompt() {
        assert_eq!(name("<|user|>#12.3;<|assistant|>"), Some("12.3"));
        assert_eq!(name("no name"), None);
        assert!(says("1.2").starts_with("1.2 and 1.2 and "));
    }
}
