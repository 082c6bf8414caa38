//! How a library and a host that were built apart meet: a note that is read before anything is loaded, one root function
//! that never changes, and offers (interface, version, layout, object) traded through it.
//!
//! An interface is written once with [`interface!`](crate::interface): a trait for whoever implements it, and an object
//! that carries any implementation across. Every call of an object catches panics on the side that panicked.

mod guard;
mod interface;
mod layout;
mod note;
mod offer;
#[cfg(test)]
mod tests;

pub use guard::guard;
pub use interface::{Borrowed, Interface, Opaque};
pub use layout::{Difference, differences, layout_text};
pub use note::{MAGIC, MAJOR, NOTE_SECTION, Note, NoteError, PANIC, ROOT_SYMBOL, join, note_len};
pub use offer::{Give, Mismatch, Offer, Root, Shared};

/// Owned list that either side may grow and free.
pub type List<T> = abi_stable::std_types::RVec<T>;
/// Owned text that either side may free.
pub type TextBuf = abi_stable::std_types::RString;
/// A value or nothing, with a fixed layout.
pub type Maybe<T> = abi_stable::std_types::ROption<T>;
/// A result with a fixed layout.
pub type Fallible<T> = abi_stable::std_types::RResult<T, crate::OpError>;

#[doc(hidden)]
pub mod private {
    pub use abi_stable::StableAbi;
    pub use abi_stable::type_layout::TypeLayout;
}
