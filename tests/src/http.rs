//! A server over a scripted engine on a loopback socket, a small HTTP client, and the aftercheck of every case.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use plugfold::http::{App, HttpSettings, Server};
use plugfold::scripted::{Gate, Script, ScriptedService, Step};
use plugfold::text::TextModel;
use plugfold::text::testing::{text_model, tokenizer};
use plugfold::vision::Vision;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{Request, Service as _};
use serde_json::{Value, json};

/// How long a test waits for something that must happen; only a broken server uses it up.
const PATIENCE: Duration = Duration::from_secs(20);
/// What the aftercheck's concurrent stream says.
const STEADY: &str = "a steady stream of words that nothing may disturb";
/// Prompts with these words get the aftercheck's scripts.
const GREEDY_MARK: &str = "#greedy";
const STEADY_MARK: &str = "#steady";

/// Rounds that say a text, one token each; control tokens in it are tokens.
pub fn say(text: &str) -> Script {
    let ids = tokenizer().encode(text).unwrap_or_default();
    ids.into_iter().map(|id| Step::Tokens(vec![id])).collect()
}

/// A round that says a text in one piece.
pub fn burst(text: &str) -> Script {
    vec![Step::Tokens(tokenizer().encode(text).unwrap_or_default())]
}

/// Rounds of single bytes.
pub fn bytes(text: &[u8]) -> Script {
    text.iter().map(|byte| Step::Tokens(vec![u32::from(*byte)])).collect()
}

/// What is said to a prompt.
type Answer = Arc<dyn Fn(&str) -> Script + Send + Sync>;

/// Scripts by a mark in the prompt.
#[derive(Clone, Default)]
pub struct Scripts {
    marked: Arc<Mutex<HashMap<String, Script>>>,
    otherwise: Arc<Mutex<Option<Answer>>>,
}

impl Scripts {
    /// Prompts that contain `mark` get this script.
    pub fn set(&self, mark: &str, script: Script) {
        self.marked.lock().unwrap_or_else(PoisonError::into_inner).insert(mark.to_owned(), script);
    }

    /// Prompts without a mark get what this says to them.
    pub fn otherwise(&self, answer: impl Fn(&str) -> Script + Send + Sync + 'static) {
        *self.otherwise.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(answer));
    }

    fn get(&self, prompt: &str) -> Script {
        let scripts = self.marked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, script)) = scripts.iter().find(|(mark, _)| prompt.contains(mark.as_str())) {
            return script.clone();
        }
        let otherwise = self.otherwise.lock().unwrap_or_else(PoisonError::into_inner).clone();
        otherwise.map_or_else(|| say("fine</think>Hello, world!<|endoftext|>"), |answer| answer(prompt))
    }
}

/// A running server.
pub struct TestServer {
    /// Where it listens.
    pub address: SocketAddr,
    /// What its engine says.
    pub scripts: Scripts,
    /// Its engine.
    pub engine: Arc<ScriptedService>,
    requests: Arc<Mutex<Vec<Request>>>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Settings of most tests.
pub fn settings() -> HttpSettings {
    HttpSettings::new("scripted")
}

impl TestServer {
    /// A server with a context of 4,096 tokens and 4 slots.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start() -> Self {
        Self::with(settings(), 4096, 4)
    }

    /// A server with other settings.
    ///
    /// # Panics
    /// When it does not start.
    #[allow(clippy::expect_used)]
    pub fn with(settings: HttpSettings, context: usize, slots: usize) -> Self {
        let template = include_str!("../fixtures/chat/chat_template.jinja");
        let text = text_model(template).expect("the template fixture parses");
        Self::with_text(settings, context, slots, text)
    }

    /// A server with another tokenizer and template. Scripts still speak in bytes.
    ///
    /// # Panics
    /// When it does not start.
    pub fn with_text(settings: HttpSettings, context: usize, slots: usize, text: TextModel) -> Self {
        Self::build(settings, context, slots, text, None, &Hooks::default())
    }

    /// A server with hooks of plugins.
    ///
    /// # Panics
    /// When it does not start.
    #[allow(clippy::expect_used)]
    pub fn hooked(settings: HttpSettings, hooks: &Hooks) -> Self {
        let template = include_str!("../fixtures/chat/chat_template.jinja");
        let text = text_model(template).expect("the template fixture parses");
        Self::build(settings, 4096, 4, text, None, hooks)
    }

    /// A server whose model can see.
    ///
    /// # Panics
    /// When it does not start.
    #[allow(clippy::expect_used)]
    pub fn seeing(settings: HttpSettings, context: usize, slots: usize, vision: Vision) -> Self {
        let template = include_str!("../fixtures/chat/chat_template.jinja");
        let text = text_model(template).expect("the template fixture parses");
        Self::build(settings, context, slots, text, Some(vision), &Hooks::default())
    }

    /// A server with hooks of plugins, and another tokenizer and template.
    ///
    /// # Panics
    /// When it does not start.
    pub fn with_hooks_and_text(settings: HttpSettings, hooks: &Hooks, text: TextModel) -> Self {
        Self::build(settings, 4096, 4, text, None, hooks)
    }

    #[allow(clippy::expect_used)]
    fn build(
        settings: HttpSettings,
        context: usize,
        slots: usize,
        text: TextModel,
        vision: Option<Vision>,
        hooks: &Hooks,
    ) -> Self {
        let scripts = Scripts::default();
        let (known, decoder) = (scripts.clone(), tokenizer());
        let requests = Arc::<Mutex<Vec<Request>>>::default();
        let seen = requests.clone();
        let engine =
            Arc::new(ScriptedService::new(ScriptedService::info_for_tests(context, slots), move |request| {
                seen.lock().unwrap_or_else(PoisonError::into_inner).push(request.clone());
                known.get(&decoder.decode(&request.ids))
            }));
        let app = App::new(engine.clone(), Arc::new(text), settings).with_vision(vision);
        let app = Arc::new(app.with_hooks(hooks).expect("the hooks take the tokenizer"));
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(2).enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let server = Server::bind("127.0.0.1", 0).await.expect("a free port");
                let _ = tell.send(server.address().expect("its address"));
                let stop = async {
                    let _ = stopped.await;
                };
                server.run(app, stop).await.expect("the address is served");
            });
        });
        let address = told.recv().expect("the server starts");
        Self { address, scripts, engine, requests, stop: Some(stop), thread: Some(thread) }
    }

    /// A new connection.
    ///
    /// # Panics
    /// When it is refused.
    #[allow(clippy::expect_used)]
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
        stream
    }

    /// Sends bytes on a new connection and reads all that comes back until it closes.
    ///
    /// # Panics
    /// When the connection stays open for too long.
    #[allow(clippy::expect_used)]
    pub fn raw(&self, request: &[u8]) -> Vec<u8> {
        let mut stream = self.connect();
        // The server may answer and close before it has read everything.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("the connection does not end: {error}; so far {answer:?}"),
        }
        answer
    }

    /// `GET path`.
    pub fn get(&self, path: &str) -> Reply {
        self.get_with(path, "")
    }

    /// `GET path` with further header lines.
    pub fn get_with(&self, path: &str, headers: &str) -> Reply {
        let request = format!("GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n{headers}\r\n");
        Reply::parse(&self.raw(request.as_bytes()))
    }

    /// `POST path` with a body of bytes.
    pub fn post_bytes(&self, path: &str, body: &[u8]) -> Reply {
        Reply::parse(&self.raw(&post(path, body)))
    }

    /// `POST path` with a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    /// A chat completion of one user message, with further fields.
    pub fn chat(&self, text: &str, more: Value) -> Reply {
        self.post("/v1/chat/completions", &chat(text, more))
    }

    /// The prompts that reached the engine, in the order of their start.
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        self.requests().into_iter().map(|request| request.ids).collect()
    }

    /// The requests that reached the engine, in the order of their start.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// `/health`.
    pub fn health(&self) -> Value {
        self.get("/health").json()
    }

    /// Waits until no slot is held and nothing waits.
    ///
    /// # Panics
    /// When that takes too long.
    pub fn wait_idle(&self) {
        self.wait_for("no slot held", |stats| stats.decoding + stats.prefilling + stats.waiting == 0);
    }

    /// Waits for a state of the engine.
    ///
    /// # Panics
    /// When that takes too long.
    pub fn wait_for(&self, what: &str, holds: impl Fn(&plugfold_engine::service::EngineStats) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(&self.engine.stats()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.engine.stats());
            std::thread::yield_now();
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The bytes of a `POST`.
pub fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let mut request = format!(
        "POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(body);
    request
}

/// The body of a chat completion of one user message.
pub fn chat(text: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": text}]});
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    body
}

/// A reply that was read to its end.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Status code.
    pub status: u16,
    /// Header names in lower case.
    pub headers: HashMap<String, String>,
    /// The body, without chunk framing.
    pub body: Vec<u8>,
}

impl Reply {
    /// Reads one HTTP/1.1 reply.
    ///
    /// # Panics
    /// When it is not one.
    #[allow(clippy::expect_used)]
    pub fn parse(answer: &[u8]) -> Self {
        let end = answer.windows(4).position(|w| w == b"\r\n\r\n");
        let end = end.unwrap_or_else(|| panic!("no reply in {:?}", String::from_utf8_lossy(answer)));
        let head = std::str::from_utf8(&answer[..end]).expect("a readable head");
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|s| s.parse().ok());
        let headers: HashMap<String, String> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let rest = &answer[end + 4..];
        let body = if headers.get("transfer-encoding").is_some_and(|t| t == "chunked") {
            dechunk(rest)
        } else {
            rest.to_vec()
        };
        Self { status: status.expect("a status"), headers, body }
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.text()))
    }

    /// The events of a stream of a dialect that names them; each must be named as its `type` says.
    ///
    /// # Panics
    /// When the stream is not well formed.
    pub fn named_events(&self) -> Vec<Value> {
        let text = std::str::from_utf8(&self.body).unwrap_or_else(|e| panic!("{e}"));
        assert!(text.ends_with("\n\n"), "a broken end: {text:?}");
        let event = |event: &str| {
            let (name, data) = event.split_once('\n').unwrap_or_else(|| panic!("not two lines: {event:?}"));
            let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("no data: {event:?}"));
            let data: Value = serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}"));
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{event:?}");
            data
        };
        text.split_terminator("\n\n").filter(|e| !e.starts_with(':')).map(event).collect()
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The events of a stream, which must end in `[DONE]`.
    ///
    /// # Panics
    /// When the stream is not well formed.
    pub fn events(&self) -> Vec<Value> {
        let text = std::str::from_utf8(&self.body).unwrap_or_else(|e| panic!("{e}"));
        let mut events = Vec::new();
        let mut done = false;
        for event in text.split_terminator("\n\n") {
            if event.starts_with(':') {
                continue;
            }
            assert!(!done, "something after [DONE]: {event}");
            let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("not an event: {event:?}"));
            assert!(!data.contains('\n'), "an event of two lines: {data:?}");
            if data == "[DONE]" {
                done = true;
            } else {
                events.push(serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}")));
            }
        }
        assert!(done, "no [DONE] in {text:?}");
        events
    }
}

fn dechunk(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|w| w == b"\r\n") {
        let size =
            std::str::from_utf8(&rest[..end]).ok().and_then(|s| usize::from_str_radix(s.trim(), 16).ok());
        let Some(size) = size.filter(|size| *size > 0) else { break };
        let from = end + 2;
        let Some(chunk) = rest.get(from..from + size) else { break };
        body.extend_from_slice(chunk);
        rest = rest.get(from + size + 2..).unwrap_or_default();
    }
    body
}

/// A chat reply put together, streamed or not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// The visible answer.
    pub content: String,
    /// The reasoning.
    pub reasoning: String,
    /// Names and arguments of calls.
    pub calls: Vec<(String, String)>,
    /// Why it ended.
    pub finish: String,
    /// `completion_tokens`.
    pub tokens: u64,
}

impl Said {
    /// Reads a chat reply. Streams need `include_usage` for the token count.
    ///
    /// # Panics
    /// When the reply breaks the contract.
    pub fn read(reply: &Reply) -> Self {
        assert_eq!(reply.status, 200, "{}", reply.text());
        let mut said = Self::default();
        if reply.headers["content-type"] != "text/event-stream" {
            let body = reply.json();
            let choice = &body["choices"][0];
            said.add(&choice["message"]);
            choice["finish_reason"].as_str().unwrap_or_default().clone_into(&mut said.finish);
            said.tokens = body["usage"]["completion_tokens"].as_u64().unwrap_or_default();
            return said;
        }
        let events = reply.events();
        assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant"}));
        for (at, event) in events.iter().enumerate() {
            let choices = event["choices"].as_array().map(Vec::as_slice).unwrap_or_default();
            let [choice] = choices else { panic!("not one choice: {event}") };
            said.add(&choice["delta"]);
            let last = at + 1 == events.len();
            assert_eq!(choice["finish_reason"].is_string(), last, "{event}");
            assert_eq!(event["id"], events[0]["id"]);
            if last {
                assert_eq!(choice["delta"], json!({}));
                choice["finish_reason"].as_str().unwrap_or_default().clone_into(&mut said.finish);
                said.tokens = event["usage"]["completion_tokens"].as_u64().unwrap_or_default();
            }
        }
        said
    }

    fn add(&mut self, part: &Value) {
        self.content += part["content"].as_str().unwrap_or_default();
        self.reasoning += part["reasoning"].as_str().unwrap_or_default();
        assert_eq!(part["reasoning"], part["reasoning_content"]);
        for call in part["tool_calls"].as_array().into_iter().flatten() {
            let id = call["id"].as_str().unwrap_or_default();
            assert!(id.len() == 29 && id.starts_with("call_"), "{call}");
            if let Some(index) = call.get("index") {
                assert_eq!(index.as_u64(), Some(self.calls.len() as u64));
            }
            let text = |name: &str| call["function"][name].as_str().unwrap_or_default().to_owned();
            self.calls.push((text("name"), text("arguments")));
        }
    }
}

/// What must hold after every case: the server is healthy, a greedy request gives the same bytes as before, no slot is
/// held, and a good stream that ran all the time is undisturbed.
pub struct Aftercheck<'a> {
    server: &'a TestServer,
    greedy: String,
    gate: Gate,
    steady: std::thread::JoinHandle<Vec<u8>>,
}

impl<'a> Aftercheck<'a> {
    /// Before the case. The good stream takes a slot until [`Self::finish`].
    pub fn begin(server: &'a TestServer) -> Self {
        server.scripts.set(GREEDY_MARK, say("</think>always the same<|endoftext|>"));
        let gate = Gate::default();
        let mut script = say("</think>");
        for (at, step) in say(STEADY).into_iter().enumerate() {
            if at == STEADY.len() / 2 {
                script.push(Step::Wait(gate.clone()));
            }
            script.push(step);
        }
        script.extend(say("<|endoftext|>"));
        server.scripts.set(STEADY_MARK, script);
        let greedy = Self::greedy(server);
        let body = chat(STEADY_MARK, json!({"stream": true})).to_string();
        let mut stream = server.connect();
        let _ = stream.write_all(&post("/v1/chat/completions", body.as_bytes()));
        server.wait_for("the good stream runs", |stats| stats.decoding > 0);
        let steady = std::thread::spawn(move || {
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer
        });
        Self { server, greedy, gate, steady }
    }

    fn greedy(server: &TestServer) -> String {
        let reply = server.chat(GREEDY_MARK, json!({"temperature": 0}));
        let body = reply.json();
        assert_eq!(reply.status, 200);
        format!("{}{}", body["choices"], body["tensorfold"]["sha256"])
    }

    /// After the case.
    ///
    /// # Panics
    /// When something does not hold.
    #[allow(clippy::expect_used)]
    pub fn finish(self) {
        assert_eq!(self.server.get("/health").status, 200);
        assert_eq!(Self::greedy(self.server), self.greedy);
        self.gate.open();
        let steady = self.steady.join().expect("the good stream is read");
        assert_eq!(Said::read(&Reply::parse(&steady)).content, STEADY);
        self.server.wait_idle();
    }
}
