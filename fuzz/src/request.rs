//! A request body in any dialect: it becomes a sound job, or a refusal that a client can read.

use std::sync::{Arc, OnceLock};

use plugfold::http::body::object;
use plugfold::http::completions::translate;
use plugfold::http::dialect::Dialect;
use plugfold::http::request::{Kind, NotReady, read};
use plugfold::http::{App, HttpSettings};
use plugfold::scripted::ScriptedService;
use plugfold::text::testing::text_model;
use plugfold_tests::catalogue::resolve;

/// Prompt and reply of the model behind the requests.
const CONTEXT: usize = 2048;

/// What mutations put in.
pub static WORDS: [&str; 40] = [
    "{}",
    "[]",
    "null",
    "true",
    "-1",
    "0.5",
    "1e9",
    "\"\"",
    ",",
    ":",
    "\"messages\":",
    "\"role\":",
    "\"user\"",
    "\"system\"",
    "\"assistant\"",
    "\"tool\"",
    "\"content\":",
    "\"type\":",
    "\"text\"",
    "\"image_url\"",
    "\"tools\":",
    "\"function\":",
    "\"parameters\":",
    "\"tool_choice\":",
    "\"required\"",
    "\"stop\":",
    "\"max_tokens\":",
    "\"temperature\":",
    "\"seed\":",
    "\"logprobs\":",
    "\"reasoning_effort\":",
    "\"thinking\":",
    "\"chat_template_kwargs\":",
    "\"tf_knobs\":",
    "\"input\":",
    "\"tool_result\"",
    "\"prompt\":",
    "<|user|>",
    "</think>",
    "\\u0000",
];

fn app() -> &'static App {
    static APP: OnceLock<App> = OnceLock::new();
    APP.get_or_init(|| {
        let template = include_str!("../../tests/fixtures/chat/chat_template.jinja");
        let text = text_model(template).unwrap_or_else(|e| panic!("{e}"));
        let service = ScriptedService::new(ScriptedService::info_for_tests(CONTEXT, 1), |_| Vec::new());
        let knobs = resolve(&["0003", "0020", "0090"], "", &[], &[]).unwrap_or_else(|e| panic!("{e}"));
        let settings = HttpSettings { knobs: Arc::new(knobs.table()), ..HttpSettings::new("fuzz") };
        App::new(Arc::new(service), Arc::new(text), settings)
    })
}

/// The first byte chooses the dialect (`t`, `m`, `r` or `c`), the rest is the body.
///
/// `true`: a job came of it.
///
/// # Panics
/// When an invariant does not hold.
pub fn run(data: &[u8]) -> bool {
    let Some((first, body)) = data.split_first() else { return false };
    let dialect =
        [Dialect::Text, Dialect::Messages, Dialect::Responses, Dialect::Chat][usize::from(first % 4)];
    let kind = if dialect == Dialect::Text { Kind::Text } else { Kind::Chat };
    let app = app();
    let job = object(body, &app.settings.limits)
        .and_then(|body| translate(dialect, body))
        .map_err(NotReady::Refused)
        .and_then(|translated| read(app, kind, translated.body));
    match job {
        Ok(job) => {
            let (request, info) = (&job.request, app.service.info());
            assert!(!request.ids.is_empty() && request.max_tokens > 0);
            assert!(request.ids.iter().all(|id| (*id as usize) < info.vocab_size));
            assert!(request.ids.len() + request.max_tokens <= info.context);
            assert!(request.sampling.temperature.is_finite() && request.sampling.top_p.is_finite());
            assert!(job.tools.iter().all(|tool| !tool.name.is_empty()));
            assert_eq!(
                request.knobs.as_ref().map_or(0, |knobs| knobs.len()),
                app.settings.knobs.knobs().len()
            );
            true
        }
        Err(NotReady::Images(_)) => panic!("a model that cannot see has images fetched"),
        Err(NotReady::Refused(error)) => {
            assert!(error.status.is_client_error(), "{error:?}");
            let told = error.body()["error"]["message"].as_str().map_or(0, |message| message.chars().count());
            assert!((1..=2000).contains(&told), "{error:?}");
            assert!(error.anthropic()["error"]["message"].is_string());
            false
        }
    }
}
