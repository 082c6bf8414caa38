//! How worlds end: on every rank, with one message that names the rank at fault.

use std::sync::mpsc;

use plugfold_abi::{Comm, OpError, Slice, SliceMut};

use super::super::{At, EndKind, Fault, SharedComm, World};
use super::{SOON, each, each_within, end_of, exchange};

/// Runs calls until the world ends; every rank must see one end of this kind, which tells of `rank`.
fn all_see(ranks: usize, kind: EndKind, rank: usize, run: impl Fn(&World) + Clone + Send + 'static) {
    let worlds = World::local(ranks).unwrap();
    let ends = each_within(SOON, worlds, move |world| {
        run(&world);
        let end = world.ended().expect("ended");
        assert_eq!(end_of(world.gather_to_all("later", b"")), end, "every later call says the same");
        end
    });
    for end in &ends {
        assert_eq!((end.kind, end.rank), (kind, rank), "{ends:?}");
        assert!(end.who.starts_with(&format!("rank {rank} of {ranks} (pid ")), "{end}");
    }
}

fn exchanges_until_the_end(world: &World) {
    while exchange(world, 40_000).is_ok() {}
}

fn plans_until_the_end(world: &World) {
    if world.is_lead() {
        while world.broadcast(&[1; 3000]).and_then(|()| world.agree_all("done", true)).is_ok() {}
    } else {
        while let Ok(Some(_)) = world.receive() {
            if world.agree_all("done", true).is_err() {
                break;
            }
        }
    }
}

#[test]
fn a_rank_that_vanishes_is_named_by_all_in_any_call() {
    for dying in 0..3 {
        for run in [exchanges_until_the_end, plans_until_the_end] {
            all_see(3, EndKind::Died, dying, move |world| {
                if world.rank() == dying {
                    world.inject(At::Exchange(5), Fault::Die);
                    world.inject(At::Control(5), Fault::Die);
                }
                run(world);
            });
        }
    }
}

#[test]
fn damaged_frames_are_found_and_named() {
    for rank in 0..3 {
        for run in [exchanges_until_the_end, plans_until_the_end] {
            all_see(3, EndKind::Damaged, rank, move |world| {
                if world.rank() == rank {
                    world.inject(At::Exchange(2), Fault::Corrupt);
                    world.inject(At::Control(3), Fault::Corrupt);
                }
                run(world);
            });
        }
    }
}

#[test]
fn a_frame_that_was_never_sent_ends_the_wait_for_it() {
    for run in [exchanges_until_the_end, plans_until_the_end] {
        let ends = each_within(SOON, World::local(2).unwrap(), move |world| {
            if world.rank() == 1 {
                world.inject(At::Exchange(2), Fault::Drop);
                world.inject(At::Control(3), Fault::Drop);
            }
            run(&world);
            world.ended().unwrap()
        });
        assert!(ends.iter().all(|end| end.kind == EndKind::OutOfStep), "{ends:?}");
        assert_eq!(ends[0], ends[1]);
    }
}

#[test]
fn a_rank_that_gives_up_tells_all_why() {
    all_see(3, EndKind::Failed, 2, |world| {
        if world.rank() == 2 {
            assert_eq!(
                world.fail("no memory for layer 7").to_string(),
                format!("{} gave up: no memory for layer 7", world.who(2))
            );
        } else if world.is_lead() {
            assert!(end_of(exchange(world, 10)).reason.contains("no memory for layer 7"));
        } else {
            assert!(end_of(world.receive()).reason.contains("no memory for layer 7"));
        }
    });
}

#[test]
fn ranks_out_of_step_name_both_ends() {
    type Call = fn(&World) -> String;
    let cases: [(Call, Call, [&str; 2]); 7] = [
        (
            |world| end_of(world.agree_all("one", true)).to_string(),
            |world| end_of(world.agree_all("two", true)).to_string(),
            ["rank 0 is in agreement `one`", "rank 1 in agreement `two`"],
        ),
        (
            |world| end_of(world.agree_all("one", true)).to_string(),
            |world| end_of(world.receive()).to_string(),
            ["rank 0 is in agreement `one`", "rank 1 in waiting for a message of rank 0"],
        ),
        (
            |world| {
                world.broadcast(b"plan").unwrap();
                end_of(exchange(world, 1)).to_string()
            },
            |world| end_of(world.agree_all("two", true)).to_string(),
            ["rank 0 is in a broadcast", "rank 1 in agreement `two`"],
        ),
        (
            |world| end_of(exchange(world, 8)).to_string(),
            |world| end_of(exchange(world, 9)).to_string(),
            ["exchange 0 (tag 7, 8 bytes)", "exchange 0 (tag 7, 9 bytes)"],
        ),
        (
            |world| end_of(world.comm().gather(1, &[0; 8], &mut [0; 16])).to_string(),
            |world| end_of(world.comm().gather(2, &[0; 8], &mut [0; 16])).to_string(),
            ["exchange 0 (tag 1, 8 bytes)", "exchange 0 (tag 2, 8 bytes)"],
        ),
        (
            |world| end_of(exchange(world, 8)).to_string(),
            |world| end_of(world.receive()).to_string(),
            ["rank 0 is in exchange 0 (tag 7, 8 bytes)", "rank 1 is in waiting for a message of rank 0"],
        ),
        (
            |world| end_of(world.agree_all("one", true)).to_string(),
            |world| end_of(exchange(world, 8)).to_string(),
            ["rank 0 is in agreement `one`", "rank 1 is in exchange 0 (tag 7, 8 bytes)"],
        ),
    ];
    for (lead, follower, parts) in cases {
        let texts = each_within(SOON, World::local(2).unwrap(), move |world| {
            if world.is_lead() { lead(&world) } else { follower(&world) }
        });
        for text in texts {
            assert!(text.starts_with("the ranks are out of step: "), "{text}");
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
    }
}

/// An exchange of two ranks as an operation makes it.
fn gather(comm: &dyn Comm, len: usize) -> Result<(), OpError> {
    let (mine, mut all) = (vec![0; len], vec![0; len * 2]);
    comm.all_gather(Slice::from(&mine[..]), SliceMut::from(&mut all[..]))
}

#[test]
fn marks_tell_swapped_exchanges_of_one_size_apart() {
    let errors = each(2, |world| {
        let comm = world.comm();
        comm.mark(if world.is_lead() { 3 } else { 4 });
        gather(&*comm, 8).unwrap_err().message
    });
    assert!(errors.iter().all(|text| text.contains("(tag 3, 8 bytes)") && text.contains("(tag 4, 8 bytes)")));
}

#[test]
fn a_goodbye_is_no_death_and_a_drop_is() {
    for (says_goodbye, kind) in [(true, EndKind::Left), (false, EndKind::Died)] {
        let ends = each_within(SOON, World::local(3).unwrap(), move |world| {
            if world.rank() == 1 {
                if says_goodbye {
                    world.goodbye();
                }
                return None;
            }
            Some(end_of(exchange(&world, 10)))
        });
        for end in ends.into_iter().flatten() {
            assert_eq!((end.kind, end.rank), (kind, 1), "{end}");
        }
    }
}

#[test]
fn an_idle_rank_0_is_woken_by_a_death_and_by_a_goodbye() {
    for (says_goodbye, kind) in [(true, EndKind::Left), (false, EndKind::Died)] {
        let mut worlds = World::local(2).unwrap();
        let (send, receive) = mpsc::channel();
        let late = send.clone();
        worlds[0].on_end(move |end| send.send(end.clone()).unwrap());
        assert_eq!(worlds[0].ended(), None);
        let follower = worlds.pop().unwrap();
        if says_goodbye {
            follower.goodbye();
        }
        drop(follower);
        let end = receive.recv_timeout(SOON).unwrap();
        assert_eq!((end.kind, end.rank), (kind, 1));
        assert_eq!(worlds[0].ended(), Some(end.clone()));
        worlds[0].on_end(move |end| late.send(end.clone()).unwrap());
        assert_eq!(receive.recv_timeout(SOON).unwrap(), end, "a hook that comes late runs at once");
    }
}

#[test]
fn threads_in_one_group_end_each_others_waits() {
    let pair = |lens: [Option<usize>; 2]| {
        let threads = SharedComm::group(2).into_iter().zip(lens).map(|(comm, len)| {
            std::thread::spawn(move || len.map(|len| gather(&comm, len).unwrap_err().message))
        });
        threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    };
    let gone = pair([Some(8), None]);
    assert_eq!(gone[0].as_deref(), Some("rank 1 of 2 has left its group"));
    for text in pair([Some(8), Some(9)]) {
        let text = text.unwrap();
        assert!(text.contains('8') && text.contains('9') && text.contains("exchange 0"), "{text}");
    }
}
