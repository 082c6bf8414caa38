//! Incremental decoding: bytes of tokens in, whole characters out.

/// Turns a stream of bytes, cut anywhere, into valid UTF-8 pieces.
///
/// At most three bytes of an unfinished character are held back. A sequence that can no longer become a character turns
/// into U+FFFD at once, one for each maximal broken part, exactly as decoding the whole at once would give.
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Takes bytes and appends every character that is complete now.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        let joined;
        let mut rest: &[u8] = if self.held.is_empty() {
            bytes
        } else {
            self.held.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.held);
            &joined
        };
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    return;
                }
                Err(error) => {
                    let (good, bad) = rest.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(good));
                    let Some(len) = error.error_len() else {
                        self.held = bad.to_vec();
                        return;
                    };
                    out.push(char::REPLACEMENT_CHARACTER);
                    rest = &bad[len..];
                }
            }
        }
    }

    /// Ends the stream: an unfinished character becomes one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !std::mem::take(&mut self.held).is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(pieces: &[&[u8]]) -> String {
        let mut stream = Utf8Stream::default();
        let mut out = String::new();
        for piece in pieces {
            stream.push(piece, &mut out);
            assert!(stream.held.len() <= 3);
        }
        stream.finish(&mut out);
        out
    }

    #[test]
    fn one_byte_at_a_time() {
        let text = "ďábelské 🌶️ 👩‍👩‍👧 ไทย 客单价";
        let pieces: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        assert_eq!(stream(&pieces), text);
    }

    #[test]
    fn a_cut_character_becomes_one_replacement() {
        assert_eq!(stream(&["客".as_bytes(), &"单".as_bytes()[..2]]), "客\u{fffd}");
        assert_eq!(stream(&[&[0xf0], &[0x9f], &[0x8c]]), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn any_cut_equals_the_whole(bytes in proptest::collection::vec(any::<u8>(), 0..40), cuts in any::<u64>()) {
            let mut pieces = Vec::new();
            let mut start = 0;
            for at in 0..bytes.len() {
                if cuts >> (at % 64) & 1 == 1 {
                    pieces.push(&bytes[start..at]);
                    start = at;
                }
            }
            pieces.push(&bytes[start..]);
            prop_assert_eq!(stream(&pieces), String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
