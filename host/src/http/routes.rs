//! The route table: one list from which requests are routed and the routes are documented.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, header};
use axum::response::Response;
use tokio::sync::Notify;

use super::app::App;
use super::body::Incoming;
use super::error::not_found;
use super::request::Kind;
use super::{completions, info};

/// Which paths a route takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paths {
    /// These, exactly.
    Exact(&'static [&'static str]),
    /// Every path with this end; the second is the usual one.
    EndingIn(&'static str, &'static str),
}

type Reply = Pin<Box<dyn Future<Output = Response> + Send>>;

/// One line of the table.
pub struct Route {
    /// `GET` or `POST`.
    pub method: Method,
    /// Its paths.
    pub paths: Paths,
    /// What it is for, for the documentation.
    pub purpose: &'static str,
    handler: fn(Arc<App>, Incoming) -> Reply,
}

/// All routes; the first that fits takes a request, anything else is the plain 404.
pub static ROUTES: [Route; 6] = [
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/v1/models", "/models"]),
        purpose: "the served model and its context size",
        handler: |app, _| Box::pin(async move { info::models(&app) }),
    },
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/health", "/v1/health"]),
        purpose: "liveness, health mode, live totals",
        handler: |app, _| Box::pin(async move { info::health(&app) }),
    },
    Route {
        method: Method::GET,
        paths: Paths::Exact(&["/metrics"]),
        purpose: "Prometheus text",
        handler: |app, _| Box::pin(async move { info::metrics(&app) }),
    },
    Route {
        method: Method::POST,
        paths: Paths::EndingIn("/chat/completions", "/v1/chat/completions"),
        purpose: "chat",
        handler: |app, incoming| Box::pin(completions::serve(app, incoming, Kind::Chat)),
    },
    Route {
        method: Method::POST,
        paths: Paths::EndingIn("/completions", "/v1/completions"),
        purpose: "raw text or token-id prompt",
        handler: |app, incoming| Box::pin(completions::serve(app, incoming, Kind::Text)),
    },
    Route {
        method: Method::POST,
        paths: Paths::Exact(&["/tokenize", "/v1/tokenize"]),
        purpose: "count and list prompt tokens without running the model",
        handler: |app, incoming| Box::pin(info::tokenize(app, incoming)),
    },
];

/// The route that takes a method and path. A trailing `/` is ignored.
pub fn find(method: &Method, path: &str) -> Option<&'static Route> {
    let path = path.strip_suffix('/').unwrap_or(path);
    ROUTES.iter().find(|route| {
        route.method == *method
            && match route.paths {
                Paths::Exact(paths) => paths.contains(&path),
                Paths::EndingIn(end, _) => path.ends_with(end),
            }
    })
}

/// The router over the table.
pub fn router(app: Arc<App>) -> Router {
    Router::new().fallback(dispatch).with_state(app)
}

async fn dispatch(State(app): State<Arc<App>>, request: Request) -> Response {
    // Where lengths and chunking could be read in two ways, nothing after the first request is served.
    let chunked = request.headers().contains_key(header::TRANSFER_ENCODING);
    let mut response = match find(request.method(), request.uri().path()) {
        Some(route) => {
            let (parts, body) = request.into_parts();
            let connection = parts.extensions.get::<Arc<Notify>>().cloned().unwrap_or_default();
            (route.handler)(app, Incoming { headers: parts.headers, body, connection }).await
        }
        None => not_found(),
    };
    if chunked {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
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
        for (method, path) in [
            (Method::GET, "/v1/chat/completions"),
            (Method::POST, "/v1/models"),
            (Method::GET, "/"),
            (Method::POST, "/completions.txt"),
            (Method::POST, "/health"),
            (Method::GET, "/v2/models"),
        ] {
            assert!(find(&method, path).is_none(), "{method} {path}");
        }
    }

    #[test]
    fn every_usual_path_reaches_its_own_route() {
        for route in &ROUTES {
            let paths = match route.paths {
                Paths::Exact(paths) => paths.to_vec(),
                Paths::EndingIn(_, usual) => vec![usual],
            };
            for path in paths {
                assert_eq!(find(&route.method, path).map(|r| r.purpose), Some(route.purpose), "{path}");
            }
        }
    }
}
