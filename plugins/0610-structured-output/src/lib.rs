//! Replies and tool calls that are held to a schema, a regex, a choice or a grammar: what may come next is decided before each draw.
//!
//! [`asked`] reads what a request wants, [`schema`] says what of it can be enforced, [`grammar`], [`ebnf`] and [`tools`] write it in
//! the language of the grammar library, [`compiler`] compiles it within bounds, and [`seats`] follows each reply on each rank.
//! [`mask`] puts what may be said in front of the draw. Nothing of it is there for a request that asks for nothing.

pub mod asked;
pub mod compiler;
pub mod ebnf;
pub mod grammar;
pub mod mask;
pub mod matcher;
mod pool;
pub mod schema;
pub mod seats;
pub mod tokens;
pub mod tools;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use plugfold_0610_structured_output_api::{Grammar, GrammarObject};
use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{
    Attachment, BatchFacts, DocumentObject, DraftCut, DraftCutObject, Ended, FieldId, FieldPer, FieldSpec,
    Fields, FieldsObject, Host as _, HostObject, Level, Limits, Observer, ObserverObject, PromptLink,
    PromptLinkObject, Refusal, RequestLink, RequestLinkObject, SequenceEvent, Words, WordsObject, interest,
};
use plugfold_abi::{
    DType, KnobValue, Knobs, List, Maybe, OpError, PassObject, ProviderObject, Slice, TextBuf, View,
};
use serde_json::json;

use asked::{Asked, FIELDS};
use compiler::{Bounds, Compiler};
use mask::{Apply, Insert, WORD};
use schema::Rules;
use seats::{ATTACHMENT, Order, Seats};
use tokens::Tokens;

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");

/// What the knobs say.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Threads that fill masks ahead.
    pub threads: usize,
    /// Bounds of compiling.
    pub bounds: Bounds,
    /// Planted by tests: filling the masks of a reply fails from this token on.
    pub fails_at: Option<usize>,
}

impl Default for Settings {
    /// The defaults of the manifest.
    fn default() -> Self {
        let bounds = Bounds {
            rules: Rules { depth: 64, lenient: false },
            bytes: 256 << 10,
            mib: 128,
            time: Duration::from_secs(2),
            entries: 64,
            cache: 128 << 20,
        };
        Self { threads: 4, bounds, fails_at: None }
    }
}

impl Settings {
    /// Reads the knobs.
    ///
    /// # Errors
    /// A knob that is not there or is out of its range.
    pub fn new(knobs: &Knobs<'_>) -> Result<Self, OpError> {
        let number = |key: &str| -> Result<usize, OpError> {
            let value = knobs.int(key)?;
            usize::try_from(value).map_err(|_| OpError::invalid(format!("{key} is {value}: give 0 or more")))
        };
        let seconds = knobs.float("compile_s")?;
        let time = Duration::try_from_secs_f64(seconds)
            .map_err(|e| OpError::invalid(format!("compile_s is {seconds}: {e}")))?;
        let bounds = Bounds {
            rules: Rules { depth: number("depth")?, lenient: knobs.text("unenforced")? == "warn" },
            bytes: number("schema_kib")? << 10,
            mib: number("compile_mib")? as u64,
            time,
            entries: number("cache_entries")?,
            cache: number("cache_mib")? << 20,
        };
        Ok(Self { threads: number("threads")?, bounds, fails_at: None })
    }
}

/// What is there once the vocabulary is known.
struct Engine {
    compiler: Arc<Compiler>,
    seats: Seats,
}

/// The feature on one rank.
#[derive(Clone)]
pub struct Structured(Arc<State>);

struct State {
    settings: Settings,
    host: Option<&'static HostObject>,
    /// The engine, or why there is none.
    engine: OnceLock<Result<Engine, String>>,
    field: Arc<AtomicU32>,
    ends: RwLock<Vec<u32>>,
    all_strict: AtomicBool,
}

impl Structured {
    /// The feature before the vocabulary is known.
    pub fn new(settings: Settings, host: Option<&'static HostObject>) -> Self {
        Self(Arc::new(State {
            settings,
            host,
            engine: OnceLock::new(),
            field: Arc::default(),
            ends: RwLock::default(),
            all_strict: AtomicBool::new(false),
        }))
    }

    /// Takes a vocabulary, or the reason why there is none. The first one stays.
    pub fn serve(&self, tokens: Result<Tokens, String>) {
        let made = tokens.and_then(|tokens| {
            let compiler = Arc::new(Compiler::new(tokens, self.0.settings.bounds)?);
            let lead = self.0.host.is_none_or(|host| host.rank().is_ok_and(|rank| rank == 0));
            let seats = Seats::new(compiler.clone(), self.0.settings.threads, lead, self.0.settings.fails_at);
            Ok(Engine { compiler, seats: seats.map_err(|e| format!("no threads for masks: {e}"))? })
        });
        let _ = self.0.engine.set(made);
    }

    fn engine(&self) -> Result<&Engine, &str> {
        match self.0.engine.get() {
            Some(Ok(engine)) => Ok(engine),
            Some(Err(why)) => Err(why),
            None => Err("the server has not started"),
        }
    }

    /// The compiler, once the vocabulary is known.
    pub fn compiler(&self) -> Option<&Arc<Compiler>> {
        self.engine().ok().map(|engine| &engine.compiler)
    }

    /// All hooks.
    pub fn offers(&self) -> Vec<Offer> {
        vec![
            Offer::of(RequestLinkObject::new(self.clone())),
            Offer::of(PromptLinkObject::new(self.clone())),
            Offer::of(ObserverObject::new(self.clone())),
            Offer::of(WordsObject::new(self.clone())),
            Offer::of(FieldsObject::new(self.clone())),
            Offer::of(DraftCutObject::new(self.clone())),
            Offer::of(PassObject::new(Insert)),
            Offer::of(ProviderObject::new(Apply { field: self.0.field.clone() })),
        ]
    }

    /// Reads the vocabulary; all ranks must have the same one, or none serves.
    fn prepare(&self, host: &HostObject, device: &str) -> Result<(), OpError> {
        let began = Instant::now();
        let folder = host.model_folder()?;
        let mut tokens = if device != "cpu" {
            Err(format!("the model runs on {device}, and masks are applied on the CPU only"))
        } else if folder.is_empty() {
            Err("no model is served".to_owned())
        } else {
            Tokens::of_folder(&PathBuf::from(folder.as_str()))
        };
        let mine = match &tokens {
            Ok(tokens) => format!("{:016x}", tokens.hash),
            Err(why) => format!("! {why}"),
        };
        let all = host.agree("vocabulary".into(), Slice::from(mine.as_bytes()))?;
        let all: Vec<String> = all.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect();
        let missing = all.iter().enumerate().find_map(|(rank, said)| Some((rank, said.strip_prefix("! ")?)));
        if let Some((rank, why)) = missing {
            let at = if all.len() > 1 { format!(" (rank {rank})") } else { String::new() };
            tokens = Err(format!("{why}{at}"));
        } else if all.iter().any(|said| *said != mine) {
            tokens = Err("the ranks have different vocabularies".into());
        }
        let told = match &tokens {
            Ok(tokens) => format!(
                "grammars over {} tokens by llguidance, {}, read in {:.1} s; masks on {} threads",
                tokens.width,
                if tokens.markup.is_some() { "tool calls too" } else { "no markup of tool calls" },
                began.elapsed().as_secs_f64(),
                self.0.settings.threads,
            ),
            Err(why) => format!("output formats are refused: {why}"),
        };
        host.log(if tokens.is_ok() { Level::Info } else { Level::Warn }, told.as_str().into())?;
        self.serve(tokens);
        Ok(())
    }

    /// What a body asks for, or how it is refused.
    fn asked(&self, body: &DocumentObject) -> Result<Result<Option<Asked>, Refusal>, OpError> {
        let read = asked::read(body, self.0.all_strict.load(Ordering::Relaxed))?;
        Ok(read.map_err(|wrong| {
            let param = wrong.field.split('.').next().unwrap_or_default();
            refusal(param, format!("{} {}", wrong.field, wrong.what))
        }))
    }

    fn count(&self, name: &str) {
        if let Some(host) = self.0.host {
            // A figure that cannot be kept is no reason to fail a request.
            let _ = host.count(name.into(), 1.0);
        }
    }
}

fn refusal(field: &str, message: String) -> Refusal {
    Refusal { status: 400, message: message.into(), code: TextBuf::new(), param: field.into() }
}

impl RequestLink for Structured {
    fn fields(&self) -> Result<List<TextBuf>, OpError> {
        Ok(FIELDS.into_iter().map(TextBuf::from).collect())
    }

    fn check(&self, body: &DocumentObject, _: Slice<'_, KnobValue>) -> Result<Maybe<Refusal>, OpError> {
        let asked = match self.asked(body)? {
            Ok(None) => return Ok(Maybe::RNone),
            Ok(Some(asked)) => asked,
            Err(refusal) => return Ok(Maybe::RSome(refusal)),
        };
        let field = asked.at.split('/').nth(1).unwrap_or_default();
        let refused = match self.engine() {
            Err(why) => format!("there is no grammar engine: {why}"),
            Ok(engine) => match engine.compiler.within(&asked) {
                Ok(_) => return Ok(Maybe::RNone),
                Err(problem) => problem.to_string(),
            },
        };
        self.count("refused");
        Ok(Maybe::RSome(refusal(field, format!("{field}: the grammar cannot be enforced: {refused}"))))
    }

    fn prepare(&self, body: &DocumentObject, ids: Slice<'_, u32>) -> Result<List<Attachment>, OpError> {
        let asked = match self.asked(body)? {
            Ok(None) => return Ok(List::new()),
            Ok(Some(asked)) => asked,
            Err(refusal) => return Err(OpError::invalid(refusal.message)),
        };
        let tokens = &self.engine().map_err(OpError::invalid)?.compiler.tokens;
        let thinks = |id: &&u32| Some(**id) == tokens.think || Some(**id) == tokens.think_end;
        let open = ids.iter().rev().find(thinks).is_some_and(|id| Some(*id) == tokens.think);
        let order = Order {
            asked,
            ends: self.0.ends.read().unwrap_or_else(PoisonError::into_inner).clone(),
            think_end: tokens.think_end.filter(|_| open),
            prompt: ids.len() as u32,
        };
        let bytes = serde_json::to_vec(&order).map_err(|e| OpError::new(e.to_string()))?;
        Ok(List::from(vec![Attachment { name: ATTACHMENT.into(), bytes: bytes.into() }]))
    }
}

impl PromptLink for Structured {
    fn ends(&self, ids: Slice<'_, u32>) -> Result<(), OpError> {
        *self.0.ends.write().unwrap_or_else(PoisonError::into_inner) = ids.to_vec();
        Ok(())
    }
}

impl Observer for Structured {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::SEQUENCE | interest::REQUEST)
    }

    fn sequence(&self, slot: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        self.engine().map_or(Ok(()), |engine| engine.seats.event(slot, event))
    }

    fn request(&self, ended: &Ended<'_>) -> Result<TextBuf, OpError> {
        let figures = self
            .engine()
            .ok()
            .and_then(|engine| engine.seats.figures(ended.request, ended.reply.last().copied()));
        let Some(figures) = figures else { return Ok(TextBuf::new()) };
        self.count(if ended.reason.get_str() == "error" { "failed" } else { "replies" });
        Ok(json!({"grammar": figures.block()}).to_string().into())
    }
}

impl Words for Structured {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(WORD.into())
    }

    fn value(&self, batch: &BatchFacts<'_>) -> Result<u64, OpError> {
        Ok(self.engine().map_or(0, |engine| engine.seats.word(batch)))
    }
}

impl Fields for Structured {
    fn spec(&self) -> Result<FieldSpec, OpError> {
        Ok(FieldSpec { name: "mask".into(), dtype: DType::U32, per: FieldPer::Row, width: 2, late: true })
    }

    fn numbered(&self, id: FieldId) -> Result<(), OpError> {
        self.0.field.store(id, Ordering::Relaxed);
        Ok(())
    }

    fn fill(&self, batch: &BatchFacts<'_>, entries: View) -> Result<(), OpError> {
        self.engine().map_or(Ok(()), |engine| engine.seats.addresses(batch, entries))
    }
}

impl DraftCut for Structured {
    fn cut(&self, slot: u32, pending: u32, drafts: Slice<'_, u32>) -> Result<u32, OpError> {
        self.engine().map_or(Ok(drafts.len() as u32), |engine| engine.seats.cut(slot, pending, &drafts))
    }
}

impl Grammar for Structured {
    fn strict_tools(&self) -> Result<(), OpError> {
        self.0.all_strict.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// The plugin.
#[derive(Default)]
pub struct StructuredOutput {
    feature: OnceLock<Structured>,
    host: OnceLock<&'static HostObject>,
    device: OnceLock<String>,
}

impl Plugin for StructuredOutput {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        if !setup.knobs.get("enabled")?.value.as_bool() {
            return Ok(List::new());
        }
        let host = setup.host();
        let feature = Structured::new(Settings::new(&setup.knobs)?, Some(host));
        let offers = feature.offers();
        let _ = self.device.set(setup.device_class.get_str().to_owned());
        let (_, _) = (self.feature.set(feature), self.host.set(host));
        Ok(offers.into())
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        let Some(feature) = self.feature.get() else { return Ok(List::new()) };
        Ok(List::from(vec![Offer::of(GrammarObject::new(feature.clone()))]))
    }

    fn prepare(&self, _: &Limits) -> Result<(), OpError> {
        match (self.feature.get(), self.host.get()) {
            (Some(feature), Some(host)) => {
                feature.prepare(host, self.device.get().map_or("cpu", String::as_str))
            }
            _ => Ok(()),
        }
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: StructuredOutput::default());
