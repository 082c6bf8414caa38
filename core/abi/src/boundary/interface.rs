//! Traits that cross: one declaration gives the trait, its table of functions and the object that carries both.

use std::marker::PhantomData;
use std::ops::Deref;

use abi_stable::type_layout::TypeLayout;

/// Stands for a value of the other side; only its address is used.
#[repr(C)]
#[derive(abi_stable::StableAbi)]
pub struct Opaque {
    never: [u8; 0],
}

/// An object of some interface.
pub trait Interface: Sized {
    /// Name of the interface.
    const NAME: &'static str;
    /// Version; a released version never changes.
    const VERSION: u32;
    /// Layout of the table of functions, with all types that its functions take and give.
    fn table_layout() -> &'static TypeLayout;
    /// Value, table and the function that frees the value.
    fn into_raw(self) -> (*mut Opaque, *const Opaque);
    /// The opposite of [`Interface::into_raw`].
    ///
    /// # Safety
    /// The pointers come from `into_raw` of an object whose layout was compared with this one's and found equal, and
    /// nobody else frees the value.
    unsafe fn from_raw(this: *mut Opaque, table: *const Opaque) -> Self;
}

/// An object that stands for a borrowed value: it frees nothing.
pub struct Borrowed<'a, I> {
    object: std::mem::ManuallyDrop<I>,
    life: PhantomData<&'a ()>,
}

impl<I> Borrowed<'_, I> {
    /// Wraps an object whose value is borrowed.
    ///
    /// # Safety
    /// The value must live as long as `'a`.
    pub unsafe fn new(object: I) -> Self {
        Self { object: std::mem::ManuallyDrop::new(object), life: PhantomData }
    }
}

impl<I> Deref for Borrowed<'_, I> {
    type Target = I;
    fn deref(&self) -> &I {
        &self.object
    }
}

/// Declares an interface.
///
/// ```
/// plugfold_abi::interface! {
///     /// Counts.
///     "counter", 0: Counter, CounterObject, CounterTable {
///         /// One more; says how many.
///         fn count(&self) -> u32;
///         /// Whether it can go back. Links that say nothing cannot.
///         fn backward(&self) -> bool = Ok(false);
///     }
/// }
/// struct One;
/// impl Counter for One {
///     fn count(&self) -> Result<u32, plugfold_abi::OpError> {
///         Ok(1)
///     }
/// }
/// let object = CounterObject::new(One);
/// assert_eq!(object.count(), Ok(1));
/// assert_eq!(object.backward(), Ok(false));
/// ```
///
/// Every method takes `&self` and returns `Result<T, OpError>` (written as `-> T`); `= value` gives a method a default.
/// Arguments and results must be types of fixed layout.
#[macro_export]
macro_rules! interface {
    (
        $(#[$doc:meta])*
        $name:literal, $version:literal: $trait:ident, $object:ident, $table:ident {
            $(
                $(#[$mdoc:meta])*
                fn $method:ident(&self $(, $arg:ident: $ty:ty)* $(,)?) -> $ret:ty $(= $default:expr)?;
            )*
        }
    ) => {
        $(#[$doc])*
        #[allow(clippy::missing_errors_doc)] // an error of a hook ends what the hook was called for
        pub trait $trait: Send + Sync {
            $(
                $crate::interface_method! {
                    [$(#[$mdoc])*] $method ($($arg: $ty),*) -> $ret; $($default)?
                }
            )*
        }

        #[doc = concat!("Functions of [`", stringify!($trait), "`].")]
        #[repr(C)]
        #[derive($crate::boundary::private::StableAbi)]
        #[allow(missing_docs)]
        pub struct $table {
            $(
                pub $method: unsafe extern "C" fn(*const $crate::boundary::Opaque $(, $ty)*)
                    -> $crate::boundary::Fallible<$ret>,
            )*
            pub release: unsafe extern "C" fn(*mut $crate::boundary::Opaque),
        }

        #[doc = concat!("An implementation of [`", stringify!($trait), "`], from either side.")]
        #[repr(C)]
        #[derive($crate::boundary::private::StableAbi)]
        pub struct $object {
            this: *mut $crate::boundary::Opaque,
            table: *const $table,
        }

        // SAFETY: the implementation is `Send + Sync`; the table is constant.
        unsafe impl Send for $object {}
        // SAFETY: as above.
        unsafe impl Sync for $object {}

        const _: () = {
            struct Shim<T>(std::marker::PhantomData<T>);

            #[allow(improper_ctypes_definitions)] // all types have fixed layouts; the lint does not know `()`
            impl<T: $trait> Shim<T> {
                const OWNED: $table = $table { $($method: Self::$method,)* release: Self::release };
                const LENT: $table = $table { $($method: Self::$method,)* release: Self::keep };
                $(
                    unsafe extern "C" fn $method(
                        this: *const $crate::boundary::Opaque $(, $arg: $ty)*
                    ) -> $crate::boundary::Fallible<$ret> {
                        // SAFETY: the object was made from a `T` that lives as long as the object.
                        let value = unsafe { &*this.cast::<T>() };
                        $crate::boundary::guard($name, stringify!($method), || $trait::$method(value $(, $arg)*))
                    }
                )*
                unsafe extern "C" fn release(this: *mut $crate::boundary::Opaque) {
                    let freed = std::panic::AssertUnwindSafe(|| {
                        // SAFETY: `new` made it from a box, and the object is dropped once.
                        drop(unsafe { Box::from_raw(this.cast::<T>()) });
                    });
                    if let Err(panic) = std::panic::catch_unwind(freed) {
                        // A destructor that fails has nobody to tell; its payload's destructor may fail as well.
                        std::mem::forget(panic);
                    }
                }
                unsafe extern "C" fn keep(_: *mut $crate::boundary::Opaque) {}
            }

            impl $object {
                /// Carries a value.
                pub fn new<T: $trait + 'static>(value: T) -> Self {
                    Self { this: Box::into_raw(Box::new(value)).cast(), table: &raw const *(&Shim::<T>::OWNED) }
                }
                /// Stands for a borrowed value.
                pub fn lend<T: $trait>(value: &T) -> $crate::boundary::Borrowed<'_, Self> {
                    let this = (&raw const *value).cast_mut().cast();
                    let object = Self { this, table: &raw const *(&Shim::<T>::LENT) };
                    // SAFETY: the borrow carries the value's lifetime.
                    unsafe { $crate::boundary::Borrowed::new(object) }
                }
            }
        };

        impl $trait for $object {
            $(
                fn $method(&self $(, $arg: $ty)*) -> Result<$ret, $crate::OpError> {
                    // SAFETY: the table belongs to the value, and both live until the object is dropped.
                    unsafe { ((*self.table).$method)(self.this $(, $arg)*) }.into_result()
                }
            )*
        }

        impl<T: $trait + ?Sized> $trait for std::sync::Arc<T> {
            $(
                fn $method(&self $(, $arg: $ty)*) -> Result<$ret, $crate::OpError> {
                    (**self).$method($($arg),*)
                }
            )*
        }

        impl Drop for $object {
            fn drop(&mut self) {
                // SAFETY: dropped once; nothing uses the value afterwards.
                unsafe { ((*self.table).release)(self.this) }
            }
        }

        impl $crate::boundary::Interface for $object {
            const NAME: &'static str = $name;
            const VERSION: u32 = $version;
            fn table_layout() -> &'static $crate::boundary::private::TypeLayout {
                <$table as $crate::boundary::private::StableAbi>::LAYOUT
            }
            fn into_raw(self) -> (*mut $crate::boundary::Opaque, *const $crate::boundary::Opaque) {
                let raw = (self.this, self.table.cast());
                std::mem::forget(self);
                raw
            }
            unsafe fn from_raw(
                this: *mut $crate::boundary::Opaque,
                table: *const $crate::boundary::Opaque,
            ) -> Self {
                Self { this, table: table.cast() }
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! interface_method {
    ([$($doc:tt)*] $method:ident ($($arg:ident: $ty:ty),*) -> $ret:ty; ) => {
        $($doc)*
        fn $method(&self $(, $arg: $ty)*) -> Result<$ret, $crate::OpError>;
    };
    ([$($doc:tt)*] $method:ident ($($arg:ident: $ty:ty),*) -> $ret:ty; $default:expr) => {
        $($doc)*
        fn $method(&self $(, $arg: $ty)*) -> Result<$ret, $crate::OpError> {
            $(let _ = &$arg;)*
            $default
        }
    };
}
