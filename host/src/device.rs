//! The device that the settings ask for.

use std::sync::Arc;

use anyhow::Context as _;
use plugfold_cuda::cache::{Cache, Origin};
use plugfold_cuda::{CudaDevice, Gpu};
use plugfold_engine::program::HOST;
use plugfold_kernels::device::Device;

use crate::config::Device as Kind;

/// The GPU of a rank: ranks on one machine take its GPUs in turn.
fn index(rank: usize) -> anyhow::Result<(usize, usize)> {
    let count = plugfold_cuda::devices().context("--device cuda")?;
    Ok((rank.checked_rem(count).unwrap_or(0), count))
}

/// The class of a kind of device, by which plugins and their providers are chosen.
///
/// # Errors
/// No driver, or no GPU.
pub fn class(kind: Kind) -> anyhow::Result<String> {
    match kind {
        Kind::Cpu => Ok(HOST.into()),
        Kind::Cuda => plugfold_cuda::class(0).context("--device cuda"),
    }
}

/// Opens the device of a rank; `None`: the host.
///
/// # Errors
/// No driver, an old one, no such GPU, a kernel that does not compile.
pub fn open(kind: Kind, rank: usize) -> anyhow::Result<Option<Arc<dyn Device>>> {
    if kind == Kind::Cpu {
        return Ok(None);
    }
    let device = CudaDevice::new(gpu(rank)?);
    tracing::info!("rank {rank} runs on {}", device.name());
    Ok(Some(Arc::new(device)))
}

/// The GPU of a rank, with its kernels.
///
/// # Errors
/// As [`open`].
pub fn gpu(rank: usize) -> anyhow::Result<Arc<Gpu>> {
    let (index, count) = index(rank)?;
    if rank >= count {
        tracing::warn!("rank {rank} shares GPU {index} with rank {index}: there are {count}");
    }
    let mut compiled = Vec::new();
    let told = |source: &str, origin: &Origin| match origin {
        Origin::Disk => {}
        Origin::Compiled(None) => compiled.push(source.to_owned()),
        Origin::Compiled(Some(why)) => tracing::warn!("{source}.cu was compiled anew: {why}"),
        Origin::OtherCompiler(version) => {
            tracing::warn!("{source}.cu: no compiler is here, code of NVRTC {version} is used");
        }
    };
    let gpu = Gpu::open(index, &Cache::of_user()?, told).context("--device cuda")?;
    tracing::info!("rank {rank} takes GPU {index}");
    if !compiled.is_empty() {
        tracing::info!("kernels were compiled for it: {}", compiled.join(", "));
    }
    Ok(Arc::new(gpu))
}
