//! What the host offers to each plugin: who it is among the ranks, log, figures, a folder, agreements, services of others.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use plugfold_abi::boundary::Shared;
use plugfold_abi::points::{Host, Level, Services};
use plugfold_abi::{List, Maybe, OpError, Slice, Text, TextBuf};
use prometheus::proto::MetricFamily;
use prometheus::{CounterVec, GaugeVec, Opts, Registry};

use super::agree::Desk;

/// Most figures of one plugin, and longest name of one.
const MOST_FIGURES: usize = 256;
const LONGEST_NAME: usize = 100;

/// A named number of a plugin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Figure {
    /// Only grows.
    Counter(f64),
    /// Is set.
    Gauge(f64),
}

/// Figures of all plugins by (plugin, name), for the metrics page.
#[derive(Debug, Default)]
pub struct Figures(Mutex<BTreeMap<(Arc<str>, String), Figure>>);

impl Figures {
    /// All of them now: plugin, name, figure.
    pub fn all(&self) -> Vec<(String, String, Figure)> {
        lock(&self.0).iter().map(|((plugin, name), f)| (plugin.to_string(), name.clone(), *f)).collect()
    }

    /// All of them as families of metrics: `plugfold_plugin_NAME_total` and `plugfold_plugin_NAME`, by plugin.
    ///
    /// # Errors
    /// A family that cannot be made.
    pub fn families(&self) -> prometheus::Result<Vec<MetricFamily>> {
        let registry = Registry::new();
        let mut counters: BTreeMap<String, CounterVec> = BTreeMap::new();
        let mut gauges: BTreeMap<String, GaugeVec> = BTreeMap::new();
        for (plugin, name, figure) in self.all() {
            match figure {
                Figure::Counter(value) => {
                    let family = format!("plugfold_plugin_{name}_total");
                    if !counters.contains_key(&family) {
                        let made = CounterVec::new(Opts::new(&family, "Counted by a plugin"), &["plugin"])?;
                        registry.register(Box::new(made.clone()))?;
                        counters.insert(family.clone(), made);
                    }
                    if let Some(made) = counters.get(&family) {
                        made.with_label_values(&[&plugin]).inc_by(value);
                    }
                }
                Figure::Gauge(value) => {
                    let family = format!("plugfold_plugin_{name}");
                    if !gauges.contains_key(&family) {
                        let made = GaugeVec::new(Opts::new(&family, "Set by a plugin"), &["plugin"])?;
                        registry.register(Box::new(made.clone()))?;
                        gauges.insert(family.clone(), made);
                    }
                    if let Some(made) = gauges.get(&family) {
                        made.with_label_values(&[&plugin]).set(value);
                    }
                }
            }
        }
        Ok(registry.gather())
    }

    fn change(
        &self,
        plugin: &Arc<str>,
        name: &str,
        new: Figure,
        change: impl FnOnce(&mut Figure) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        let mut all = lock(&self.0);
        let key = (plugin.clone(), name.to_owned());
        if let Some(figure) = all.get_mut(&key) {
            return change(figure);
        }
        let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(good) {
            return Err(OpError::new(format!(
                "figure {name:?}: write small letters, digits and `_`, {LONGEST_NAME} at most"
            )));
        }
        if all.keys().filter(|(p, _)| p == plugin).count() >= MOST_FIGURES {
            return Err(OpError::new(format!(
                "figure {name:?} would be one more than the {MOST_FIGURES} that a plugin may have"
            )));
        }
        let mut figure = new;
        change(&mut figure)?;
        all.insert(key, figure);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The host as one plugin sees it.
pub struct HostFor {
    /// The plugin's id.
    pub plugin: Arc<str>,
    /// Its figures go here.
    pub figures: Arc<Figures>,
    /// The folder under which it gets one of its own.
    pub cache: PathBuf,
    /// The ranks.
    pub desk: Arc<Desk>,
    /// The checkpoint's folder, once it is known.
    pub model: Arc<OnceLock<PathBuf>>,
}

impl Host for HostFor {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(self.desk.rank())
    }

    fn ranks(&self) -> Result<u32, OpError> {
        Ok(self.desk.ranks())
    }

    fn threads(&self) -> Result<u32, OpError> {
        // The pool of this program, which was sized before any plugin was loaded.
        Ok(rayon::current_num_threads() as u32)
    }

    fn log(&self, level: Level, message: Text<'_>) -> Result<(), OpError> {
        let (plugin, message) = (&*self.plugin, message.get_str());
        match level {
            Level::Debug => tracing::debug!(plugin, "{message}"),
            Level::Info => tracing::info!(plugin, "{message}"),
            Level::Warn => tracing::warn!(plugin, "{message}"),
        }
        Ok(())
    }

    fn count(&self, name: Text<'_>, delta: f64) -> Result<(), OpError> {
        self.figures.change(&self.plugin, &name, Figure::Counter(0.0), |figure| match figure {
            Figure::Counter(value) if delta.is_finite() && delta >= 0.0 => {
                *value += delta;
                Ok(())
            }
            Figure::Counter(_) => Err(OpError::new(format!("counter {name:?} cannot grow by {delta}"))),
            Figure::Gauge(_) => Err(OpError::new(format!("{name:?} is a gauge already"))),
        })
    }

    fn gauge(&self, name: Text<'_>, value: f64) -> Result<(), OpError> {
        self.figures.change(&self.plugin, &name, Figure::Gauge(value), |figure| match figure {
            Figure::Gauge(old) => {
                *old = value;
                Ok(())
            }
            Figure::Counter(_) => Err(OpError::new(format!("{name:?} is a counter already"))),
        })
    }

    fn cache_folder(&self) -> Result<TextBuf, OpError> {
        let folder = self.cache.join("plugins").join(&*self.plugin);
        let told = |e: std::io::Error| OpError::new(format!("cache folder {}: {e}", folder.display()));
        std::fs::create_dir_all(&folder).map_err(told)?;
        let text = folder.to_str();
        let text =
            text.ok_or_else(|| OpError::new(format!("cache folder {} is not UTF-8", folder.display())))?;
        Ok(text.into())
    }

    fn model_folder(&self) -> Result<TextBuf, OpError> {
        let Some(folder) = self.model.get() else { return Ok(TextBuf::new()) };
        let text = folder.to_str();
        let text =
            text.ok_or_else(|| OpError::new(format!("model folder {} is not UTF-8", folder.display())))?;
        Ok(text.into())
    }

    fn agree(&self, what: Text<'_>, mine: Slice<'_, u8>) -> Result<List<List<u8>>, OpError> {
        let all = self.desk.ask(&self.plugin, &what, &mine).map_err(OpError::new)?;
        Ok(all.into_iter().map(List::from).collect())
    }
}

/// Services of the plugins before one.
pub struct ServicesOf(pub Vec<Shared>);

impl Services for ServicesOf {
    fn find(&self, interface: Text<'_>) -> Result<Maybe<Shared>, OpError> {
        let found = self.0.iter().find(|shared| shared.interface() == interface.get_str());
        Ok(found.copied().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostFor {
        HostFor {
            plugin: "0003".into(),
            figures: Arc::default(),
            cache: PathBuf::from("/nowhere"),
            desk: Arc::new(Desk::alone()),
            model: Arc::default(),
        }
    }

    #[test]
    fn figures_are_kept_by_plugin_and_bounded() {
        let host = host();
        host.count("chunks".into(), 2.0).unwrap();
        host.count("chunks".into(), 1.0).unwrap();
        host.gauge("rows".into(), 64.0).unwrap();
        host.gauge("rows".into(), 32.0).unwrap();
        let all = host.figures.all();
        assert_eq!(all[0], ("0003".into(), "chunks".into(), Figure::Counter(3.0)));
        assert_eq!(all[1], ("0003".into(), "rows".into(), Figure::Gauge(32.0)));
        let families = host.figures.families().unwrap();
        let names: Vec<&str> = families.iter().map(MetricFamily::name).collect();
        assert_eq!(names, ["plugfold_plugin_chunks_total", "plugfold_plugin_rows"]);
        assert!(host.count("rows".into(), 1.0).is_err() && host.gauge("chunks".into(), 1.0).is_err());
        assert!(host.count("chunks".into(), -1.0).is_err() && host.count("x".into(), f64::NAN).is_err());
        assert!(host.count("Not a name".into(), 1.0).is_err() && host.gauge("".into(), 1.0).is_err());
        for i in 0..MOST_FIGURES - 2 {
            host.count(format!("n{i}").as_str().into(), 1.0).unwrap();
        }
        let told = host.count("one_more".into(), 1.0).unwrap_err().to_string();
        assert!(told.contains("256"), "{told}");
    }

    #[test]
    fn plugins_get_the_threads_of_the_program() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        assert_eq!(pool.install(|| host().threads()), Ok(3));
    }

    #[test]
    fn alone_everything_is_agreed() {
        let all = host().agree("x".into(), Slice::from(&[1u8, 2][..])).unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].as_slice(), [1, 2]);
    }
}
