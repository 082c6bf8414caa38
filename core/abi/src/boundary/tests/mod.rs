//! The boundary with both of its sides in one program.

mod interface;
mod note;
mod offer;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{List, Maybe, OpError, Slice, SliceMut, Text, TextBuf};

/// Facts that cross.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// Some numbers.
    pub numbers: Slice<'a, u32>,
    /// A name.
    pub name: Text<'a>,
    /// A rate.
    pub rate: f32,
}

crate::interface! {
    /// An interface with every kind of argument and result.
    "sample", 3: Sample, SampleObject, SampleTable {
        /// Describes the facts.
        fn describe(&self, facts: &Facts<'_>) -> TextBuf;
        /// Writes into memory of the caller.
        fn fill(&self, from: Slice<'_, u32>, to: SliceMut<'_, u32>) -> ();
        /// Appends to a list of the caller.
        fn append(&self, list: &mut List<u32>) -> () = Err(OpError::invalid("this one appends nothing"));
        /// Nothing, unless an implementation says otherwise.
        fn limit(&self) -> Maybe<u32> = Ok(Maybe::RNone);
        /// Another object's limit.
        fn limit_of(&self, other: &SampleObject) -> Maybe<u32> = other.limit();
    }
}

/// Counts its drops.
struct Counted(Arc<AtomicU32>);

impl Counted {
    fn new() -> (Self, Arc<AtomicU32>) {
        let drops = Arc::new(AtomicU32::new(0));
        (Self(drops.clone()), drops)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Sample for Counted {
    fn describe(&self, facts: &Facts<'_>) -> Result<TextBuf, OpError> {
        if facts.rate < 0.0 {
            return Err(OpError::invalid(format!("rate {} of {} is negative", facts.rate, facts.name)));
        }
        Ok(format!("{} has {:?} at {}", facts.name, facts.numbers, facts.rate).into())
    }
    fn fill(&self, from: Slice<'_, u32>, to: SliceMut<'_, u32>) -> Result<(), OpError> {
        to.into_mut().iter_mut().zip(from.iter().rev()).for_each(|(to, from)| *to = *from);
        Ok(())
    }
    fn append(&self, list: &mut List<u32>) -> Result<(), OpError> {
        // More than its memory holds, so that the list must grow on this side.
        list.extend(0..1000);
        Ok(())
    }
}

fn counted() -> (SampleObject, Arc<AtomicU32>) {
    let (value, drops) = Counted::new();
    (SampleObject::new(value), drops)
}

fn count(drops: &AtomicU32) -> u32 {
    drops.load(Ordering::Relaxed)
}

fn facts(numbers: &[u32], rate: f32) -> Facts<'_> {
    Facts { numbers: Slice::from(numbers), name: Text::from("röst"), rate }
}
