//! A watch over hooks: one that does not return is named and ends the engine, instead of keeping everybody waiting.
//!
//! Nothing can stop a call from outside, so the rule is simple: a hook that has not returned for half the limit is named in
//! the log; at the limit the engine ends on all ranks with the hook's name as the reason. While a rank waits for others in
//! an exchange, its own hooks have twice the time: the rank whose hook hangs speaks first. Hooks of one request's chains are
//! only named.
//!
//! A call costs two additions (see [`Calls`]); the clock is this thread's.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::hooks::{Calls, Hooks};

/// Shortest and longest pause between two looks.
const LOOKS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// Hooks that run for one request on threads of their own: one that hangs keeps that request waiting and nobody else, so
/// it is only named.
const OF_REQUESTS: [&str; 4] = ["request", "prompt", "stream", "reply"];

/// One hook under watch.
struct Seen {
    owner: Arc<str>,
    kind: &'static str,
    calls: Arc<Calls>,
    /// Calls that had ended when one was first seen running, and since when.
    since: Option<(u64, Instant)>,
    warned: bool,
}

/// What a hook that hangs is reported with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hung {
    /// Its plugin.
    pub owner: String,
    /// Its kind, as the interface is called.
    pub kind: &'static str,
    /// Seconds without a return.
    pub seconds: u64,
}

impl std::fmt::Display for Hung {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Hung { owner, kind, seconds } = self;
        write!(f, "plugin {owner}: its hook of kind `{kind}` has not returned for {seconds} s")
    }
}

/// The thread that watches; it ends when this is dropped.
pub struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches all hooks. `waits`: whether this rank waits for others. `hung` is told at most once.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        hooks: &Hooks,
        limit: Duration,
        waits: impl Fn() -> bool + Send + 'static,
        hung: impl FnOnce(Hung) + Send + 'static,
    ) -> std::io::Result<Self> {
        let all: Vec<Seen> = hooks
            .calls()
            .into_iter()
            .map(|(owner, kind, calls)| Seen { owner, kind, calls, since: None, warned: false })
            .collect();
        if all.is_empty() || limit.is_zero() {
            return Ok(Self { stop: None, thread: None });
        }
        let (stop, stopped) = channel();
        let run = move || {
            let mut all = all;
            let pause = (limit / 16).clamp(LOOKS.0, LOOKS.1);
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(pause) {
                let limit = if waits() { limit * 2 } else { limit };
                if let Some(found) = look(&mut all, limit, Instant::now()) {
                    return hung(found);
                }
            }
        };
        let thread = std::thread::Builder::new().name("plugfold-watchdog".into()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

/// Looks at every hook; gives the one that has hung for the limit. Of hooks within hooks, the innermost began last.
fn look(all: &mut [Seen], limit: Duration, now: Instant) -> Option<Hung> {
    let mut found: Option<(Instant, Hung)> = None;
    for seen in all {
        let Some(ended) = seen.calls.running() else {
            (seen.since, seen.warned) = (None, false);
            continue;
        };
        let since = match seen.since {
            Some((then, since)) if then == ended => since,
            _ => {
                (seen.since, seen.warned) = (Some((ended, now)), false);
                continue;
            }
        };
        let waited = now.duration_since(since);
        let hung = Hung { owner: seen.owner.to_string(), kind: seen.kind, seconds: waited.as_secs() };
        let ends = !OF_REQUESTS.contains(&seen.kind);
        if waited >= limit / 2 && !seen.warned {
            seen.warned = true;
            if ends {
                tracing::warn!("{hung}; at {:.1} s the engine ends", limit.as_secs_f64());
            } else {
                tracing::warn!("{hung}; its request waits");
            }
        }
        if ends && waited >= limit && found.as_ref().is_none_or(|(first, _)| since >= *first) {
            found = Some((since, hung));
        }
    }
    found.map(|(_, hung)| hung)
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        let here = std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != here) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(kinds: &[&'static str]) -> Vec<Seen> {
        let one = |kind: &&'static str| Seen {
            owner: "p".into(),
            kind,
            calls: Arc::default(),
            since: None,
            warned: false,
        };
        kinds.iter().map(one).collect()
    }

    #[test]
    fn what_keeps_one_request_waiting_ends_nothing() {
        let mut all = seen(&["reply"]);
        let calls = all[0].calls.clone();
        let (start, limit) = (Instant::now(), Duration::from_secs(10));
        let _busy = calls.enter();
        assert_eq!(look(&mut all, limit, start), None);
        assert_eq!(look(&mut all, limit, start + Duration::from_secs(60)), None);
        assert!(all[0].warned);
    }

    #[test]
    fn only_one_call_that_lasts_counts() {
        let mut all = seen(&["spans", "field"]);
        let (spans, field) = (all[0].calls.clone(), all[1].calls.clone());
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let limit = Duration::from_secs(10);
        assert_eq!(look(&mut all, limit, at(0)), None);
        // Many short calls are no long one, even if one is running at every look.
        for s in 0..60 {
            let busy = spans.enter();
            assert_eq!(look(&mut all, limit, at(s)), None);
            drop(busy);
        }
        let outer = spans.enter();
        assert_eq!(look(&mut all, limit, at(100)), None);
        let inner = field.enter();
        assert_eq!(look(&mut all, limit, at(101)), None);
        assert_eq!(look(&mut all, limit, at(109)), None);
        let hung = look(&mut all, limit, at(110)).unwrap();
        assert_eq!((hung.kind, hung.seconds), ("spans", 10), "the inner one has a second left");
        let hung = look(&mut all, limit, at(111)).unwrap();
        assert_eq!(hung.kind, "field", "the innermost is the one that hangs");
        assert_eq!(hung.to_string(), "plugin p: its hook of kind `field` has not returned for 10 s");
        drop(inner);
        drop(outer);
        assert_eq!(look(&mut all, limit, at(200)), None);
    }

    #[test]
    fn who_waits_for_others_has_twice_the_time() {
        struct Idle;
        impl plugfold_abi::points::Planner for Idle {}
        let mut hooks = Hooks::default();
        hooks.add_object("p", plugfold_abi::points::PlannerObject::new(Idle)).unwrap();
        let busy = hooks.planners[0].calls.clone();
        let _busy = busy.enter();
        let (told, found) = channel();
        let limit = Duration::from_millis(40);
        let began = Instant::now();
        let dog =
            Watchdog::start(&hooks, limit, || true, move |hung| told.send(hung).unwrap_or_default()).unwrap();
        let hung = found.recv().unwrap();
        assert!(began.elapsed() >= 2 * limit);
        assert_eq!((hung.owner.as_str(), hung.kind), ("p", "planner"));
        drop(dog);
    }
}
