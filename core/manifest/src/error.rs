//! What is wrong with a manifest, or with a value.

/// A manifest that cannot be used. Names the file, the field, what is allowed and the nearest valid name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestError {
    /// The file, or whatever the manifest came from; with the plugin's id once that is known.
    pub place: String,
    /// Everything that is wrong, a line each.
    pub problems: Vec<String>,
}

impl std::fmt::Display for ManifestError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.place, self.problems.join("; "))
    }
}
impl std::error::Error for ManifestError {}

/// A value that a knob does not take. Names the value, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueError(pub String);

impl std::fmt::Display for ValueError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for ValueError {}
