//! What a hook can fail with.

use crate::TextBuf;

/// Whose fault an error is, and with it what ends.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The engine or a plugin failed: the request (or all requests of the call) ends with it; the engine goes on.
    Failed = 0,
    /// The request asks for something that cannot be: HTTP 400.
    Invalid = 1,
    /// A hook panicked; ends what [`ErrorKind::Failed`] ends.
    Panicked = 2,
    /// Nothing can go on: the engine ends on all ranks.
    Fatal = 3,
}

/// A failed hook or call.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct OpError {
    /// Whose fault.
    pub kind: ErrorKind,
    /// Names the operation, the operand, the value and the limit.
    pub message: TextBuf,
}

impl OpError {
    fn of(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into().into() }
    }
    /// The engine or the plugin failed.
    pub fn new(message: impl Into<String>) -> Self {
        Self::of(ErrorKind::Failed, message)
    }
    /// The request or a setting is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::of(ErrorKind::Invalid, message)
    }
    /// Nothing can go on.
    pub fn fatal(message: impl Into<String>) -> Self {
        Self::of(ErrorKind::Fatal, message)
    }
    /// A hook panicked.
    pub fn panicked(interface: &str, method: &str, said: &str) -> Self {
        Self::of(ErrorKind::Panicked, format!("panicked in {interface}.{method}: {said}"))
    }
}

impl std::fmt::Display for OpError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}
impl std::error::Error for OpError {}
