//! What tests of plugins share: libraries, folders, runs of the program.
#![allow(dead_code)] // each test file uses its part

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::{Value, json};

pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// Chooses the deed of the hostile plugin.
pub const DEED: &str = "PLUGFOLD_TEST_HOSTILE";
pub const HOSTILE: &str = "9900-hostile";
pub const ROWS: &str = "0003-prefill-rows";

/// The folder of the program, with every plugin of the workspace built into it.
pub fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = Path::new(env!("CARGO_BIN_EXE_plugfold")).parent().unwrap().to_owned();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--locked", "--quiet", "--workspace", "--lib"]);
        cargo.arg("--target-dir").arg(folder.parent().unwrap());
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.current_dir(ROOT).status().unwrap().success(), "the plugins of the tests do not build");
        folder
    })
}

/// The bytes of a built library.
pub fn library(name: &str) -> Vec<u8> {
    std::fs::read(built().join(file_name(name))).unwrap()
}

pub fn file_name(name: &str) -> String {
    plugfold::plugins::library::file_name(name)
}

/// Replaces a text in a file of the same length; it must be there.
pub fn patch(bytes: &mut [u8], from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let places: Vec<usize> = bytes
        .windows(from.len())
        .enumerate()
        .filter(|(_, window)| *window == from.as_bytes())
        .map(|(place, _)| place)
        .collect();
    assert!(!places.is_empty(), "{from:?} is not in the library");
    for place in places {
        bytes[place..place + to.len()].copy_from_slice(to.as_bytes());
    }
}

/// The hostile library under another number and name.
pub fn hostile_as(id: &str, name: &str) -> Vec<u8> {
    let mut bytes = library(HOSTILE);
    patch(&mut bytes, "id = \"9900\"", &format!("id = \"{id}\""));
    patch(&mut bytes, "name = \"hostile\"", &format!("name = \"{name}\""));
    // The name of its request knob is nobody else's.
    patch(&mut bytes, "hostile_mood", &format!("hostile_{id}"));
    bytes
}

/// A folder for plugins, profiles and caches.
pub struct Place {
    pub folder: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        built();
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("plugins")).unwrap();
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Puts a file into the plugin folder, as the library of a plugin.
    pub fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path("plugins").join(file_name(name));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// A profile of the tiny model with these plugins, one a line from line 3.
    pub fn profile(&self, plugins: &[&str]) -> PathBuf {
        self.profile_of(&tiny(), plugins)
    }

    fn profile_of(&self, model: &str, plugins: &[&str]) -> PathBuf {
        let path = self.path("profile.toml");
        let list: Vec<String> = plugins.iter().map(|p| format!("{p:?},\n")).collect();
        let text = format!(
            "model = {:?}\nplugins = [\n{}]\nplugin_path = [\"plugins\"]\ncontext = 512\n",
            model,
            list.concat()
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The program, with caches here.
    pub fn plugfold(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plugfold"));
        command
            .args(arguments)
            .current_dir(ROOT)
            .env("PLUGFOLD_CACHE_DIR", self.path("cache"))
            .env_remove(DEED);
        command
    }

    /// `generate` with the profile: a short greedy reply, or a refusal.
    pub fn generate(&self, plugins: &[&str], deed: &str, more: &[&str]) -> Output {
        let profile = self.profile(plugins);
        let mut command = self.plugfold(&["generate", "--profile", profile.to_str().unwrap()]);
        command.args(["--ids", "1,2,3,4,5,6,7,8", "--max-tokens", "4", "--json", "--ignore-eos"]).args(more);
        command.env(DEED, deed).output().unwrap()
    }

    /// Fails unless the start is refused by lines that say all of `words`, the first beginning as errors do.
    pub fn refused(&self, plugins: &[&str], deed: &str, words: &[&str]) -> String {
        let output = self.generate(plugins, deed, &[]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && output.stdout.is_empty(), "{plugins:?} {deed}: {output:?}");
        assert!(output.status.code().is_some(), "{plugins:?} {deed}: it crashed: {output:?}");
        for word in words {
            assert!(told.contains(word), "{plugins:?} {deed}: no {word:?} in {told}");
        }
        told
    }

    /// A server with the profile.
    pub fn serve(&self, plugins: &[&str], deed: &str, more: &[&str]) -> Served {
        // The tiny model has no tokenizer.
        let profile = self.profile_of(&format!("{ROOT}/host/assets/demo-model"), plugins);
        let mut command = self.plugfold(&["serve", "--port", "0", "--profile", profile.to_str().unwrap()]);
        command.args(more).env(DEED, deed);
        Served::start(command)
    }
}

/// The processes that a process started and that run.
pub fn children(parent: u32) -> Vec<u32> {
    let of = |stat: &str| -> Option<(u32, u32)> {
        // The name between the brackets may hold anything; state and parent follow it.
        let (head, rest) = stat.rsplit_once(") ")?;
        let mut fields = rest.split(' ');
        let state = fields.next()?;
        Some((head.split(' ').next()?.parse().ok().filter(|_| state != "Z")?, fields.next()?.parse().ok()?))
    };
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let stats = all.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    stats.filter_map(|stat| of(&stat)).filter(|(_, of)| *of == parent).map(|(id, _)| id).collect()
}

pub fn tiny() -> String {
    format!("{ROOT}/tests/fixtures/tiny")
}

/// A running server; killed when dropped.
pub struct Served {
    pub child: Child,
    pub address: String,
}

impl Served {
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        Self { child, address }
    }

    fn exchanged(&self, request: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn exchange(&self, request: &str) -> (u16, Value) {
        let (status, body) = self.exchanged(request);
        (status, serde_json::from_str(&body).unwrap_or_default())
    }

    /// What a page says.
    pub fn get(&self, path: &str) -> String {
        self.exchanged(&format!("GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")).1
    }

    /// A short completion.
    pub fn complete(&self) -> (u16, Value) {
        self.post("/v1/completions", &json!({"prompt": "abc", "max_tokens": 3, "temperature": 0}))
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let body = body.to_string();
        self.exchange(&format!(
            "POST {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ))
    }

    pub fn health(&self) -> (u16, Value) {
        self.exchange("GET /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
    }

    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
    }

    /// Sends a signal and waits for the end.
    pub fn end(mut self, name: &str) -> std::process::ExitStatus {
        self.signal(name);
        self.child.wait().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
