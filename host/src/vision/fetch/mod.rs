//! Images that lie elsewhere: fetched by `https` from public addresses, within bounds, before anything is decoded.

mod address;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, LOCATION};
use reqwest::{Client, Response, StatusCode, redirect};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::{FIELDS, ImageProblem, address_of, is_image};

/// Redirects of one download.
const HOPS: usize = 3;
/// Names that are looked up at once: a lookup cannot be called off, and a slow one holds a thread.
const LOOKUPS: usize = 4;
/// Kinds of pictures, as a server declares them.
const PICTURES: [&str; 4] = ["image/jpeg", "image/png", "image/webp", "image/gif"];
/// What is said of an address that is not public.
const CLOSED: &str = "has a URL whose address is not public";

/// What may be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Anything at all.
    pub fetch: bool,
    /// `http`, and any port: for tests on one machine.
    pub http: bool,
    /// From any address: for tests on one machine.
    pub private: bool,
}

/// Bounds on fetching.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes of one image.
    pub image: usize,
    /// Bytes of all images of a request, as base64.
    pub request: usize,
    /// Seconds of one download.
    pub one: Duration,
    /// Seconds of all downloads of a request.
    pub all: Duration,
    /// Requests that fetch at once.
    pub slots: usize,
    /// Requests that may wait for that.
    pub waiters: usize,
    /// How long they may.
    pub wait: Duration,
}

/// Why images of a request could not be fetched.
#[derive(Debug)]
pub enum FetchProblem {
    /// One that cannot be had.
    Image(ImageProblem),
    /// Too many requests fetch images now.
    Busy(String),
}

/// Addresses of images that a request names, with the names of their parts.
pub type Wanted = Vec<(String, String)>;

/// Images that were fetched: their `data:` URLs by their addresses.
#[derive(Debug, Default)]
pub struct Fetched(HashMap<String, String>);

impl Fetched {
    /// Puts them into the messages of a request in the place of their addresses.
    pub fn put(&self, body: &mut Map<String, Value>) {
        if self.0.is_empty() {
            return;
        }
        let messages = body.get_mut("messages").and_then(Value::as_array_mut).into_iter().flatten();
        for part in messages.filter_map(|m| m.get_mut("content")?.as_array_mut()).flatten() {
            let Some(image) = Some(&*part).filter(|part| is_image(part)).and_then(address_of) else {
                continue;
            };
            let Some(image) = self.0.get(image) else { continue };
            let field = FIELDS.into_iter().find(|field| !part[*field].is_null()).unwrap_or(FIELDS[0]);
            // What else is said of the image stays.
            let place = &mut part[field];
            *(if place.is_object() { &mut place["url"] } else { place }) = image.as_str().into();
        }
    }
}

/// Whether an address is one that something would have to be fetched from.
pub(super) fn is_elsewhere(address: &str) -> bool {
    !address.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"))
}

/// Looks names up.
type Lookup =
    dyn Fn(String) -> Pin<Box<dyn Future<Output = std::io::Result<Vec<IpAddr>>> + Send>> + Send + Sync;

/// Gives the addresses of a name if all of them are open.
struct Checked {
    lookup: Arc<Lookup>,
    open: fn(IpAddr) -> bool,
    places: Arc<Semaphore>,
}

#[derive(Debug, thiserror::Error)]
#[error("{CLOSED}")]
struct NotPublic;

impl Resolve for Checked {
    fn resolve(&self, name: Name) -> Resolving {
        let (lookup, open, places) = (Arc::clone(&self.lookup), self.open, Arc::clone(&self.places));
        Box::pin(async move {
            let place = places.acquire_owned().await?;
            // On a task of its own, so that the place is held until the lookup has ended, whoever still waits for it.
            let looked = tokio::spawn(async move {
                let found = lookup(name.as_str().to_owned()).await;
                drop(place);
                found
            });
            let found = looked.await??;
            if !found.iter().copied().all(open) {
                return Err(NotPublic.into());
            }
            Ok(Box::new(found.into_iter().map(|ip| SocketAddr::new(ip, 0))) as Addrs)
        })
    }
}

/// Fetches images.
pub struct Fetcher {
    client: Client,
    rules: Rules,
    bounds: Bounds,
    slots: Arc<Semaphore>,
    waiting: AtomicUsize,
}

/// Held while the images of a request are fetched and prepared.
pub struct Slot(#[allow(dead_code)] OwnedSemaphorePermit);

impl Fetcher {
    /// A fetcher that trusts the authorities that browsers trust.
    ///
    /// # Errors
    /// A TLS library that does not start.
    pub fn new(rules: Rules, bounds: Bounds) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        let system = |name: String| {
            let found = async move {
                Ok(tokio::net::lookup_host((name, 0)).await?.map(|address| address.ip()).collect::<Vec<_>>())
            };
            Box::pin(found) as Pin<Box<dyn Future<Output = _> + Send>>
        };
        let open = if rules.private { |_| true } else { address::public };
        Self::with(rules, bounds, roots, Arc::new(system), open)
    }

    fn with(
        rules: Rules,
        bounds: Bounds,
        roots: RootCertStore,
        lookup: Arc<Lookup>,
        open: fn(IpAddr) -> bool,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let tls = tls.with_root_certificates(roots).with_no_client_auth();
        let places = Arc::new(Semaphore::new(LOOKUPS));
        // Connections are not kept: every download looks its name up and checks what it finds.
        let client = Client::builder()
            .tls_backend_preconfigured(tls)
            .dns_resolver(Arc::new(Checked { lookup, open, places }))
            .user_agent(concat!("plugfold/", env!("CARGO_PKG_VERSION")))
            .redirect(redirect::Policy::none())
            .no_proxy()
            .referer(false)
            .pool_max_idle_per_host(0)
            .build()?;
        let slots = Arc::new(Semaphore::new(bounds.slots.max(1)));
        Ok(Self { client, rules, bounds, slots, waiting: AtomicUsize::new(0) })
    }

    /// Fetches the images that a request names; the slot is held while they are prepared.
    ///
    /// # Errors
    /// The first image that cannot be had; too many requests before this one.
    pub async fn fetch(&self, wanted: Wanted) -> Result<(Fetched, Slot), FetchProblem> {
        let wrong =
            |name: &str, problem: String| FetchProblem::Image(ImageProblem(format!("{name}: {problem}")));
        if !self.rules.fetch {
            let told = "this server fetches no images; send the image itself as a data: URL".to_owned();
            return Err(wrong(wanted.first().map_or("messages", |w| w.0.as_str()), told));
        }
        // All of them before the first connection.
        for (name, address) in &wanted {
            address::check(address, self.rules).map_err(|problem| wrong(name, problem))?;
        }
        let slot = self.slot().await?;
        let room = Arc::new(AtomicUsize::new(self.bounds.request));
        let mut downloads = JoinSet::new();
        let mut names = HashMap::new();
        for (name, address) in wanted {
            if names.contains_key(&address) {
                continue;
            }
            names.insert(address.clone(), name);
            let download = Download {
                client: self.client.clone(),
                rules: self.rules,
                most: self.bounds.image,
                room: Arc::clone(&room),
            };
            let limit = self.bounds.one;
            downloads.spawn(async move {
                let done = tokio::time::timeout(limit, download.run(&address)).await;
                (address, done.unwrap_or_else(|_| Err(late("did not arrive within", limit))))
            });
        }
        let mut fetched = Fetched::default();
        let all = async {
            while let Some(done) = downloads.join_next().await {
                let Ok((address, image)) = done else { continue };
                let name = names.remove(&address).unwrap_or_default();
                fetched.0.insert(address, image.map_err(|problem| wrong(&name, problem))?);
            }
            Ok(())
        };
        let done = tokio::time::timeout(self.bounds.all, all).await;
        done.unwrap_or_else(|_| {
            Err(wrong("messages", late("hold images that did not arrive within", self.bounds.all)))
        })?;
        Ok((fetched, slot))
    }

    /// A place among the requests that fetch.
    async fn slot(&self) -> Result<Slot, FetchProblem> {
        if let Ok(permit) = Arc::clone(&self.slots).try_acquire_owned() {
            return Ok(Slot(permit));
        }
        let busy = |why: String| FetchProblem::Busy(format!("{why}; try again shortly"));
        let waiter = Waiter::new(&self.waiting);
        if waiter.before >= self.bounds.waiters {
            return Err(busy(format!(
                "{} requests already wait to have their images prepared",
                waiter.before
            )));
        }
        match tokio::time::timeout(self.bounds.wait, Arc::clone(&self.slots).acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Slot(permit)),
            _ => Err(busy(format!(
                "no place to prepare images was free for {} s",
                self.bounds.wait.as_secs_f64()
            ))),
        }
    }
}

fn late(what: &str, limit: Duration) -> String {
    format!("{what} {} s; send the image as a data: URL", limit.as_secs_f64())
}

/// One that waits, until it is dropped.
struct Waiter<'w> {
    waiting: &'w AtomicUsize,
    before: usize,
}

impl<'w> Waiter<'w> {
    fn new(waiting: &'w AtomicUsize) -> Self {
        Self { waiting, before: waiting.fetch_add(1, Ordering::AcqRel) }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One image on its way.
struct Download {
    client: Client,
    rules: Rules,
    most: usize,
    room: Arc<AtomicUsize>,
}

impl Download {
    /// Its `data:` URL.
    async fn run(&self, address: &str) -> Result<String, String> {
        let mut url = address::check(address, self.rules)?;
        for _ in 0..=HOPS {
            let asked = self.client.get(url.clone()).header(ACCEPT, PICTURES.join(", "));
            let reply = asked.header(ACCEPT_ENCODING, "identity").send().await.map_err(|e| told(&e))?;
            if !matches!(reply.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return self.read(reply).await;
            }
            let to = reply.headers().get(LOCATION).and_then(|to| to.to_str().ok()).map(str::to_owned);
            let to = to.ok_or("has a URL that redirects to nowhere; send the image as a data: URL")?;
            let next = url.join(&to).map_err(|_| "has a URL that redirects to none".to_owned())?;
            // The text as it came too: parsing forgives what is refused.
            let absolute = to.contains("://").then_some(to.as_str());
            url = address::check(absolute.unwrap_or(next.as_str()), self.rules)
                .map_err(|problem| format!("redirects, and then {problem}"))?;
        }
        Err(format!("has a URL with more than {HOPS} redirects; send the image as a data: URL"))
    }

    async fn read(&self, mut reply: Response) -> Result<String, String> {
        let header =
            |name| reply.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if reply.status() != StatusCode::OK {
            return Err(format!("cannot be fetched: its server answers {}", reply.status().as_u16()));
        }
        if !matches!(header(CONTENT_ENCODING), "" | "identity") {
            return Err("came encoded although its server was asked not to; send it as a data: URL".into());
        }
        let kind = header(CONTENT_TYPE).split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if !PICTURES.contains(&kind.as_str()) {
            return Err("is not declared as a PNG, JPEG, WebP or GIF image by its server".into());
        }
        let most = self.most;
        let over = || format!("is larger than {most} bytes: send a smaller image");
        if reply.content_length().is_some_and(|bytes| bytes > most as u64) {
            return Err(over());
        }
        let mut bytes = Vec::new();
        while let Some(piece) = reply.chunk().await.map_err(|e| told(&e))? {
            if bytes.len() + piece.len() > most {
                return Err(over());
            }
            let takes = piece.len().div_ceil(3) * 4;
            let left = |room: usize| room.checked_sub(takes);
            if self.room.fetch_update(Ordering::AcqRel, Ordering::Acquire, left).is_err() {
                return Err(
                    "is too much beside the other images of the request: send fewer or smaller ones".into()
                );
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(format!("data:{kind};base64,{}", BASE64_STANDARD.encode(bytes)))
    }
}

/// What is said of a failed download: never its URL.
fn told(error: &reqwest::Error) -> String {
    let mut source: Option<&dyn Error> = Some(error);
    while let Some(inner) = source {
        if inner.is::<NotPublic>() {
            return format!("{CLOSED}; send the image as a data: URL");
        }
        source = inner.source();
    }
    let what = if error.is_connect() {
        "its server cannot be reached, or its certificate is not valid"
    } else {
        "its server did not answer in full"
    };
    format!("cannot be fetched: {what}; send the image as a data: URL")
}
