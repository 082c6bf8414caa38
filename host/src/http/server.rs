//! Sockets: listening, the bounds of one connection, stopping.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Extension;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use plugfold_engine::hooks::Hooks;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, Sleep};

use super::app::App;
use super::limits::seconds;
use super::routes::router;

/// How long running requests may go on after the server was told to stop.
const GRACE: Duration = Duration::from_secs(5);

/// A bound address at which nothing is served yet, so that a port in use is found before a model is loaded.
pub struct Server {
    listener: std::net::TcpListener,
}

/// The role of the server's threads, as observers are told it.
pub const ROLE: &str = "http";

/// The threads of the server; each tells observers that it has started.
///
/// # Errors
/// When the system gives no threads.
pub fn threads(hooks: &Hooks) -> io::Result<Runtime> {
    let hooks = hooks.clone();
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    threads.thread_name("http").on_thread_start(move || hooks.thread(ROLE)).enable_all().build()
}

impl Server {
    /// Binds the address. It may be served on other threads than it was bound on.
    ///
    /// # Errors
    /// When the host is unknown or the port is in use.
    pub async fn bind(host: &str, port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((host, port)).await?.into_std()?;
        Ok(Self { listener })
    }

    /// The bound address.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Accepts connections until `stop` is done, then lets running requests end for a moment.
    ///
    /// # Errors
    /// When the system does not let these threads watch the address.
    pub async fn run(self, app: Arc<App>, stop: impl Future<Output = ()>) -> io::Result<()> {
        let listener = TcpListener::from_std(self.listener)?;
        let slots = app.settings.limits.connections.max(1);
        let permits = Arc::new(Semaphore::new(slots));
        let accept = async {
            loop {
                let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
                match listener.accept().await {
                    Ok((stream, peer)) => {
                        let app = Arc::clone(&app);
                        tokio::spawn(async move {
                            connection(app, stream, peer).await;
                            drop(permit);
                        });
                    }
                    Err(error) => {
                        // Out of file descriptors, most likely: wait for connections to end.
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                }
            }
        };
        tokio::select! {
            () = accept => {}
            () = stop => {}
        }
        drop(listener);
        // The listener is closed; every permit back means that no connection is left.
        let all = u32::try_from(slots).unwrap_or(u32::MAX);
        let _ = tokio::time::timeout(GRACE, permits.acquire_many(all)).await;
        Ok(())
    }
}

async fn connection(app: Arc<App>, stream: TcpStream, peer: SocketAddr) {
    let limits = app.settings.limits.clone();
    let leaving_ends = app.settings.disconnect;
    let socket = socket2::SockRef::from(&stream);
    let _ = socket.set_tcp_nodelay(true);
    if let Err(error) = socket.set_send_buffer_size(limits.send_buffer) {
        tracing::debug!(%error, "the send buffer keeps its size");
    }
    let dropped = Arc::new(Notify::new());
    let service = TowerToHyperService::new(router(app).layer(Extension(Arc::clone(&dropped))));
    let serving = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(seconds(limits.header_s))
        // Without this, the end of what a client sends is the end of its connection, and with it of its request.
        .half_close(!leaving_ends)
        .max_buf_size(limits.header_bytes.max(8 << 10))
        .serve_connection(TokioIo::new(Bounded::new(stream, seconds(limits.write_s))), service);
    tokio::select! {
        result = serving => {
            if let Err(error) = result {
                tracing::debug!(%peer, %error, "connection ended");
            }
        }
        () = dropped.notified() => tracing::debug!(%peer, "connection dropped: its reader is too slow"),
    }
}

/// A socket whose writes fail when the peer takes nothing for a while.
struct Bounded {
    stream: TcpStream,
    patience: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Bounded {
    fn new(stream: TcpStream, patience: Duration) -> Self {
        Self { stream, patience, stalled: None }
    }

    fn watch<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stalled = None;
            return result;
        }
        let patience = self.patience;
        let timer =
            self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + patience)));
        match timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Bounded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Bounded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, data);
        self.watch(context, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, data);
        self.watch(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use plugfold_abi::points::{Observer, ObserverObject, interest};
    use plugfold_abi::{OpError, Text};

    use super::*;

    /// A role, and the name of the thread that was told it.
    type Told = (String, Option<String>);

    /// What was told.
    struct Roles(Arc<Mutex<Vec<Told>>>);

    impl Observer for Roles {
        fn interests(&self) -> Result<u32, OpError> {
            Ok(interest::THREAD)
        }
        fn thread(&self, role: Text<'_>) -> Result<(), OpError> {
            let name = std::thread::current().name().map(Into::into);
            self.0.lock().unwrap().push((role.get_str().into(), name));
            Ok(())
        }
    }

    #[test]
    fn every_thread_of_the_server_is_announced_on_itself() {
        let seen = Arc::<Mutex<Vec<Told>>>::default();
        let mut hooks = Hooks::default();
        hooks.add_object("watch", ObserverObject::new(Roles(seen.clone()))).unwrap();
        let runtime = threads(&hooks).unwrap();
        runtime.block_on(async {
            tokio::spawn(async {}).await.unwrap();
            // Threads for what blocks, too.
            tokio::task::spawn_blocking(|| assert_eq!(std::thread::current().name(), Some("http")))
                .await
                .unwrap();
        });
        drop(runtime);
        let seen = seen.lock().unwrap();
        assert!(
            seen.len() >= 2 && seen.iter().all(|s| *s == ("http".into(), Some("http".into()))),
            "{seen:?}"
        );
    }
}
