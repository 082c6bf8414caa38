//! Real agents, as their makers publish them: each changes one word of a file in a folder of its own.
//!
//! The programs come from the packages of npm that `tests/agents/package-lock.json` names. Those are the ones that the
//! launchers (`opencode-ai`, `@openai/codex`, `@anthropic-ai/claude-code`) choose on Linux on x86-64; a launcher's install
//! script would only link them. An agent gets a home that is empty but for its settings.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use plugfold::scripted::Script;
use serde_json::json;
use tempfile::TempDir;

use crate::http::say;
use crate::node;

/// The folder of the packages and of the recorder.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/agents");
/// What every agent is asked.
const TASK: &str = "In note.txt replace the word old by new.";
/// The file before.
const BEFORE: &str = "an old word\n";
/// The file after.
const AFTER: &str = "an new word\n";
/// What the model asks the agent's shell to do.
const EDIT: &str = "sed -i s/old/new/ note.txt";
/// A tool's name as it is in a prompt that offers it, and the names of the tool and of the argument that is the command.
const SHELLS: [(&str, &str, &str); 4] = [
    ("\"exec_command\"", "exec_command", "cmd"),
    ("\"shell_command\"", "shell_command", "command"),
    ("\"Bash\"", "Bash", "command"),
    ("\"bash\"", "bash", "command"),
];
/// Seconds after which an agent is ended.
const PATIENCE: &str = "100";
/// Names a folder into which the forms of the agents' requests are written; see `agents/record.mjs`.
const RECORD: &str = "PLUGFOLD_AGENTS_RECORD";

/// What the model says to a prompt: it calls the shell that is offered, once; then it is content.
///
/// `None`: no shell is offered, so the agent asks for something else.
pub fn reply(prompt: &str) -> Option<String> {
    let (_, name, key) = SHELLS.iter().find(|(mark, ..)| prompt.contains(mark))?;
    if prompt.contains("<tool_response>") {
        return Some("That worked.</think>Done.<|endoftext|>".into());
    }
    let more = if name.eq_ignore_ascii_case("bash") {
        "<arg_key>description</arg_key><arg_value>Change one word</arg_value>"
    } else {
        ""
    };
    Some(format!(
        "A tool can do this.</think>Let me do that.<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{EDIT}</arg_value>{more}\
         </tool_call><|observation|>"
    ))
}

/// A reply as rounds of one token. A prompt that ends in a closed block of reasoning gets the answer alone.
pub fn spoken(prompt: &str, reply: &str) -> Script {
    let answer = reply.split_once("</think>").map_or(reply, |(_, answer)| answer);
    say(if prompt.ends_with("</think>") { answer } else { reply })
}

/// An agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agent {
    /// `opencode-ai`: chat completions.
    Opencode,
    /// `@openai/codex`: Responses.
    Codex,
    /// `@anthropic-ai/claude-code`: Messages.
    ClaudeCode,
}

/// What an agent has done.
#[derive(Debug)]
pub struct Done {
    /// Whether the file is as it should be.
    pub changed: bool,
    /// All that is left: the file, how the agent ended, what it said.
    pub told: String,
}

/// Installs the packages of all agents, unless they are there.
///
/// # Panics
/// When npm cannot.
pub fn install() {
    node::install(Path::new(FOLDER));
}

impl Agent {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Opencode => "opencode",
            Self::Codex => "codex",
            Self::ClaudeCode => "claude",
        }
    }

    /// Its program.
    fn program(self) -> PathBuf {
        let packages = Path::new(FOLDER).join("node_modules");
        packages.join(match self {
            Self::Opencode => "opencode-linux-x64/bin/opencode",
            Self::Codex => "@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex",
            Self::ClaudeCode => "@anthropic-ai/claude-code-linux-x64/claude",
        })
    }

    /// Lets it do its task with the model of a server, in new folders that are gone afterwards.
    ///
    /// # Panics
    /// When its folders cannot be made or the programs to start it are missing.
    #[allow(clippy::expect_used)]
    pub fn work(self, server: SocketAddr) -> Done {
        let program = self.program();
        assert!(program.is_file(), "{} is missing; `npm ci` in {FOLDER} installs it", program.display());
        let recorder = Recorder::before(server, self);
        let server = recorder.as_ref().map_or(server, |recorder| recorder.address);
        let space = tempfile::tempdir().expect("a temporary folder");
        let mut command = self.command(&program, server, &space);
        let output = command.output().expect("`timeout` of the coreutils runs");
        let note = std::fs::read_to_string(space.path().join("work/note.txt")).unwrap_or_default();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let told = format!(
            "{} ended with {:?} and left {note:?}\n{}\n{}",
            self.name(),
            output.status,
            said(&output.stdout),
            said(&output.stderr)
        );
        Done { changed: note == AFTER && output.status.success(), told }
    }

    /// The command, with its settings written.
    #[allow(clippy::expect_used)]
    fn command(self, program: &Path, server: SocketAddr, space: &TempDir) -> Command {
        let (home, work) = (space.path().join("home"), space.path().join("work"));
        let write = |file: PathBuf, text: &str| {
            std::fs::create_dir_all(file.parent().expect("a folder above")).expect("a folder");
            std::fs::write(file, text).expect("a file");
        };
        write(work.join("note.txt"), BEFORE);
        std::fs::create_dir_all(&home).expect("a folder");
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", PATIENCE]).arg(program).current_dir(&work).env_clear();
        command.env("HOME", &home).env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("TERM", "dumb").stdin(std::process::Stdio::null());
        match self {
            Self::Opencode => {
                let model = json!({"tool_call": true, "reasoning": true, "limit": {"context": 131_072, "output": 4096}});
                let settings = json!({
                    "autoupdate": false, "permission": {"bash": "allow", "edit": "allow"},
                    "provider": {"plugfold": {"npm": "@ai-sdk/openai-compatible", "models": {"scripted": model},
                                              "options": {"baseURL": format!("http://{server}/v1")}}}
                });
                write(work.join("opencode.json"), &settings.to_string());
                command
                    .args(["run", "-m", "plugfold/scripted", TASK])
                    .env("OPENCODE_DISABLE_MODELS_FETCH", "1");
            }
            Self::Codex => {
                let settings = format!(
                    "model = \"scripted\"\nmodel_provider = \"plugfold\"\n[model_providers.plugfold]\nname = \"Plugfold\"\n\
                     base_url = \"http://{server}/v1\"\nwire_api = \"responses\"\nenv_key = \"PLUGFOLD_API_KEY\"\n"
                );
                write(home.join(".codex/config.toml"), &settings);
                command.args([
                    "exec",
                    "--skip-git-repo-check",
                    "--dangerously-bypass-approvals-and-sandbox",
                    TASK,
                ]);
                command.env("PLUGFOLD_API_KEY", "unused");
            }
            Self::ClaudeCode => {
                command.args(["-p", TASK, "--model", "scripted", "--allowedTools", "Bash(sed:*)"]);
                command.env("ANTHROPIC_BASE_URL", format!("http://{server}"));
                command.env("ANTHROPIC_API_KEY", "unused").env("ANTHROPIC_MODEL", "scripted");
                command.env("ANTHROPIC_SMALL_FAST_MODEL", "scripted").env("DISABLE_TELEMETRY", "1");
                command.env("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1").env("DISABLE_AUTOUPDATER", "1");
            }
        }
        command
    }
}

/// The proxy that writes requests down, while it runs.
struct Recorder {
    address: SocketAddr,
    process: Child,
}

impl Recorder {
    /// In front of a server, if recordings are asked for.
    #[allow(clippy::expect_used)]
    fn before(server: SocketAddr, agent: Agent) -> Option<Self> {
        let folder = std::env::var_os(RECORD)?;
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let address = free.expect("a free port");
        let mut node = Command::new("node");
        node.arg(Path::new(FOLDER).join("record.mjs"));
        node.args([address.port(), server.port()].map(|port| port.to_string())).arg(folder).arg(agent.name());
        let process = node.spawn().expect("node runs");
        while std::net::TcpStream::connect(address).is_err() {
            std::thread::yield_now();
        }
        Some(Self { address, process })
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
