//! Reasoning in the form that clients hand back unread (`encrypted_content`).
//!
//! It is not a secret here, only a form: the text itself, marked as this server's.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

const MARK: &str = "plugfold.1:";

/// Puts reasoning into the form.
pub fn close(text: &str) -> String {
    MARK.to_owned() + &BASE64_STANDARD.encode(text)
}

/// Takes reasoning out of the form; `None` when it is another server's.
pub fn open(sealed: &str) -> Option<String> {
    let bytes = BASE64_STANDARD.decode(sealed.strip_prefix(MARK)?).ok()?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        assert_eq!(open(&close("why 客?")).as_deref(), Some("why 客?"));
        assert_eq!(open("gAAAA"), None);
        assert_eq!(open("plugfold.1:???"), None);
    }
}
