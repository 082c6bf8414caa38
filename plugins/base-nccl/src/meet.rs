//! How ranks meet: whatever is wrong on one of them is told on all, before any waits for another inside of NCCL.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use plugfold_abi::points::{Control, ControlObject, DeviceAccess, DeviceAccessObject, DeviceFacts};
use plugfold_abi::{CommObject, Maybe, OpError, Slice, SliceMut, Text};

use crate::comm::{Gpus, Line};
use crate::library::{Nccl, UniqueId};
use crate::settings::Settings;

/// Bytes of a rank in the exchanges that are tried first: one of each kind that programs make.
const TRIED: [usize; 2] = [64, 256 << 10];

/// What a rank says before ranks meet: its device, and its version of NCCL.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ready {
    identity: String,
    name: String,
    version: String,
}

/// Every rank's answer, or the first refusal with the rank's number; this rank's own comes as it is.
fn agree(control: &impl Control, what: &str, mine: Result<String, String>) -> Result<Vec<String>, OpError> {
    let (word, text) = match &mine {
        Ok(text) => ("+", text),
        Err(text) => ("-", text),
    };
    let all = control.gather(Text::from(what), Slice::from(format!("{word}{text}").as_bytes()))?;
    // Each rank tells its own reason.
    mine.map_err(OpError::invalid)?;
    let mut said = Vec::new();
    for (rank, bytes) in all.iter().enumerate() {
        let text = String::from_utf8_lossy(bytes);
        let Some(text) = text.strip_prefix('+') else {
            let reason = text.strip_prefix('-').unwrap_or(&text);
            return Err(OpError::invalid(format!("rank {rank}: {reason}")));
        };
        said.push(text.to_owned());
    }
    Ok(said)
}

impl Ready {
    fn text(&self) -> String {
        [&self.identity, &self.name, &self.version].map(|s| s.replace('\n', " ")).join("\n")
    }

    fn of(text: &str) -> Self {
        let mut lines = text.lines().map(str::to_owned);
        let mut next = || lines.next().unwrap_or_default();
        Self { identity: next(), name: next(), version: next() }
    }
}

/// Refuses ranks that NCCL could not serve together.
fn fit(ranks: &[Ready]) -> Result<(), OpError> {
    for (rank, ready) in ranks.iter().enumerate() {
        if let Some(first) = ranks[..rank].iter().position(|other| other.identity == ready.identity) {
            return Err(OpError::invalid(format!(
                "ranks {first} and {rank} are on one GPU, {} ({}): NCCL takes one rank a GPU. Use the transport shm or tcp, \
                 or at most as many ranks as there are GPUs",
                ready.name, ready.identity
            )));
        }
        if ready.version != ranks[0].version {
            return Err(OpError::invalid(format!(
                "rank 0 has NCCL {}, rank {rank} NCCL {}: install one version for all ranks",
                ranks[0].version, ready.version
            )));
        }
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

fn unhex(text: &str) -> Option<UniqueId> {
    let mut id = UniqueId([0; 128]);
    if text.len() != 256 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in id.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).ok()?;
    }
    Some(id)
}

/// What this rank needs by itself.
fn prepare(
    settings: &Settings,
    library: Option<&Path>,
    device: &Maybe<DeviceAccessObject>,
) -> Result<(Nccl, DeviceFacts), String> {
    let Maybe::RSome(device) = device else {
        return Err("the transport nccl exchanges the memory of GPUs, and this model is on the CPU: give --device cuda, or \
                    choose the transport shm (one host) or tcp"
            .into());
    };
    let facts = device.facts().map_err(|e| e.to_string())?;
    if facts.family != "cuda" {
        return Err(format!(
            "the transport nccl needs a GPU of NVIDIA's, {} is none: choose shm or tcp",
            facts.name
        ));
    }
    settings.apply()?;
    Ok((Nccl::load(library)?, facts))
}

/// Opens a communicator over all ranks, each in a call of its own.
///
/// `limit`: how long joining may take.
pub(crate) fn open(
    settings: &Settings,
    library: Option<&Path>,
    limit: Duration,
    control: ControlObject,
    device: Maybe<DeviceAccessObject>,
) -> Result<CommObject, OpError> {
    let control = Arc::new(control);
    let (rank, ranks) = (control.rank()?, control.ranks()?);
    let prepared = prepare(settings, library, &device);
    let ready = prepared.as_ref().map(|(nccl, facts)| Ready {
        identity: facts.identity.to_string(),
        name: facts.name.to_string(),
        version: nccl.version(),
    });
    let said = agree(&control, "nccl: devices", ready.map(|r| r.text()).map_err(Clone::clone))?;
    let all: Vec<Ready> = said.iter().map(|text| Ready::of(text)).collect();
    fit(&all)?;
    let ((nccl, _), Maybe::RSome(device)) = (prepared.map_err(OpError::invalid)?, device) else {
        return Err(OpError::new("no device"));
    };
    let device = Arc::new(device);
    device.enter()?;
    // Rank 0 opens a socket at which the others will find it.
    let id = if rank == 0 { nccl.unique_id().map(|id| hex(&id.0)) } else { Ok(String::new()) };
    let said = agree(&control, "nccl: id", id)?;
    let id = unhex(&said[0]).ok_or_else(|| OpError::new("rank 0 sent an id that is none of NCCL's"))?;
    let streams = control.streams()?;
    // Refused by NCCL at once: told before the others wait for this rank.
    let line = Line::begin(nccl, control.clone(), device.clone(), &id, (rank, ranks));
    let begun = line.as_ref().map(|_| String::new()).map_err(Clone::clone);
    let begun = agree(&control, "nccl: begun", begun);
    let line = match (line, begun) {
        (Ok(line), Ok(_)) => line,
        (Ok(line), Err(error)) => {
            line.leave();
            return Err(error);
        }
        (Err(why), _) => return Err(OpError::invalid(why)),
    };
    // Another rank's refusal leaves this one's communicator without use.
    let told = |what: &str, mine: Result<(), OpError>| {
        let said = mine.as_ref().map(|()| String::new()).map_err(ToString::to_string);
        let all = agree(&control, what, said).map(|_| ());
        mine.and(all)
    };
    let met = told("nccl: joined", join(&line, limit)).and_then(|()| {
        // Waits on the device cannot hear that another rank has refused.
        line.by(Some((limit, "the first exchange over NCCL has not come")));
        let tried = attempt(&line, rank, ranks);
        line.by(None);
        told("nccl: tried", tried)
    });
    match met {
        Ok(()) => Ok(CommObject::new(Gpus::new(line, rank, ranks, streams))),
        Err(error) => {
            line.leave();
            Err(error)
        }
    }
}

/// Waits until all ranks have joined.
fn join(line: &Line, limit: Duration) -> Result<(), OpError> {
    match line.settled(Some(limit))? {
        Some(()) => Ok(()),
        None => Err(OpError::new(format!(
            "NCCL has not joined the ranks within {} s: on several hosts they must reach each other over the network \
             that socket_ifname names; env = \"NCCL_DEBUG=INFO\" prints what it waits for",
            limit.as_secs_f64()
        ))),
    }
}

/// What rank `rank` sends at a place of the exchange that is tried.
fn pattern(rank: u32, at: usize) -> u8 {
    (rank as usize * 31 + at * 7 + at / 251) as u8
}

/// Exchanges what all ranks know: channels are made, and parts come whole and in the order of ranks.
fn attempt(line: &Line, rank: u32, ranks: u32) -> Result<(), OpError> {
    for bytes in TRIED {
        let (part, all) = (bytes as u64, bytes as u64 * u64::from(ranks));
        let at = line.device.allocate("a first exchange of NCCL".into(), part + all)?;
        let tried = exchange(line, (rank, ranks), at, bytes);
        let freed = line.device.free(at);
        tried.and(freed)?;
    }
    Ok(())
}

fn exchange(line: &Line, (rank, ranks): (u32, u32), at: u64, bytes: usize) -> Result<(), OpError> {
    let mine: Vec<u8> = (0..bytes).map(|i| pattern(rank, i)).collect();
    let mut all = vec![0; bytes * ranks as usize];
    line.device.upload(at, Slice::from(&mine[..]))?;
    line.gather(at, at + bytes as u64, bytes as u64, line.device.stream()?)?;
    line.device.download(at + bytes as u64, SliceMut::from(&mut all[..]))?;
    line.check()?;
    for (from, part) in (0..).zip(all.chunks(bytes)) {
        if let Some(i) = (0..bytes).find(|i| part[*i] != pattern(from, *i)) {
            return Err(OpError::new(format!(
                "NCCL has exchanged other bytes than were sent: byte {i} of {bytes} of rank {from} came as {:#04x} at rank \
                 {rank}, not {:#04x}. Other settings of proto and env may help; the transports shm and tcp do without NCCL",
                part[i],
                pattern(from, i)
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_on_one_gpu_or_with_two_versions_are_refused_with_the_mend() {
        let ready = |identity: &str, version: &str| Ready {
            identity: identity.into(),
            name: "NVIDIA H200".into(),
            version: version.into(),
        };
        fit(&[ready("a", "2.28.9"), ready("b", "2.28.9")]).unwrap();
        let told = fit(&[ready("a", "2.28.9"), ready("b", "2.28.9"), ready("a", "2.28.9")]).unwrap_err();
        for words in ["ranks 0 and 2 are on one GPU, NVIDIA H200 (a)", "shm or tcp"] {
            assert!(told.to_string().contains(words), "{told}");
        }
        let told = fit(&[ready("a", "2.28.9"), ready("b", "2.27.3")]).unwrap_err().to_string();
        assert!(told.contains("rank 0 has NCCL 2.28.9, rank 1 NCCL 2.27.3"), "{told}");
    }

    #[test]
    fn what_ranks_say_is_read_as_it_was_written() {
        let ready = Ready { identity: "a-b".into(), name: "two\nlines".into(), version: "2.28.9".into() };
        assert_eq!(Ready::of(&ready.text()), Ready { name: "two lines".into(), ..ready });
        let id = UniqueId(std::array::from_fn(|i| i as u8 ^ 0xa5));
        assert_eq!(unhex(&hex(&id.0)).map(|read| read.0), Some(id.0));
        assert!(unhex("00").is_none());
    }
}
