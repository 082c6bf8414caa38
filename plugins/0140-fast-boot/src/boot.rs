//! The timeline of a start: a line a phase on each rank.

use plugfold_abi::points::{BootPhase, Host as _, HostObject, Level, Observer, interest};
use plugfold_abi::{OpError, Text};

/// Seconds since 1970 at which a launcher began, if it says so.
pub const LAUNCHED: &str = "PLUGFOLD_LAUNCHED_AT";

/// Seconds since the launcher began, or else since this process did; nothing where the system does not tell.
fn since_launch() -> Option<f64> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?.as_secs_f64();
    if let Some(stamp) = std::env::var(LAUNCHED).ok().and_then(|text| text.parse::<f64>().ok()) {
        return Some(now - stamp);
    }
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    started(&stat).map(|at| uptime - at / rustix::param::clock_ticks_per_second() as f64)
}

/// Clock ticks from the start of the system to that of a process, out of its `stat`. Its second field may hold anything.
fn started(stat: &str) -> Option<f64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Free and available memory in GB, out of `/proc/meminfo`.
fn memory(text: &str) -> Option<(f64, f64)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok().map(|kib| kib * 1024.0 / 1e9)
    };
    Some((field("MemFree:")?, field("MemAvailable:")?))
}

/// Tells each phase.
pub struct Timeline(pub &'static HostObject);

impl Observer for Timeline {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::BOOT)
    }

    fn boot(&self, phase: &BootPhase<'_>) -> Result<(), OpError> {
        let at = since_launch().map_or_else(String::new, |s| format!("{s:.2} s: "));
        let bytes = match phase.bytes {
            0 => String::new(),
            few if few < 1_000_000_000 => format!(", {:.2} MB", few as f64 / 1e6),
            many => format!(", {:.2} GB", many as f64 / 1e9),
        };
        let free = std::fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(memory);
        let free = free.map_or_else(String::new, |(free, available)| {
            format!("; memory free {free:.2} GB, available {available:.2} GB")
        });
        let line = format!("boot {at}{} took {:.2} s{bytes}{free}", phase.name, phase.seconds);
        self.0.log(Level::Info, Text::from(&*line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_tests::host::Alone;

    #[test]
    fn the_system_s_figures_are_read() {
        let mut fields: Vec<String> = (3..=52).map(|i| i.to_string()).collect();
        fields[19] = "4711".into();
        assert_eq!(started(&format!("12 (a) b) {}", fields.join(" "))), Some(4711.0));
        assert_eq!(started("12 (a"), None);
        let text = "MemTotal: 24 kB\nMemFree:   1000000 kB\nMemAvailable: 2000000 kB\n";
        assert_eq!(memory(text), Some((1.024, 2.048)));
        assert_eq!(memory("MemFree: x"), None);
    }

    #[test]
    fn a_line_names_phase_time_and_bytes() {
        let host = Alone::default();
        let phase = BootPhase { name: Text::from("weights"), seconds: 1.5, bytes: 82_000_000_000 };
        Timeline(host.object()).boot(&phase).unwrap();
        let line = host.lines().join("");
        assert!(line.contains("weights took 1.50 s, 82.00 GB"), "{line}");
        let host = Alone::default();
        Timeline(host.object()).boot(&BootPhase { bytes: 35_475_456, ..phase }).unwrap();
        assert!(host.lines().join("").contains("weights took 1.50 s, 35.48 MB"));
    }
}
