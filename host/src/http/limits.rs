//! Every bound on what a client can make the server hold, in one place.

use std::time::Duration;

use crate::vision::Limit;

/// Bounds with their defaults. Each is a key of the `[limits]` table of a profile.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Largest request body, in bytes (64 MiB).
    pub body_bytes: usize,
    /// Seconds a client may take to send a request's headers (10); an idle connection is closed after it too.
    pub header_s: f64,
    /// Seconds a client may take to send a request's body (60).
    pub body_s: f64,
    /// Bytes of a request's headers (65,536).
    pub header_bytes: usize,
    /// Open connections (1,024). More wait in the listening queue.
    pub connections: usize,
    /// Events of a stream that wait for its reader before text is gathered into larger ones (256).
    pub stream_events: usize,
    /// Bytes of a stream that wait for its reader (1 MiB); then the connection is dropped and the run cancelled.
    pub stream_bytes: usize,
    /// Seconds of silence after which a stream gets a comment that keeps it alive (10); 0: never.
    pub keep_alive_s: f64,
    /// Seconds that text of a stream may wait for its reader; then the connection is dropped and the run cancelled (10).
    pub reader_s: f64,
    /// Seconds a connection may take no bytes while some wait to be written (30).
    pub write_s: f64,
    /// Bytes the system may buffer for a slow reader, a connection (131,072).
    pub send_buffer: usize,
    /// Depth of objects and lists in a request body (100; at most 127).
    pub json_depth: usize,
    /// Stop strings of a request (64).
    pub stop_strings: usize,
    /// Bytes of one stop string (1,024).
    pub stop_bytes: usize,
    /// Tools of a request (1,024).
    pub tools: usize,
    /// Bytes of the tools of a request with their schemas, and of an output schema (4 MiB).
    pub schema_bytes: usize,
    /// Messages of a request (100,000).
    pub messages: usize,
    /// Keys of `logit_bias`, which has no effect (1,024).
    pub logit_bias: usize,
    /// Bytes of text that one request may have tokenized (16 MiB).
    pub prompt_bytes: usize,
    /// Bytes that plugins may attach to a request for all ranks (16 MiB).
    pub attachment_bytes: usize,
    /// Images of a request, its whole history counted (8).
    pub images: usize,
    /// Encoded bytes of one image (20 MiB).
    pub image_bytes: usize,
    /// Pixels of one image, checked before it is decoded (67,108,864).
    pub image_pixels: usize,
    /// Requests whose text is prepared at once (as many as the machine has cores).
    pub text_workers: usize,
    /// Seconds for rendering and tokenizing one request, waiting included (30).
    pub text_s: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 64 << 20,
            header_s: 10.0,
            header_bytes: 64 << 10,
            body_s: 60.0,
            connections: 1024,
            stream_events: 256,
            stream_bytes: 1 << 20,
            keep_alive_s: 10.0,
            reader_s: 10.0,
            write_s: 30.0,
            send_buffer: 128 << 10,
            json_depth: 100,
            stop_strings: 64,
            stop_bytes: 1024,
            tools: 1024,
            schema_bytes: 4 << 20,
            messages: 100_000,
            attachment_bytes: 16 << 20,
            logit_bias: 1024,
            prompt_bytes: 16 << 20,
            images: 8,
            image_bytes: 20 << 20,
            image_pixels: 64 << 20,
            text_workers: std::thread::available_parallelism().map_or(1, usize::from),
            text_s: 30.0,
        }
    }
}

impl Limits {
    /// Bounds on the images of a request.
    pub fn image(&self) -> Limit {
        Limit { images: self.images, bytes: self.image_bytes, pixels: self.image_pixels }
    }
}

/// Seconds as a duration; what is negative or not finite becomes zero.
pub fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_has_room_for_images_at_their_limit() {
        // Base64 takes four bytes for three; two of the largest images and a long text fit into one request.
        let limits = Limits::default();
        assert!(limits.body_bytes > 2 * limits.image_bytes * 4 / 3 + (8 << 20));
    }
}
