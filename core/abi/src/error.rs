//! What an operation can fail with.

/// A failed call. The request (or all requests of the call) ends with it; the engine goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpError {
    /// Names the operation, the operand, the value and the limit.
    pub message: String,
}

impl OpError {
    /// An error with this text.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

impl std::fmt::Display for OpError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}
impl std::error::Error for OpError {}
