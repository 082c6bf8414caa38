//! Images over HTTP, with a scripted engine and a tower that shows what it was given.
#![allow(clippy::unwrap_used)]

use std::io::Cursor;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use image::{DynamicImage, ImageFormat, Rgb, RgbImage};
use plugfold::http::app::ImageSettings;
use plugfold::http::{HttpSettings, Limits};
use plugfold::vision::fetch::Rules;
use plugfold::vision::{Tower, Vision};
use plugfold_engine::image::{ImageConfig, Patches, Resampler};
use plugfold_kernels::device::Device;
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::http::{Aftercheck, TestServer, chat, settings};
use plugfold_tests::model::emulated;
use serde_json::{Value, json};

const IDS: [u32; 3] = [267, 268, 269];

/// Rows of 8 numbers, each the mean of the picture.
struct Mean;

impl Tower for Mean {
    fn rows(&self, patches: &Patches) -> Result<Vec<f32>, String> {
        let (_, height, width) = patches.grid;
        let mean = patches.values.iter().sum::<f32>() / patches.values.len() as f32;
        Ok(vec![mean; height * width / 4 * 8])
    }
}

fn server(limits: Limits) -> TestServer {
    server_with(HttpSettings { limits, ..settings() })
}

fn server_with(settings: HttpSettings) -> TestServer {
    let config = ImageConfig {
        patch: 14,
        temporal_patch: 2,
        merge: 2,
        expand: 1,
        min_tokens: 16,
        max_tokens: 8000,
        mean: [0.5; 3],
        std: [0.5; 3],
        resampler: Resampler::Fast,
    };
    let vision = Vision::new(config, Box::new(Mean), IDS);
    TestServer::seeing(settings, 1 << 16, 4, vision)
}

fn address(width: u32, height: u32, colour: u8) -> String {
    let picture = DynamicImage::ImageRgb8(RgbImage::from_pixel(width, height, Rgb([colour; 3])));
    let mut png = Cursor::new(Vec::new());
    picture.write_to(&mut png, ImageFormat::Png).unwrap();
    format!("data:image/png;base64,{}", BASE64_STANDARD.encode(png.into_inner()))
}

fn parts(parts: &[Value]) -> Value {
    json!({"messages": [{"role": "user", "content": parts}]})
}

fn picture(address: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": address}})
}

#[test]
fn images_become_rows_at_their_places_in_every_dialect() {
    let server = server(Limits::default());
    let after = Aftercheck::begin(&server);
    let (white, black) = (address(512, 512, 255), address(112, 112, 0));
    let text = |text: &str| json!({"type": "text", "text": text});
    let body =
        parts(&[text("one "), picture(&white), text(" two<|user|> "), picture(&black), text(" three")]);
    let reply = server.post("/v1/chat/completions", &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let request = server.requests().last().unwrap().clone();
    let runs: Vec<(usize, usize)> = request.attachments.iter().map(|a| (a.at, a.rows.len() / 8)).collect();
    assert_eq!((runs[0].1, runs[1].1), (361, 16));
    for ((at, rows), colour) in runs.iter().zip([1.0, -1.0]) {
        assert_eq!((request.ids[at - 1], request.ids[at + rows]), (IDS[0], IDS[2]));
        assert!(request.ids[*at..at + rows].iter().all(|id| *id == IDS[1]));
        let attachment = request.attachments.iter().find(|a| a.at == *at).unwrap();
        // The white picture is padded with black on its canvas.
        assert!(attachment.rows.iter().all(|v| (v - colour).abs() < 0.3));
    }
    assert_eq!(request.ids.iter().filter(|id| **id == IDS[1]).count(), 377);
    let usage = reply.json()["usage"]["prompt_tokens"].clone();
    assert_eq!(usage, request.ids.len());
    assert_eq!(reply.json()["tensorfold"]["vision"]["encoded"], 2);
    let counted = server.post("/tokenize", &body).json();
    assert_eq!((&counted["count"], counted["tokens"].as_array().unwrap().len()), (&usage, request.ids.len()));

    // The same pictures in the words of the other dialects.
    let data = white.strip_prefix("data:image/png;base64,").unwrap();
    let block =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}});
    let messages = json!({"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]});
    assert_eq!(server.post("/v1/messages", &messages).status, 200);
    let item = json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": white}]}]});
    assert_eq!(server.post("/v1/responses", &item).status, 200);
    for request in &server.requests()[server.requests().len() - 2..] {
        assert_eq!(request.attachments[0].rows.len(), 361 * 8);
    }
    after.finish();
}

#[test]
fn case_22_bad_images_are_refused_before_a_stream() {
    let limits = Limits { images: 2, image_bytes: 100_000, image_pixels: 1 << 20, ..Limits::default() };
    let server = server(limits);
    let after = Aftercheck::begin(&server);
    let small = address(64, 64, 9);
    for (body, words) in [
        (parts(&[picture(&address(1025, 1024, 3))]), "at most 1048576"),
        (parts(&[picture("http://example.com/secret.png")]), "another kind"),
        (parts(&[picture("data:image/png;base64,!!!")]), "not base64"),
        (parts(&[picture("data:image/svg+xml,<svg/>")]), "not a PNG"),
        (parts(&[picture(&small[..small.len() / 2 / 4 * 4])]), "messages[0].content[0]"),
        (parts(&[picture(&format!("data:,{}", "x".repeat(100_001)))]), "limit is 100000"),
        (parts(&[picture(&small), picture(&small), picture(&small)]), "2 images"),
        (parts(&[json!({"type": "image_url"})]), "no URL"),
        (parts(&[picture(&small), json!({"type": "text", "text": "<|image|>"})]), "<|image|>"),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = stream.into();
            let reply = server.post("/v1/chat/completions", &body);
            let error = &reply.json()["error"];
            assert_eq!((reply.status, &error["param"]), (400, &json!("messages")), "{error}");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(words) && !message.contains("example.com"), "{message}");
        }
    }
    // The same text without images is text.
    assert_eq!(server.post("/v1/chat/completions", &chat("<|image|>", json!({}))).status, 200);
    after.finish();
}

/// Bytes of a photo of cases like these.
const PHOTO: usize = 6_000_000;

#[test]
fn case_23_a_large_photo_and_a_long_conversation_pass_the_default_limits() {
    let server = server(Limits::default());
    let after = Aftercheck::begin(&server);
    // Noise: nothing of it can be left out.
    let mut state = 1u32;
    let photo = RgbImage::from_fn(1600, 1400, |_, _| {
        Rgb([0; 3].map(|_: u8| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        }))
    });
    let mut jpeg = Vec::new();
    let encoder = image::codecs::jpeg::JpegEncoder::new_with_quality(&mut jpeg, 100);
    photo.write_with_encoder(encoder).unwrap();
    assert!(jpeg.len() > PHOTO, "{}", jpeg.len());
    let body = parts(&[picture(&format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(jpeg)))]);
    let reply = server.post("/v1/chat/completions", &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    after.finish();

    // A token a byte here; only the context has to be large.
    let server = TestServer::with(settings(), 1 << 22, 2);
    let turns: Vec<Value> =
        (0..300).map(|_| json!({"role": "user", "content": "word ".repeat(2000)})).collect();
    let reply = server.post("/v1/chat/completions", &json!({"messages": turns}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(reply.json()["usage"]["prompt_tokens"].as_u64().unwrap() > 3_000_000);
}

#[test]
fn an_image_elsewhere_is_refused_without_a_connection() {
    let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
    elsewhere.set_nonblocking(true).unwrap();
    let address = elsewhere.local_addr().unwrap();
    let server = server(Limits::default());
    let after = Aftercheck::begin(&server);
    for url in [
        format!("http://{address}/secret.png"),
        format!("https://{address}/secret.png"),
        format!("https://user:secret@localhost:{}/x.png", address.port()),
        "https://169.254.169.254/latest/meta-data/secret".into(),
        "file:///etc/secret".into(),
        "ftp://example.org/secret.png".into(),
    ] {
        for part in [
            json!({"type": "image_url", "image_url": {"url": url}}),
            json!({"type": "image_url", "image_url": url}),
            json!({"type": "input_image", "image_url": url}),
            json!({"type": "image", "image": url}),
        ] {
            let body = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}],
                              "stream": true});
            let reply = server.post("/v1/chat/completions", &body);
            let error = &reply.json()["error"];
            assert_eq!((reply.status, &error["param"]), (400, &json!("messages")), "{body}: {error}");
            assert!(!reply.text().contains("secret"), "no answer tells an address: {}", reply.text());
        }
    }
    let told = elsewhere.accept().unwrap_err();
    assert_eq!(told.kind(), std::io::ErrorKind::WouldBlock, "nobody came");
    after.finish();
}

/// A server of pictures on this machine: its address, and how many were asked for.
fn gallery(bytes: Vec<u8>) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/secret.png", listener.local_addr().unwrap());
    let asked = Arc::<AtomicUsize>::default();
    let counts = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let head = BufReader::new(stream.try_clone().unwrap());
            if !head.lines().map_while(Result::ok).any(|line| line.is_empty()) {
                continue;
            }
            counts.fetch_add(1, Ordering::Relaxed);
            let head = "HTTP/1.1 200 OK\r\ncontent-type: image/png\r\nconnection: close\r\n";
            let _ = write!(stream, "{head}content-length: {}\r\n\r\n", bytes.len());
            let _ = stream.write_all(&bytes);
        }
    });
    (address, asked)
}

#[test]
fn images_elsewhere_are_fetched_once_a_request_and_are_those_that_were_sent() {
    let data = address(112, 112, 255);
    let bytes = BASE64_STANDARD.decode(data.strip_prefix("data:image/png;base64,").unwrap()).unwrap();
    let (elsewhere, asked) = gallery(bytes);
    let rules = Rules { fetch: true, http: true, private: true };
    let images = ImageSettings { rules, ..ImageSettings::default() };
    let server = server_with(HttpSettings { images, ..settings() });
    let after = Aftercheck::begin(&server);

    // What stands before the images is checked before anything is fetched.
    for wrong in [json!({"temperature": "hot"}), json!({"tf_knobs": {"nothing": 1}}), json!({"stop": 5})] {
        let mut body = parts(&[picture(&elsewhere)]);
        body.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        assert_eq!(server.post("/v1/chat/completions", &body).status, 400, "{body}");
    }
    assert_eq!(asked.load(Ordering::Relaxed), 0);

    let prompt = |url: &str| {
        let body = parts(&[picture(url), json!({"type": "input_image", "image_url": url})]);
        let reply = server.post("/v1/chat/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()["tensorfold"]["vision"]["encoded"], 2);
        let request = server.requests().last().unwrap().clone();
        (request.ids, request.attachments.iter().map(|a| (a.at, a.rows.to_vec())).collect::<Vec<_>>())
    };
    assert_eq!(prompt(&elsewhere), prompt(&data));
    assert_eq!(asked.load(Ordering::Relaxed), 1, "one address is asked once");

    // The other dialects, and the counts of tokens.
    let block = json!({"type": "image", "source": {"type": "url", "url": elsewhere}});
    let messages = json!({"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]});
    assert_eq!(server.post("/v1/messages", &messages).status, 200);
    let counted = server.post("/v1/messages/count_tokens", &messages).json();
    assert_eq!(server.requests().last().unwrap().ids.len(), counted["input_tokens"]);
    let item =
        json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": elsewhere}]}]});
    assert_eq!(server.post("/v1/responses", &item).status, 200);
    let tokens = |url: &str| server.post("/tokenize", &parts(&[picture(url)])).json()["tokens"].clone();
    assert_eq!(
        server.requests().last().unwrap().ids,
        serde_json::from_value::<Vec<u32>>(tokens(&elsewhere)).unwrap()
    );
    assert_eq!(tokens(&elsewhere), tokens(&data));
    assert_eq!(asked.load(Ordering::Relaxed), 6);

    // Off: only what is sent.
    let rules = Rules { fetch: false, ..rules };
    let closed = server_with(HttpSettings { images: ImageSettings { rules, ..images }, ..settings() });
    let reply = closed.post("/v1/responses", &item);
    let error = &reply.json()["error"];
    assert_eq!((reply.status, &error["param"]), (400, &json!("input")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("fetches no images"), "{error}");
    assert_eq!(asked.load(Ordering::Relaxed), 6);
    after.finish();
}

/// What a client sends, seen by a checkpoint's own tower: on a device the bits of the host.
#[test]
fn a_device_sees_what_the_host_sees() {
    let see = |device: Option<Arc<dyn Device>>| -> Vec<Vec<u32>> {
        let vision = Vision::load(&tiny_dir(), || Ok(device)).unwrap().unwrap();
        let limit = Limits::default().image();
        let mut messages = vec![json!({"role": "user", "content": [
            picture(&address(112, 112, 200)), {"type": "text", "text": "and"}, picture(&address(150, 90, 30))
        ]})];
        let images = vision.take(&mut messages, &limit, |n| format!("<{n}>")).unwrap();
        let rows = vision.rows(images, &limit).unwrap().rows;
        rows.iter().map(|image| image.iter().map(|v| v.to_bits()).collect()).collect()
    };
    let host = see(None);
    assert_eq!((host.len(), host[0].len() % 16), (2, 0));
    assert_eq!(see(Some(emulated(true))), host);
}
