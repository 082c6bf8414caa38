//! What runs kernels: a GPU, or in tests the CPU.

use std::sync::Mutex;

use plugfold_abi::RoundTable;

use crate::error::CudaError;
use crate::kernel::Launch;

/// Something that runs kernels over memory of its own, in the order in which they are launched.
pub trait Machine: Send + Sync {
    /// Its class in queries: "sm_90" for an H100, "cpu" where the kernels run on the CPU.
    fn class(&self) -> &str;

    /// Runs a kernel after what was launched before.
    ///
    /// # Errors
    /// A launch that does not fit, or what the driver says.
    fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError>;

    /// At least so many bytes that last until the next call: for one operation's intermediate results. Aligned to 256.
    ///
    /// # Errors
    /// Memory that is used up.
    fn scratch(&self, bytes: usize) -> Result<u64, CudaError>;

    /// Memory for a product's input in aligned rows, that lasts until the next call that asks for one.
    ///
    /// # Errors
    /// Memory that is used up.
    fn aligned_input(&self, bytes: usize) -> Result<u64, CudaError>;

    /// Zeroed memory at a fixed address, aligned to 256; `what` it is for is said where there is not enough.
    ///
    /// # Errors
    /// Memory that is used up.
    fn allocate(&self, what: &str, bytes: usize) -> Result<u64, CudaError>;

    /// Gives memory of [`Machine::allocate`] back once nothing that was launched uses it any more.
    fn release(&self, address: u64);

    /// Memory that holds `bytes` for good.
    ///
    /// # Errors
    /// Memory that is used up.
    fn keep(&self, bytes: &[u8]) -> Result<u64, CudaError> {
        let at = self.allocate("a table", bytes.len())?;
        self.upload(at, bytes)?;
        Ok(at)
    }

    /// Sets bytes to zero, after what was launched before.
    ///
    /// # Errors
    /// What the driver says.
    fn zero(&self, at: u64, bytes: usize) -> Result<(), CudaError>;

    /// Changes when memory that launches use has moved: what was recorded before is void.
    fn epoch(&self) -> u64;

    /// Records launches from now on, instead of running them.
    ///
    /// # Errors
    /// What the driver says; a recording that is under way.
    fn record(&self) -> Result<(), CudaError>;

    /// Ends the recording, and gives its number.
    ///
    /// # Errors
    /// What the driver says, also of what was recorded.
    fn recorded(&self) -> Result<u64, CudaError>;

    /// Runs what was recorded, after what was launched before.
    ///
    /// # Errors
    /// No such recording, or what the driver says.
    fn replay(&self, recording: u64) -> Result<(), CudaError>;

    /// Forgets a recording.
    fn forget_recording(&self, recording: u64);

    /// Forgets all recordings.
    fn forget_recordings(&self);

    /// Its number among those that this process sees, and what tells it from every other of every host.
    ///
    /// # Errors
    /// What the driver says.
    fn identity(&self) -> Result<(usize, String), CudaError>;

    /// Makes its context the calling thread's.
    ///
    /// # Errors
    /// What the driver says.
    fn enter(&self) -> Result<(), CudaError>;

    /// The stream of all launches, as the driver's handle.
    fn stream(&self) -> u64;

    /// Bytes of memory that are free.
    ///
    /// # Errors
    /// What the driver says.
    fn free_bytes(&self) -> Result<u64, CudaError>;

    /// What it is, for people.
    fn name(&self) -> String;

    /// Copies bytes to the machine's memory, after what was launched before.
    ///
    /// # Errors
    /// What the driver says.
    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError>;

    /// Copies bytes from the machine's memory, after what was launched before, and waits for them.
    ///
    /// # Errors
    /// What the driver says, also of earlier launches.
    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<(), CudaError>;

    /// Memory of `bytes` bytes for the round table: the same as the time before while it is large enough.
    ///
    /// # Errors
    /// Memory that is used up.
    fn round_memory(&self, bytes: usize) -> Result<u64, CudaError>;

    /// The bytes of the round table that lie in the machine's memory.
    fn last_round(&self) -> &Mutex<Vec<u8>>;
}

/// Cuts one stretch of scratch memory into aligned pieces.
pub struct Scratch {
    sizes: Vec<usize>,
}

impl Scratch {
    /// Pieces of so many bytes each.
    pub fn pieces(sizes: &[usize]) -> Self {
        Self { sizes: sizes.iter().map(|s| s.next_multiple_of(256)).collect() }
    }

    /// Takes them from a machine: their addresses.
    ///
    /// # Errors
    /// Memory that is used up.
    pub fn take(&self, machine: &dyn Machine) -> Result<Vec<u64>, CudaError> {
        let mut at = machine.scratch(self.sizes.iter().sum())?;
        Ok(self
            .sizes
            .iter()
            .map(|size| {
                let mine = at;
                at += *size as u64;
                mine
            })
            .collect())
    }
}

/// Head of the round table in device memory: `Round` of the sources. Eleven addresses, then four counts.
const HEAD: usize = 11 * 8 + 4 * 4;

/// Where `out_rows` of a round table lies that [`round`] put at an address.
pub fn out_rows(round: u64, table: &RoundTable<'_>) -> u64 {
    let before: [usize; 9] = [
        table.tokens.len(),
        table.positions.len(),
        table.row_seq.len(),
        table.seq_first.len(),
        table.seq_rows.len(),
        table.seq_start.len(),
        table.seq_slot.len(),
        table.seq_parity.len(),
        table.seq_keep.len(),
    ];
    let size = |bytes: usize| bytes.next_multiple_of(16);
    round + (size(HEAD) + before.iter().map(|len| size(len * 4)).sum::<usize>()) as u64
}

/// Puts the round table into the machine's memory, unless it is there already, and gives its address.
///
/// The address stays while the table does not outgrow it, so kernels that were launched with it can be replayed.
///
/// # Errors
/// Memory that is used up, or what the driver says.
pub fn round(machine: &dyn Machine, table: &RoundTable<'_>) -> Result<u64, CudaError> {
    let fields: [&[u32]; 10] = [
        &table.tokens,
        &table.positions,
        &table.row_seq,
        &table.seq_first,
        &table.seq_rows,
        &table.seq_start,
        &table.seq_slot,
        &table.seq_parity,
        &table.seq_keep,
        &table.out_rows,
    ];
    let embeds: Vec<u64> = table.embeds.iter().map(|a| *a as u64).collect();
    let size = |bytes: usize| bytes.next_multiple_of(16);
    let total = size(HEAD) + fields.iter().map(|f| size(f.len() * 4)).sum::<usize>() + size(embeds.len() * 8);
    let base = machine.round_memory(total)?;
    let mut bytes = vec![0u8; total];
    let (mut at, mut head) = (size(HEAD), Vec::with_capacity(HEAD));
    let parts =
        fields.iter().map(|f| bytemuck::cast_slice::<u32, u8>(f)).chain([bytemuck::cast_slice(&embeds)]);
    for part in parts {
        bytes[at..at + part.len()].copy_from_slice(part);
        let address = if part.is_empty() { 0 } else { base + at as u64 };
        head.extend_from_slice(&address.to_le_bytes());
        at += size(part.len());
    }
    for count in [table.rows(), table.seqs(), table.out_rows.len(), 0] {
        head.extend_from_slice(&(count as u32).to_le_bytes());
    }
    bytes[..HEAD].copy_from_slice(&head);
    let mut last = machine.last_round().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if *last != bytes {
        machine.upload(base, &bytes)?;
        *last = bytes;
    }
    Ok(base)
}
