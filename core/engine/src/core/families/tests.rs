//! The chain of layouts: what two plugins may both set, and what is refused.

use plugfold_abi::boundary::Offer;
use plugfold_abi::points::{Families, Family, LayoutLink, LayoutLinkObject, Owner};
use plugfold_abi::{Addressing, List, OpError};

use super::laid_out;
use crate::hooks::Hooks;

/// A link that does what a closure does.
struct Edit<E>(E);

impl<E: Fn(&mut Families) + Send + Sync> LayoutLink for Edit<E> {
    fn edit(&self, families: &mut Families) -> Result<(), OpError> {
        (self.0)(families);
        Ok(())
    }
}

/// One link of the chain: plugin, the plugins that it is over, its edit.
type Link = (&'static str, &'static [&'static str], fn(&mut Families));

fn family(id: &str, owner: Owner, layers: &[u32]) -> Family {
    Family {
        id: id.into(),
        layers: layers.into(),
        owner,
        addressing: Addressing::Linear,
        format: "f32".into(),
        row_bytes: 64,
        positions_a_row: 1,
        rows: 100,
        buffers: 1,
        in_snapshot: false,
    }
}

fn base() -> Families {
    let all = [
        family("mla.kv", Owner::Model, &[2, 5]),
        family("idx.pool", Owner::Model, &[2]),
        family("mla.kv", Owner::Mtp, &[8]),
    ];
    Families {
        all: List::from(all.to_vec()),
        context: 100,
        window_rows: 8,
        mla_heads: 4,
        mla_key: 2,
        mla_value: 2,
        mla_latent: 3,
    }
}

fn chain(links: &[Link]) -> Result<Families, String> {
    let mut hooks = Hooks::default();
    for (owner, over, edit) in links {
        let over: Vec<String> = over.iter().map(ToString::to_string).collect();
        hooks.add(owner, &over, Offer::of(LayoutLinkObject::new(Edit(*edit)))).unwrap();
    }
    laid_out(base(), &hooks).map_err(|e| e.to_string())
}

fn refused(links: &[Link], words: &[&str]) {
    let text = chain(links).expect_err("must be refused");
    for word in words {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
}

fn latent(families: &mut Families) {
    for f in families.named("mla.kv") {
        (f.format, f.row_bytes) = ("latent.f32".into(), 12);
    }
}

fn coded(families: &mut Families) {
    for f in families.named("mla.kv") {
        (f.format, f.row_bytes) = ("latent.fp8".into(), 8);
    }
}

fn paged(families: &mut Families) {
    families.named("mla.kv").for_each(|f| f.addressing = Addressing::Paged);
}

fn add(families: &mut Families) {
    families.all.push(family("draft.kv", Owner::Drafter, &[0, 1]));
}

fn remove(families: &mut Families) {
    families.all.retain(|f| f.id != "idx.pool");
}

fn nothing(_: &mut Families) {}

#[test]
fn every_link_sees_what_the_ones_before_it_made() {
    assert_eq!(chain(&[]), Ok(base()));
    assert_eq!(chain(&[("a", &[], nothing)]), Ok(base()));
    let all = chain(&[("a", &[], latent), ("b", &[], paged), ("c", &[], add), ("d", &["a"], coded)]).unwrap();
    let said: Vec<String> = all
        .all
        .iter()
        .map(|f| format!("{} {:?} {} {} {:?}", f.id, f.owner, f.format, f.row_bytes, f.addressing))
        .collect();
    let want = [
        "mla.kv Model latent.fp8 8 Paged",
        "idx.pool Model f32 64 Linear",
        "mla.kv Mtp latent.fp8 8 Paged",
        "draft.kv Drafter f32 64 Linear",
    ];
    assert_eq!(said, want);
}

#[test]
fn two_plugins_that_set_one_field_are_refused_unless_the_later_names_the_earlier() {
    refused(
        &[("a", &[], latent), ("b", &[], coded)],
        &["plugins a and b", "mla.kv of Model: format", "`over`"],
    );
    refused(&[("a", &["b"], latent), ("b", &["c"], coded)], &["plugins a and b"]);
    assert!(chain(&[("a", &[], latent), ("b", &["c", "a"], coded)]).is_ok());
    // A third has to name the one whose field stands.
    refused(&[("a", &[], latent), ("b", &["a"], coded), ("c", &["a"], latent)], &["plugins b and c"]);
    assert!(chain(&[("a", &[], latent), ("b", &["a"], coded), ("c", &["b"], latent)]).is_ok());
    // One plugin may set its own field again; setting what stands already is no change.
    assert!(chain(&[("a", &[], latent), ("a", &[], coded)]).is_ok());
    assert!(chain(&[("a", &[], latent), ("b", &[], latent)]).is_ok());
    // Other fields, and the same field of another family, are nobody's but their own.
    assert!(chain(&[("a", &[], latent), ("b", &[], paged)]).is_ok());
    assert!(chain(&[("a", &[], latent), ("b", &[], |f| f.all[1].format = "f16".into())]).is_ok());
}

#[test]
fn who_adds_or_removes_a_family_sets_all_of_it() {
    let edit: fn(&mut Families) = |f| f.named("draft.kv").for_each(|f| f.rows = 7);
    refused(&[("a", &[], add), ("b", &[], edit)], &["plugins a and b", "draft.kv of Drafter: rows"]);
    assert_eq!(chain(&[("a", &[], add), ("b", &["a"], edit)]).unwrap().all[3].rows, 7);
    let pools: fn(&mut Families) = |f| f.named("idx.pool").for_each(|f| f.rows = 7);
    refused(&[("a", &[], pools), ("b", &[], remove)], &["plugins a and b", "idx.pool of Model: rows"]);
    assert_eq!(chain(&[("a", &[], pools), ("b", &["a"], remove)]).unwrap().all.len(), 2);
    // What is gone is gone for the links after it.
    assert_eq!(chain(&[("a", &[], remove), ("b", &[], pools)]).unwrap().all.len(), 2);
}

#[test]
fn layouts_that_no_memory_can_have_are_refused() {
    refused(&[("a", &[], |f| f.all[0].row_bytes = 6)], &["plugin a", "mla.kv", "6 bytes", "multiple of 4"]);
    refused(&[("a", &[], |f| f.all[1].row_bytes = 0)], &["plugin a", "idx.pool", "0 bytes"]);
    refused(&[("a", &[], |f| f.all[0].rows = 0)], &["plugin a", "mla.kv", "(0 rows)", "at least one row"]);
    let twice: fn(&mut Families) = |f| f.all.push(family("mla.kv", Owner::Drafter, &[4, 5]));
    refused(&[("a", &[], twice)], &["plugin a", "mla.kv", "layer 5"]);
    let apart: fn(&mut Families) = |f| f.all.push(family("mla.kv", Owner::Drafter, &[3, 4]));
    assert!(chain(&[("a", &[], apart)]).is_ok());
    let again: Link = ("b", &["a"], add);
    refused(&[("a", &[], add), again], &["plugin b", "draft.kv", "layer 0"]);
}

/// Fails.
struct Fails;

impl LayoutLink for Fails {
    fn edit(&self, _: &mut Families) -> Result<(), OpError> {
        Err(OpError::invalid("no room for rows of 3 bytes"))
    }
}

#[test]
fn a_link_that_fails_is_named() {
    let mut hooks = Hooks::default();
    hooks.add_object("a", LayoutLinkObject::new(Fails)).unwrap();
    let text = laid_out(base(), &hooks).unwrap_err().to_string();
    assert_eq!(text, "plugin a: no room for rows of 3 bytes");
}
