//! The host as a plugin's tests need it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{Host, HostObject, Level};
use plugfold_abi::{List, OpError, Slice, Text, TextBuf};

/// A host of one rank that keeps the log and the counters, and drops gauges.
#[derive(Clone, Debug, Default)]
pub struct Alone {
    log: Arc<Mutex<Vec<String>>>,
    counters: Arc<Mutex<HashMap<String, f64>>>,
}

impl Alone {
    /// This host as plugins get it; it stays for the process, as hosts do.
    pub fn object(&self) -> &'static HostObject {
        Box::leak(Box::new(HostObject::new(self.clone())))
    }

    /// The lines of the log.
    pub fn lines(&self) -> Vec<String> {
        self.kept().clone()
    }

    /// What a counter stands at.
    pub fn counted(&self, name: &str) -> f64 {
        let counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        counters.get(name).copied().unwrap_or(0.0)
    }

    fn kept(&self) -> MutexGuard<'_, Vec<String>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Host for Alone {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(0)
    }
    fn ranks(&self) -> Result<u32, OpError> {
        Ok(1)
    }
    fn threads(&self) -> Result<u32, OpError> {
        Ok(std::thread::available_parallelism().map_or(1, |n| n.get() as u32))
    }
    fn log(&self, _: Level, message: Text<'_>) -> Result<(), OpError> {
        self.kept().push(message.to_string());
        Ok(())
    }
    fn count(&self, name: Text<'_>, delta: f64) -> Result<(), OpError> {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        *counters.entry(name.to_string()).or_default() += delta;
        Ok(())
    }
    fn gauge(&self, _: Text<'_>, _: f64) -> Result<(), OpError> {
        Ok(())
    }
    fn cache_folder(&self) -> Result<TextBuf, OpError> {
        Err(OpError::new("tests have no folder for plugins"))
    }
    fn model_folder(&self) -> Result<TextBuf, OpError> {
        Ok(TextBuf::new())
    }
    fn agree(&self, _: Text<'_>, mine: Slice<'_, u8>) -> Result<List<List<u8>>, OpError> {
        Ok(List::from(vec![mine.to_vec().into()]))
    }
}
