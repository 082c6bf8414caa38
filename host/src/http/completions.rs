//! `/chat/completions` and `/completions`: prepare, submit, reply.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use plugfold_engine::service::EngineError;
use serde_json::Value;

use super::app::App;
use super::body::Incoming;
use super::error::{ApiError, json_response};
use super::limits::seconds;
use super::pump::{Pump, Update, Updates};
use super::request::{self, Job, Kind};
use super::shape::Shape;
use crate::reply::{ChatParser, ReplyParser, ReplyReader, Verbatim};

/// Serves a completion.
pub async fn serve(app: Arc<App>, incoming: Incoming, kind: Kind) -> Response {
    match start(&app, incoming, kind).await {
        Err(error) => {
            app.rejected.fetch_add(1, Ordering::Relaxed);
            error.into_response()
        }
        Ok((shape, updates, true)) => stream(shape, updates),
        Ok((shape, updates, false)) => whole(shape, updates).await,
    }
}

/// Checks and submits a request, all of it off the async threads.
async fn start(app: &Arc<App>, incoming: Incoming, kind: Kind) -> Result<(Shape, Updates, bool), ApiError> {
    let connection = incoming.connection.clone();
    let bytes = incoming.bytes(&app.settings.limits).await?;
    let shared = Arc::clone(app);
    off_thread(app, move || {
        let job = request::read(&shared, kind, &super::body::object(&bytes)?)?;
        drop(bytes);
        let shape = Shape::new(&job, now(), &shared.settings.served_name, shared.settings.reasoning_fields);
        let Job { request, stops, tools, thinking, stream, .. } = job;
        let parser: Box<dyn ReplyParser> = match kind {
            Kind::Chat => Box::new(ChatParser::new(thinking, tools)),
            Kind::Text => Box::new(Verbatim),
        };
        let prompt = request.ids.len();
        let handle = shared.service.submit(request)?;
        let updates =
            Pump::start(&shared, handle, ReplyReader::new(parser, stops), prompt, thinking, connection)?;
        Ok((shape, updates, stream))
    })
    .await
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

async fn whole(mut shape: Shape, mut updates: Updates) -> Response {
    let mut pieces = Vec::new();
    loop {
        match updates.next().await {
            Some(Update::Pieces(more)) => pieces.extend(more),
            Some(Update::End(ending)) => return json_response(StatusCode::OK, &shape.whole(pieces, &ending)),
            Some(Update::Failed(error)) => return ApiError::from(error).into_response(),
            None => return lost().into_response(),
        }
    }
}

fn lost() -> ApiError {
    ApiError::from(EngineError::Failed("the reply was lost".into()))
}

fn stream(shape: Shape, updates: Updates) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONNECTION, "close"),
    ];
    (headers, Body::from_stream(EventStream { shape, updates, state: State::Opening })).into_response()
}

/// Writes a reply as server-sent events.
struct EventStream {
    shape: Shape,
    updates: Updates,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Opening,
    Running,
    Ended,
}

impl futures_core::Stream for EventStream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            let mut out = String::new();
            match this.state {
                State::Ended => return Poll::Ready(None),
                State::Opening => {
                    this.state = State::Running;
                    this.shape.opening().iter().for_each(|event| write_event(&mut out, event));
                }
                State::Running => match std::task::ready!(this.updates.poll_next(context)) {
                    Some(Update::Pieces(pieces)) => {
                        this.shape.events(pieces).iter().for_each(|event| write_event(&mut out, event));
                    }
                    Some(Update::End(ending)) => {
                        write_event(&mut out, &this.shape.closing(&ending));
                        this.end(&mut out);
                    }
                    Some(Update::Failed(error)) => {
                        write_event(&mut out, &ApiError::from(error).body());
                        this.end(&mut out);
                    }
                    None => {
                        write_event(&mut out, &lost().body());
                        this.end(&mut out);
                    }
                },
            }
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(out.into())));
            }
        }
    }
}

impl EventStream {
    fn end(&mut self, out: &mut String) {
        out.push_str("data: [DONE]\n\n");
        self.state = State::Ended;
    }
}

/// One `data:` line and a blank line. JSON text never holds a raw newline.
fn write_event(out: &mut String, event: &Value) {
    out.push_str("data: ");
    out.push_str(&event.to_string());
    out.push_str("\n\n");
}
