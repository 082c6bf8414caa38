//! The `cache.layout` chain: the families as plugins leave them.

use std::collections::HashMap;

use plugfold_abi::points::{Families, Family, LayoutLink};

use super::LoadError;
use crate::hooks::Hooks;

/// A field of a family, or the family itself, for messages and as a key.
fn changes(before: &Families, after: &Families) -> Vec<String> {
    let key = |f: &Family| (f.id.to_string(), f.owner);
    let mut all = Vec::new();
    for f in &after.all {
        let name = format!("{} of {:?}", f.id, f.owner);
        let Some(old) = before.all.iter().find(|b| key(b) == key(f)) else {
            all.push(name);
            continue;
        };
        let fields = [
            ("format", old.format != f.format),
            ("row_bytes", old.row_bytes != f.row_bytes),
            ("addressing", old.addressing != f.addressing),
            ("rows", old.rows != f.rows),
            ("positions_a_row", old.positions_a_row != f.positions_a_row),
            ("buffers", old.buffers != f.buffers),
            ("layers", old.layers != f.layers),
            ("in_snapshot", old.in_snapshot != f.in_snapshot),
        ];
        all.extend(
            fields.iter().filter(|(_, changed)| *changed).map(|(field, _)| format!("{name}: {field}")),
        );
    }
    let gone = before.all.iter().filter(|b| !after.all.iter().any(|f| key(f) == key(b)));
    all.extend(gone.map(|b| format!("{} of {:?}", b.id, b.owner)));
    all
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
    }
    Ok(families)
}
