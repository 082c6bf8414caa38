//! The `cache.layout` chain: the families as plugins leave them.

use std::collections::HashMap;

use plugfold_abi::points::{Families, Family, LayoutLink};

use super::LoadError;
use crate::hooks::Hooks;

/// The fields of a family, and what tells two values of each apart.
type Field = (&'static str, fn(&Family, &Family) -> bool);
const FIELDS: [Field; 8] = [
    ("format", |a, b| a.format == b.format),
    ("row_bytes", |a, b| a.row_bytes == b.row_bytes),
    ("addressing", |a, b| a.addressing == b.addressing),
    ("rows", |a, b| a.rows == b.rows),
    ("positions_a_row", |a, b| a.positions_a_row == b.positions_a_row),
    ("buffers", |a, b| a.buffers == b.buffers),
    ("layers", |a, b| a.layers == b.layers),
    ("in_snapshot", |a, b| a.in_snapshot == b.in_snapshot),
];

/// Fields that a link changed, for messages and as keys. Who adds or removes a family sets all of its fields.
fn changes(before: &Families, after: &Families) -> Vec<String> {
    let same = |a: &Family, b: &Family| (&a.id, a.owner) == (&b.id, b.owner);
    let mut all = Vec::new();
    let mut changed = |f: &Family, old: Option<&Family>| {
        let fields = FIELDS.iter().filter(|(_, equal)| old.is_none_or(|old| !equal(old, f)));
        all.extend(fields.map(|(field, _)| format!("{} of {:?}: {field}", f.id, f.owner)));
    };
    for f in &after.all {
        changed(f, before.all.iter().find(|b| same(b, f)));
    }
    let gone = before.all.iter().filter(|b| !after.all.iter().any(|f| same(b, f)));
    gone.for_each(|b| changed(b, None));
    all
}

/// Two families of one name in one layer: calls could not tell them apart.
fn ambiguous(families: &Families) -> Option<(&Family, u32)> {
    families.all.iter().enumerate().find_map(|(i, f)| {
        let earlier = families.all[..i].iter().filter(|e| e.id == f.id);
        earlier.flat_map(|e| &e.layers).find(|l| f.layers.contains(l)).map(|l| (f, *l))
    })
}

/// Runs the chain. Two plugins that set one field are refused unless the later names the earlier.
pub(super) fn laid_out(mut families: Families, hooks: &Hooks) -> Result<Families, LoadError> {
    let mut set: HashMap<String, String> = HashMap::new();
    for link in &hooks.layouts {
        let before = families.clone();
        link.call(|l| l.edit(&mut families))?;
        for change in changes(&before, &families) {
            if let Some(earlier) = set.get(&change)
                && !link.over.iter().any(|o| o == earlier)
                && *earlier != *link.owner
            {
                return Err(LoadError::Layout(format!(
                    "plugins {earlier} and {} both set cache family {change}: take one off the list, or name {earlier} in \
                     `over` or `extends` of {}",
                    link.owner, link.owner
                )));
            }
            set.insert(change, link.owner.to_string());
        }
        if let Some(f) = families.all.iter().find(|f| f.row_bytes == 0 || f.row_bytes % 4 != 0 || f.rows == 0)
        {
            return Err(LoadError::Layout(format!(
                "plugin {} makes rows of cache family {} {} bytes ({} rows): give a multiple of 4, and at least one row",
                link.owner, f.id, f.row_bytes, f.rows
            )));
        }
        if let Some((f, layer)) = ambiguous(&families) {
            return Err(LoadError::Layout(format!(
                "plugin {} adds cache family {} to layer {layer}, which has one: give it a name of its own",
                link.owner, f.id
            )));
        }
    }
    Ok(families)
}

#[cfg(test)]
mod tests;
