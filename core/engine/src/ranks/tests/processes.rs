//! Ranks as processes: this test program starts itself, with a switch in the environment.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::super::{Children, EndKind, Lead, RankError, SECRET_ENV, Secret, World, spawn_local};
use super::{HANG, SOON, end_of, exchange};

/// What the child does; not set in the test itself.
const PART: &str = "PLUGFOLD_TEST_RANK";

/// In a child: plays its part and exits. `part`: address, rank, ranks, call.
fn play() {
    let Ok(part) = std::env::var(PART) else { return };
    let mut words = part.split(' ');
    let mut next = || words.next().unwrap();
    let (addr, rank, ranks) = (next().parse().unwrap(), next().parse().unwrap(), next().parse().unwrap());
    if next() == "broken" {
        eprintln!("first line");
        eprintln!("cannot open the checkpoint");
        std::process::exit(7);
    }
    let secret = Secret::new(std::env::var(SECRET_ENV).unwrap());
    let world = World::join(addr, rank, ranks, &secret, HANG).unwrap();
    let ended = loop {
        match world.receive() {
            Ok(Some(_)) => {}
            Ok(None) => std::process::exit(0),
            Err(error) => break error,
        }
    };
    eprintln!("{ended}");
    std::process::exit(3);
}

/// Starts a world whose followers run `play` in the test of this name.
fn world(test: &str, ranks: usize, part: &'static str) -> (Result<World, RankError>, Children) {
    let lead = Lead::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let (addr, secret) = (lead.addr(), Secret::random().unwrap());
    let name = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
    let args = |rank: usize| -> Vec<OsString> {
        // Only `env` can hand each child its own variable.
        let part = format!("{PART}={addr} {rank} {ranks} {part}");
        let exe = std::env::current_exe().unwrap();
        vec![part.into(), exe.into(), "--exact".into(), name.clone().into(), "--nocapture".into()]
    };
    let mut children = spawn_local("env".as_ref(), ranks, &secret, args).unwrap();
    let world = lead.world(ranks, &secret, HANG, &mut || children.check());
    (world, children)
}

fn send(children: &Children, rank: usize, signal: Signal) {
    kill_process(Pid::from_raw(children.pids()[rank - 1] as i32).unwrap(), signal).unwrap();
}

/// Waits for the rank's process to end, and tells how it did.
fn last_words(children: &mut Children, rank: usize) -> String {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(ended) = children.ended(rank) {
            return ended.to_string();
        }
        assert!(Instant::now() < deadline, "rank {rank} does not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_killed_rank_is_named_and_the_others_stop() {
    play();
    let (world, mut children) = world("a_killed_rank_is_named_and_the_others_stop", 3, "run");
    let world = world.unwrap();
    let begun = Instant::now();
    send(&children, 1, Signal::KILL);
    let end = end_of(exchange(&world, 10));
    assert_eq!((end.kind, end.rank), (EndKind::Died, 1), "{end}");
    assert!(end.who.contains(&format!("(pid {}, 127.0.0.1:", children.pids()[0])), "{end}");
    assert!(begun.elapsed() < SOON);
    // Rank 2 is idle in its receive; it stops with the same words.
    let text = last_words(&mut children, 2);
    assert!(text.contains("exit status: 3; its last words: rank 1 of 3 (pid "), "{text}");
    assert!(text.contains("stopped answering"), "{text}");
    assert!(begun.elapsed() < SOON);
    let text = children.check().unwrap_err().to_string();
    assert!(text.starts_with("rank 1 of 3 (pid ") && text.contains("signal: 9"), "{text}");
}

#[test]
fn a_stopped_rank_is_named() {
    play();
    let (world, mut children) = world("a_stopped_rank_is_named", 3, "run");
    let world = world.unwrap();
    let begun = Instant::now();
    send(&children, 2, Signal::STOP);
    let end = end_of(exchange(&world, 10));
    assert_eq!((end.kind, end.rank), (EndKind::Died, 2), "{end}");
    assert!(end.reason.contains("silent for 3.5 s"), "{end}");
    let text = last_words(&mut children, 1);
    assert!(text.contains("last words: rank 2 of 3 (pid "), "{text}");
    assert!(begun.elapsed() < SOON);
    // Woken, it learns that the others have gone on without it.
    send(&children, 2, Signal::CONT);
    let text = last_words(&mut children, 2);
    assert!(text.contains("last words: rank 2 of 3 (pid "), "{text}");
}

#[test]
fn followers_stop_when_rank_0_is_gone() {
    play();
    let (world, mut children) = world("followers_stop_when_rank_0_is_gone", 2, "run");
    drop(world.unwrap());
    let text = last_words(&mut children, 1);
    assert!(text.contains("last words: rank 0 of 2 (pid "), "{text}");
}

#[test]
fn a_goodbye_ends_all_processes_with_success() {
    play();
    let (world, children) = world("a_goodbye_ends_all_processes_with_success", 3, "run");
    let world = world.unwrap();
    world.broadcast(b"plan").unwrap();
    world.goodbye();
    drop(world);
    assert!(children.finish(SOON));
}

#[test]
fn a_child_that_fails_early_is_reported_with_its_last_words() {
    play();
    let (world, _children) = world("a_child_that_fails_early_is_reported_with_its_last_words", 2, "broken");
    let error = world.err().unwrap().to_string();
    assert!(error.starts_with("rank 1 of 2 (pid ") && error.contains("exit status: 7"), "{error}");
    assert!(error.ends_with("its last words: cannot open the checkpoint"), "{error}");
}

#[test]
fn dropped_children_are_killed() {
    play();
    let (world, children) = world("dropped_children_are_killed", 2, "run");
    let pid = Pid::from_raw(children.pids()[0] as i32).unwrap();
    assert!(test_kill_process(pid).is_ok());
    let (done, waited) = mpsc::channel();
    std::thread::spawn(move || {
        drop(children);
        done.send(()).unwrap();
    });
    waited.recv_timeout(SOON).unwrap();
    assert!(test_kill_process(pid).is_err(), "the process is gone and was waited for");
    drop(world);
}
