//! A completion request: from the JSON body to what the engine and the reply need.
//!
//! The checks run in the contract's order, all before the first byte of a reply.

mod draw;
mod prompt;
mod tools;

use std::sync::Arc;

use plugfold_engine::knobs::Values;
use plugfold_engine::service::{EngineError, Request};
use serde_json::{Map, Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::policy::Policy;
use crate::reply::stop::StopStrings;
use crate::reply::tools::ToolSpec;
use crate::vision::fetch::Wanted;
use draw::{budget, counts, logprobs, sampling, stop_strings, thinking_budget};
pub use prompt::token_ids;
use prompt::{attach, chat, context, encode, prompt_ids, render, settled, text_bytes};
use tools::{Choice, schema_size, tools};

/// The two kinds of completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `/chat/completions`.
    Chat,
    /// `/completions`.
    Text,
}

/// A checked request, ready to be submitted.
#[allow(clippy::struct_excessive_bools)]
pub struct Job {
    /// Which form the reply takes.
    pub kind: Kind,
    /// What the engine gets.
    pub request: Request,
    /// Stop strings of the visible answer.
    pub stops: StopStrings,
    /// Offered tools; empty: call markup is text.
    pub tools: Vec<ToolSpec>,
    /// More than one call may be in a reply.
    pub parallel: bool,
    /// The prompt ends in an open think block.
    pub thinking: bool,
    /// The reply is streamed.
    pub stream: bool,
    /// The last event of a stream carries `usage`.
    pub include_usage: bool,
    /// The reply lists its token ids.
    pub return_ids: bool,
    /// The draft policy in force.
    pub policy: Policy,
    /// The request knobs in force, as the reply shows them.
    pub knobs: Map<String, Value>,
    /// Images of the request, and the seconds that their rows took.
    pub vision: Option<(usize, f64)>,
    /// Fields that ask for something this server does not do, named in the reply.
    pub ignored: Vec<&'static str>,
    /// The body that all this was read from.
    pub body: Arc<Map<String, Value>>,
}

/// Why a request is not ready to be submitted.
#[derive(Debug)]
pub enum NotReady {
    /// It is refused.
    Refused(ApiError),
    /// Its images have to be fetched first.
    Images(Wanted),
}

impl<E: Into<ApiError>> From<E> for NotReady {
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

/// Output formats, which need a plugin that obeys them.
const GRAMMAR_FIELDS: [&str; 6] = [
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
];

/// Reads a completion request.
///
/// # Errors
/// What the client is told: 400 for anything malformed, 503 when the engine has failed; images that lie elsewhere.
pub fn read(app: &App, kind: Kind, body: Map<String, Value>) -> Result<Job, NotReady> {
    let limits = &app.settings.limits;
    let body = Arc::new(app.chains.rewrite(body, limits)?);
    let fields = Fields(&body);
    let model = fields.string("model")?;

    // 1 and 2: what decides the prompt's shape. 3: everything else of the body.
    let effort = if kind == Kind::Chat { effort(app, fields)? } else { None };
    let choice = if kind == Kind::Chat { tools(app, fields)? } else { Choice::default() };
    let policy = policy(app, fields, model)?;
    if kind == Kind::Chat {
        messages(app, fields)?;
    }
    let stops = stop_strings(app, fields)?;
    let kwargs = if kind == Kind::Chat { fields.object("chat_template_kwargs")?.cloned() } else { None };
    let sampling = sampling(fields)?;
    let budget = budget(fields)?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = match fields.object("stream_options")? {
        Some(options) => Fields(options).boolean("include_usage")?.unwrap_or(false),
        None => false,
    };
    let ignore_eos = fields.boolean("ignore_eos")?.unwrap_or(false);
    let return_ids = fields.boolean("return_token_ids")?.unwrap_or(false);
    let priority = fields.string("priority");
    let priority = priority.or_else(|error| fields.integer("priority").map(|_| None).map_err(|_| error))?;
    let raw = if kind == Kind::Text { prompt_ids(app, fields)? } else { Vec::new() };
    counts(fields)?;
    let logprobs = logprobs(fields, kind)?;
    let thinking_budget = if kind == Kind::Chat { thinking_budget(app, fields)? } else { None };
    let knobs = knobs(app, fields)?;
    unused(app, fields)?;
    for name in GRAMMAR_FIELDS {
        schema_size(app, name, fields.get(name).map_or(0, text_bytes))?;
    }
    let ignored = GRAMMAR_FIELDS
        .into_iter()
        .filter(|name| fields.get(name).is_some_and(|value| value["type"] != "text"))
        .filter(|name| !app.chains.obeys(name))
        .collect();

    app.chains.check(&body, &knobs)?;

    // The prompt of a chat is rendered last: it is the dearest step.
    let Choice { offered, specs, parallel } = choice;
    let mut named = None;
    let (ids, images) = match kind {
        Kind::Text => (settled(app, fields, raw, &[], &[])?, None),
        Kind::Chat => {
            let asked = chat(app, fields, kwargs, effort, offered)?;
            named = asked.variables.get("reasoning_effort").cloned();
            let (prompt, images) = render(app, fields, asked)?;
            (prompt.ids, Some((prompt.images, images)))
        }
    };
    let thinking = kind == Kind::Chat && app.text.thinking_is_open(&ids);
    let max_tokens = context(app, kind, ids.len(), budget)?;
    app.refuse_when_failed()?;
    app.chains.gate()?;
    let blobs = app.chains.prepare(&body, &ids, limits)?;
    // The tower is dear: it runs for requests that will be taken.
    let (attachments, vision) = match images {
        Some((at, images)) if !images.is_empty() => attach(app, &at, images)?,
        _ => (Vec::new(), None),
    };
    let roles = Roles::of(app, &ids);
    let request = Request {
        ids,
        attachments,
        sampling,
        max_tokens,
        stop_ids: if ignore_eos { Vec::new() } else { app.stop_ids.clone() },
        draft: policy.drafts(),
        policy: policy.asked.clone(),
        logprobs,
        thinking: thinking_budget.filter(|_| thinking),
        knobs: (!knobs.is_empty()).then(|| knobs.clone()),
        background: priority.map_or_else(|| makes_a_title(fields), |asked| asked == "background"),
        blobs,
        facts: facts(
            app,
            kind,
            fields,
            Told { roles: &roles, thinking, effort: named, budget, tools: specs.len() },
        ),
    };
    Ok(Job {
        kind,
        knobs: app.settings.knobs.echo(&knobs),
        request,
        stops,
        tools: specs,
        parallel,
        thinking,
        stream,
        include_usage,
        return_ids,
        policy,
        ignored,
        vision,
        body,
    })
}

/// Whether this is opencode's request for the title of a session, which it sends beside the first turn: nobody waits for it.
fn makes_a_title(fields: Fields) -> bool {
    let offers = fields.get("tools").and_then(Value::as_array).is_some_and(|tools| !tools.is_empty());
    let messages = fields.get("messages").and_then(Value::as_array);
    let first = messages.and_then(|messages| messages.iter().find(|message| message["role"] == "user"));
    let asks = first.and_then(|message| message["content"].as_str());
    !offers && asks.is_some_and(|text| text.starts_with("Generate a title for this conversation:"))
}

/// Where the turns of a prompt begin.
struct Roles {
    /// Ids before the first turn of anybody but the system.
    system: Option<usize>,
    /// Ids through the first token that opens an assistant's turn: the same for every later turn of a conversation.
    conversation: Option<usize>,
}

impl Roles {
    fn of(app: &App, ids: &[u32]) -> Self {
        let role = |name: &str| app.text.tokenizer.control_id(name);
        let assistant = role("<|assistant|>");
        let turns = [role("<|user|>"), assistant, role("<|observation|>")];
        let system = ids.iter().position(|id| turns.contains(&Some(*id)));
        let conversation = ids.iter().position(|id| Some(*id) == assistant).map(|at| at + 1);
        Self { system, conversation }
    }
}

/// What is known of a request when its prompt is.
struct Told<'r> {
    roles: &'r Roles,
    thinking: bool,
    effort: Option<Value>,
    budget: Option<usize>,
    tools: usize,
}

/// What observers are told of a request beside what the engine knows: sizes and switches, never text.
fn facts(app: &App, kind: Kind, fields: Fields, told: Told<'_>) -> String {
    let chat = kind == Kind::Chat;
    let call_end = app.text.tokenizer.control_id("<|observation|>").filter(|_| told.tools > 0);
    json!({
        "kind": if chat { "chat" } else { "completion" },
        "stream": fields.get("stream") == Some(&Value::Bool(true)),
        "thinking": chat.then_some(told.thinking),
        "effort": told.effort.filter(|_| told.thinking),
        "effort_asked": fields.get("reasoning_effort").filter(|_| chat),
        "max_tokens": told.budget,
        "tools": told.tools,
        "messages": fields.get("messages").and_then(Value::as_array).map(Vec::len),
        "sys_len": told.roles.system,
        "conv_len": told.roles.conversation,
        "call_end": call_end,
    })
    .to_string()
}

/// The prompt ids of a `/tokenize` request.
///
/// # Errors
/// What the client is told.
pub fn tokenize(app: &App, body: Map<String, Value>) -> Result<Vec<u32>, NotReady> {
    let body = app.chains.rewrite(body, &app.settings.limits)?;
    let fields = Fields(&body);
    if fields.get("messages").is_some() {
        if fields.get("prompt").is_some() {
            return Err(ApiError::field("prompt", "cannot be given beside messages: give one of them").into());
        }
        let effort = effort(app, fields)?;
        let choice = tools(app, fields)?;
        messages(app, fields)?;
        let kwargs = fields.object("chat_template_kwargs")?.cloned();
        return Ok(render(app, fields, chat(app, fields, kwargs, effort, choice.offered)?)?.0.ids);
    }
    match fields.get("prompt") {
        Some(Value::String(text)) => {
            let ids = encode(app, fields, text)?;
            Ok(if ids.is_empty() { ids } else { settled(app, fields, ids, &[], &[])? })
        }
        Some(_) => Err(ApiError::field("prompt", "must be a string").into()),
        None => Err(ApiError::invalid("give a prompt or messages to tokenize").with_param("prompt").into()),
    }
}

/// What top-level `reasoning_effort` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effort {
    Off,
    Named(&'static str),
}

fn effort(app: &App, fields: Fields) -> Result<Option<Effort>, ApiError> {
    if !app.settings.effort_field {
        return Ok(None);
    }
    let Some(value) = fields.get("reasoning_effort") else { return Ok(None) };
    match value.as_str() {
        Some("none" | "minimal") => Ok(Some(Effort::Off)),
        Some("low") => Ok(Some(Effort::Named("low"))),
        Some("medium" | "high") => Ok(Some(Effort::Named("high"))),
        Some("xhigh" | "max") => Ok(Some(Effort::Named("max"))),
        _ => Err(ApiError::field(
            "reasoning_effort",
            "must be one of none, minimal, low, medium, high, xhigh, max",
        )),
    }
}

fn policy(app: &App, fields: Fields, model: Option<&str>) -> Result<Policy, ApiError> {
    let off = !fields.boolean("draft")?.unwrap_or(true);
    let in_force = |param: &str, asked: &str| {
        let spec = app.service.policy(asked).map_err(|error| ApiError::from(error).with_param(param))?;
        Ok(Policy { asked: asked.to_owned(), spec, off })
    };
    let checked = |param: &str, asked: &str| match asked {
        "" => Err(ApiError::field(param, "must name a draft policy, or be left out")),
        _ => in_force(param, asked),
    };
    let mut policy = in_force("tf_policy", "")?;
    if let Some((_, spec)) = model.and_then(|name| name.rsplit_once('@')) {
        policy = checked("model", spec)?;
    }
    if let Some(spec) = fields.string("tf_policy")? {
        policy = checked("tf_policy", spec)?;
    }
    if off {
        "0".clone_into(&mut policy.spec);
    }
    Ok(policy)
}

fn messages(app: &App, fields: Fields) -> Result<(), ApiError> {
    if !fields.get("messages").is_some_and(Value::is_array) {
        return Err(ApiError::field("messages", "must be a list of messages"));
    }
    match fields.list("messages", app.settings.limits.messages)? {
        None | Some([]) => Err(ApiError::field("messages", "must hold at least one message")),
        Some(_) => Ok(()),
    }
}

/// The value of every request knob.
fn knobs(app: &App, fields: Fields) -> Result<Values, ApiError> {
    let table = &app.settings.knobs;
    match fields.object("tf_knobs")? {
        Some(asked) => table.resolve_request(asked).map_err(|error| {
            if error.failed {
                EngineError::Failed(format!("tf_knobs {error}")).into()
            } else {
                ApiError::field("tf_knobs", error)
            }
        }),
        None => Ok(table.defaults().clone()),
    }
}

/// Fields without an effect that still must not be endless.
fn unused(app: &App, fields: Fields) -> Result<(), ApiError> {
    let limit = app.settings.limits.logit_bias;
    match fields.object("logit_bias")? {
        Some(bias) if bias.len() > limit => {
            Err(ApiError::field("logit_bias", format_args!("has {} keys; the limit is {limit}", bias.len())))
        }
        _ => Ok(()),
    }
}
