//! The demo model behind the HTTP server in this process, on one rank or several.
#![allow(dead_code)] // each test file uses its part

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use plugfold::http::HttpSettings;
use plugfold::http::app::App;
use plugfold::http::server::Server;
use plugfold::text::TextModel;
use plugfold_0610_structured_output::{Settings, Structured};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::Service as _;
use plugfold_tests::drafting::Drafting;
use plugfold_tests::http::{Reply, post};
use plugfold_tests::model::{engine, options};
use serde_json::{Value, json};

use crate::support::{demo, patient, tokens};

/// How a server is set up.
#[derive(Clone)]
pub struct How {
    pub ranks: usize,
    pub slots: usize,
    pub drafts: bool,
    /// The feature's settings; off without any.
    pub grammar: Option<Settings>,
    /// The rank on which a planted fault is.
    pub culprit: usize,
}

impl Default for How {
    fn default() -> Self {
        Self { ranks: 1, slots: 4, drafts: true, grammar: Some(patient()), culprit: 0 }
    }
}

/// A server; ends when it is dropped.
pub struct Live {
    pub address: SocketAddr,
    pub engine: Arc<Engine>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn hooks(how: &How, rank: usize) -> Hooks {
    let drafting = Drafting { sizes: (how.slots as u32, 8), ..Drafting::default() };
    let mut hooks = if how.drafts { drafting.hooks().unwrap() } else { Hooks::default() };
    if let Some(mut settings) = how.grammar {
        settings.fails_at = settings.fails_at.filter(|_| rank == how.culprit);
        let feature = Structured::new(settings, None);
        feature.serve(Ok(tokens()));
        for offer in feature.offers() {
            hooks.add("0610", &[], offer).unwrap_or_else(|e| panic!("{e}"));
        }
    }
    hooks
}

impl Live {
    pub fn start(how: &How) -> Self {
        let of = |rank| CoreOptions { hooks: Arc::new(hooks(how, rank)), ..CoreOptions::default() };
        let lead = hooks(how, 0);
        // The HTTP side and the engine of rank 0 are one plugin.
        let engine = Arc::new(engine(&options(&demo(), how.slots, 64), how.ranks, |rank| {
            if rank == 0 {
                CoreOptions { hooks: Arc::new(lead.clone()), ..CoreOptions::default() }
            } else {
                of(rank)
            }
        }));
        let text = TextModel::load(&demo(), &engine.info().eos_ids).unwrap();
        let app = App::new(engine.clone(), Arc::new(text), HttpSettings::new("demo"));
        let app = Arc::new(app.with_hooks(&lead).unwrap_or_else(|e| panic!("{e}")));
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let server = Server::bind("127.0.0.1", 0).await.unwrap();
                let _ = tell.send(server.address().unwrap());
                server
                    .run(app, async {
                        let _ = stopped.await;
                    })
                    .await
                    .unwrap();
            });
        });
        Self { address: told.recv().unwrap(), engine, stop: Some(stop), thread: Some(thread) }
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.write_all(&post(path, body.to_string().as_bytes())).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        Reply::parse(&answer)
    }

    /// The choice of a chat, with its ids, and the block of its statistics.
    pub fn chat(&self, text: &str, more: &Value) -> (Value, Value) {
        let reply = self.post("/v1/chat/completions", &body(text, more));
        assert_eq!(reply.status, 200, "{more}: {}", reply.text());
        let reply = reply.json();
        let (mut choice, block) = (reply["choices"][0].clone(), reply["tensorfold"].clone());
        choice["token_ids"] = block["token_ids"].clone();
        (choice, block)
    }
}

/// A chat request of one message.
pub fn body(text: &str, more: &Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": text}], "max_tokens": 64, "return_token_ids": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
