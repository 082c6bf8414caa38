//! Objects: calls, defaults, panics, and who frees what.

use std::panic::panic_any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Counted, Facts, Sample, SampleObject, count, counted, facts};
use crate::boundary::Interface;
use crate::{ErrorKind, List, Maybe, OpError, Slice, SliceMut, TextBuf};

#[test]
fn arguments_results_and_errors_cross() {
    let (object, _) = counted();
    assert_eq!(object.describe(&facts(&[7, 9], 0.5)).unwrap(), "röst has [7, 9] at 0.5");
    let error = object.describe(&facts(&[], -1.0)).unwrap_err();
    assert_eq!(error, OpError::invalid("rate -1 of röst is negative"));
    let mut to = [0; 3];
    object.fill(Slice::from(&[1, 2, 3][..]), SliceMut::from(&mut to[..])).unwrap();
    assert_eq!(to, [3, 2, 1]);
    let mut list = List::from(vec![5]);
    object.append(&mut list).unwrap();
    assert_eq!((list.len(), list[0], list[1000]), (1001, 5, 999));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| object.describe(&facts(&[3], 1.0)));
        assert_eq!(other.join().unwrap().unwrap(), "röst has [3] at 1");
    });
}

/// Says what the interface does by itself, but for its limit.
struct Limited(u32);

impl Sample for Limited {
    fn describe(&self, _: &Facts<'_>) -> Result<TextBuf, OpError> {
        Ok("limited".into())
    }
    fn fill(&self, _: Slice<'_, u32>, _: SliceMut<'_, u32>) -> Result<(), OpError> {
        Ok(())
    }
    fn limit(&self) -> Result<Maybe<u32>, OpError> {
        Ok(Maybe::RSome(self.0))
    }
}

#[test]
fn a_method_that_is_not_written_has_its_default() {
    let (plain, limited) = (counted().0, SampleObject::new(Limited(4)));
    assert_eq!(plain.limit(), Ok(Maybe::RNone));
    assert_eq!(limited.limit(), Ok(Maybe::RSome(4)));
    assert_eq!(limited.append(&mut List::new()), Err(OpError::invalid("this one appends nothing")));
    // Objects are arguments, too, and a default may use them.
    assert_eq!(plain.limit_of(&limited), Ok(Maybe::RSome(4)));
    assert_eq!(limited.limit_of(&plain), Ok(Maybe::RNone));
}

/// Panics in every way, when told a rate.
struct Panics(Arc<AtomicU32>);

/// A payload that panics again when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the payload's own panic");
    }
}

impl Sample for Panics {
    fn describe(&self, facts: &Facts<'_>) -> Result<TextBuf, OpError> {
        match facts.rate {
            1.0 => panic!("plain words"),
            2.0 => panic!("rate {} is too much", facts.rate),
            3.0 => panic_any(Bomb),
            _ => Ok("well".into()),
        }
    }
    fn fill(&self, from: Slice<'_, u32>, _: SliceMut<'_, u32>) -> Result<(), OpError> {
        panic!("{} numbers", from.len())
    }
}

impl Drop for Panics {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("while it is freed");
    }
}

#[test]
fn a_panic_becomes_an_error_that_names_the_hook() {
    let drops = Arc::new(AtomicU32::new(0));
    let object = SampleObject::new(Panics(drops.clone()));
    let cases = [
        (1.0, "panicked in sample.describe: plain words"),
        (2.0, "panicked in sample.describe: rate 2 is too much"),
        (3.0, "panicked in sample.describe: without a message"),
    ];
    for (rate, text) in cases {
        let error = object.describe(&facts(&[], rate)).unwrap_err();
        assert_eq!((error.kind, error.message.as_str()), (ErrorKind::Panicked, text));
    }
    let error = object.fill(Slice::from(&[1, 2][..]), SliceMut::from(&mut [][..])).unwrap_err();
    assert_eq!(error.message, "panicked in sample.fill: 2 numbers");
    assert_eq!(object.describe(&facts(&[], 0.0)).unwrap(), "well", "the object goes on");
    // Freeing it panics as well: nobody can be told, and nothing ends.
    drop(object);
    assert_eq!(count(&drops), 1);
}

#[test]
fn an_object_is_freed_once_and_a_lent_value_never() {
    let (object, drops) = counted();
    assert_eq!(count(&drops), 0);
    let (this, table) = object.into_raw();
    assert_eq!(count(&drops), 0, "raw parts own the value");
    // SAFETY: the parts come from an object of this type, and nobody else frees them.
    drop(unsafe { SampleObject::from_raw(this, table) });
    assert_eq!(count(&drops), 1);

    let (value, drops) = Counted::new();
    {
        let lent = SampleObject::lend(&value);
        assert_eq!(lent.describe(&facts(&[], 1.0)).unwrap(), "röst has [] at 1");
        assert_eq!(SampleObject::lend(&*lent).limit(), Ok(Maybe::RNone), "a lent object can be lent on");
    }
    assert_eq!(count(&drops), 0);
    drop(value);
    assert_eq!(count(&drops), 1);
}

#[test]
fn objects_may_share_a_value() {
    let (value, drops) = Counted::new();
    let value = Arc::new(value);
    let (one, two) = (SampleObject::new(value.clone()), SampleObject::new(value.clone()));
    drop((value, one));
    assert_eq!(count(&drops), 0);
    assert_eq!(two.describe(&facts(&[], 2.0)).unwrap(), "röst has [] at 2");
    // An object is an implementation itself.
    let nested = SampleObject::new(two);
    assert_eq!(nested.describe(&facts(&[], 2.0)).unwrap(), "röst has [] at 2");
    drop(nested);
    assert_eq!(count(&drops), 1);
}
