//! The list of plugins, each name with the place that lists it.

use std::path::Path;

use super::Listed;

/// Names of a profile's `plugins = [...]`.
#[derive(Default, serde::Deserialize)]
#[serde(default)]
struct Profile {
    plugins: Vec<toml::Spanned<String>>,
}

/// Gives each name the line of the profile that has it; what a profile does not have comes from `elsewhere`.
pub fn places(names: &[String], profile: Option<&Path>, elsewhere: &str) -> Vec<Listed> {
    let text = profile.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    let mut there = toml::from_str::<Profile>(&text).unwrap_or_default().plugins;
    let place = |name: &String| {
        // A name that is listed twice has two lines.
        let found = there.iter().position(|there| there.get_ref() == name).map(|i| there.remove(i));
        match (found, profile) {
            (Some(found), Some(path)) => {
                let line = text[..found.span().start].matches('\n').count() + 1;
                format!("{}:{line}", path.display())
            }
            _ => elsewhere.to_owned(),
        }
    };
    let places: Vec<String> = names.iter().map(place).collect();
    names.iter().cloned().zip(places).map(|(name, place)| Listed { name, place }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_lines_of_the_profile() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.toml");
        std::fs::write(&path, "port = 1\nplugins = [\n  \"0003\",\n  \"0006\", \"0003\",\n]\n").unwrap();
        let names = ["0003", "0006", "0003", "0009"].map(String::from);
        let places: Vec<String> = places(&names, Some(&path), "--plugin").into_iter().map(|l| l.place).collect();
        let file = path.display();
        assert_eq!(places, [format!("{file}:3"), format!("{file}:4"), format!("{file}:4"), "--plugin".into()]);
    }
}
