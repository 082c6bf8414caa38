//! Memory of this machine.

/// Bytes that the system could still give; `u64::MAX` where it does not say.
pub(crate) fn free_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map_or(u64::MAX, |k| k * 1024)
}
