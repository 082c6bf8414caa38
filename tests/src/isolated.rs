//! Tests in a network namespace that has only loopback: what runs there can reach nothing outside, and no test can depend on
//! it.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

/// Set in the process that runs inside.
const INSIDE: &str = "PLUGFOLD_TESTS_ISOLATED";
/// Whoever sets this runs such tests without a namespace, where none can be made.
const OPEN: &str = "PLUGFOLD_TESTS_OPEN_NETWORK";
/// An address that is routed nowhere (RFC 5737); without a network the kernel says so at once.
const OUTSIDE: ([u8; 4], u16) = ([192, 0, 2, 1], 443);

/// `unshare` with further options, and what is to run inside with loopback switched on.
fn unshare(options: &[&str], inside: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net"]).args(options).args(["--", "sh", "-c", r#"ip link set lo up && exec "$@""#, "sh"]);
    command.args(inside);
    command
}

/// Runs `body`, the whole of the test named `test`, in a process and a network namespace of its own. `before` runs outside,
/// first.
///
/// The test's program starts itself again through `unshare`, with this one test. Who may not make a namespace as he is makes
/// one of users too, in which he may. Some systems forbid that: then the test fails and says what to do.
///
/// # Panics
/// When the namespace cannot be made, or the test fails inside.
#[allow(clippy::expect_used)]
pub fn isolated(test: &str, before: impl FnOnce(), body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        let outside = TcpStream::connect_timeout(&SocketAddr::from(OUTSIDE), Duration::from_secs(1));
        let nothing = outside.as_ref().is_err_and(|e| e.kind() == ErrorKind::NetworkUnreachable);
        assert!(nothing, "there is a network in the namespace: {outside:?}");
        return body();
    }
    before();
    if std::env::var_os(OPEN).is_some() {
        return body();
    }
    let ways: [&[&str]; 2] = [&[], &["--map-root-user"]];
    let tried = ways.map(|options| unshare(options, &["true"]).output());
    let way = tried.iter().position(|tried| tried.as_ref().is_ok_and(|tried| tried.status.success()));
    let Some(way) = way else {
        panic!(
            "no network namespace can be made. `unshare` (util-linux) and `ip` (iproute2) must be installed. Who is not root \
             needs user namespaces: `sysctl -w kernel.unprivileged_userns_clone=1`, on Ubuntu also \
             `kernel.apparmor_restrict_unprivileged_userns=0`; a container needs CAP_SYS_ADMIN. {OPEN}=1 runs the test \
             without one, with the network that there is. Tried: {tried:?}"
        );
    };
    let program = std::env::current_exe().expect("this program's path");
    let program = program.to_str().expect("a path in UTF-8");
    let inside = [program, "--exact", test, "--nocapture"];
    let status = unshare(ways[way], &inside).env(INSIDE, "1").status();
    assert!(status.is_ok_and(|status| status.success()), "{test} failed, see above");
}
