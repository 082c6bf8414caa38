//! The route table: one list from which requests are routed and the routes are documented.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, header};
use axum::response::{IntoResponse as _, Response};
use tokio::sync::Notify;

use super::app::App;
use super::body::Incoming;
use super::dialect::Dialect;
use super::doc::{self, Answer, Body, bodies};
use super::error::not_found;
use super::{completions, info, loaded, page};

/// Which paths a route takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paths {
    /// These, exactly.
    Exact(&'static [&'static str]),
    /// Every path with this end; the second is the usual one.
    EndingIn(&'static str, &'static [&'static str]),
    /// One more part after this beginning; as it is shown, and the name of the part.
    Under(&'static str, &'static [&'static str], &'static str),
}

impl Paths {
    /// The paths as they are documented, the usual one first.
    pub fn shown(&self) -> &'static [&'static str] {
        match self {
            Self::Exact(paths) | Self::EndingIn(_, paths) | Self::Under(_, paths, _) => paths,
        }
    }

    fn take(&self, path: &str) -> bool {
        match self {
            Self::Exact(paths) => paths.contains(&path),
            Self::EndingIn(end, _) => path.ends_with(end),
            Self::Under(start, ..) => path.strip_prefix(start).is_some_and(|rest| !rest.is_empty()),
        }
    }
}

type Reply = Pin<Box<dyn Future<Output = Response> + Send>>;

/// One line of the table.
pub struct Route {
    /// `GET` or `POST`. `HEAD` goes where `GET` does.
    pub method: Method,
    /// Its paths.
    pub paths: Paths,
    /// What it is for, in a few words.
    pub purpose: &'static str,
    /// What a reader should know besides.
    pub detail: &'static str,
    /// What it takes.
    pub body: Option<&'static Body>,
    /// What it answers with when all is well.
    pub answers: &'static [Answer],
    /// Needs no API key.
    pub open: bool,
    handler: fn(Arc<App>, Incoming) -> Reply,
}

const fn json(what: &'static str) -> Answer {
    Answer { kind: "application/json", what }
}

const fn events(what: &'static str) -> Answer {
    Answer { kind: "text/event-stream", what }
}

/// All routes; the first that fits takes a request, anything else is the plain 404.
pub static ROUTES: [Route; 15] = [
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/"]),
        purpose: "a page to try the model in a browser",
        detail: "One page without anything from elsewhere: a conversation with its reasoning and calls, two settings \
                 side by side, the loaded plugins, and live gauges.",
        body: None,
        answers: &[Answer { kind: "text/html", what: "the page." }],
        open: false,
        handler: |_, _| Box::pin(async { page::page() }),
    },
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/v1/models", "/models"]),
        purpose: "the served model and its context size",
        detail: "The served name comes first, then its aliases.",
        body: None,
        answers: &[json("`data`: a list of models with `id`, `max_model_len` and `context_length`.")],
        open: false,
        handler: |app, _| Box::pin(async move { info::models(&app) }),
    },
    Route {
        method: Method::GET,
        paths: Paths::Under("/v1/models/", &["/v1/models/{model}"], "model"),
        purpose: "one name of the model",
        detail: "404 for names that `/v1/models` does not list.",
        body: None,
        answers: &[json("the entry of `/v1/models`.")],
        open: false,
        handler: |app, incoming| {
            Box::pin(async move {
                let name = incoming.path.trim_end_matches('/').trim_start_matches("/v1/models/");
                info::one_model(&app, name)
            })
        },
    },
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/health", "/v1/health"]),
        purpose: "liveness, health mode, live totals",
        detail: "Always 200 with `health = \"basic\"`; with `\"strict\"` 503 once the engine has failed or a request stalls.",
        body: None,
        answers: &[json("`ok`, `mode`, totals of requests and tokens, `streams`, what stalls.")],
        open: true,
        handler: |app, _| Box::pin(async move { info::health(&app) }),
    },
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/metrics"]),
        purpose: "Prometheus text",
        detail: "Families `tensorfold_*` with the label `model`, and vLLM's `vllm:*` with `model_name`. What this server \
                 does not do has no family.",
        body: None,
        answers: &[Answer { kind: "text/plain", what: "Prometheus text, version 0.0.4." }],
        open: false,
        handler: |app, _| Box::pin(async move { info::metrics(&app) }),
    },
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/plugins"]),
        purpose: "the loaded plugins and their knobs",
        detail: "In the order of the profile. Knobs with a `request_key` can be set by a request, under that name in \
                 `tf_knobs`; `request_default` is what it has otherwise.",
        body: None,
        answers: &[json(
            "`data`: a list of plugins with `id`, `name`, `version`, `title`, `class` and `knobs`, each with its `value` and \
             where that comes `from`.",
        )],
        open: false,
        handler: |app, _| Box::pin(async move { loaded::plugins(&app) }),
    },
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/openapi.json"]),
        purpose: "this API for programs",
        detail: "An OpenAPI 3.1 document.",
        body: None,
        answers: &[json("the document.")],
        open: false,
        handler: |_, _| {
            Box::pin(async { super::error::json_response(axum::http::StatusCode::OK, &doc::openapi()) })
        },
    },
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/docs"]),
        purpose: "this page",
        detail: "What `docs/API.md` says, as HTML.",
        body: None,
        answers: &[Answer { kind: "text/html", what: "the page." }],
        open: false,
        handler: |_, _| Box::pin(async { page::html(doc::html()) }),
    },
    Route {
        method: Method::POST,
        paths: Paths::EndingIn("/chat/completions", &["/v1/chat/completions"]),
        purpose: "chat",
        detail: "Any path with this end. Reasoning comes in `reasoning` and `reasoning_content` (setting `reasoning_fields`), \
                 calls in `tool_calls`. Images in a message's parts are PNG, JPEG, WebP or GIF, in `data:` URLs or at public \
                 `https` addresses (settings `fetch…`, `prep_…`).",
        body: Some(&bodies::CHAT),
        answers: &[
            json("a `chat.completion` with one choice, `usage`, and measurements under `tensorfold`."),
            events("`chat.completion.chunk` events, then `[DONE]`."),
        ],
        open: false,
        handler: |app, incoming| Box::pin(completions::serve(app, incoming, Dialect::Chat)),
    },
    Route {
        method: Method::POST,
        paths: Paths::EndingIn("/completions", &["/v1/completions"]),
        purpose: "raw text or token-id prompt",
        detail: "Any path with this end. No chat template, no reasoning split, no tools.",
        body: Some(&bodies::TEXT),
        answers: &[
            json("a `text_completion` with one choice, `usage`, and measurements under `tensorfold`."),
            events("`text_completion` events, then `[DONE]`."),
        ],
        open: false,
        handler: |app, incoming| Box::pin(completions::serve(app, incoming, Dialect::Text)),
    },
    Route {
        method: Method::POST,
        paths: Paths::Exact(&["/v1/responses", "/responses"]),
        purpose: "the Responses API, stateless",
        detail: "Nothing is stored: send the whole history, reasoning items included. `previous_response_id`, `conversation` \
                 and `background` are refused. Tools of other types than `function`, and items of such tools, are left out \
                 and named in the header `x-plugfold-skipped-tools`.",
        body: Some(&bodies::RESPONSES),
        answers: &[
            json("a `response` with its `output` items and `usage`."),
            events(
                "`response.created`, the events of every item, then `response.completed`, `response.incomplete` or \
                 `response.failed`.",
            ),
        ],
        open: false,
        handler: |app, incoming| Box::pin(completions::serve(app, incoming, Dialect::Responses)),
    },
    Route {
        method: Method::POST,
        paths: Paths::Exact(&["/v1/messages", "/messages"]),
        purpose: "Anthropic's Messages API",
        detail: "Thinking is off unless `thinking` turns it on. A first line of the system text that begins with \
                 `x-anthropic-billing-header:` is left out, since it changes between requests. Tools that run on another \
                 server are left out and named in the header `x-plugfold-skipped-tools`.",
        body: Some(&bodies::MESSAGES),
        answers: &[
            json("a `message` with blocks of thinking, text and tool use, and `usage`."),
            events(
                "`message_start`, the events of every block, `message_delta`, `message_stop`; `ping` now and then.",
            ),
        ],
        open: false,
        handler: |app, incoming| Box::pin(completions::serve(app, incoming, Dialect::Messages)),
    },
    Route {
        method: Method::POST,
        paths: Paths::Exact(&["/v1/messages/count_tokens", "/messages/count_tokens"]),
        purpose: "prompt tokens of a Messages request",
        detail: "Without running the model.",
        body: Some(&bodies::COUNT_TOKENS),
        answers: &[json("`input_tokens`.")],
        open: false,
        handler: |app, incoming| Box::pin(completions::count_tokens(app, incoming)),
    },
    Route {
        method: Method::POST,
        paths: Paths::Exact(&["/tokenize", "/v1/tokenize"]),
        purpose: "count and list prompt tokens without running the model",
        detail: "A `prompt`, or `messages` as a chat completion renders them; answers while the engine is busy.",
        body: Some(&bodies::TOKENIZE),
        answers: &[json("`count`, `max_model_len`, `tokens`, `token_strs` (null).")],
        open: false,
        handler: |app, incoming| Box::pin(info::tokenize(app, incoming)),
    },
    Route {
        method: Method::POST,
        paths: Paths::Exact(&["/detokenize", "/v1/detokenize"]),
        purpose: "the text of token ids",
        detail: "Special tokens have no text.",
        body: Some(&bodies::DETOKENIZE),
        answers: &[json("`prompt`: the text.")],
        open: false,
        handler: |app, incoming| Box::pin(info::detokenize(app, incoming)),
    },
];

/// The route that takes a method and path. A trailing `/` is ignored.
pub fn find(method: &Method, path: &str) -> Option<&'static Route> {
    let path = if path == "/" { path } else { path.strip_suffix('/').unwrap_or(path) };
    let method = if method == Method::HEAD { &Method::GET } else { method };
    ROUTES.iter().find(|route| route.method == *method && route.paths.take(path))
}

/// The router over the table.
pub fn router(app: Arc<App>) -> Router {
    Router::new().fallback(dispatch).with_state(app)
}

async fn dispatch(State(app): State<Arc<App>>, request: Request) -> Response {
    // Where lengths and chunking could be read in two ways, nothing after the first request is served.
    let chunked = request.headers().contains_key(header::TRANSFER_ENCODING);
    let mut response = answer(app, request).await;
    if chunked {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

async fn answer(app: Arc<App>, request: Request) -> Response {
    let Some(route) = find(request.method(), request.uri().path()) else {
        // What is not there is no secret, but a scan must not learn more than that a key is wanted.
        return match app.settings.keys.check(request.headers()) {
            Ok(()) => not_found(),
            Err(error) => error.into_response(),
        };
    };
    if !route.open
        && let Err(error) = app.settings.keys.check(request.headers())
    {
        let messages = route.paths.shown()[0].starts_with("/v1/messages");
        let mut response = if messages { Dialect::Messages } else { Dialect::Chat }.refuse(&error);
        if route.method == Method::GET {
            // Browsers ask for a password and send it with everything that a page asks for.
            let basic = HeaderValue::from_static("Basic realm=\"plugfold\"");
            response.headers_mut().append(header::WWW_AUTHENTICATE, basic);
        }
        return response;
    }
    let (parts, body) = request.into_parts();
    let connection = parts.extensions.get::<Arc<Notify>>().cloned().unwrap_or_default();
    let path = parts.uri.path().to_owned();
    (route.handler)(app, Incoming { path, headers: parts.headers, body, connection }).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_routes() {
        let purpose = |method: Method, path: &str| find(&method, path).map(|route| route.purpose);
        assert_eq!(purpose(Method::POST, "/v1/chat/completions/"), Some("chat"));
        assert_eq!(purpose(Method::POST, "/any/where/chat/completions"), Some("chat"));
        assert_eq!(purpose(Method::POST, "/openai/completions"), Some("raw text or token-id prompt"));
        assert_eq!(purpose(Method::GET, "/models/"), Some("the served model and its context size"));
        assert_eq!(purpose(Method::GET, "/v1/models/a/b"), Some("one name of the model"));
        assert_eq!(purpose(Method::HEAD, "/"), Some("a page to try the model in a browser"));
        for (method, path) in [
            (Method::GET, "/v1/chat/completions"),
            (Method::POST, "/v1/models"),
            (Method::POST, "/"),
            (Method::POST, "/completions.txt"),
            (Method::POST, "/health"),
            (Method::GET, "/v2/models"),
            (Method::GET, "/v1/messages"),
        ] {
            assert!(find(&method, path).is_none(), "{method} {path}");
        }
    }

    #[test]
    fn every_documented_path_reaches_its_own_route() {
        for route in &ROUTES {
            for path in route.paths.shown() {
                assert_eq!(find(&route.method, path).map(|r| r.purpose), Some(route.purpose), "{path}");
            }
        }
    }

    #[test]
    fn health_alone_needs_no_key() {
        let open: Vec<&str> = ROUTES.iter().filter(|r| r.open).map(|r| r.paths.shown()[0]).collect();
        assert_eq!(open, ["/health"]);
    }
}
