//! The precision map: which class of matrices has which mode.

use std::collections::BTreeMap;

use plugfold_0001_exl3_nonexpert_q4_api::{Assigned, CLASSES};

/// What a class may be stored as.
pub const MODES: [&str; 4] = ["bf16", "q4", "q4mse", "q8"];
/// Prefix of what holds in the multi-token-prediction layer alone.
const MTP: &str = "mtp.";
/// What holds where nothing else is said.
const DEFAULT: &str = "default";
/// Groups of classes; a name that ends in `_` stands for all classes that begin so.
const GROUPS: [(&str, &[&str]); 12] = [
    ("o_proj", &["kda_out", "dsa_out"]),
    ("down", &["dense_down", "shared_down"]),
    ("out", &["kda_out", "dsa_out", "dense_down", "shared_down", "lm_head"]),
    ("kda", &["kda_"]),
    ("dsa", &["dsa_"]),
    ("indexer", &["idx_"]),
    ("attn", &["kda_", "dsa_", "idx_"]),
    ("dense", &["dense_"]),
    ("shared", &["shared_"]),
    ("mlp", &["dense_", "shared_"]),
    ("kv_b", &["dsa_kvb"]),
    ("head", &["lm_head"]),
];

fn has(members: &[&str], class: &str) -> bool {
    members.iter().any(|m| if m.ends_with('_') { class.starts_with(m) } else { *m == class })
}

/// What a map says, by key.
pub type Map = BTreeMap<String, String>;

/// Reads `key=mode` pairs that `,` or `;` separates. An empty text is an empty map.
///
/// # Errors
/// A pair that is none, a repeated or unknown key, an unknown mode, `mtp.` of a class that layer has not.
pub fn read(text: &str) -> Result<Map, String> {
    let mut map = Map::new();
    for pair in text.split([',', ';']).map(str::trim).filter(|pair| !pair.is_empty()) {
        let Some((key, mode)) = pair.split_once('=').map(|(key, mode)| (key.trim(), mode.trim())) else {
            return Err(format!("{pair:?} is no pair: write class=mode, as out=q8"));
        };
        let name = key.strip_prefix(MTP).unwrap_or(key);
        let class = CLASSES.iter().find(|c| c.name == name);
        if class.is_none() && name != DEFAULT && !GROUPS.iter().any(|(group, _)| *group == name) {
            let classes: Vec<&str> = CLASSES.iter().map(|c| c.name).collect();
            let groups: Vec<&str> = GROUPS.iter().map(|(group, _)| *group).collect();
            return Err(format!(
                "{key:?} is no class, group or default: classes are {}; groups are {}; each may follow mtp.",
                classes.join(" "),
                groups.join(" ")
            ));
        }
        if key.starts_with(MTP) && class.is_some_and(|c| !c.mtp) {
            let there: Vec<&str> = CLASSES.iter().filter(|c| c.mtp).map(|c| c.name).collect();
            return Err(format!("{key:?}: the MTP layer has no {name}; it has {}", there.join(" ")));
        }
        if !MODES.contains(&mode) {
            return Err(format!("{key}={mode}: {mode:?} is no mode; give {}", MODES.join(", ")));
        }
        if map.insert(key.to_owned(), mode.to_owned()).is_some() {
            return Err(format!("{key:?} is given twice: keep one"));
        }
    }
    Ok(map)
}

/// The map as text that reads back to it.
pub fn write(map: &Map) -> String {
    let pairs: Vec<String> = map.iter().map(|(key, mode)| format!("{key}={mode}")).collect();
    pairs.join(",")
}

/// The mode that the groups of one level give a class.
fn by_group<'m>(map: &'m Map, prefix: &str, class: &str) -> Result<Option<&'m str>, String> {
    let mut found: Option<(String, &str)> = None;
    for (group, members) in GROUPS {
        let key = format!("{prefix}{group}");
        let Some(mode) = map.get(&key).filter(|_| has(members, class)) else { continue };
        match &found {
            Some((other, said)) if *said != mode => {
                return Err(format!(
                    "{other}={said} and {key}={mode} disagree about {class}: name {class} itself, or drop one of them"
                ));
            }
            Some(_) => {}
            None => found = Some((key, mode)),
        }
    }
    Ok(found.map(|(_, mode)| mode))
}

fn resolve(map: &Map, mode: &str, class: &str, mtp: bool) -> Result<String, String> {
    let named = |prefix: &str, name: &str| map.get(&format!("{prefix}{name}")).map(String::as_str);
    let prefixes: &[&str] = if mtp { &[MTP, ""] } else { &[""] };
    if let Some(mode) = prefixes.iter().find_map(|p| named(p, class)) {
        return Ok(mode.to_owned());
    }
    for prefix in prefixes {
        if let Some(mode) = by_group(map, prefix, class)? {
            return Ok(mode.to_owned());
        }
    }
    Ok(prefixes.iter().find_map(|p| named(p, DEFAULT)).unwrap_or(mode).to_owned())
}

/// The mode of every class, in order of [`CLASSES`]; `mode` where the map says nothing.
///
/// # Errors
/// Groups that disagree about a class; modes that differ between classes that are one matrix.
pub fn table(map: &Map, mode: &str) -> Result<Vec<Assigned>, String> {
    let mut table = Vec::with_capacity(CLASSES.len());
    for class in CLASSES {
        let main = resolve(map, mode, class.name, false)?;
        let mtp = if class.mtp { resolve(map, mode, class.name, true)? } else { main.clone() };
        table.push(Assigned { main: main.into(), mtp: mtp.into() });
    }
    for (i, class) in CLASSES.iter().enumerate() {
        for (j, other) in CLASSES.iter().enumerate().skip(i + 1) {
            if other.role == class.role && table[i] != table[j] {
                return Err(format!(
                    "{} and {} are one matrix of this engine ({}): give both the same mode",
                    class.name, other.name, class.role
                ));
            }
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(map: &str, class: &str) -> (String, String) {
        let map = read(map).unwrap();
        let main = resolve(&map, "q4", class, false).unwrap();
        let in_mtp = CLASSES.iter().any(|c| c.name == class && c.mtp);
        let mtp = if in_mtp { resolve(&map, "q4", class, true).unwrap() } else { main.clone() };
        (main, mtp)
    }

    #[test]
    fn the_nearest_name_decides() {
        for (map, class, main, mtp) in [
            ("", "kda_out", "q4", "q4"),
            ("default=q8", "kda_out", "q8", "q8"),
            ("default=q8,kda=bf16", "kda_out", "bf16", "bf16"),
            ("default=q8; kda=bf16; kda_out=q4mse", "kda_out", "q4mse", "q4mse"),
            // In the MTP layer: mtp.class > class > mtp.group > group > mtp.default > default > mode.
            ("mtp.default=q8", "dsa_out", "q4", "q8"),
            ("mtp.default=q8,default=bf16", "dsa_out", "bf16", "q8"),
            ("mtp.default=q8,dsa=bf16", "dsa_out", "bf16", "bf16"),
            ("mtp.dsa=q8,dsa=bf16", "dsa_out", "bf16", "q8"),
            ("mtp.dsa=q8,dsa_out=bf16", "dsa_out", "bf16", "bf16"),
            ("mtp.dsa_out=q8,dsa_out=bf16", "dsa_out", "bf16", "q8"),
            ("mtp.mtp_eh=bf16", "mtp_eh", "q4", "bf16"),
            ("out=q8", "lm_head", "q8", "q8"),
            ("head=q8,kv_b=bf16", "dsa_kvb", "bf16", "bf16"),
            ("mlp=q8,shared_gu=q4", "shared_gu", "q4", "q4"),
            ("indexer=q8,dsa_proj=q8", "idx_qb", "q8", "q8"),
        ] {
            assert_eq!(mode(map, class), (main.into(), mtp.into()), "{map}: {class}");
        }
    }

    #[test]
    fn what_contradicts_itself_or_is_unknown_is_refused() {
        for (map, parts) in [
            ("kda_proj", ["is no pair", "class=mode"]),
            ("kda_proj=q8,kda_proj=q8", ["\"kda_proj\"", "twice"]),
            ("kda_porj=q8", ["\"kda_porj\"", "kda_proj"]),
            ("kda_proj=q5", ["q5", "bf16, q4, q4mse, q8"]),
            ("mtp.kda_proj=q8", ["mtp.kda_proj", "the MTP layer has no kda_proj"]),
            ("mtp.lm_head=q8", ["mtp.lm_head", "mtp_eh"]),
        ] {
            let told = read(map).unwrap_err();
            assert!(parts.iter().all(|part| told.contains(part)), "{map}: {told}");
        }
        for (map, parts) in [
            ("o_proj=q8,kda=bf16", ["o_proj=q8 and kda=bf16", "kda_out"]),
            ("mtp.out=q8,mtp.dsa=bf16,dsa=q4,indexer=q4", ["mtp.out=q8 and mtp.dsa=bf16", "dsa_out"]),
            ("dsa=q8", ["dsa_proj and idx_proj", "one matrix"]),
        ] {
            let told = table(&read(map).unwrap(), "q4").unwrap_err();
            assert!(parts.iter().all(|part| told.contains(part)), "{map}: {told}");
        }
        // The class itself settles it, and groups that agree are fine.
        assert_eq!(mode("o_proj=q8,kda=bf16,kda_out=q4", "kda_out").0, "q4");
        assert_eq!(mode("o_proj=q8,kda=q8", "kda_out").0, "q8");
    }

    #[test]
    fn a_map_reads_back_from_its_text() {
        let map = read(" out = q8 ; default=bf16,,").unwrap();
        assert_eq!(write(&map), "default=bf16,out=q8");
        assert_eq!(read(&write(&map)).unwrap(), map);
        assert_eq!(read("").unwrap(), Map::new());
    }
}
