//! The bytes of a `data:` URL.

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};

/// Base64 with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Decodes a `data:` URL of at most `most` bytes.
///
/// # Errors
/// What is wrong, without the URL.
pub fn data(address: &str, most: usize) -> Result<Vec<u8>, String> {
    // The scheme's letters may be large.
    let Some((head, body)) = address.get(5..).unwrap_or_default().split_once(',') else {
        return Err("is a data: URL without a comma".into());
    };
    let over = |bytes: usize| format!("is {bytes} bytes; the limit is {most}: send a smaller image");
    if head.trim_end().ends_with(";base64") {
        let clean: String = body.chars().filter(|c| !c.is_ascii_whitespace()).collect();
        let bytes = clean.len() / 4 * 3;
        if bytes > most + 3 {
            return Err(over(bytes));
        }
        let decoded = BASE64.decode(&clean).map_err(|_| "is not base64".to_owned())?;
        return if decoded.len() > most { Err(over(decoded.len())) } else { Ok(decoded) };
    }
    let mut out = Vec::with_capacity(body.len().min(most + 1));
    let mut bytes = body.bytes();
    while let Some(byte) = bytes.next() {
        let hex = |digit: Option<u8>| digit.and_then(|d| char::from(d).to_digit(16));
        out.push(match byte {
            b'%' => match (hex(bytes.next()), hex(bytes.next())) {
                (Some(high), Some(low)) => (high * 16 + low) as u8,
                _ => return Err("has a % that is not followed by two hexadecimal digits".into()),
            },
            other => other,
        });
        if out.len() > most {
            return Err(over(body.len()));
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_urls() {
        assert_eq!(data("data:image/png;base64,aGk=", 9).unwrap(), b"hi");
        assert_eq!(data("data:image/png;base64,aG\nk", 9).unwrap(), b"hi");
        assert_eq!(data("data:,h%69", 9).unwrap(), b"hi");
        let encoded = BASE64.encode([7; 30]);
        assert_eq!(data(&format!("data:;base64,{encoded}"), 30).unwrap().len(), 30);
        for (address, words) in [
            ("DATA:,0123456789", "limit is 9"),
            ("data:image/png;base64", "comma"),
            ("data:image/png;base64,???", "not base64"),
            ("data:,%4", "hexadecimal"),
            (&format!("data:;base64,{encoded}"), "limit is 9"),
            ("data:,0123456789", "limit is 9"),
        ] {
            let problem = data(address, 9).unwrap_err();
            assert!(problem.contains(words) && !problem.contains("example"), "{problem}");
        }
    }
}
