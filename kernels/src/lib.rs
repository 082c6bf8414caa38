//! Reference operations of glm5_next.

pub mod cpu;
