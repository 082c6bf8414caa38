//! The built-in page.

use axum::http::header;
use axum::response::{IntoResponse as _, Response};

/// Everything of the page: markup, style and script.
const PAGE: &str = include_str!("../../assets/page.html");

/// `GET /`.
pub fn page() -> Response {
    html(PAGE.to_owned())
}

/// A page that may load nothing from elsewhere and be framed by nobody.
pub fn html(text: String) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
             img-src data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        ),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}
