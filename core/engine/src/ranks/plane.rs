//! The control plane as transports see it.

use std::sync::Arc;

use plugfold_abi::points::Control as ControlPoint;
use plugfold_abi::{CommObject, List, OpError, Slice, Text, TextBuf};

use super::control::Control;
use super::fate::Fate;
use super::{SILENCE, TcpComm};

/// What a transport may use, for as long as it lives.
pub(crate) struct Plane {
    pub(super) fate: Arc<Fate>,
    pub(super) control: Arc<Control>,
    pub(super) comm: Arc<TcpComm>,
}

impl ControlPoint for Plane {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(self.fate.rank as u32)
    }
    fn ranks(&self) -> Result<u32, OpError> {
        Ok(self.fate.who.len() as u32)
    }
    fn gather(&self, what: Text<'_>, mine: Slice<'_, u8>) -> Result<List<List<u8>>, OpError> {
        let all = self.control.gather(what.get_str(), &mine).map_err(|e| OpError::fatal(e.to_string()))?;
        Ok(all.into_iter().map(List::from).collect())
    }
    fn patience_s(&self) -> Result<f64, OpError> {
        Ok(SILENCE.as_secs_f64())
    }
    fn ended(&self) -> Result<TextBuf, OpError> {
        Ok(self.fate.ended().map_or_else(TextBuf::new, |end| end.to_string().into()))
    }
    fn host(&self) -> Result<TextBuf, OpError> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Ok(id.trim().into())
    }
    fn streams(&self) -> Result<CommObject, OpError> {
        Ok(CommObject::new(Arc::clone(&self.comm)))
    }
}
