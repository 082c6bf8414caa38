//! How worlds do not come to be.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::super::{Lead, PROTOCOL, RankError, Secret, World};
use super::HANG;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

fn never(_: SocketAddr) {}

/// Starts rank 0 of `ranks` and the followers given as (rank, ranks, secret); their results, rank 0's first.
fn start(
    ranks: usize,
    timeout: Duration,
    followers: &[(usize, usize, &str)],
    beside: impl FnOnce(SocketAddr),
) -> Vec<Result<World, String>> {
    let lead = Lead::bind(ANY).unwrap();
    let addr = lead.addr();
    std::thread::scope(|scope| {
        let secret = Secret::new("right");
        let lead = scope.spawn(move || lead.world(ranks, &secret, timeout, &mut || Ok(())));
        beside(addr);
        let join = |&(rank, ranks, secret): &(usize, usize, &str)| {
            let secret = Secret::new(secret);
            scope.spawn(move || World::join(addr, rank, ranks, &secret, timeout))
        };
        let threads: Vec<_> = std::iter::once(lead).chain(followers.iter().map(join)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().map_err(|error| error.to_string())).collect()
    })
}

fn errors(results: Vec<Result<World, String>>) -> Vec<String> {
    results.into_iter().map(|result| result.err().unwrap()).collect()
}

#[test]
fn a_wrong_secret_is_turned_away_and_named() {
    let errors = errors(start(2, Duration::from_millis(700), &[(1, 2, "wrong")], never));
    let reason = "rank 1 of 2 (pid ";
    assert!(errors[0].starts_with("rank 1 of 2 did not join at 127.0.0.1:"), "{}", errors[0]);
    for error in &errors {
        assert!(error.contains(reason) && error.contains("another secret than rank 0"), "{error}");
        assert!(!error.contains("wrong"), "a secret must not be shown: {error}");
    }
}

#[test]
fn wrong_numbers_are_named_on_both_sides() {
    let two_of_three = "was started for 3 ranks, rank 0 for 2: give all ranks the same number";
    for (follower, part) in [((1, 3, "right"), two_of_three), ((2, 3, "right"), two_of_three)] {
        for error in errors(start(2, HANG, &[follower], never)) {
            assert!(error.contains(part) && error.contains(&format!("rank {} ", follower.0)), "{error}");
        }
    }
    for (rank, ranks) in [(0, 2), (2, 2), (5, 2)] {
        let error = World::join(ANY, rank, ranks, &Secret::new("x"), HANG).err().unwrap();
        assert!(matches!(error, RankError::Start(_)), "{error}");
    }
    assert!(World::lead(ANY, 0, &Secret::new("x"), HANG).is_err());
    assert_eq!(World::lead(ANY, 1, &Secret::new("x"), HANG).unwrap().ranks(), 1);
}

#[test]
fn one_rank_twice_ends_the_start_for_all() {
    let errors = errors(start(3, HANG, &[(1, 3, "right"), (1, 3, "right")], never));
    for error in errors {
        assert!(error.contains("two processes say they are rank 1: rank 1 of 3 (pid "), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let errors = errors(start(4, Duration::from_millis(400), &[(2, 4, "right")], never));
    for error in errors {
        assert!(error.contains("ranks 1, 3 of 4 did not join at 127.0.0.1:"), "{error}");
    }
}

#[test]
fn a_port_in_use_is_named() {
    let first = Lead::bind(ANY).unwrap();
    let error = Lead::bind(first.addr()).unwrap_err().to_string();
    assert!(error.contains(&first.addr().to_string()) && error.contains("in use"), "{error}");
}

#[test]
fn nobody_at_the_address_is_named() {
    let addr = Lead::bind(ANY).unwrap().addr();
    let error = World::join(addr, 1, 2, &Secret::new("x"), Duration::from_millis(200)).err().unwrap();
    let text = error.to_string();
    assert!(text.contains(&format!("rank 1 of 2 cannot reach rank 0 at {addr} within 0.2 s")), "{text}");
}

#[test]
fn strangers_do_not_disturb_the_start() {
    let long = vec![b'x'; 1 << 20];
    let hello = format!("{{\"plugfold_ranks\":{PROTOCOL},\"note\":{{\"rank\":-1}}}}\n");
    let cases: [(&[u8], &str); 5] = [
        (b"GET / HTTP/1.1\r\n", "does not speak the protocol"),
        (b"{}\n", "does not speak the protocol"),
        (b"\xff\xfe\0\n", "does not speak the protocol"),
        (hello.as_bytes(), "greeting cannot be read"),
        (&long, "over 65536 bytes"),
    ];
    let strangers = |addr| {
        let silent = TcpStream::connect(addr).unwrap();
        for (bytes, reason) in cases {
            let mut stream = TcpStream::connect(addr).unwrap();
            let mut answer = String::new();
            // A reset may overtake the answer to what was not read to its end.
            if stream.write_all(bytes).and_then(|()| stream.read_to_string(&mut answer)).is_ok() {
                assert!(answer.contains(reason), "{reason}: {answer}");
            }
        }
        drop(silent);
    };
    let results = start(2, HANG, &[(1, 2, "right")], strangers);
    let errors: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert_eq!(errors, Vec::<&String>::new());
}

#[test]
fn another_protocol_version_is_named_on_both_sides() {
    let other = |addr| {
        let mut stream = TcpStream::connect(addr).unwrap();
        let hello = format!("{{\"plugfold_ranks\":{},\"note\":\"of another kind\"}}\n", PROTOCOL + 1);
        stream.write_all(hello.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let text = String::from_utf8_lossy(&answer);
        assert!(text.contains(&format!("version {} of the ranks' protocol, not {PROTOCOL}", PROTOCOL + 1)));
    };
    let error = errors(start(2, Duration::from_millis(300), &[], other)).remove(0);
    assert!(error.contains(&format!("version {}", PROTOCOL + 1)) && error.contains("same build"), "{error}");
}

#[test]
fn a_rank_that_dies_while_others_are_awaited_ends_the_start() {
    let lead = Lead::bind(ANY).unwrap();
    let addr = lead.addr();
    let begun = Instant::now();
    // Joins with a short patience and is gone again.
    let follower =
        std::thread::spawn(move || World::join(addr, 1, 3, &Secret::new("s"), Duration::from_millis(300)));
    let error = lead.world(3, &Secret::new("s"), HANG, &mut || Ok(())).err().unwrap().to_string();
    assert!(error.contains("rank 1 of 3 (pid ") && error.contains("went away"), "{error}");
    assert!(begun.elapsed() < HANG && follower.join().unwrap().is_err());
}

#[test]
fn an_error_while_waiting_ends_the_start() {
    let lead = Lead::bind(ANY).unwrap();
    let mut alive = || Err(RankError::Start("the child has exited".to_owned()));
    let error = lead.world(2, &Secret::new("s"), HANG, &mut alive).err().unwrap();
    assert_eq!(error.to_string(), "the child has exited");
}
