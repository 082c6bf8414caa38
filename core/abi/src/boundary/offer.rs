//! Offers: an interface, its version and layout, and an object of it.

use std::marker::PhantomData;

use super::{Difference, Interface, Opaque, differences, layout_text};
use crate::Text;

/// Takes an offer over.
pub type Give = unsafe extern "C" fn(context: *mut Opaque, offer: Offer);
/// The root function: gives offers; anything but 0 says that it could not.
pub type Root = unsafe extern "C" fn(context: *mut Opaque, give: Give) -> i32;

/// An object that one side offers to the other. Its layout never changes.
#[repr(C)]
#[derive(abi_stable::StableAbi)]
pub struct Offer {
    interface: Text<'static>,
    version: u32,
    layout: Text<'static>,
    this: *mut Opaque,
    table: *const Opaque,
    release: unsafe extern "C" fn(*mut Opaque, *const Opaque),
}

// SAFETY: every interface's objects are `Send + Sync`.
unsafe impl Send for Offer {}
// SAFETY: as above.
unsafe impl Sync for Offer {}

/// Why an offer cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// It is of another interface.
    Interface {
        /// Asked for.
        ours: String,
        /// Offered.
        theirs: String,
    },
    /// It is of another version.
    Version {
        /// The interface.
        interface: String,
        /// Known here.
        ours: u32,
        /// Offered.
        theirs: u32,
    },
    /// Same version, other layout: the two were built from different sources.
    Layout {
        /// The interface.
        interface: String,
        /// All fields that differ.
        differences: Vec<Difference>,
    },
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Mismatch::Interface { ours, theirs } => {
                write!(f, "offers interface `{theirs}` where `{ours}` is wanted")
            }
            Mismatch::Version { interface, ours, theirs } => write!(
                f,
                "offers version {theirs} of interface `{interface}`, this host knows version {ours}: build both from \
                 one release"
            ),
            Mismatch::Layout { interface, differences } => {
                write!(
                    f,
                    "interface `{interface}` has another layout than in this host ({} differences): rebuild the plugin \
                     against this host's plugfold-abi",
                    differences.len()
                )?;
                differences.iter().try_for_each(|d| write!(f, "\n  {d}"))
            }
        }
    }
}
impl std::error::Error for Mismatch {}

unsafe extern "C" fn release<I: Interface>(this: *mut Opaque, table: *const Opaque) {
    // SAFETY: `of` made the offer from an `I`, and an offer frees its object once.
    drop(unsafe { I::from_raw(this, table) });
}

impl Offer {
    /// Offers an object.
    pub fn of<I: Interface>(object: I) -> Self {
        let (this, table) = object.into_raw();
        Self {
            interface: Text::from(I::NAME),
            version: I::VERSION,
            layout: Text::from(layout_text::<I>()),
            this,
            table,
            release: release::<I>,
        }
    }

    /// The interface's name.
    pub fn interface(&self) -> &'static str {
        self.interface.get_str()
    }

    /// The interface's version.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Whether this is an `I` as this side knows it.
    ///
    /// # Errors
    /// The first of name, version, layout that differs; a layout with all its differing fields.
    pub fn fits<I: Interface>(&self) -> Result<(), Mismatch> {
        if self.interface() != I::NAME {
            let (ours, theirs) = (I::NAME.to_owned(), self.interface().to_owned());
            return Err(Mismatch::Interface { ours, theirs });
        }
        let interface = I::NAME.to_owned();
        if self.version != I::VERSION {
            return Err(Mismatch::Version { interface, ours: I::VERSION, theirs: self.version });
        }
        let differences = differences(layout_text::<I>(), self.layout.get_str());
        if differences.is_empty() { Ok(()) } else { Err(Mismatch::Layout { interface, differences }) }
    }

    /// Takes the object.
    ///
    /// # Errors
    /// As [`Offer::fits`]; the object is then freed.
    pub fn take<I: Interface>(self) -> Result<I, Mismatch> {
        self.fits::<I>()?;
        // SAFETY: name, version and layout are equal, and the offer gives up its own release.
        let object = unsafe { I::from_raw(self.this, self.table) };
        std::mem::forget(self);
        Ok(object)
    }

    /// Keeps the object for the rest of the process and gives a handle that many may hold (services between plugins).
    pub fn share(self) -> Shared {
        let shared = Shared {
            interface: self.interface,
            version: self.version,
            layout: self.layout,
            this: self.this,
            table: self.table,
        };
        std::mem::forget(self);
        shared
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        // SAFETY: the offer owns its object.
        unsafe { (self.release)(self.this, self.table) }
    }
}

/// An object that lives as long as the process and has many users.
#[repr(C)]
#[derive(Clone, Copy, abi_stable::StableAbi)]
pub struct Shared {
    interface: Text<'static>,
    version: u32,
    layout: Text<'static>,
    this: *mut Opaque,
    table: *const Opaque,
}

// SAFETY: every interface's objects are `Send + Sync`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// The interface's name.
    pub fn interface(&self) -> &'static str {
        self.interface.get_str()
    }

    /// The object as `I`.
    ///
    /// # Errors
    /// As [`Offer::fits`].
    pub fn get<I: Interface>(&self) -> Result<super::Borrowed<'static, I>, Mismatch> {
        let offer = std::mem::ManuallyDrop::new(Offer {
            interface: self.interface,
            version: self.version,
            layout: self.layout,
            this: self.this,
            table: self.table,
            release: never,
        });
        offer.fits::<I>()?;
        let life: PhantomData<&'static ()> = PhantomData;
        let _ = life;
        // SAFETY: equal layouts; the object is never freed, so it may be borrowed for ever.
        Ok(unsafe { super::Borrowed::new(I::from_raw(self.this, self.table)) })
    }
}

unsafe extern "C" fn never(_: *mut Opaque, _: *const Opaque) {}
