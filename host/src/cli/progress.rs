//! Progress bars, on a terminal only.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

fn bar(total: Option<u64>, template: &str) -> ProgressBar {
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::new_spinner(),
    };
    // Hides itself when standard error is not a terminal.
    bar.set_draw_target(ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// Bytes and rate while loading; ends when dropped.
pub struct Loading(ProgressBar);

impl Loading {
    /// A bar over the bytes of a checkpoint's weight files.
    pub fn start(model: &Path) -> Self {
        let entries = std::fs::read_dir(model).into_iter().flatten().flatten();
        let weights = entries.filter(|e| e.path().extension().is_some_and(|x| x == "safetensors"));
        let total: u64 = weights.filter_map(|e| e.metadata().ok()).map(|m| m.len()).sum();
        let template = "loading [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        Self(bar((total > 0).then_some(total), template))
    }

    /// The callback that loading tells its bytes.
    pub fn told(&self) -> Arc<dyn Fn(usize) + Send + Sync> {
        let bar = self.0.clone();
        // Weights can be larger in memory than in their file.
        Arc::new(move |bytes| bar.set_position((bytes as u64).min(bar.length().unwrap_or(u64::MAX))))
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Tokens and rate while a long prompt is prefilled.
pub struct Prefilling {
    bar: ProgressBar,
    shown: AtomicBool,
}

impl Prefilling {
    /// A bar over the tokens of a prompt.
    pub fn start(tokens: usize) -> Self {
        let bar = bar(Some(tokens as u64), "prefill [{bar:40}] {pos}/{len} tokens {per_sec} {eta}");
        Self { bar, shown: AtomicBool::new(false) }
    }

    /// So many tokens are done.
    pub fn at(&self, done: usize) {
        if !self.shown.swap(true, Ordering::Relaxed) {
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
        self.bar.set_position(done as u64);
    }

    /// The prompt is done.
    pub fn done(&self) {
        self.bar.finish_and_clear();
    }
}
