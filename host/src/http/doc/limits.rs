//! The limits in words, for the documentation.

/// Name and meaning of every key of the `[limits]` table, in its order.
pub static LIMITS: [(&str, &str); 25] = [
    ("body_bytes", "Bytes of a request body. Over it: 413."),
    ("header_s", "Seconds for a request's headers; an idle connection is closed after it too."),
    ("header_bytes", "Bytes of a request's headers, at least 8,192. Over it: 431."),
    ("body_s", "Seconds for a request's body. Over it: 408."),
    ("connections", "Open connections; more wait to be accepted."),
    (
        "stream_events",
        "Events of a stream that wait for its reader before text is gathered into larger ones.",
    ),
    (
        "stream_bytes",
        "Bytes gathered for a slow reader; over it the connection is dropped and the run cancelled.",
    ),
    ("keep_alive_s", "Seconds of silence after which a stream gets a comment (Messages: a ping); 0: never."),
    ("reader_s", "Seconds that text may wait for its reader; then as `stream_bytes`."),
    ("write_s", "Seconds a connection may take no bytes while some wait to be written."),
    ("send_buffer", "Bytes the system may buffer for a slow reader."),
    ("json_depth", "Levels of objects and lists in a request body, at most 127. Over it: 400."),
    ("stop_strings", "Stop strings of a request."),
    ("stop_bytes", "Bytes of one stop string."),
    ("tools", "Tools of a request."),
    ("schema_bytes", "Bytes of text in the tools of a request with their schemas, and in an output schema."),
    ("messages", "Messages of a request."),
    (
        "attachment_bytes",
        "Bytes that plugins may attach to a request for all ranks. Over it: 500, with the plugin's name.",
    ),
    ("logit_bias", "Keys of `logit_bias`."),
    ("prompt_bytes", "Bytes of text that a request may have tokenized."),
    ("images", "Images of a request, its whole history counted."),
    ("image_bytes", "Encoded bytes of one image."),
    ("image_pixels", "Pixels of one image, read from its header before anything is decoded."),
    ("text_workers", "Requests whose text is prepared at once; the default is the number of cores."),
    ("text_s", "Seconds for rendering and tokenizing a request, waiting included. Over it: 503."),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::Limits;

    #[test]
    fn every_limit_is_in_the_table() {
        let limits = serde_json::to_value(Limits::default()).unwrap();
        let mut names: Vec<&String> = limits.as_object().unwrap().keys().collect();
        let mut told: Vec<&str> = LIMITS.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        told.sort_unstable();
        assert_eq!(names, told);
    }
}
