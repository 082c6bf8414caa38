//! The content id of a checkpoint: what digests of ranks and keys of stored states compare.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::Checkpoint;
use super::error::CheckpointError;

/// Tensors up to this many bytes count whole.
const WHOLE: usize = 4096;
/// Bytes taken from the beginning, the middle and the end of a longer one.
const SAMPLE: usize = 256;

impl Checkpoint {
    /// The content id: SHA-256 in hexadecimal over
    ///
    /// 1. the bytes of `config.json`;
    /// 2. of every tensor, in order of names: name, stored type, shape;
    /// 3. its bytes, if it has at most 4,096; of a longer one 256 bytes from its beginning, its middle and its end.
    ///
    /// Lengths go before contents, so that no two checkpoints give the same text. How the tensors are spread over
    /// files does not count. It is a sample: it tells releases, conversions and training runs apart, which change
    /// nearly every value, but not two files of which one was altered by hand at a place in between.
    ///
    /// # Errors
    /// [`CheckpointError::Read`] when `config.json` cannot be read.
    pub fn content_id(&self) -> Result<String, CheckpointError> {
        let path = self.dir().join("config.json");
        let config = std::fs::read(&path).map_err(|source| CheckpointError::Read { path, source })?;
        let mut hash = Sha256::new();
        let mut put = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        put(b"plugfold checkpoint 1");
        put(&config);
        // A few pages of each tensor: reading ahead would fetch megabytes for every one of them.
        self.advise(memmap2::Advice::Random);
        for name in self.names() {
            let Some(data) = self.tensor(name) else { continue };
            put(name.as_bytes());
            put(data.dtype.to_string().as_bytes());
            put(format!("{:?}", data.shape).as_bytes());
            if data.bytes.len() <= WHOLE {
                put(data.bytes);
            } else {
                let last = data.bytes.len() - SAMPLE;
                for start in [0, last / 2, last] {
                    put(&data.bytes[start..start + SAMPLE]);
                }
            }
        }
        self.advise(memmap2::Advice::Normal);
        let mut text = String::with_capacity(64);
        for byte in hash.finalize() {
            // Writing into a string cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        Ok(text)
    }

    fn advise(&self, advice: memmap2::Advice) {
        for shard in &self.files.shards {
            shard.advise(advice);
        }
    }
}
