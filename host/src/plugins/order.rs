//! In which order plugins of a list come, and whether they can be loaded together.

use plugfold_manifest::{Manifest, Need};

use super::{Listed, PluginError};

/// A listed plugin and what its note says.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Where it is listed.
    pub listed: &'a Listed,
    /// Its manifest.
    pub manifest: &'a Manifest,
}

impl Member<'_> {
    fn refuse(&self, why: impl std::fmt::Display) -> PluginError {
        PluginError::new(self.listed, why)
    }

    /// Plugins that come before this one, where they are loaded.
    fn after(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let m = self.manifest;
        let lists = [("requires", &m.requires), ("extends", &m.extends), ("is over", &m.over)];
        lists.into_iter().flat_map(|(how, ids)| ids.iter().map(move |id| (how, id.as_str())))
    }
}

/// The places of a list, sorted: as listed, but each plugin after those that it requires, extends or is over. Later is
/// outer.
///
/// # Errors
/// A plugin that needs what is not listed, conflicts with another, is for other devices, or waits for itself.
pub fn order(list: &[Member<'_>], device: &str) -> Result<Vec<usize>, PluginError> {
    for member in list {
        check(*member, list, device)?;
    }
    let mut sorted = Vec::with_capacity(list.len());
    while sorted.len() < list.len() {
        let free = (0..list.len()).find(|&i| !sorted.contains(&i) && waits(list, &sorted, i).is_none());
        match free {
            Some(place) => sorted.push(place),
            None => return Err(cycle(list, &sorted)),
        }
    }
    Ok(sorted)
}

fn find(list: &[Member<'_>], id: &str) -> Option<usize> {
    list.iter().position(|m| m.manifest.is_called(id))
}

/// The first plugin that `place` has to wait for, and why.
fn waits(list: &[Member<'_>], sorted: &[usize], place: usize) -> Option<(&'static str, usize)> {
    let before = list[place].after().filter_map(|(how, id)| Some((how, find(list, id)?)));
    before.into_iter().find(|(_, other)| *other != place && !sorted.contains(other))
}

/// Names the members of a cycle, each with why it waits for the next.
fn cycle(list: &[Member<'_>], sorted: &[usize]) -> PluginError {
    let start = (0..list.len()).find(|i| !sorted.contains(i)).unwrap_or_default();
    let mut path: Vec<(usize, &str)> = Vec::new();
    let mut at = start;
    while !path.iter().any(|(i, _)| *i == at) {
        let Some((how, next)) = waits(list, sorted, at) else { break };
        path.push((at, how));
        at = next;
    }
    let begin = path.iter().position(|(i, _)| *i == at).unwrap_or_default();
    let ring = &path[begin..];
    let links: Vec<String> =
        ring.iter().map(|(i, how)| format!("{} {how}", list[*i].manifest.label())).collect();
    list[at].refuse(format!(
        "waits for itself: {} {}: remove one of them",
        links.join(" "),
        list[at].manifest.label()
    ))
}

fn check(member: Member<'_>, list: &[Member<'_>], device: &str) -> Result<(), PluginError> {
    let manifest = member.manifest;
    for id in &manifest.requires {
        if find(list, id).is_none() {
            return Err(member.refuse(format!("requires plugin {id}, which is not listed: list it as well")));
        }
    }
    for id in &manifest.conflicts {
        if let Some(other) = find(list, id) {
            let (name, place) = (&list[other].listed.name, &list[other].listed.place);
            return Err(member.refuse(format!("cannot run beside {name} ({place}): remove one of them")));
        }
    }
    for want in manifest.wants.iter().filter(|w| w.need == Need::Required) {
        let offered = |m: &Member<'_>| m.manifest.offers.iter().any(|o| o.service == want.service);
        if !list.iter().any(offered) {
            return Err(member.refuse(format!(
                "needs the service {:?}, which no listed plugin offers: list one that does",
                want.service
            )));
        }
    }
    let fits = |class: &String| match class.strip_suffix('*') {
        Some(prefix) => device.starts_with(prefix),
        None => device == class,
    };
    if !manifest.devices.is_empty() && !manifest.devices.iter().any(fits) {
        let devices = manifest.devices.join(", ");
        return Err(member.refuse(format!("runs on {devices}, not on {device}: remove it from the list")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(text: &str) -> Manifest {
        // `0001 >0002 !0003`: id, what it comes after, what it conflicts with; `+` requires.
        let mut words = text.split(' ');
        let mut m = Manifest { id: words.next().unwrap().into(), name: "x".into(), ..Manifest::default() };
        for word in words {
            let id = word[1..].to_owned();
            match &word[..1] {
                ">" => m.over.push(id),
                "~" => m.extends.push(id),
                "+" => m.requires.push(id),
                "@" => m.devices.push(id),
                _ => m.conflicts.push(id),
            }
        }
        m
    }

    fn sorted(list: &[&str]) -> Result<String, String> {
        let manifests: Vec<Manifest> = list.iter().map(|m| manifest(m)).collect();
        let listed: Vec<Listed> = manifests
            .iter()
            .enumerate()
            .map(|(i, m)| Listed { name: m.id.clone(), place: format!("p.toml:{}", i + 1) })
            .collect();
        let members: Vec<Member<'_>> =
            manifests.iter().zip(&listed).map(|(manifest, listed)| Member { listed, manifest }).collect();
        let places = order(&members, "cpu").map_err(|e| e.to_string())?;
        Ok(places.iter().map(|p| manifests[*p].id.as_str()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn the_list_is_kept_where_nothing_moves_it() {
        let cases: &[(&[&str], &str)] = &[
            (&[], ""),
            (&["0003", "0001", "0002"], "0003 0001 0002"),
            (&["0003 >0002", "0001", "0002"], "0001 0002 0003"),
            (&["0003 ~0002", "0002 +0001", "0001", "0004"], "0001 0002 0003 0004"),
            (&["0003 >0009", "0001 ~0008"], "0003 0001"),
            (&["0003 >0002-x", "0002"], "0002 0003"),
            (&["0003 @cpu", "0001 @sm_90 @c*"], "0003 0001"),
        ];
        for (list, expected) in cases {
            assert_eq!(sorted(list).unwrap(), *expected, "{list:?}");
        }
    }

    #[test]
    fn what_cannot_be_together_is_refused_by_name_place_and_mend() {
        let cases: &[(&[&str], &[&str])] = &[
            (&["0003 +0001"], &["0003 (p.toml:1)", "requires plugin 0001", "list it"]),
            (&["0001", "0003 !0001"], &["0003 (p.toml:2)", "beside 0001 (p.toml:1)", "remove one"]),
            (&["0003 !0001", "0001"], &["0003 (p.toml:1)", "beside 0001 (p.toml:2)"]),
            (&["0003 @sm_90"], &["0003 (p.toml:1)", "runs on sm_90, not on cpu"]),
            (
                &["0009", "0001 >0002", "0002 ~0003", "0003 +0001"],
                &["waits for itself", "0001-x is over 0002-x extends 0003-x requires 0001-x"],
            ),
        ];
        for (list, words) in cases {
            let told = sorted(list).unwrap_err();
            for word in *words {
                assert!(told.contains(word), "{list:?}: no {word:?} in {told}");
            }
            assert_eq!(told.lines().count(), 1);
        }
    }
}
