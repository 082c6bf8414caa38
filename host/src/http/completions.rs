//! Completions in every dialect: prepare, submit, reply.

use std::convert::Infallible;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use plugfold_engine::hooks::HookError;
use plugfold_engine::service::{EngineError, Handle, Request};
use serde_json::{Map, Value, json};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};
use tracing::Span;

use super::app::App;
use super::body::{Incoming, object};
use super::dialect::{Dialect, Translated, name_skipped};
use super::error::{ApiError, json_response};
use super::limits::seconds;
use super::pump::{Part, Pump, Update, Updates};
use super::request::{self, Job, Kind, NotReady};
use super::shape::messages::Message;
use super::shape::openai::Completion;
use super::shape::{self, Shape};
use super::{messages, responses};
use crate::chains::ReplyLinks;
use crate::reply::stop::StopStrings;
use crate::reply::tools::ToolSpec;
use crate::reply::{ChatParser, PieceLinks, ReplyParser, ReplyReader, Verbatim};
use crate::traces;
use crate::vision::fetch::{FetchProblem, Fetched};

/// A request whose reply has begun.
struct Started {
    shape: Box<dyn Shape>,
    updates: Updates,
    stream: bool,
    skipped: Vec<String>,
}

/// Serves a completion.
pub async fn serve(app: Arc<App>, incoming: Incoming, dialect: Dialect) -> Response {
    let span = traces::request(&incoming.path, &incoming.headers);
    let started = match start(&app, incoming, dialect, &span).await {
        Ok(started) => started,
        Err(error) => {
            traces::failed(&span, &error.message);
            app.rejected.fetch_add(1, Ordering::Relaxed);
            return dialect.refuse(&error);
        }
    };
    let Started { shape, updates, stream, skipped } = started;
    let mut response = if stream {
        streamed(shape, updates, seconds(app.settings.limits.keep_alive_s))
    } else {
        whole(shape, updates, dialect).await
    };
    name_skipped(&skipped, response.headers_mut());
    response
}

/// Checks and submits a request, all of it off the async threads.
async fn start(
    app: &Arc<App>,
    incoming: Incoming,
    dialect: Dialect,
    span: &Span,
) -> Result<Started, ApiError> {
    let connection = incoming.connection.clone();
    let bytes = incoming.bytes(&app.settings.limits).await?;
    let (shared, span) = (Arc::clone(app), span.clone());
    // Dropped with this future when the client leaves: what is prepared then never reaches the engine.
    let (waiting, left) = Waiting::new();
    let started = prepared(app, move |fetched| {
        let body = object(&bytes, &shared.settings.limits)?;
        let Translated { mut body, skipped, echo, seal } = translate(dialect, body)?;
        fetched.put(&mut body);
        let kind = if dialect == Dialect::Text { Kind::Text } else { Kind::Chat };
        let job = request::read(&shared, kind, body)?;
        let shape: Box<dyn Shape> = match dialect {
            Dialect::Chat | Dialect::Text => Box::new(Completion::new(&shared, &job, now())),
            Dialect::Messages => Box::new(Message::new(&shared, &job, now())),
            Dialect::Responses => Box::new(shape::responses::Response::new(&shared, &job, now(), echo, seal)),
        };
        let stream = job.stream;
        let gone = || left.load(Ordering::Acquire);
        let updates = run(&shared, job, connection.clone(), span.clone(), |request| {
            if gone() {
                shared.metrics.left();
                return Err(ApiError::unavailable("the client has left"));
            }
            Ok(shared.service.submit(request)?)
        })?;
        Ok(Started { shape, updates, stream, skipped })
    })
    .await;
    drop(waiting);
    started.map_err(|error| in_words_of(dialect, error))
}

/// A client that waits for its request to be prepared.
struct Waiting(Arc<AtomicBool>);

impl Waiting {
    /// The client, and the flag that is set when it leaves.
    fn new() -> (Self, Arc<AtomicBool>) {
        let left = Arc::<AtomicBool>::default();
        (Self(Arc::clone(&left)), left)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Submits a checked request and reads its reply as the links of plugins want it.
///
/// # Errors
/// What `submit` gives, a link that fails to begin, no thread for the reply.
pub fn run(
    app: &Arc<App>,
    job: Job,
    connection: Arc<Notify>,
    span: Span,
    submit: impl FnOnce(Request) -> Result<Handle, ApiError>,
) -> Result<Updates, ApiError> {
    let Job { kind, request, stops, tools, thinking, stream, body, .. } = job;
    let (reader, replies) = reading(app, kind, &body, (stops, tools, thinking), stream)?;
    let prompt = request.ids.len();
    let handle = submit(request)?;
    Ok(Pump::start(app, handle, reader, prompt, thinking, connection, replies, span)?)
}

/// How a reply is read, and the links that see it when it is complete.
fn reading(
    app: &Arc<App>,
    kind: Kind,
    body: &Arc<Map<String, Value>>,
    (stops, tools, thinking): (StopStrings, Vec<ToolSpec>, bool),
    streamed: bool,
) -> Result<(ReplyReader, Option<ReplyLinks>), ApiError> {
    let parser = move |tools: Vec<ToolSpec>, patient: bool| -> Box<dyn ReplyParser> {
        match kind {
            Kind::Chat if patient => Box::new(ChatParser::new(thinking, tools).patient()),
            Kind::Chat => Box::new(ChatParser::new(thinking, tools)),
            Kind::Text => Box::new(Verbatim),
        }
    };
    let links = |app: &App, body: &Map<String, Value>| {
        let links = app.chains.stream(body, &app.settings.limits)?;
        Ok::<_, HookError>(links.map(|links| Box::new(links) as Box<dyn PieceLinks>))
    };
    let passed = links(app, body)?;
    let Some(replies) = app.chains.replies() else {
        return Ok((ReplyReader::new(parser(tools, false), stops).with_links(passed), None));
    };
    let again = {
        let (tools, stops, app, body) = (tools.clone(), stops.clone(), app.clone(), body.clone());
        move || {
            let reader = ReplyReader::new(parser(tools.clone(), false), stops.clone());
            Ok(reader.with_links(links(&app, &body)?))
        }
    };
    let body = body.clone();
    let replies = ReplyLinks { links: replies, body, streamed, thinking, reader: Box::new(again) };
    Ok((ReplyReader::new(parser(tools, true), stops).with_links(passed), Some(replies)))
}

/// A request's body in the words of a chat completion or completion.
///
/// # Errors
/// What the client is told.
pub fn translate(dialect: Dialect, body: Map<String, Value>) -> Result<Translated, ApiError> {
    match dialect {
        Dialect::Chat | Dialect::Text => Ok(Translated { body, ..Translated::default() }),
        Dialect::Messages => messages::translate(&body),
        Dialect::Responses => responses::translate(&body),
    }
}

/// A refusal of the translated request, with the field's name in the client's dialect.
fn in_words_of(dialect: Dialect, mut error: ApiError) -> ApiError {
    if dialect == Dialect::Responses {
        let theirs = match error.param.as_deref() {
            Some("messages") => "input",
            Some("max_tokens") => "max_output_tokens",
            Some("response_format") => "text",
            _ => return error,
        };
        error.param = Some(theirs.to_owned());
    }
    error
}

/// `POST /v1/messages/count_tokens`: the tokens of a Messages request, without running it.
pub async fn count_tokens(app: Arc<App>, incoming: Incoming) -> Response {
    let counted = async {
        let bytes = incoming.bytes(&app.settings.limits).await?;
        let shared = Arc::clone(&app);
        prepared(&app, move |fetched| {
            let mut translated = messages::translate(&object(&bytes, &shared.settings.limits)?)?;
            fetched.put(&mut translated.body);
            Ok((request::tokenize(&shared, translated.body)?.len(), translated.skipped))
        })
        .await
    };
    match counted.await {
        Ok((count, skipped)) => {
            let mut response = json_response(StatusCode::OK, &json!({"input_tokens": count}));
            name_skipped(&skipped, response.headers_mut());
            response
        }
        Err(error) => {
            app.rejected.fetch_add(1, Ordering::Relaxed);
            Dialect::Messages.refuse(&error)
        }
    }
}

/// Runs work on a request [off the async threads](off_thread); where it stops at images that lie elsewhere, they are fetched and
/// it begins again with them. So nothing is fetched for a request that is refused for what stands before its images.
///
/// # Errors
/// What the work gives, images that cannot be had, 503 when it takes too long.
pub async fn prepared<T: Send + 'static>(
    app: &Arc<App>,
    work: impl Fn(&Fetched) -> Result<T, NotReady> + Send + Sync + 'static,
) -> Result<T, ApiError> {
    let work = Arc::new(work);
    let attempt = |fetched: Fetched| {
        let work = Arc::clone(&work);
        off_thread(app, move || match work(&fetched) {
            Ok(done) => Ok(Ok(done)),
            Err(NotReady::Images(wanted)) => Ok(Err(wanted)),
            Err(NotReady::Refused(error)) => Err(error),
        })
    };
    let wanted = match attempt(Fetched::default()).await? {
        Ok(done) => return Ok(done),
        Err(wanted) => wanted,
    };
    let refused = |problem: String| ApiError::invalid(problem).with_param("messages");
    let (fetched, _slot) = app.fetcher()?.fetch(wanted).await.map_err(|problem| match problem {
        FetchProblem::Image(problem) => refused(problem.0),
        FetchProblem::Busy(problem) => ApiError::unavailable(problem),
    })?;
    attempt(fetched).await?.map_err(|wanted| {
        let name = wanted.first().map_or("messages", |(name, _)| name);
        refused(format!(
            "{name}: a plugin put an image elsewhere into the request; it has to give a data: URL"
        ))
    })
}

/// Runs work on text on a blocking thread, a bounded number at once and within the time budget.
///
/// # Errors
/// What the work gives, or 503 when it takes too long.
pub async fn off_thread<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let limit = app.settings.limits.text_s;
    let workers = Arc::clone(&app.text_workers);
    let job = async move {
        let Ok(permit) = workers.acquire_owned().await else {
            return Err(ApiError::unavailable("the server is shutting down"));
        };
        let task = tokio::task::spawn_blocking(move || {
            let result = work();
            drop(permit);
            result
        });
        task.await.unwrap_or_else(|_| {
            Err(ApiError::with_status(StatusCode::INTERNAL_SERVER_ERROR, "preparing the request failed"))
        })
    };
    match tokio::time::timeout(seconds(limit), job).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::unavailable(format!(
            "rendering and tokenizing the request took longer than {limit} s; send less text, or try again"
        ))),
    }
}

fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

async fn whole(mut shape: Box<dyn Shape>, mut updates: Updates, dialect: Dialect) -> Response {
    let mut all = Part::default();
    loop {
        match updates.next().await {
            Some(Update::Part(more)) => all.append(more),
            Some(Update::End(ending)) => return json_response(StatusCode::OK, &shape.whole(all, &ending)),
            Some(Update::Failed(error)) => return dialect.refuse(&ApiError::from(error)),
            None => return dialect.refuse(&lost()),
        }
    }
}

fn lost() -> ApiError {
    ApiError::from(EngineError::Failed("the reply was lost".into()))
}

fn streamed(shape: Box<dyn Shape>, updates: Updates, keep_alive: Duration) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONNECTION, "close"),
    ];
    let quiet = (!keep_alive.is_zero()).then(|| Box::pin(tokio::time::sleep(keep_alive)));
    let stream = EventStream { shape, updates, state: State::Opening, keep_alive, quiet };
    (headers, Body::from_stream(stream)).into_response()
}

/// Writes a reply as server-sent events.
struct EventStream {
    shape: Box<dyn Shape>,
    updates: Updates,
    state: State,
    keep_alive: Duration,
    /// Ends when nothing was written for that long.
    quiet: Option<Pin<Box<Sleep>>>,
}

#[derive(PartialEq)]
enum State {
    Opening,
    Running,
    Ended,
}

impl EventStream {
    /// The events that can be written now.
    fn events(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<shape::Event>>> {
        match self.state {
            State::Ended => return Poll::Ready(None),
            State::Opening => {
                self.state = State::Running;
                return Poll::Ready(Some(self.shape.opening()));
            }
            State::Running => {}
        }
        let update = std::task::ready!(self.updates.poll_next(context));
        if !matches!(update, Some(Update::Part(_))) {
            self.state = State::Ended;
        }
        Poll::Ready(Some(match update {
            Some(Update::Part(part)) => self.shape.part(part),
            Some(Update::End(ending)) => self.shape.closing(&ending),
            Some(Update::Failed(error)) => self.shape.failure(&ApiError::from(error)),
            None => self.shape.failure(&lost()),
        }))
    }
}

impl futures_core::Stream for EventStream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            match this.events(context) {
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(events)) => {
                    let mut out = String::new();
                    for event in events {
                        event.write(&mut out);
                    }
                    if out.is_empty() {
                        continue;
                    }
                    if let Some(quiet) = &mut this.quiet {
                        quiet.as_mut().reset(Instant::now() + this.keep_alive);
                    }
                    return Poll::Ready(Some(Ok(out.into())));
                }
                Poll::Pending => {}
            }
            let Some(quiet) = &mut this.quiet else { return Poll::Pending };
            std::task::ready!(quiet.as_mut().poll(context));
            quiet.as_mut().reset(Instant::now() + this.keep_alive);
            return Poll::Ready(Some(Ok(this.shape.keep_alive().into())));
        }
    }
}
