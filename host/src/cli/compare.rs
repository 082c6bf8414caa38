//! Numbers of pairs: medians and spread, and what the machine was doing meanwhile.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Quartiles of some values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// A quarter lies below.
    pub low: f64,
    /// The middle.
    pub median: f64,
    /// A quarter lies above.
    pub high: f64,
}

impl Spread {
    /// Of values; `None` without any, or where one is no number.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        if values.is_empty() || values.iter().any(|v| !v.is_finite()) {
            return None;
        }
        values.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * (values.len() - 1) as f64;
            let (low, part) = (place.floor() as usize, place.fract());
            let high = (low + 1).min(values.len() - 1);
            values[low] + (values[high] - values[low]) * part
        };
        Some(Self { low: at(0.25), median: at(0.5), high: at(0.75) })
    }
}

/// Which build this is.
pub const BUILD: &str = if cfg!(debug_assertions) { "debug" } else { "release" };

/// The machine: cores, threads of the kernels, and how busy it was over the last minute (more than the cores: others
/// computed too).
pub fn machine() -> Value {
    let load = std::fs::read_to_string("/proc/loadavg").ok();
    let load = load.as_deref().and_then(|l| l.split(' ').next()?.parse::<f64>().ok());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    json!({"cores": cores, "load": load, "build": BUILD})
}

/// Token ids of a made-up prompt: the same for the same number, shared with no other.
pub fn made_up(number: usize, length: usize, vocab: usize) -> Vec<u32> {
    let mut state = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % vocab.max(1) as u64) as u32
    };
    (0..length).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_the_values() {
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0, 5.0]);
        assert_eq!(spread, Some(Spread { low: 2.0, median: 3.0, high: 4.0 }));
        assert_eq!(Spread::of([1.0, 2.0]).map(|s| s.median), Some(1.5));
        assert_eq!(Spread::of([7.0]).map(|s| (s.low, s.high)), Some((7.0, 7.0)));
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([1.0, f64::NAN]), None, "a rate over no time is none");
    }

    #[test]
    fn made_up_prompts_are_repeatable_and_different() {
        assert_eq!(made_up(3, 40, 1000), made_up(3, 40, 1000));
        assert_ne!(made_up(3, 40, 1000)[..8], made_up(4, 40, 1000)[..8]);
        assert!(made_up(5, 400, 7).iter().all(|id| *id < 7));
    }
}
