//! `plugfold bench exchange`: what an exchange between ranks takes, over the transport of the settings.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold::device;
use plugfold::plugins::cache_folder;
use plugfold::plugins::life::{Chosen, Plugins};
use plugfold_abi::points::{DeviceAccess as _, DeviceAccessObject, Graphs as _};
use plugfold_abi::{Comm as _, CommObject, RoundTable, SliceMut};
use plugfold_engine::program::HOST;
use plugfold_engine::rank::Options;
use plugfold_engine::ranks::World;
use plugfold_engine::transport;
use plugfold_kernels::device::Device;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::ModelArgs;
use super::bench::save;
use super::model;
use super::setup::Company;

/// Exchanges that are asked for in one go.
const QUEUED: usize = 20;
/// Most bytes of a rank: larger ones are no exchange of a decode step.
const MOST: usize = 64 << 20;

/// What to exchange.
#[derive(Args)]
pub struct Exchange {
    #[command(flatten)]
    model: ModelArgs,
    /// Bytes of each rank, with commas between them.
    #[arg(long, value_delimiter = ',', default_values_t = [8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10],
          value_name = "BYTES")]
    bytes: Vec<usize>,
    /// Measured turns of each size, after a tenth as many that are not.
    #[arg(long, default_value_t = 200, value_name = "N")]
    turns: usize,
    /// Write all numbers to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What every rank does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Work {
    bytes: Vec<usize>,
    turns: usize,
}

/// What was measured: a size, a way, and microseconds of an exchange.
#[derive(Debug, Serialize)]
pub struct Line {
    bytes: usize,
    way: &'static str,
    median_us: f64,
    least_us: f64,
    most_us: f64,
}

impl Exchange {
    /// Measures and prints.
    pub fn run(mut self) -> anyhow::Result<()> {
        if self.turns == 0 || self.bytes.is_empty() {
            bail!("--turns and --bytes: exchange something at least once");
        }
        if let Some(bytes) = self.bytes.iter().find(|b| **b == 0 || **b > MOST || **b % 4 != 0) {
            bail!("--bytes {bytes}: give multiples of 4 up to {MOST}");
        }
        // No model is read; without one said the plugins would be those of the profile `quickstart`.
        if self.model.profile.is_none() {
            self.model.model.get_or_insert_with(|| ".".into());
        }
        let setup = self.model.setup(json!({}))?;
        let settings = setup.settings();
        let company = setup.company()?;
        let options = Options { transport: settings.transport.clone(), ..Options::new(PathBuf::new()) };
        let work = Work { bytes: self.bytes, turns: self.turns };
        let (world, followers) = model::meet(settings, &options, &company, Some(&work))?;
        let device = device::open(settings.device, 0)?;
        let place = device.as_ref().map_or_else(|| HOST.to_owned(), |device| device.name());
        let lines = work.run(&options, &company, setup.chosen.clone(), &world, device.as_ref())?;
        drop(world);
        followers.finish();
        let transport = settings.transport.as_deref().unwrap_or("built in");
        println!("{} ranks, transport {transport}, {place}", settings.ranks);
        println!("{:>9}  {:22} {:>10} {:>10} {:>10}", "bytes", "", "median us", "least", "most");
        for line in &lines {
            let Line { bytes, way, median_us, least_us, most_us } = line;
            println!("{bytes:>9}  {way:22} {median_us:>10.1} {least_us:>10.1} {most_us:>10.1}");
        }
        let report = json!({"bench": "exchange", "ranks": settings.ranks, "transport": transport, "device": place,
                            "queued": QUEUED, "turns": work.turns, "lines": lines});
        self.json.as_deref().map_or(Ok(()), |path| save(path, &report))
    }
}

impl Work {
    /// This rank's part.
    pub fn run(
        &self,
        options: &Options,
        company: &Company,
        chosen: Vec<Chosen>,
        world: &World,
        device: Option<&Arc<dyn Device>>,
    ) -> anyhow::Result<Vec<Line>> {
        let cache = if chosen.is_empty() { PathBuf::new() } else { cache_folder()? };
        let lines = self.measured(options, company, chosen, world, device.map(|d| &**d), &cache);
        match lines {
            Ok(lines) => {
                // Who leaves first must not leave another in an exchange.
                world.agree_all("bench exchange: done", true)?;
                world.goodbye();
                Ok(lines)
            }
            Err(error) => {
                // Where the world has ended, its word is the cause.
                let said = world.fail(format!("{error:#}"));
                bail!("{said}");
            }
        }
    }

    fn measured(
        &self,
        options: &Options,
        company: &Company,
        chosen: Vec<Chosen>,
        world: &World,
        device: Option<&dyn Device>,
        cache: &Path,
    ) -> anyhow::Result<Vec<Line>> {
        let class = device.map_or(HOST, Device::class).to_owned();
        let plugins = Plugins::load(chosen, &company.settled, world, &class, cache)?;
        let comm = transport::open_any(options.transport.as_deref(), plugins.hooks(), world, device)?;
        if world.is_lead() {
            super::tell(&"exchanges begin");
        }
        let mut lines = Vec::new();
        for &bytes in &self.bytes {
            let access = device.and_then(Device::access);
            match (&access, comm.exchanges()?.device) {
                (Some(access), true) => self.on_device(&comm, access, device, bytes, &mut lines)?,
                (Some(access), false) => self.through_the_host(&comm, access, bytes, &mut lines)?,
                (None, _) => self.on_the_host(&comm, bytes, &mut lines)?,
            }
        }
        Ok(lines)
    }

    /// Times something, `each` exchanges a turn.
    fn timed(
        &self,
        bytes: usize,
        way: &'static str,
        each: usize,
        lines: &mut Vec<Line>,
        mut turn: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for _ in 0..=(self.turns / 10) {
            turn()?;
        }
        let mut took = Vec::with_capacity(self.turns);
        for _ in 0..self.turns {
            let since = Instant::now();
            turn()?;
            took.push(since.elapsed().as_secs_f64() * 1e6 / each as f64);
        }
        took.sort_by(f64::total_cmp);
        let (median_us, least_us, most_us) = (took[took.len() / 2], took[0], took[took.len() - 1]);
        lines.push(Line { bytes, way, median_us, least_us, most_us });
        Ok(())
    }

    fn on_the_host(&self, comm: &CommObject, bytes: usize, lines: &mut Vec<Line>) -> anyhow::Result<()> {
        let (rank, ranks) = (comm.rank()?, comm.ranks()?);
        let (mine, mut all) = (part(rank, bytes), vec![0; bytes * ranks as usize]);
        self.timed(bytes, "memory of the host", 1, lines, || Ok(comm.gather(&mine, &mut all)?))?;
        compare(&all, bytes)
    }

    /// What a partial sum on a device does where the transport moves memory of the host only.
    fn through_the_host(
        &self,
        comm: &CommObject,
        device: &DeviceAccessObject,
        bytes: usize,
        lines: &mut Vec<Line>,
    ) -> anyhow::Result<()> {
        let (rank, ranks) = (comm.rank()?, comm.ranks()? as usize);
        let room = Room::new(device, bytes * (ranks + 1))?;
        let (mut mine, mut all) = (part(rank, bytes), vec![0; bytes * ranks]);
        device.upload(room.at, (&mine[..]).into())?;
        let there = room.at + bytes as u64;
        self.timed(bytes, "through the host", 1, lines, || {
            device.download(room.at, SliceMut::from(&mut mine[..]))?;
            comm.gather(&mine, &mut all)?;
            device.upload(there, (&all[..]).into())?;
            Ok(device.download(there, SliceMut::from(&mut [][..]))?)
        })?;
        device.download(there, SliceMut::from(&mut all[..]))?;
        compare(&all, bytes)
    }

    fn on_device(
        &self,
        comm: &CommObject,
        access: &DeviceAccessObject,
        device: Option<&dyn Device>,
        bytes: usize,
        lines: &mut Vec<Line>,
    ) -> anyhow::Result<()> {
        let (rank, ranks) = (comm.rank()?, comm.ranks()? as usize);
        let room = Room::new(access, bytes * (ranks + 1))?;
        let (from, to, stream) = (room.at, room.at + bytes as u64, access.stream()?);
        access.upload(from, (&part(rank, bytes)[..]).into())?;
        let ask = |n: usize| -> anyhow::Result<()> {
            for _ in 0..n {
                comm.gather_on_device(from, to, bytes as u64, stream)?;
            }
            Ok(())
        };
        let wait = || -> anyhow::Result<()> {
            access.download(from, SliceMut::from(&mut [][..]))?;
            Ok(comm.check()?)
        };
        self.timed(bytes, "one, and the wait", 1, lines, || ask(1).and_then(|()| wait()))?;
        self.timed(bytes, "one of 20 in a row", QUEUED, lines, || ask(QUEUED).and_then(|()| wait()))?;
        if let Some(graphs) =
            device.and_then(Device::graphs).filter(|_| comm.exchanges().is_ok_and(|e| e.recorded))
        {
            let round = RoundTable::default();
            graphs.begin(&round)?;
            let asked = ask(QUEUED);
            // Whatever was asked: the device must not go on recording.
            let recording = graphs.end()?;
            let timed = asked.and_then(|()| {
                self.timed(bytes, "one of 20 recorded", QUEUED, lines, || {
                    graphs.launch(recording, &round)?;
                    wait()
                })
            });
            // A communicator ends once no recording holds an exchange of it.
            graphs.forget(recording)?;
            timed?;
        }
        let mut all = vec![0; bytes * ranks];
        access.download(to, SliceMut::from(&mut all[..]))?;
        comm.check()?;
        compare(&all, bytes)
    }
}

/// Memory of a device, given back when this is dropped.
struct Room<'d> {
    device: &'d DeviceAccessObject,
    at: u64,
}

impl<'d> Room<'d> {
    fn new(device: &'d DeviceAccessObject, bytes: usize) -> anyhow::Result<Self> {
        Ok(Self { device, at: device.allocate("exchanges".into(), bytes as u64)? })
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let _ = self.device.free(self.at);
    }
}

/// What a rank sends.
fn part(rank: u32, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (rank as usize * 131 + i * 7 + i / 255) as u8).collect()
}

/// Every rank's part has come, in rank order.
fn compare(all: &[u8], bytes: usize) -> anyhow::Result<()> {
    let wrong = (0..).zip(all.chunks(bytes)).find(|(rank, got)| *got != part(*rank, bytes));
    wrong.map_or(Ok(()), |(rank, _)| {
        Err(anyhow::anyhow!("the part of rank {rank}, {bytes} bytes, came otherwise than it was sent"))
    })
}

/// Reads what rank 0 wants to be measured.
pub fn read(text: &str) -> anyhow::Result<Work> {
    serde_json::from_str(text).context("--exchange")
}
