//! Launches that are kept with the grids and arguments that they had, as a GPU's graph keeps them.

use std::collections::HashMap;
use std::sync::Arc;

use crate::HostMachine;
use crate::stream::Work;
use plugfold_cuda::{Arg, CudaError, Kernel, Launch, Machine};

/// Recordings by number, and the one that is under way.
#[derive(Default)]
pub struct Recordings {
    pub made: u64,
    pub open: Option<Vec<Recorded>>,
    pub lists: HashMap<u64, Arc<[Recorded]>>,
}

/// An argument with what it refers to.
enum Held {
    Same(Arg<'static>),
    Struct(&'static str, Vec<u8>),
}

/// What a recording holds: launches, and work of other libraries.
pub enum Recorded {
    Launch(Kept),
    Other(Arc<Work>),
}

/// A launch with everything in it.
pub struct Kept {
    kernel: &'static Kernel,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    args: Vec<Held>,
}

impl Recorded {
    pub fn of(launch: &Launch<'_>) -> Self {
        let held = |arg: &Arg<'_>| match *arg {
            Arg::Struct(name, bytes) => Held::Struct(name, bytes.to_vec()),
            Arg::Pointer(v) => Held::Same(Arg::Pointer(v)),
            Arg::Word(v) => Held::Same(Arg::Word(v)),
            Arg::Long(v) => Held::Same(Arg::Long(v)),
            Arg::Float(v) => Held::Same(Arg::Float(v)),
        };
        let Launch { kernel, grid, threads, shared, args } = *launch;
        Self::Launch(Kept { kernel, grid, threads, shared, args: args.iter().map(held).collect() })
    }

    pub fn launch(&self, machine: &HostMachine) -> Result<(), CudaError> {
        match self {
            Recorded::Launch(kept) => kept.launch(machine),
            Recorded::Other(work) => {
                machine.pending.push(work.clone());
                Ok(())
            }
        }
    }
}

impl Kept {
    fn launch(&self, machine: &impl Machine) -> Result<(), CudaError> {
        let mut args: Vec<Arg<'_>> = Vec::with_capacity(self.args.len());
        for held in &self.args {
            args.push(match held {
                Held::Same(arg) => *arg,
                Held::Struct(name, bytes) => Arg::Struct(name, bytes),
            });
        }
        let Self { kernel, grid, threads, shared, args: _ } = self;
        machine.launch(&Launch { kernel, grid: *grid, threads: *threads, shared: *shared, args: &args })
    }
}
