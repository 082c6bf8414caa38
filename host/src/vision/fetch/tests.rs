//! Downloads from servers on this machine, with names of their own.

use std::sync::Mutex;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;

const LOCAL: Rules = Rules { fetch: true, http: true, private: true };
const BOUNDS: Bounds = Bounds {
    image: 100,
    request: 400,
    one: Duration::from_secs(20),
    all: Duration::from_secs(20),
    slots: 2,
    waiters: 1,
    wait: Duration::from_secs(20),
};

/// Answers of a lookup, the last one again and again, and the names that were asked for.
struct Names {
    answers: Mutex<Vec<&'static [&'static str]>>,
    asked: Mutex<Vec<String>>,
}

fn fetcher(
    rules: Rules,
    bounds: Bounds,
    roots: RootCertStore,
    answers: &[&'static [&'static str]],
) -> (Fetcher, Arc<Names>) {
    let names = Arc::new(Names { answers: Mutex::new(answers.to_vec()), asked: Mutex::default() });
    let lookup = {
        let names = Arc::clone(&names);
        move |name: String| {
            names.asked.lock().unwrap().push(name);
            let mut answers = names.answers.lock().unwrap();
            let now = if answers.len() > 1 { answers.remove(0) } else { answers[0] };
            let now = now.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
            Box::pin(async move { Ok(now) }) as Pin<Box<dyn Future<Output = _> + Send>>
        }
    };
    let open = if rules.private { |_| true } else { address::public };
    (Fetcher::with(rules, bounds, roots, Arc::new(lookup), open).unwrap(), names)
}

fn local() -> Fetcher {
    fetcher(LOCAL, BOUNDS, RootCertStore::empty(), &[&["127.0.0.1"]]).0
}

/// Reads a request's head and writes an answer; what was asked for.
async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin, reply: &[u8]) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let Ok(byte) = stream.read_u8().await else { return String::new() };
        head.push(byte);
    }
    let _ = stream.write_all(reply).await;
    let _ = stream.shutdown().await;
    String::from_utf8_lossy(&head).into_owned()
}

/// A server that gives these answers, a connection each; its port, and what it was asked.
async fn server(replies: Vec<String>) -> (u16, tokio::task::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let heads = tokio::spawn(async move {
        let mut heads = Vec::new();
        for reply in replies {
            let (stream, _) = listener.accept().await.unwrap();
            heads.push(answer(stream, reply.as_bytes()).await);
        }
        heads
    });
    (port, heads)
}

fn png(bytes: usize) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: {bytes}\r\n\r\n{}",
        "x".repeat(bytes)
    )
}

fn wanted(addresses: &[String]) -> Wanted {
    addresses.iter().enumerate().map(|(i, address)| (format!("part {i}"), address.clone())).collect()
}

/// What is said of one address, or its `data:` URL.
async fn one(fetcher: &Fetcher, address: &str) -> Result<String, String> {
    match fetcher.fetch(wanted(&[address.to_owned()])).await {
        Ok((fetched, _)) => Ok(fetched.0[address].clone()),
        Err(FetchProblem::Image(problem)) => Err(problem.0),
        Err(FetchProblem::Busy(problem)) => Err(format!("busy: {problem}")),
    }
}

#[tokio::test]
async fn an_image_is_fetched_through_three_redirects_and_put_in_its_place() {
    let to = |to: &str| format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n");
    let fetcher = local();
    let (port, heads) = server(vec![to("/b"), to("c?d"), to("/e"), png(3)]).await;
    let address = format!("http://pictures.example:{port}/a");
    let (fetched, _slot) = fetcher.fetch(wanted(&[address.clone(), address.clone()])).await.unwrap();
    let heads = heads.await.unwrap();
    let lines: Vec<&str> = heads.iter().map(|head| head.lines().next().unwrap()).collect();
    assert_eq!(lines, ["GET /a HTTP/1.1", "GET /b HTTP/1.1", "GET /c?d HTTP/1.1", "GET /e HTTP/1.1"]);
    assert!(heads.iter().all(|head| head.contains("accept-encoding: identity") && !head.contains("referer")));
    let part =
        |url: &str| serde_json::json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}});
    let body = serde_json::json!({"messages": [
        {"role": "user", "content": [part(&address), {"type": "input_image", "image_url": address},
                                     {"type": "text", "image_url": address}, part("data:,x")]},
        {"role": "user", "content": address}]});
    let Value::Object(mut body) = body else { unreachable!() };
    fetched.put(&mut body);
    let content = &body["messages"][0]["content"];
    assert_eq!(
        content[0]["image_url"],
        serde_json::json!({"url": "data:image/png;base64,eHh4", "detail": "low"})
    );
    assert_eq!(content[1]["image_url"], "data:image/png;base64,eHh4");
    assert_eq!(
        (&content[2]["image_url"], &content[3]["image_url"]["url"]),
        (&Value::from(address.clone()), &"data:,x".into())
    );
    assert_eq!(body["messages"][1]["content"], address.as_str());

    let (port, _) = server((0..5).map(|_| to("/again")).collect()).await;
    let told = one(&fetcher, &format!("http://pictures.example:{port}/secret")).await.unwrap_err();
    assert!(told.contains("more than 3 redirects") && !told.contains("secret"), "{told}");
}

#[tokio::test]
async fn answers_that_are_no_picture_are_refused() {
    let fetcher = local();
    let head = |rest: &str| format!("HTTP/1.1 200 OK\r\n{rest}\r\n\r\nxxxx");
    for (reply, words) in [
        (
            "HTTP/1.1 404 Not Found\r\ncontent-type: image/png\r\ncontent-length: 0\r\n\r\n".to_owned(),
            "answers 404",
        ),
        ("HTTP/1.1 204 No Content\r\ncontent-type: image/png\r\n\r\n".to_owned(), "answers 204"),
        (head("content-type: image/svg+xml\r\ncontent-length: 4"), "not declared"),
        (head("content-length: 4"), "not declared"),
        (head("content-type: image/png\r\ncontent-encoding: gzip\r\ncontent-length: 4"), "came encoded"),
        (head("content-type: image/png\r\ncontent-length: 101"), "larger than 100 bytes"),
        (head(&format!("content-type: image/png\r\n\r\n{}", "x".repeat(200))), "larger than 100 bytes"),
        (head("content-type: image/png\r\ncontent-length: 50"), "did not answer in full"),
        ("HTTP/1.1 301 Moved\r\ncontent-length: 0\r\n\r\n".to_owned(), "redirects to nowhere"),
        (
            "HTTP/1.1 302 Found\r\nlocation: ftp://secret.example/\r\ncontent-length: 0\r\n\r\n".to_owned(),
            "another kind",
        ),
        (
            "HTTP/1.1 302 Found\r\nlocation: http://a@secret.example/\r\ncontent-length: 0\r\n\r\n"
                .to_owned(),
            "a user",
        ),
        ("nonsense\r\n\r\n".to_owned(), "did not answer in full"),
    ] {
        let (port, _) = server(vec![reply.clone()]).await;
        let told = one(&fetcher, &format!("http://pictures.example:{port}/secret")).await.unwrap_err();
        assert!(
            told.contains(words) && told.starts_with("part 0: ") && !told.contains("secret"),
            "{reply}: {told}"
        );
    }
    // Kinds may have large letters and parameters, and the end of the connection may end the picture.
    let (port, _) = server(vec!["HTTP/1.1 200 OK\r\ncontent-type: Image/PNG; a=b\r\n\r\nxxx".into()]).await;
    assert_eq!(
        one(&fetcher, &format!("http://a.example:{port}/")).await.unwrap(),
        "data:image/png;base64,eHh4"
    );
}

#[tokio::test]
async fn images_of_a_request_share_its_room() {
    let fetcher = local();
    let (port, _) = server((0..4).map(|_| png(99)).collect()).await;
    let addresses: Vec<String> = (0..4).map(|i| format!("http://a.example:{port}/{i}")).collect();
    let told = fetcher.fetch(wanted(&addresses)).await.err().unwrap();
    assert!(matches!(told, FetchProblem::Image(problem) if problem.0.contains("beside the other images")));
}

#[tokio::test]
async fn a_name_with_an_address_that_is_not_public_gets_no_connection() {
    let closed = Rules { private: false, ..LOCAL };
    let (port, heads) = server(vec![png(3)]).await;
    // One closed address among open ones is enough.
    let (checked, names) = fetcher(closed, BOUNDS, RootCertStore::empty(), &[&["1.1.1.1", "127.0.0.1"]]);
    let told = one(&checked, &format!("http://secret.example:{port}/")).await.unwrap_err();
    assert!(told.contains("not public") && !told.contains("secret"), "{told}");
    assert_eq!(*names.asked.lock().unwrap(), ["secret.example"]);
    assert!(!heads.is_finished());
    heads.abort();
}

#[tokio::test]
async fn a_name_that_changes_its_address_between_redirects_is_caught() {
    let (second, never) = server(vec![png(3)]).await;
    let to =
        format!("HTTP/1.1 307 Again\r\nlocation: http://a.example:{second}/\r\ncontent-length: 0\r\n\r\n");
    let (first, _) = server(vec![to]).await;
    // The first answer counts as public here.
    let lookup: Arc<Lookup> = {
        let asked = AtomicUsize::new(0);
        Arc::new(move |_| {
            let ip = if asked.fetch_add(1, Ordering::Relaxed) == 0 { "127.0.0.1" } else { "127.0.0.2" };
            Box::pin(async move { Ok(vec![ip.parse().unwrap()]) })
        })
    };
    let open = |ip: IpAddr| ip.to_string() == "127.0.0.1";
    let fetcher = Fetcher::with(LOCAL, BOUNDS, RootCertStore::empty(), lookup, open).unwrap();
    let told = one(&fetcher, &format!("http://a.example:{first}/")).await.unwrap_err();
    assert!(told.contains("not public"), "{told}");
    assert!(!never.is_finished());
    never.abort();
}

#[tokio::test]
async fn certificates_are_checked_for_the_name() {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["good.example".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![cert.der().clone()], key).unwrap();
    let (listener, acceptor) =
        (TcpListener::bind("127.0.0.1:0").await.unwrap(), TlsAcceptor::from(Arc::new(config)));
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(stream) = acceptor.accept(stream).await {
                answer(stream, png(3).as_bytes()).await;
            }
        }
    });
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let (trusting, _) = fetcher(LOCAL, BOUNDS, roots, &[&["127.0.0.1"]]);
    let good = format!("https://good.example:{port}/secret");
    assert_eq!(one(&trusting, &good).await.unwrap(), "data:image/png;base64,eHh4");
    let other = one(&trusting, &format!("https://other.example:{port}/secret")).await.unwrap_err();
    let nobody = one(&local(), &good).await.unwrap_err();
    for told in [other, nobody] {
        assert!(told.contains("certificate") && !told.contains("secret"), "{told}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_stalls_ends_with_the_time_of_one_and_of_all() {
    let stalled = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = stalled.local_addr().unwrap().port();
    for (one_s, all_s, words) in
        [(5, 20, "part 0: did not arrive within 5 s"), (9, 7, "hold images that did not arrive within 7 s")]
    {
        let bounds = Bounds { one: Duration::from_secs(one_s), all: Duration::from_secs(all_s), ..BOUNDS };
        let (fetcher, _) = fetcher(LOCAL, bounds, RootCertStore::empty(), &[&["127.0.0.1"]]);
        let told = one(&fetcher, &format!("http://a.example:{port}/secret")).await.unwrap_err();
        assert!(told.contains(words) && !told.contains("secret"), "{told}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_next_request_waits_for_a_slot_and_the_one_after_it_is_told_to_come_again() {
    let fetcher = Arc::new(local());
    let (first, second) = (fetcher.slot().await.unwrap(), fetcher.slot().await.unwrap());
    let waiting = {
        let fetcher = Arc::clone(&fetcher);
        tokio::spawn(async move { fetcher.slot().await.is_ok() })
    };
    while fetcher.waiting.load(Ordering::Acquire) == 0 {
        tokio::task::yield_now().await;
    }
    let told = one(&fetcher, "http://a.example/").await.unwrap_err();
    assert!(told.starts_with("busy: 1 requests already wait") && told.contains("try again"), "{told}");
    drop(first);
    assert!(waiting.await.unwrap());
    assert_eq!(fetcher.waiting.load(Ordering::Acquire), 0);
    let _third = fetcher.slot().await.unwrap();
    drop(second);
    let _fourth = fetcher.slot().await.unwrap();
    let told = one(&fetcher, "http://a.example/").await.unwrap_err();
    assert!(told.contains("was free for 20 s"), "{told}");
}

#[tokio::test]
async fn nothing_is_fetched_where_that_is_off_or_one_address_is_wrong() {
    let (port, heads) = server(vec![png(3)]).await;
    let good = format!("http://a.example:{port}/secret");
    let (off, _) =
        fetcher(Rules { fetch: false, ..LOCAL }, BOUNDS, RootCertStore::empty(), &[&["127.0.0.1"]]);
    assert!(one(&off, &good).await.unwrap_err().contains("fetches no images"));
    let told = local().fetch(wanted(&[good, "ftp://secret/".into()])).await.err().unwrap();
    assert!(matches!(told, FetchProblem::Image(problem) if problem.0.starts_with("part 1: ")));
    assert!(!heads.is_finished());
    heads.abort();
}
