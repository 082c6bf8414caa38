//! Ranks on emulated devices exchange over an emulated NCCL: the same bits as over sockets, step by step and recorded, and what goes
//! wrong ends all ranks in time, by name.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use plugfold_abi::points::{
    Control, ControlObject, DeviceAccess, DeviceAccessObject, Mode, Transport, TransportObject,
};
use plugfold_abi::{
    Below as _, BelowObject, Bits, Call, Claim, Comm, CommObject, Granted, List, Maybe, OpError, Phase, Plan,
    Provider, ProviderObject, Query, Slice, SliceMut, Text, TextBuf,
};
use plugfold_base_nccl::transport;
use plugfold_cuda::CudaDevice;
use plugfold_emulated::HostMachine;
use plugfold_emulated_nccl::Library;
use plugfold_engine::core::{Core, CoreOptions, SeqRows, Want};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::Options;
use plugfold_engine::ranks::World;
use plugfold_engine::service::{EngineError, Sampling, Service as _};
use plugfold_engine::split::Split;
use plugfold_engine::transport::open_any;
use plugfold_kernels::device::Device;
use plugfold_tests::goldens::{Goldens, relative, tiny_dir, within};
use plugfold_tests::model::{emulated, engine, ids, on_ranks_with, prefill, reply, request};

const VOCAB: u32 = 480;
/// Joining takes no time here.
const JOIN: Duration = Duration::from_secs(20);
/// What the issue of a rank that is gone may take on the others.
const SOON: Duration = Duration::from_secs(5);

/// The hooks of a rank with this NCCL.
fn hooks(library: &Library, recorded: bool) -> Hooks {
    let mut all = Hooks::default();
    all.add_object("base-nccl", transport(library.path().into(), JOIN)).unwrap();
    if recorded {
        for offer in plugfold_base_graph::hooks(true, 8, 64, None) {
            all.add("base-graph", &[], offer).unwrap();
        }
    }
    all
}

fn options(nccl: bool) -> Options {
    let transport = nccl.then(|| "nccl".to_owned());
    Options { context: Some(128), prefill_rows: 32, transport, ..Options::new(tiny_dir()) }
}

fn core_options(library: &Library, recorded: bool) -> CoreOptions {
    CoreOptions {
        hooks: Arc::new(hooks(library, recorded)),
        device: Some(emulated(false)),
        executor: recorded.then(|| "graph".to_owned()),
        slots: 2,
        context: Some(128),
        ..CoreOptions::default()
    }
}

/// How ranks exchange.
#[derive(Clone, Copy, PartialEq)]
enum Over {
    /// Sockets, on the host: what every device and transport has to equal.
    Sockets,
    /// NCCL, on devices of their own.
    Nccl,
    /// The same, recorded.
    Recorded,
}

/// Runs something on all ranks of the tiny model.
fn cores<T: Send>(
    ranks: usize,
    library: &Library,
    over: Over,
    run: impl Fn(&mut Core) -> T + Sync,
) -> Vec<T> {
    let done = Barrier::new(ranks);
    let one = |world: World| {
        let mut options = core_options(library, over == Over::Recorded);
        if over == Over::Sockets {
            options.device = None;
        }
        let name = (over != Over::Sockets).then_some("nccl");
        let comm = open_any(name, &options.hooks, &world, options.device.as_deref()).unwrap();
        let split = Split { rank: world.rank(), ranks };
        let mut core = Core::load(&tiny_dir(), &options, split, Some(comm)).unwrap();
        let out = run(&mut core);
        done.wait();
        world.goodbye();
        out
    };
    thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> =
            World::local(ranks).unwrap().into_iter().map(|w| scope.spawn(move || one(w))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Bits of logits and states after a prompt and some windows, and how the windows ran.
fn script(core: &mut Core) -> (Vec<Vec<u32>>, Vec<Mode>) {
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
    let mut all = vec![bits(&prefill(core, 0, &ids(1, 3, VOCAB), 3))];
    let mut modes = Vec::new();
    for number in 0..5 {
        let tokens = ids(number + 9, 1, VOCAB);
        let seqs = [SeqRows { slot: 0, tokens: &tokens, want: Want::All, embeds: &[] }];
        let f = core.forward(Phase::Window, &seqs, None, false).unwrap();
        assert_eq!(f.failure, None);
        all.push(bits(core.output(&f, "logits").unwrap()));
        modes.push(f.mode);
        core.commit(&f, &[1]).unwrap();
        core.recycle(f);
    }
    all.extend(core.image(0).into_iter().map(|(_, bits)| bits));
    (all, modes)
}

#[test]
fn bits_over_nccl_are_those_of_sockets_step_by_step_and_recorded() {
    let library = Library::default();
    let sockets = cores(2, &library, Over::Sockets, script);
    assert_eq!(library.exchanges(), 0, "nothing was exchanged by NCCL");
    let eager = cores(2, &library, Over::Nccl, script);
    let made = library.exchanges();
    assert!(made > 20, "{made} exchanges");
    let recorded = cores(2, &library, Over::Recorded, script);
    for rank in 0..2 {
        assert!(eager[rank].0 == sockets[rank].0, "rank {rank} differs from what sockets give");
        assert!(recorded[rank].0 == sockets[rank].0, "rank {rank} differs where it was recorded");
        let replays = recorded[rank].1.iter().filter(|m| **m == Mode::Replay).count();
        assert!(replays >= 2, "{:?}", recorded[rank].1);
    }
    assert_eq!(
        library.exchanges(),
        2 * made,
        "a recorded forward makes the exchanges of one that runs step by step"
    );
    assert_eq!(library.open(), 0, "every communicator is gone");
}

#[test]
fn logits_are_the_goldens_on_one_to_four_ranks() {
    let goldens = Goldens::tiny();
    let library = Library::default();
    // One row goes as it comes, several are put in order.
    for (ranks, text) in [(1, "text.1"), (2, "text.5"), (3, "text.1"), (4, "text.1")] {
        let ids = goldens.ids(&format!("{text}.input_ids"));
        let before = library.exchanges();
        on_ranks_with(
            &options(true),
            ranks,
            |_| core_options(&library, false),
            |rank| {
                let got = rank.trace(&ids, false).unwrap();
                let golden = goldens.f32(&format!("{text}.logits"));
                within(&format!("{text} on {ranks} ranks"), &got.logits, &golden, 1e-4);
            },
        );
        assert_eq!(library.exchanges() > before, ranks > 1, "on {ranks} ranks");
    }
}

#[test]
fn parts_that_are_not_their_ranks_are_found() {
    let goldens = Goldens::tiny();
    let library = Library::default();
    // The exchanges that are tried at the start come right; later ones give two ranks the same part.
    library.fault("same", 0, 2);
    let ids = goldens.ids("text.1.input_ids");
    let wrong = on_ranks_with(
        &options(true),
        2,
        |_| core_options(&library, false),
        |rank| {
            let got = rank.trace(&ids, false).unwrap();
            relative(&got.logits, &goldens.f32("text.1.logits"))
        },
    );
    assert!(wrong > 1e-2, "{wrong}");
    // Parts in another order round otherwise.
    let prompt = |core: &mut Core| {
        let bits = |values: Vec<f32>| values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
        bits(prefill(core, 0, &self::ids(1, 2, VOCAB), 2))
    };
    let library = Library::default();
    let sockets = cores(3, &library, Over::Sockets, prompt);
    assert!(cores(3, &library, Over::Nccl, prompt) == sockets, "unequal shares");
    library.fault("swap", 0, 2);
    assert!(cores(3, &library, Over::Nccl, prompt) != sockets);
}

/// A step of the tiny model that fails where the window has a token.
struct Planted(bool);

impl Provider for Planted {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok("moe.combine".into())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::of("ref"))))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, below: &BelowObject) -> Result<(), OpError> {
        if self.0 && call.round.tokens.contains(&481) {
            return Err(OpError::new("this is planted"));
        }
        below.run(call)
    }
}

/// A window of one row that runs for the third time is recorded.
const RECORDED_AT: usize = 2;

#[test]
fn a_step_that_fails_while_it_is_recorded_on_one_rank_leaves_the_others_in_step() {
    let library = Library::default();
    let done = Barrier::new(2);
    let one = |world: World| {
        let mut hooks = hooks(&library, true);
        hooks.add_object("planted", ProviderObject::new(Planted(world.rank() == 1))).unwrap();
        let options = CoreOptions { hooks: Arc::new(hooks), ..core_options(&library, true) };
        let comm = open_any(Some("nccl"), &options.hooks, &world, options.device.as_deref()).unwrap();
        let split = Split { rank: world.rank(), ranks: 2 };
        let mut core = Core::load(&tiny_dir(), &options, split, Some(comm)).unwrap();
        prefill(&mut core, 0, &ids(1, 2, VOCAB), 2);
        let mut failed = Vec::new();
        for turn in 0..4 {
            let token = if turn == RECORDED_AT { 481 } else { 7 };
            let seqs = [SeqRows { slot: 0, tokens: &[token], want: Want::All, embeds: &[] }];
            let f = core.forward(Phase::Window, &seqs, None, false).unwrap();
            assert!(f.failure.as_ref().is_none_or(|f| !f.exchange), "{:?}", f.failure);
            failed.extend(f.failure.as_ref().map(|f| (turn, f.to_string())));
            if turn != RECORDED_AT {
                core.commit(&f, &[1]).unwrap();
            }
            core.recycle(f);
        }
        done.wait();
        world.goodbye();
        failed
    };
    let failed: Vec<_> = thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> =
            World::local(2).unwrap().into_iter().map(|w| scope.spawn(move || one(w))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(failed[0], []);
    assert!(matches!(&failed[1][..], [(RECORDED_AT, why)] if why.contains("this is planted")), "{failed:?}");
    assert_eq!(library.open(), 0);
}

/// Opens the transport on ranks of their own; what each rank got.
fn opened(devices: Vec<Option<Arc<dyn Device>>>, library: &Path, join: Duration) -> Vec<Result<(), String>> {
    let one = |world: World, device: Option<Arc<dyn Device>>| {
        let mut hooks = Hooks::default();
        hooks.add_object("base-nccl", transport(library.to_owned(), join)).unwrap();
        let comm = open_any(Some("nccl"), &hooks, &world, device.as_deref());
        comm.map(|_| world.goodbye()).map_err(|e| e.to_string())
    };
    thread::scope(|scope| {
        let one = &one;
        let worlds = World::local(devices.len()).unwrap().into_iter().zip(devices);
        let threads: Vec<_> = worlds.map(|(w, d)| scope.spawn(move || one(w, d))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn two() -> Vec<Option<Arc<dyn Device>>> {
    vec![Some(emulated(false)), Some(emulated(false))]
}

/// Every rank is refused, each with these words.
fn refused(told: &[Result<(), String>], words: &[&str]) {
    for told in told {
        let told = told.as_ref().unwrap_err();
        assert!(words.iter().all(|w| told.contains(w)), "{words:?} in {told}");
    }
}

#[test]
fn what_is_missing_is_said_on_all_ranks_with_the_mend() {
    let library = Library::default();
    let path = library.path().to_owned();
    let told = opened(vec![None, None], &path, JOIN);
    refused(&told, &["base-nccl", "this model is on the CPU", "--device cuda", "shm"]);
    // One rank without a device is enough.
    let told = opened(vec![Some(emulated(false)), None], &path, JOIN);
    refused(&told, &["--device cuda"]);
    assert!(told[0].as_ref().unwrap_err().contains("rank 1:"), "{told:?}");
    let told = opened(two(), Path::new("/nowhere/libnccl.so.2"), JOIN);
    refused(&told, &["/nowhere/libnccl.so.2", "PLUGFOLD_NCCL", "pip install nvidia-nccl-cu13"]);
    let one = || -> Option<Arc<dyn Device>> {
        Some(Arc::new(CudaDevice::new(Arc::new(HostMachine::default().named("GPU-1")))))
    };
    let told = opened(vec![one(), one()], &path, JOIN);
    refused(&told, &["ranks 0 and 1 are on one GPU", "GPU-1", "shm or tcp"]);
    library.fault("version", 0, 0);
    let told = opened(two(), library.path(), JOIN);
    refused(&told, &["is NCCL 2.20.5", "2.21.0 or newer", "pip install"]);
    assert_eq!(library.open(), 0, "nothing was begun");
}

#[test]
fn what_goes_wrong_on_the_way_is_said_on_all_ranks() {
    for (word, rank, words) in [
        ("id", 0, "ncclGetUniqueId of NCCL 2.28.9: unhandled system error"),
        ("init", 1, "ncclCommInitRankConfig of NCCL 2.28.9: unhandled cuda error"),
        ("swap", 0, "other bytes than were sent"),
    ] {
        let library = Library::default();
        library.fault(word, rank, 0);
        refused(&opened(two(), library.path(), JOIN), &[words]);
        assert_eq!(library.open(), 0, "{word}");
    }
    // Who cannot join is missed by the others for as long as joining may take.
    let library = Library::default();
    library.fault("join", 1, 0);
    let told = opened(two(), library.path(), Duration::from_millis(300));
    refused(&told, &["unhandled system error"]);
    assert!(told[0].as_ref().unwrap_err().contains("rank 1:"), "{told:?}");
    assert_eq!(library.open(), 0);
    // A first exchange that one rank does not make is not waited for longer, either.
    let library = Library::default();
    library.fault("lose", 1, 0);
    let told = opened(two(), library.path(), Duration::from_millis(300));
    assert!(told[0].as_ref().unwrap_err().contains("has not come within 0.3 s"), "{told:?}");
    assert!(told[1].as_ref().unwrap_err().contains("ncclAllGather of NCCL"), "{told:?}");
}

/// One exchange of 4 KiB over a communicator, and the wait for it.
fn exchange(comm: &CommObject, device: &DeviceAccessObject) -> Result<(), OpError> {
    let ranks = u64::from(comm.ranks()?);
    let at = device.allocate("an exchange".into(), 4096 * (ranks + 1))?;
    let asked = comm.gather_on_device(at, at + 4096, 4096, device.stream()?);
    let waited = device.download(at + 4096, SliceMut::from(&mut [0; 4096][..]));
    let fine = comm.check();
    device.free(at)?;
    asked.and(waited).and(fine)
}

#[test]
fn a_rank_that_dies_ends_the_exchange_of_the_others_by_name() {
    let library = Library::default();
    let worlds = World::local(3).unwrap();
    let met = Barrier::new(3);
    let one = |world: World| {
        let (device, hooks) = (emulated(false), hooks(&library, false));
        let comm = open_any(Some("nccl"), &hooks, &world, Some(&*device)).unwrap();
        let access = device.access().unwrap();
        exchange(&comm, &access).unwrap();
        met.wait();
        if world.rank() == 2 {
            // Without a goodbye: as if the process had gone.
            drop(world);
            return;
        }
        let since = Instant::now();
        let told = exchange(&comm, &access).unwrap_err();
        assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
        assert!(told.message.contains("rank 2 of 3"), "{told}");
        // And so does every later one, at once.
        assert!(exchange(&comm, &access).unwrap_err().message.contains("rank 2 of 3"));
    };
    thread::scope(|scope| {
        let one = &one;
        for world in worlds {
            scope.spawn(move || one(world));
        }
    });
    assert_eq!(library.open(), 0);
}

/// A control plane that learns after a while that a rank is silent.
struct Silent {
    inner: ControlObject,
    silent: Arc<AtomicBool>,
}

impl Control for Silent {
    fn rank(&self) -> Result<u32, OpError> {
        self.inner.rank()
    }
    fn ranks(&self) -> Result<u32, OpError> {
        self.inner.ranks()
    }
    fn gather(&self, what: Text<'_>, mine: Slice<'_, u8>) -> Result<List<List<u8>>, OpError> {
        self.inner.gather(what, mine)
    }
    fn patience_s(&self) -> Result<f64, OpError> {
        self.inner.patience_s()
    }
    fn ended(&self) -> Result<TextBuf, OpError> {
        let said = self.silent.load(Ordering::SeqCst);
        if said { Ok("rank 1 of 2 died: silent for 3.5 s".into()) } else { self.inner.ended() }
    }
    fn host(&self) -> Result<TextBuf, OpError> {
        self.inner.host()
    }
    fn streams(&self) -> Result<CommObject, OpError> {
        self.inner.streams()
    }
}

/// The transport over a control plane of its own.
struct Silently(TransportObject, Arc<AtomicBool>);

impl Transport for Silently {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("over".into())
    }
    fn open(&self, control: ControlObject, device: Maybe<DeviceAccessObject>) -> Result<CommObject, OpError> {
        let silent = Silent { inner: control, silent: self.1.clone() };
        self.0.open(ControlObject::new(silent), device)
    }
}

#[test]
fn a_rank_that_is_stuck_ends_the_exchange_of_the_others_by_name() {
    let library = Library::default();
    let silent = Arc::new(AtomicBool::new(false));
    let met = Barrier::new(2);
    let over = Barrier::new(2);
    let one = |world: World| {
        let device = emulated(false);
        let mut hooks = Hooks::default();
        let nccl = transport(library.path().into(), JOIN);
        hooks.add_object("over", TransportObject::new(Silently(nccl, silent.clone()))).unwrap();
        let comm = open_any(Some("over"), &hooks, &world, Some(&*device)).unwrap();
        let access = device.access().unwrap();
        met.wait();
        if world.rank() == 0 {
            // The other makes no exchange, and does not go away either: it is the watch over ranks that speaks.
            let (told, since) = thread::scope(|scope| {
                let waits = scope.spawn(|| exchange(&comm, &access).unwrap_err());
                while library.exchanges() < 2 {
                    thread::yield_now();
                }
                let since = Instant::now();
                silent.store(true, Ordering::SeqCst);
                (waits.join().unwrap(), since)
            });
            // Silence has taken 3.5 s before.
            assert!(since.elapsed() + Duration::from_millis(3500) < SOON, "{:?}", since.elapsed());
            assert!(told.message.contains("rank 1 of 2 died: silent"), "{told}");
        }
        over.wait();
        drop(comm);
        world.goodbye();
    };
    thread::scope(|scope| {
        let one = &one;
        for world in World::local(2).unwrap() {
            scope.spawn(move || one(world));
        }
    });
    assert_eq!(library.open(), 0);
}

#[test]
fn an_error_on_the_way_ends_the_engine_with_nccl_s_word() {
    let library = Library::default();
    let sampling = Sampling::GREEDY;
    let two = engine(&options(true), 2, |_| core_options(&library, false));
    let want = reply(&two.submit(request(1, 2, 2, sampling)).unwrap()).unwrap();
    assert_eq!(want.0.len(), 2);
    library.fault("async", 1, 0);
    let error = reply(&two.submit(request(2, 2, 2, sampling)).unwrap()).unwrap_err();
    let said = "remote process exited or there was a network error";
    assert!(matches!(&error, EngineError::Unavailable(why) if why.contains(said)), "{error:?}");
    assert!(two.stats().fatal.is_some_and(|why| why.contains("rank 1 of 2")));
}
