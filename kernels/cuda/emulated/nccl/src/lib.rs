//! NCCL between emulated devices of one process: a library with NCCL's functions, as far as `base-nccl` uses them, for ranks that
//! are threads.
//!
//! It is as inconvenient as NCCL with communicators that do not block: calls return before they are under way, work waits on the
//! stream for the other ranks, an abort ends such work and then waits until no recording holds an exchange. What is to go wrong is
//! said by [`Library::fault`].

mod functions;
mod group;
mod library;

pub use library::Library;
