//! Loading libraries in a process of their own first: one that aborts, exits, hangs or panics there is refused by name.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use plugfold_abi::points::HostObject;
use plugfold_abi::{Knob, KnobValue};
use plugfold_engine::hooks::Hooks;
use plugfold_manifest::Manifest;
use serde::{Deserialize, Serialize};

use super::agree::Desk;
use super::services::HostFor;
use super::verdicts::Verdicts;
use super::{Library, PluginError, load};

/// The subcommand that runs [`child`].
pub const COMMAND: &str = "probe-plugins";
/// How long one step of one library may take.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of what a library says of itself on its way down that are kept.
const LAST_WORDS: u64 = 64 << 10;

/// A library to load, with the knobs to configure it with.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    path: PathBuf,
    root: String,
    manifest: String,
    knobs: Vec<(String, KnobValue, Option<u32>)>,
}

/// What the child tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Told {
    /// It begins a step with a library.
    At(usize, String),
    /// It is done with a library, which may be broken.
    Done(usize, Option<String>),
}

/// How libraries are probed.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The program, which knows the subcommand [`COMMAND`].
    pub program: PathBuf,
    /// Where verdicts are kept.
    pub cache: PathBuf,
    /// How long one step of one library may take.
    pub patience: Duration,
    /// Whether kept verdicts count.
    pub again: bool,
}

impl Probe {
    /// Probes with this program.
    ///
    /// # Errors
    /// No path of the program, no cache folder.
    pub fn new() -> Result<Self, PluginError> {
        let program = std::env::current_exe()
            .map_err(|e| PluginError::general(format!("the path of this program is unknown: {e}")))?;
        Ok(Self { program, cache: super::cache_folder()?, patience: PATIENCE, again: false })
    }

    /// Whether each library can be loaded and configured with these knobs; a text says why not.
    ///
    /// # Errors
    /// No process can be started, or the cache cannot be written.
    pub fn all(&self, libraries: &[(&Library, Vec<Knob>)]) -> Result<Vec<Option<String>>, PluginError> {
        let mut verdicts = Verdicts::read(&self.cache);
        if self.again {
            for (library, _) in libraries {
                verdicts.forget(&library.hash);
            }
        }
        let unknown: Vec<usize> =
            (0..libraries.len()).filter(|i| verdicts.of(&libraries[*i].0.hash).is_none()).collect();
        if !unknown.is_empty() {
            let tasks: Vec<Task> = unknown.iter().map(|i| task(&libraries[*i])).collect();
            for (place, verdict) in unknown.iter().zip(self.run(&tasks)?) {
                let library = libraries[*place].0;
                verdicts.keep(&library.hash, &library.path, verdict);
            }
            verdicts.write(&self.cache)?;
        }
        let fresh = |i: &usize| unknown.contains(i);
        let verdict = |i: usize| {
            let library = libraries[i].0;
            let refused = verdicts.of(&library.hash)?.refused.clone()?;
            let kept = format!(
                "; kept since it was tried first, `plugfold plugins check {} --again` tries it again",
                library.name
            );
            Some(if fresh(&i) { refused } else { refused + &kept })
        };
        Ok((0..libraries.len()).map(verdict).collect())
    }

    /// All in one process; if that ends early, each in one of its own.
    fn run(&self, tasks: &[Task]) -> Result<Vec<Option<String>>, PluginError> {
        let together = self.process(tasks)?;
        let Some(ended) = together.ended else { return Ok(together.verdicts) };
        if let [_] = tasks {
            return Ok(vec![Some(ended.1)]);
        }
        let mut alone = Vec::with_capacity(tasks.len());
        for task in tasks {
            let one = self.process(std::slice::from_ref(task))?;
            alone.push(one.ended.map(|(_, why)| why).or(one.verdicts.into_iter().next().flatten()));
        }
        if alone.iter().all(Option::is_none) {
            // Each can be loaded alone, so the one that was at work cannot bear its company.
            alone[ended.0] = Some(format!("{}, beside the others of the list (alone it does not)", ended.1));
        }
        Ok(alone)
    }

    fn process(&self, tasks: &[Task]) -> Result<Ran, PluginError> {
        let no_process = |e: std::io::Error| {
            PluginError::general(format!("no process to probe plugins can be started: {e}"))
        };
        let (ours, theirs) = UnixStream::pair().map_err(no_process)?;
        ours.set_read_timeout(Some(self.patience)).map_err(no_process)?;
        let mut child = Command::new(&self.program)
            .arg(COMMAND)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(no_process)?;
        let stderr = child.stderr.take();
        let words = std::thread::spawn(move || stderr.map(last_words).unwrap_or_default());
        let mut ran = Ran { verdicts: vec![None; tasks.len()], ended: None };
        let mut at = (0, "start".to_owned());
        let stopped = converse(ours, tasks, &mut ran.verdicts, &mut at).err();
        let how = stopped.as_ref().map(|stop| how_it_ended(stop, &mut child, &at.1, self.patience));
        // Its work is done or it hangs: destructors of libraries are not waited for.
        let _ = child.kill();
        let _ = child.wait();
        if let Some(how) = how {
            let said = words.join().unwrap_or_default();
            let said = if said.is_empty() { String::new() } else { format!("; its last words: {said}") };
            ran.ended = Some((at.0.min(tasks.len().saturating_sub(1)), format!("{how}{said}")));
        }
        Ok(ran)
    }
}

struct Ran {
    verdicts: Vec<Option<String>>,
    /// The library at work when the process ended early, and what happened.
    ended: Option<(usize, String)>,
}

/// Why the talk with the child stopped.
enum Stop {
    Silence,
    Gone,
}

fn how_it_ended(stop: &Stop, child: &mut Child, step: &str, patience: Duration) -> String {
    match stop {
        Stop::Silence => format!("it did not end its step `{step}` within {} s", patience.as_secs_f32()),
        Stop::Gone => {
            let status = child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
            format!("it ended the process in its step `{step}` ({status})")
        }
    }
}

/// Tells the child its tasks and listens until all are done.
fn converse(
    mut stream: UnixStream,
    tasks: &[Task],
    verdicts: &mut [Option<String>],
    at: &mut (usize, String),
) -> Result<(), Stop> {
    let mut request = serde_json::to_vec(tasks).map_err(|_| Stop::Gone)?;
    request.push(b'\n');
    stream.write_all(&request).map_err(|_| Stop::Gone)?;
    let mut lines = BufReader::new(stream).lines();
    let mut open = tasks.len();
    while open > 0 {
        let line = match lines.next() {
            Some(Ok(line)) => line,
            Some(Err(e))
                if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) =>
            {
                return Err(Stop::Silence);
            }
            Some(Err(_)) | None => return Err(Stop::Gone),
        };
        match serde_json::from_str(&line).map_err(|_| Stop::Gone)? {
            Told::At(task, step) => *at = (task, step),
            Told::Done(task, verdict) => {
                open -= 1;
                if let Some(place) = verdicts.get_mut(task) {
                    *place = verdict;
                }
            }
        }
    }
    Ok(())
}

/// The last line that says something.
fn last_words(stderr: impl std::io::Read) -> String {
    let mut text = Vec::new();
    let mut reader = BufReader::new(stderr);
    let _ = reader.by_ref().take(LAST_WORDS).read_to_end(&mut text);
    // A child that says more must not be held up by a full pipe.
    let _ = std::io::copy(&mut reader, &mut std::io::sink());
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("note: "));
    lines.next_back().unwrap_or_default().to_owned()
}

fn task((library, knobs): &(&Library, Vec<Knob>)) -> Task {
    let knob = |k: &Knob| (k.key.to_string(), k.value.clone(), k.id.into_option());
    Task {
        path: library.path.clone(),
        root: library.note.root_symbol(),
        manifest: library.note.manifest.clone(),
        knobs: knobs.iter().map(knob).collect(),
    }
}

/// The child: reads its tasks from standard input, which is a socket, loads each library and tells.
///
/// # Errors
/// Standard input is not what [`Probe`] gives it.
pub fn child() -> std::io::Result<()> {
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = String::new();
    BufReader::new(stream.try_clone()?).read_line(&mut line)?;
    let tasks: Vec<Task> = serde_json::from_str(&line)?;
    let tell = |told: &Told| -> std::io::Result<()> {
        let mut line = serde_json::to_vec(told)?;
        line.push(b'\n');
        (&stream).write_all(&line)
    };
    let folder = std::env::temp_dir().join(format!("plugfold-probe-{}", std::process::id()));
    for (i, task) in tasks.iter().enumerate() {
        let at = |step: &str| tell(&Told::At(i, step.into()));
        let verdict = try_one(task, &folder, &at)?;
        tell(&Told::Done(i, verdict))?;
    }
    let _ = std::fs::remove_dir_all(&folder);
    // The parent ends this process, so no destructor of a library runs.
    let _ = (&stream).read(&mut [0]);
    Ok(())
}

fn try_one(
    task: &Task,
    folder: &Path,
    at: &dyn Fn(&str) -> std::io::Result<()>,
) -> std::io::Result<Option<String>> {
    let manifest = match Manifest::parse(&task.manifest, "its note") {
        Ok(manifest) => manifest,
        Err(e) => return Ok(Some(e.to_string())),
    };
    at("load")?;
    let plugin = match load::open(&task.path, &task.root) {
        Ok(plugin) => plugin,
        Err(refusal) => return Ok(Some(refusal.why)),
    };
    at("describe")?;
    if let Err(refusal) = load::describe(&plugin, &task.manifest) {
        return Ok(Some(refusal.why));
    }
    at("configure")?;
    let mut knobs: Vec<Knob> = task
        .knobs
        .iter()
        .map(|(key, value, id)| Knob { key: key.as_str().into(), value: value.clone(), id: (*id).into() })
        .collect();
    let host = HostObject::new(HostFor {
        plugin: manifest.id.as_str().into(),
        figures: Arc::default(),
        cache: folder.to_owned(),
        desk: Arc::new(Desk::alone()),
        model: Arc::default(),
    });
    let mut hooks = Hooks::default();
    let configured = load::canonical(&plugin, &manifest, &mut knobs)
        .and_then(|()| load::configure(&plugin, &manifest, &knobs, &host, "cpu", &mut hooks));
    // It may hold the host for ever.
    std::mem::forget(host);
    at("drop")?;
    drop(hooks);
    drop(plugin);
    // With other settings it may start: those decide at the start itself.
    Ok(configured.err().filter(|refusal| refusal.broken).map(|refusal| refusal.why))
}
