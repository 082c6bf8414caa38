//! What the GPU can do at most: measured by kernels that do one thing each.

use super::{Effort, Stopwatch, median};
use crate::error::CudaError;
use crate::kernel::{Arg, Launch, kernel};
use crate::machine::Machine;

/// What was measured of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes a second that all blocks read from memory.
    pub bandwidth: f64,
    /// f32 multiply-adds a second of all lanes, none waiting for another.
    pub rate: f64,
    /// Weights of EXL3 a second, 4 bits and codebook `mul1`, that are decoded and multiplied once, without any memory.
    pub decoding: f64,
    /// Seconds from one launch that does nothing to the next, in a queue that is never empty.
    pub launch: f64,
    /// The same in a recorded graph.
    pub recorded_launch: f64,
    /// Seconds of a multiply-add that waits for the one before.
    pub step: f64,
    /// Seconds of a division that waits for the one before.
    pub division: f64,
    /// Seconds of a fetch from the second-level cache whose address comes from the fetch before.
    pub fetch: f64,
    /// The same from memory.
    pub far: f64,
}

/// Blocks of the two measurements of rates.
const BLOCKS: u32 = 65_536;

/// Lines of the measured fetches: 4 MiB, more than a multiprocessor has, and less than the cache of any GPU that runs this.
const LINES: u32 = 32_768;

/// Launches a kernel of the probes.
pub(super) fn probe(
    machine: &dyn Machine,
    name: &str,
    blocks: u32,
    threads: u32,
    args: &[Arg<'_>],
) -> Result<(), CudaError> {
    let launch = Launch { kernel: kernel(name)?, grid: [blocks, 1, 1], threads, shared: 0, args };
    launch.check()?;
    machine.launch(&launch)
}

/// A launch that keeps the machine busy while the host asks for what comes next.
pub(super) fn blocker(machine: &dyn Machine, effort: &Effort, out: u64) -> Result<(), CudaError> {
    chain(machine, effort.blocker, out)
}

fn chain(machine: &dyn Machine, steps: u32, out: u64) -> Result<(), CudaError> {
    let args = [Arg::Word(steps), Arg::Float(0.999), Arg::Pointer(out)];
    probe(machine, "probe_chain", 1, 32, &args)
}

struct Probes<'m> {
    machine: &'m dyn Machine,
    watch: &'m dyn Stopwatch,
    effort: &'m Effort,
    out: u64,
}

impl Probes<'_> {
    /// Seconds of what is launched, the median of some repetitions behind a launch that takes a while.
    fn seconds(&self, run: &dyn Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        run()?;
        let mut times = Vec::new();
        for _ in 0..self.effort.repeats {
            blocker(self.machine, self.effort, self.out)?;
            times.push(self.watch.seconds(&mut || run())?);
        }
        Ok(median(&mut times))
    }

    /// Seconds of one step: of a launch with many steps against one with a quarter of them, so that the launch is left out.
    fn step(&self, run: &dyn Fn(u32) -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let steps = self.effort.steps;
        let long = self.seconds(&|| run(steps))?;
        let short = self.seconds(&|| run(steps / 4))?;
        Ok((long - short).max(0.0) / f64::from(steps - steps / 4))
    }

    fn empty(&self) -> Result<(), CudaError> {
        (0..self.effort.calls).try_for_each(|_| probe(self.machine, "probe_empty", 1, 32, &[Arg::Word(0)]))
    }

    fn launches(&self) -> Result<(f64, f64), CudaError> {
        let count = self.effort.calls as f64;
        let queued = self.seconds(&|| self.empty())? / count;
        self.machine.record()?;
        let asked = self.empty();
        let graph = self.machine.recorded()?;
        asked?;
        let recorded = self.seconds(&|| self.machine.replay(graph))? / count;
        self.machine.forget_recording(graph);
        Ok((queued, recorded))
    }

    /// Reads a stretch of memory that no cache holds.
    fn stream<T>(
        &self,
        work: impl FnOnce(&dyn Fn() -> Result<(), CudaError>, usize) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        const EACH: u32 = 8 * 256 * 16;
        let blocks = (self.effort.stream / (EACH as usize * 16)).max(1) as u32;
        let bytes = blocks as usize * EACH as usize * 16;
        let from = self.machine.allocate("memory that is read", bytes)?;
        let args = [Arg::Pointer(from), Arg::Word(EACH), Arg::Pointer(self.out)];
        let done = work(&|| probe(self.machine, "probe_read", blocks, 256, &args), bytes);
        self.machine.release(from);
        done
    }

    fn bandwidth(&self) -> Result<f64, CudaError> {
        self.stream(|read, bytes| Ok(bytes as f64 / self.seconds(read)?))
    }

    /// Seconds of a fetch: from the cache that all blocks share, and from memory.
    fn fetches(&self) -> Result<(f64, f64), CudaError> {
        let links = self.machine.allocate("lines that lead to each other", LINES as usize * 128)?;
        let args = [Arg::Pointer(links), Arg::Word(LINES), Arg::Word(12_347)];
        let chase = |steps| {
            let args = [Arg::Pointer(links), Arg::Word(steps), Arg::Pointer(self.out)];
            probe(self.machine, "probe_fetches", 1, 32, &args)
        };
        let both = probe(self.machine, "probe_links", LINES.div_ceil(256), 256, &args).and_then(|()| {
            let near = self.step(&chase)?;
            // Each line once, after something else has driven them all out.
            let far = self.stream(|read, _| {
                let mut times = [Vec::new(), Vec::new()];
                for _ in 0..self.effort.repeats {
                    for (steps, times) in [LINES, LINES / 4].into_iter().zip(&mut times) {
                        read()?;
                        times.push(self.watch.seconds(&mut || chase(steps))?);
                    }
                }
                let [long, short] = times.each_mut().map(|times| median(times));
                Ok((long - short).max(0.0) / f64::from(LINES - LINES / 4))
            })?;
            Ok((near, far))
        });
        self.machine.release(links);
        both
    }

    fn rates(&self) -> Result<(f64, f64), CudaError> {
        let blocks = BLOCKS.min(self.effort.blocks);
        let steps = 256;
        let args = [Arg::Word(steps), Arg::Float(0.999), Arg::Pointer(self.out)];
        let seconds = self.seconds(&|| probe(self.machine, "probe_rate", blocks, 256, &args))?;
        let rate = f64::from(blocks) * 256.0 * 16.0 * f64::from(steps) / seconds;
        let turns = 16;
        let args = [Arg::Word(turns), Arg::Word(0), Arg::Pointer(self.out), Arg::Pointer(self.out)];
        let seconds = self.seconds(&|| probe(self.machine, "exl3_decoding", blocks, 128, &args))?;
        Ok((rate, f64::from(blocks) * 4.0 * 2048.0 * f64::from(turns) / seconds))
    }
}

/// Measures the machine. `out` has at least 4 KiB.
pub(super) fn measure(
    machine: &dyn Machine,
    watch: &dyn Stopwatch,
    effort: &Effort,
    out: u64,
) -> Result<Limits, CudaError> {
    let probes = Probes { machine, watch, effort, out };
    let (rate, decoding) = probes.rates()?;
    let (launch, recorded_launch) = probes.launches()?;
    let step = probes.step(&|steps| chain(machine, steps, out))?;
    let division = probes.step(&|steps| {
        let args = [Arg::Word(steps), Arg::Float(0.7), Arg::Pointer(out)];
        probe(machine, "probe_divisions", 1, 32, &args)
    })?;
    let (fetch, far) = probes.fetches()?;
    Ok(Limits {
        bandwidth: probes.bandwidth()?,
        rate,
        decoding,
        launch,
        recorded_launch,
        step,
        division,
        fetch,
        far,
    })
}
