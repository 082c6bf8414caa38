//! The plugfold binary.
fn main() {}
