//! The nearest valid name, for messages.

/// How alike two names must be for one to be offered instead of the other.
const ALIKE: f64 = 0.75;
/// Valid names that a message may list when none is near.
const SHORT_LIST: usize = 24;

/// The name most like the given one, if any is like it.
pub fn nearest<'n>(given: &str, valid: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let given = given.to_ascii_lowercase();
    let alike =
        valid.into_iter().map(|name| (strsim::jaro_winkler(&given, &name.to_ascii_lowercase()), name));
    alike.filter(|(alike, _)| *alike > ALIKE).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

/// What would be right: the nearest name, or the list of valid ones.
pub fn did_you_mean<'n>(given: &str, valid: impl IntoIterator<Item = &'n str>) -> String {
    let valid: Vec<&str> = valid.into_iter().collect();
    match nearest(given, valid.iter().copied()) {
        Some(name) => format!("did you mean `{name}`?"),
        None if valid.is_empty() => "there are none".to_owned(),
        None if valid.len() <= SHORT_LIST => format!("valid are {}", valid.join(", ")),
        None => format!("{} and {} more are valid", valid[..SHORT_LIST].join(", "), valid.len() - SHORT_LIST),
    }
}
