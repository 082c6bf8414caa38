//! Which addresses images may be fetched from: public ones, by `https` on port 443.
//!
//! Whoever can make a server fetch something can reach what the server can reach. So a URL is refused by its text where its
//! text is enough, and otherwise by the addresses that its name stands for, all of them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use reqwest::Url;
use url::Host;

use super::Rules;

/// Longest URL, in characters.
const LONGEST: usize = 4096;

/// Names of machines that are not meant for others, whatever they stand for.
const NAMES: [&str; 4] = ["localhost", "metadata", "metadata.google.internal", "instance-data"];

/// Networks that are not public: first address, and bits that all of its addresses share (IANA's registry of special-purpose
/// addresses, multicast, and the address of a cloud's own services).
const CLOSED_V4: [(Ipv4Addr, u32); 17] = [
    (Ipv4Addr::UNSPECIFIED, 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 31, 196, 0), 24),
    (Ipv4Addr::new(192, 52, 193, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 3),
];

/// The only public addresses of version 6; local, mapped, translated and multicast ones lie outside.
const OPEN_V6: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);

/// What is not public among them: protocol assignments with Teredo, documentation, 6to4, and segment routing.
const CLOSED_V6: [(Ipv6Addr, u32); 4] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];

/// Whether anybody on the internet could reach an address.
pub(super) fn public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            !CLOSED_V4.iter().any(|(net, bits)| (v4.to_bits() ^ net.to_bits()) >> (32 - bits) == 0)
        }
        IpAddr::V6(v6) => {
            let within = |(net, bits): &(Ipv6Addr, u32)| (v6.to_bits() ^ net.to_bits()) >> (128 - bits) == 0;
            within(&OPEN_V6) && !CLOSED_V6.iter().any(within)
        }
    }
}

/// A URL that may be connected to, as far as its text says.
///
/// # Errors
/// What is wrong with it, without the URL.
pub(super) fn check(text: &str, rules: Rules) -> Result<Url, String> {
    let wrong = |problem: &str| Err(format!("{problem}; give an https URL on port 443, or a data: URL"));
    if text.chars().nth(LONGEST).is_some() {
        return Err(format!("has a URL of more than {LONGEST} characters; send the image as a data: URL"));
    }
    if text.chars().any(|c| c == '\\' || c.is_whitespace() || c.is_control()) {
        return wrong("has a URL with a backslash, white space or a control character");
    }
    let Ok(url) = Url::parse(text) else { return wrong("has a URL that is none") };
    if url.scheme() != "https" && !(rules.http && url.scheme() == "http") {
        return wrong("has a URL of another kind");
    }
    if !url.username().is_empty() || url.password().is_some() || text.contains('#') {
        return wrong("has a URL with a user, a password or a fragment");
    }
    if !rules.http && url.port().is_some() {
        return wrong("has a URL with a port of its own");
    }
    let open = match url.host() {
        None => return wrong("has a URL without a host"),
        Some(_) if rules.private => true,
        Some(Host::Ipv4(v4)) => public(v4.into()),
        Some(Host::Ipv6(v6)) => public(v6.into()),
        Some(Host::Domain(name)) => {
            let name = name.trim_end_matches('.');
            !NAMES.contains(&name) && !name.ends_with(".localhost")
        }
    };
    if open { Ok(url) } else { wrong(super::CLOSED) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { fetch: true, http: false, private: false };

    #[test]
    fn addresses_that_are_not_public_are_known_to_their_edges() {
        for open in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "168.63.129.15",
            "168.63.129.17",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00:1450::1",
            "2001:4860::8888",
        ] {
            assert!(public(open.parse().unwrap()), "{open}");
        }
        for closed in [
            "0.0.0.0",
            "0.255.255.255",
            "10.0.0.0",
            "10.255.255.255",
            "100.64.0.0",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.255",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.0",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.0.0",
            "192.168.255.255",
            "198.18.0.0",
            "198.19.255.255",
            "224.0.0.1",
            "239.1.1.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:1.1.1.1",
            "::1.1.1.1",
            "64:ff9b::1.1.1.1",
            "64:ff9b:1::1",
            "2001::1",
            "2001:db8::1",
            "2002:101:101::1",
            "fc00::1",
            "fd00::1",
            "fe80::1",
            "ff02::1",
            "3fff::1",
            "100::1",
        ] {
            assert!(!public(closed.parse().unwrap()), "{closed}");
        }
    }

    #[test]
    fn urls_are_refused_by_their_text_without_repeating_it() {
        for good in [
            "https://example.org/secret.png",
            "https://example.org:443/secret.png?a=b",
            "https://1.1.1.1/secret",
            "https://[2606:4700::1111]/secret",
        ] {
            assert!(check(good, RULES).is_ok(), "{good}");
        }
        let long = format!("https://example.org/secret{}", "a".repeat(LONGEST));
        for bad in [
            "http://example.org/secret",
            "ftp://example.org/secret",
            "file:///secret",
            "https:///",
            "secret",
            "https://user@example.org/secret",
            "https://:secret@example.org/",
            "https://example.org/secret#x",
            "https://example.org/secret#",
            "https://example.org:8443/secret",
            "https://example.org\\@secret.org/",
            "https://example.org/a secret",
            "https://example.org/\u{7f}secret",
            "https://example.org/secret\n",
            "https://localhost/secret",
            "https://LOCALHOST./secret",
            "https://a.localhost/secret",
            "https://metadata/secret",
            "https://metadata.google.internal/secret",
            "https://metadata.google.internal./secret",
            "https://instance-data/secret",
            "https://127.0.0.1/secret",
            "https://2130706433/secret",
            "https://0x7f.1/secret",
            "https://0177.0.0.1/secret",
            "https://[::1]/secret",
            "https://[::ffff:10.0.0.1]/secret",
            "https://169.254.169.254/secret",
            "https://\u{ff11}\u{ff12}\u{ff17}.0.0.1/secret",
            long.as_str(),
        ] {
            let told = check(bad, RULES).unwrap_err();
            assert!(!told.contains("secret") && told.contains("data:"), "{bad}: {told}");
        }
        assert!(check("http://127.0.0.1:81/x", Rules { http: true, private: true, ..RULES }).is_ok());
        assert!(check("http://127.0.0.1:81/x", Rules { http: true, ..RULES }).is_err());
    }
}
