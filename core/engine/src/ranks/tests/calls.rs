//! Calls that succeed.

use std::sync::Arc;
use std::time::Duration;

use plugfold_abi::{Comm, Slice, SliceMut};
use proptest::prelude::*;

use super::super::{At, Fault, RankError, SILENCE, SettingsDigest, SharedComm, World};
use super::{each, exchange};

#[test]
fn every_call_gives_every_rank_the_same() {
    for ranks in 1..=4 {
        let results = each(ranks, move |world| {
            let rank = world.rank();
            let message = if world.is_lead() {
                world.broadcast(b"plan").unwrap();
                b"plan".to_vec()
            } else {
                world.receive().unwrap().unwrap()
            };
            let parts = world.gather_to_all("parts", &vec![rank as u8; rank]).unwrap();
            let shared = world.share("one", ranks - 1, &[rank as u8]).unwrap();
            let numbers = (
                world.agree_min("least", 10 + rank as u64).unwrap(),
                world.agree_max("most", 10 + rank as u64).unwrap(),
                world.agree_all("yes", true).unwrap(),
                world.agree_all("no", rank != 0).unwrap(),
            );
            exchange(&world, 3).unwrap();
            world.goodbye();
            (message, parts, shared, numbers)
        });
        let parts = (0..ranks).map(|rank| vec![rank as u8; rank]).collect();
        let last = ranks as u64 - 1;
        let expected = (b"plan".to_vec(), parts, vec![last as u8], (10, 10 + last, true, false));
        assert_eq!(results, vec![expected; ranks]);
    }
}

#[test]
fn parts_far_over_the_sockets_buffers_do_not_block() {
    const LARGE: usize = 20 << 20;
    each(3, |world| {
        exchange(&world, LARGE).unwrap();
        let parts = world.gather_to_all("large", &vec![world.rank() as u8; LARGE]).unwrap();
        assert!(parts.iter().enumerate().all(|(rank, part)| *part == vec![rank as u8; LARGE]));
        if world.is_lead() {
            world.broadcast(&vec![9; LARGE]).unwrap();
        } else {
            assert_eq!(world.receive().unwrap().unwrap(), vec![9; LARGE]);
        }
        world.goodbye();
    });
}

#[test]
fn a_computation_longer_than_the_watchs_patience_is_no_death() {
    let patience = SILENCE + Duration::from_millis(500);
    each(2, move |world| {
        if world.rank() == 1 {
            world.inject(At::Exchange(0), Fault::Delay(patience));
        }
        exchange(&world, 100).unwrap();
        world.goodbye();
    });
}

#[test]
fn messages_sent_before_a_goodbye_are_read() {
    let read = each(3, |world| {
        let mut messages = Vec::new();
        if world.is_lead() {
            (0..50_u8).for_each(|i| world.broadcast(&vec![i; 1000]).unwrap());
            world.goodbye();
        } else {
            while let Some(message) = world.receive().unwrap() {
                messages.push(message);
            }
        }
        messages
    });
    let sent: Vec<_> = (0..50_u8).map(|i| vec![i; 1000]).collect();
    assert_eq!(read, [vec![], sent.clone(), sent]);
}

#[test]
fn differing_settings_are_listed_alike_on_every_rank() {
    let errors = each(3, |world| {
        let mut digest = SettingsDigest::default();
        digest.add("build", "abc");
        digest.add("plugin 1", if world.rank() == 1 { "moe 2.0" } else { "moe 1.0" });
        if world.rank() == 2 {
            digest.add("knob x", &3);
        }
        let error = digest.compare(&world).unwrap_err();
        let second = SettingsDigest::default().compare(&world);
        world.goodbye();
        assert!(second.is_ok(), "a difference does not end the world: {second:?}");
        error.to_string()
    });
    let expected = "the ranks differ in 2 settings: \
        plugin 1: ranks 0, 2 have `moe 1.0`, rank 1 has `moe 2.0`; \
        knob x: ranks 0, 1 have no such line, rank 2 has `3`; \
        start every rank with the same build, checkpoint, plugins and settings";
    assert_eq!(errors, [expected; 3]);
}

#[test]
fn a_call_of_the_wrong_rank_or_size_sends_nothing() {
    each(2, |world| {
        let wrong = if world.is_lead() { world.receive().map(|_| ()) } else { world.broadcast(b"x") };
        assert!(matches!(wrong, Err(RankError::Call(_))), "{wrong:?}");
        let comm = world.comm();
        let short = comm.gather(0, &[0; 4], &mut [0; 7]);
        assert!(matches!(short, Err(RankError::Call(_))), "{short:?}");
        assert!(world.share("x", 2, b"").is_err());
        exchange(&world, 5).unwrap();
        world.goodbye();
    });
}

#[test]
fn histories_are_equal_where_exchanges_are() {
    let histories = each(2, |world| {
        exchange(&world, 8).unwrap();
        let one = world.comm().history();
        exchange(&world, 16).unwrap();
        let two = world.comm().history();
        world.goodbye();
        (one, two)
    });
    assert_eq!(histories[0], histories[1]);
    assert_eq!((histories[0].0.0, histories[0].1.0), (1, 2));
    assert_ne!(histories[0].0.1, histories[0].1.1);
}

/// Runs a list of exchange sizes on one rank's collectives.
fn run(comm: &dyn Comm, sizes: &[usize]) -> Vec<Vec<u8>> {
    let gather = |(seed, len): (usize, &usize)| {
        let (rank, ranks) = (comm.rank().unwrap() as usize, comm.ranks().unwrap() as usize);
        let mine: Vec<u8> = (0..*len).map(|i| (i * 31 + seed * 7 + rank) as u8).collect();
        let mut all = vec![0; len * ranks];
        comm.all_gather(Slice::from(&mine[..]), SliceMut::from(&mut all[..])).unwrap();
        all
    };
    sizes.iter().enumerate().map(gather).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn any_sizes_on_any_ranks_give_the_parts_in_rank_order(
        ranks in 2usize..5,
        sizes in prop::collection::vec(
            prop_oneof![0usize..64, 0usize..20_000, 60_000usize..400_000], 1..12),
    ) {
        let expected: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(seed, len)| {
            (0..ranks * len).map(|at| (at % len * 31 + seed * 7 + at / len) as u8).collect()
        }).collect();
        let sizes = Arc::new(sizes);
        let over_tcp = each(ranks, { let sizes = Arc::clone(&sizes); move |world: World| {
            let all = run(&*world.comm(), &sizes);
            world.goodbye();
            all
        }});
        let shared = std::thread::scope(|scope| {
            let threads: Vec<_> = SharedComm::group(ranks).into_iter()
                .map(|comm| { let sizes = &sizes; scope.spawn(move || run(&comm, sizes)) }).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        prop_assert!(over_tcp.iter().all(|all| *all == expected));
        prop_assert!(shared.iter().all(|all| *all == expected));
    }
}
