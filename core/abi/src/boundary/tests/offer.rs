//! Offers: taken where name, version and layout are equal, refused with everything that differs elsewhere.

use super::{Sample, count, counted, facts};
use crate::boundary::{Difference, Interface, Mismatch, Offer, differences, layout_text};
use crate::points::{DrafterObject, LayoutLinkObject, ObserverObject, PlannerObject, StoreObject};
use crate::{PassObject, ProviderObject};

/// The interface as another release might have it.
#[allow(dead_code)] // only its layout is compared
mod other {
    use crate::{List, Maybe, OpError, Slice, SliceMut, Text, TextBuf};

    /// `rate` is wider, `numbers` and `name` changed places, `extra` is new.
    #[repr(C)]
    #[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
    pub struct Facts<'a> {
        /// A name.
        pub name: Text<'a>,
        /// Some numbers.
        pub numbers: Slice<'a, u32>,
        /// A rate.
        pub rate: f64,
        /// One more.
        pub extra: u8,
    }

    crate::interface! {
        /// Same name and version.
        "sample", 3: Sample, SampleObject, SampleTable {
            /// As before, with other facts.
            fn describe(&self, facts: &Facts<'_>) -> TextBuf;
            /// As before.
            fn fill(&self, from: Slice<'_, u32>, to: SliceMut<'_, u32>) -> ();
            /// As before.
            fn append(&self, list: &mut List<u32>) -> () = Err(OpError::invalid("this one appends nothing"));
            /// Another type.
            fn limit(&self) -> Maybe<u64> = Ok(Maybe::RNone);
        }
    }
}

/// A later version.
#[allow(dead_code)] // as above
mod later {
    use crate::TextBuf;

    crate::interface! {
        /// Same name.
        "sample", 4: Sample, SampleObject, SampleTable {
            /// Without facts.
            fn describe(&self) -> TextBuf;
        }
    }
}

/// Enums that differ in what their values mean, not in their size.
#[allow(dead_code)] // as above
mod signals {
    /// Declares an interface that takes an enum.
    macro_rules! signals {
        ($module:ident, $($variant:ident = $number:literal),*) => {
            pub mod $module {
                /// The enum.
                #[repr(u8)]
                #[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
                #[allow(missing_docs)]
                pub enum Signal {
                    $($variant = $number,)*
                }
                crate::interface! {
                    /// Takes it.
                    "signals", 0: Signals, SignalsObject, SignalsTable {
                        /// Takes it.
                        fn take(&self, signal: Signal) -> ();
                    }
                }
            }
        };
    }
    signals!(plain, Stop = 0, Go = 1);
    signals!(renamed, Stop = 0, Run = 1);
    signals!(renumbered, Stop = 1, Go = 0);
}

#[test]
fn what_fits_is_taken_and_works() {
    let (object, drops) = counted();
    let offer = Offer::of(object);
    assert_eq!((offer.interface(), offer.version()), ("sample", 3));
    assert_eq!(offer.fits::<super::SampleObject>(), Ok(()));
    let taken: super::SampleObject = offer.take().unwrap();
    assert_eq!(taken.describe(&facts(&[1], 1.0)).unwrap(), "röst has [1] at 1");
    assert_eq!(count(&drops), 0);
    drop(taken);
    assert_eq!(count(&drops), 1);
    // One that nobody takes frees its object.
    let (object, drops) = counted();
    drop(Offer::of(object));
    assert_eq!(count(&drops), 1);
}

#[test]
fn another_name_or_version_is_refused_and_freed() {
    let (object, drops) = counted();
    let refused = Offer::of(object).take::<PassObject>().err().unwrap();
    assert_eq!(refused, Mismatch::Interface { ours: "pass".into(), theirs: "sample".into() });
    assert_eq!(refused.to_string(), "offers interface `sample` where `pass` is wanted");
    assert_eq!(count(&drops), 1);

    let (object, drops) = counted();
    let refused = Offer::of(object).take::<later::SampleObject>().err().unwrap();
    assert_eq!(refused, Mismatch::Version { interface: "sample".into(), ours: 4, theirs: 3 });
    let text = refused.to_string();
    assert!(text.contains("version 3 of interface `sample`") && text.contains("knows version 4"), "{text}");
    assert_eq!(count(&drops), 1);
}

#[test]
fn another_layout_is_refused_with_every_field_that_differs() {
    let (object, drops) = counted();
    let refused = Offer::of(object).take::<other::SampleObject>().err().unwrap();
    assert_eq!(count(&drops), 1);
    let text = refused.to_string();
    let Mismatch::Layout { interface, differences } = refused else { panic!("{text}") };
    assert_eq!(interface, "sample");
    // "Ours" is the side that takes.
    let find = |at: &str| -> &Difference {
        let found = differences.iter().find(|d| d.at.ends_with(at));
        found.unwrap_or_else(|| panic!("{at} is not in: {text}"))
    };
    let differs = |at: &str, ours: &str, theirs: &str| {
        let d = find(at);
        let said = |v: &Option<String>| v.clone().unwrap_or_else(|| "absent".into());
        assert!(said(&d.ours).contains(ours) && said(&d.theirs).contains(theirs), "{d}");
        assert!(text.contains(&d.to_string()), "{d} is not in: {text}");
    };
    differs("Facts", "48 bytes, aligned to 8", "40 bytes, aligned to 8");
    differs(".00 name", "Text", "absent");
    differs(".00 numbers", "absent", "Slice");
    differs(".01 numbers", "Slice", "absent");
    differs(".01 name", "absent", "Text");
    differs(".02 rate", "f64, 8 bytes, aligned to 8", "f32, 4 bytes, aligned to 4");
    differs(".03 extra", "u8", "absent");
    differs(".03 limit", "ROption<u64>", "ROption<u32>");
    differs("ROption<u64>", "16 bytes", "absent");
    differs(".04 limit_of", "absent", "fn(");
    // What is equal is not in the list.
    assert!(!differences.iter().any(|d| d.at.ends_with("fill") || d.at.ends_with("append")), "{text}");
    assert!(text.starts_with("interface `sample` has another layout than in this host"), "{text}");
    assert_eq!(text.lines().count(), differences.len() + 1, "a line a field: {text}");
}

#[test]
fn names_and_numbers_of_enums_are_part_of_a_layout() {
    let plain = layout_text::<signals::plain::SignalsObject>();
    let renamed = differences(plain, layout_text::<signals::renamed::SignalsObject>());
    assert!(renamed.iter().any(|d| d.to_string().contains("here Stop, Go; there Stop, Run")), "{renamed:?}");
    let renumbered = differences(plain, layout_text::<signals::renumbered::SignalsObject>());
    assert!(renumbered.iter().any(|d| d.to_string().contains("here [0, 1]; there [1, 0]")), "{renumbered:?}");
}

#[test]
fn a_shared_object_has_many_users_and_is_kept() {
    let (object, drops) = counted();
    let shared = Offer::of(object).share();
    assert_eq!(shared.interface(), "sample");
    for _ in 0..2 {
        let user = shared.get::<super::SampleObject>().map_err(|e| e.to_string()).unwrap();
        assert_eq!(user.describe(&facts(&[], 1.0)).unwrap(), "röst has [] at 1");
    }
    let (name, layout) = (shared.get::<PassObject>().err(), shared.get::<other::SampleObject>().err());
    assert!(matches!(name, Some(Mismatch::Interface { .. })), "{name:?}");
    assert!(matches!(layout, Some(Mismatch::Layout { .. })), "{layout:?}");
    assert_eq!(count(&drops), 0, "neither users nor refusals free it");
}

#[test]
fn differences_are_those_of_the_texts() {
    assert_eq!(differences("A.00 x: u8, 1 bytes\nA: 1 bytes", "A.00 x: u8, 1 bytes\nA: 1 bytes"), []);
    let found = differences("A: 1 bytes\nB: 2 bytes\nC: 3 bytes", "A: 1 bytes\nB: 4 bytes\nD: 5 bytes");
    let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(
        lines,
        ["B: here 2 bytes; there 4 bytes", "C: here 3 bytes; there absent", "D: here absent; there 5 bytes"]
    );
}

/// What a generic type holds is part of a layout, also where another one of the same type stands before it.
#[allow(dead_code)] // as above
mod holders {
    /// A generic type that nobody knows by name.
    #[repr(C)]
    #[derive(abi_stable::StableAbi)]
    #[allow(missing_docs)]
    pub struct Pair<T> {
        pub one: T,
        pub two: T,
    }

    /// Declares an interface over two lists and a result.
    macro_rules! holders {
        ($module:ident, $first:ty, $second:ty, $pair:ty, $result:ty) => {
            pub mod $module {
                use super::Pair;
                use crate::{List, Maybe, Slice, TextBuf};
                crate::interface! {
                    /// Takes lists.
                    "holders", 0: Holders, HoldersObject, HoldersTable {
                        /// Takes one that is always there.
                        fn same(&self, list: Slice<'_, u8>, owned: &List<u8>, pair: &Pair<u8>) -> TextBuf;
                        /// Takes others.
                        fn other(&self, list: Slice<'_, $first>, owned: &List<$second>, pair: &Pair<$pair>)
                            -> Maybe<$result>;
                    }
                }
            }
        };
    }
    holders!(plain, u32, u32, u32, u64);
    holders!(first, i32, u32, u32, u64);
    holders!(second, u32, i32, u32, u64);
    holders!(pair, u32, u32, i32, u64);
    holders!(result, u32, u32, u32, i64);
    holders!(deep, u32, u32, u32, List<u8>);
    holders!(deeper, u32, u32, u32, List<i8>);
}

#[test]
fn parameters_of_generic_types_are_part_of_a_layout() {
    use holders::{deep, deeper, first, pair, plain, result, second};
    let texts = [
        layout_text::<plain::HoldersObject>(),
        layout_text::<first::HoldersObject>(),
        layout_text::<second::HoldersObject>(),
        layout_text::<pair::HoldersObject>(),
        layout_text::<result::HoldersObject>(),
        layout_text::<deep::HoldersObject>(),
        layout_text::<deeper::HoldersObject>(),
    ];
    for (i, a) in texts.iter().enumerate() {
        for b in &texts[..i] {
            let found = differences(a, b);
            assert!(!found.is_empty(), "{a}\n\n{b}");
        }
    }
    let said: Vec<String> = differences(texts[0], texts[1]).iter().map(ToString::to_string).collect();
    let said = said.join("\n");
    assert!(said.contains("Slice<&u32>, 16 bytes") && said.contains("Slice<&i32>, 16 bytes"), "{said}");
}

/// A layout says something about every function and type of its interface, and always the same.
#[test]
fn layouts_of_the_released_interfaces_are_whole() {
    fn lines<I: Interface>(functions: &[&str], types: &[&str]) {
        let text = layout_text::<I>();
        assert_eq!(text, layout_text::<I>());
        for name in functions {
            let function = text.lines().find(|l| l.contains(&format!(" {name}: fn(")));
            assert!(function.is_some(), "{name} of {} is not in: {text}", I::NAME);
        }
        for name in types {
            let size = text.lines().any(|l| l.strip_prefix(name).is_some_and(|l| l.starts_with(": ")));
            assert!(size, "{name} of {} is not in: {text}", I::NAME);
        }
    }
    let call = ["Call", "RoundTable", "Weight", "View", "CacheView", "CommTable", "KnobValue"];
    lines::<ProviderObject>(&["op", "covers", "claim", "run", "run_group"], &call);
    lines::<ProviderObject>(&[], &["Query", "Granted", "Claim", "Bits", "OpError", "BelowTable", "Member"]);
    lines::<PassObject>(&["name", "rewrite"], &["Program", "Step", "Buffer", "Shape", "Word"]);
    lines::<LayoutLinkObject>(&["edit"], &["Families", "Family"]);
    lines::<PlannerObject>(&["place", "pieces"], &["PlanFacts", "SlotFacts", "Verdict", "PieceChoice"]);
    lines::<StoreObject>(&["save", "resume"], &["SaveFacts", "SequencesTable", "FamilyInfo", "StoreOffer"]);
    lines::<DrafterObject>(&["propose"], &["Ask", "Proposal", "ForwardsTable", "HeadOut", "HeadRows"]);
    lines::<ObserverObject>(&["sequence"], &["SequenceEvent", "OpDone"]);
}
