//! A completion request: from the JSON body to what the engine and the reply need.
//!
//! The checks run in the contract's order, all before the first byte of a reply.

use std::sync::Arc;

use plugfold_engine::knobs::Values;
use plugfold_engine::logprobs::MAX_TOP;
use plugfold_engine::service::{Attachment, EngineError, Request, Sampling, ThinkingBudget};
use serde_json::{Map, Value, json};

use super::app::{App, ClearThinking, DefaultEffort};
use super::error::ApiError;
use super::fields::Fields;
use super::policy::Policy;
use crate::reply::stop::StopStrings;
use crate::reply::tools::ToolSpec;
use crate::text::chat::Places;
use crate::text::{ChatPrompt, ChatRequest};
use crate::vision::{Image, KINDS};

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
/// What the client is told: 400 for anything malformed, 503 when the engine has failed.
pub fn read(app: &App, kind: Kind, body: Map<String, Value>) -> Result<Job, ApiError> {
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
        .filter(|name| !app.chains.obeys(name))
        .filter(|name| fields.get(name).is_some_and(|value| value["type"] != "text"))
        .collect();

    app.chains.check(&body, &knobs)?;

    // The prompt of a chat is rendered last: it is the dearest step.
    let Choice { offered, specs, parallel } = choice;
    let (ids, images) = match kind {
        Kind::Text => (settled(app, fields, raw, &[], &[])?, None),
        Kind::Chat => {
            let (prompt, images) = render(app, fields, chat(app, fields, kwargs, effort, offered)?)?;
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
        background: priority == Some("background"),
        blobs,
        ..Request::default()
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

/// The prompt ids of a `/tokenize` request.
///
/// # Errors
/// What the client is told.
pub fn tokenize(app: &App, body: Map<String, Value>) -> Result<Vec<u32>, ApiError> {
    let body = app.chains.rewrite(body, &app.settings.limits)?;
    let fields = Fields(&body);
    if fields.get("messages").is_some() {
        if fields.get("prompt").is_some() {
            return Err(ApiError::field("prompt", "cannot be given beside messages: give one of them"));
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
            if ids.is_empty() { Ok(ids) } else { settled(app, fields, ids, &[], &[]) }
        }
        Some(_) => Err(ApiError::field("prompt", "must be a string")),
        None => Err(ApiError::invalid("give a prompt or messages to tokenize").with_param("prompt")),
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

/// The tools a request offers, after `tool_choice`.
#[derive(Default)]
struct Choice {
    /// As the template gets them.
    offered: Vec<Value>,
    /// As the reply parser gets them.
    specs: Vec<ToolSpec>,
    parallel: bool,
}

fn tools(app: &App, fields: Fields) -> Result<Choice, ApiError> {
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let given = fields.list("tools", app.settings.limits.tools)?.unwrap_or_default();
    schema_size(app, "tools", given.iter().map(text_bytes).sum())?;
    let mut offered = given.to_vec();
    let mut specs = Vec::with_capacity(offered.len());
    for (at, tool) in offered.iter().enumerate() {
        let function = if tool["function"].is_object() { &tool["function"] } else { tool };
        let Some(name) = function["name"].as_str().filter(|name| !name.is_empty()) else {
            return Err(
                ApiError::invalid(format!("tools[{at}] must be a function with a name")).with_param("tools")
            );
        };
        if !matches!(function["parameters"], Value::Null | Value::Object(_)) {
            return Err(ApiError::invalid(format!("tools[{at}].function.parameters must be an object"))
                .with_param("tools"));
        }
        specs.push(ToolSpec { name: name.to_owned(), parameters: function["parameters"].clone() });
    }
    match fields.get("tool_choice") {
        None => {}
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => {}
            "required" if !specs.is_empty() => {}
            "none" => {
                offered.clear();
                specs.clear();
            }
            "required" => {
                return Err(ApiError::field("tool_choice", "is required, but the request has no tools"));
            }
            _ => return Err(ApiError::field("tool_choice", CHOICES)),
        },
        Some(Value::Object(choice)) => {
            let named = choice.get("function").and_then(|f| f["name"].as_str());
            let Some(named) = named.filter(|_| choice.get("type").is_none_or(|t| t == "function")) else {
                return Err(ApiError::field("tool_choice", CHOICES));
            };
            let Some(at) = specs.iter().position(|tool| tool.name == named) else {
                return Err(ApiError::field(
                    "tool_choice",
                    format_args!("names {named:?}, which is not among the tools"),
                ));
            };
            offered = vec![offered.swap_remove(at)];
            specs = vec![specs.swap_remove(at)];
        }
        Some(_) => return Err(ApiError::field("tool_choice", CHOICES)),
    }
    Ok(Choice { offered, specs, parallel })
}

const CHOICES: &str =
    "must be \"auto\", \"none\", \"required\", or {\"type\":\"function\",\"function\":{\"name\":...}}";

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

fn stop_strings(app: &App, fields: Fields) -> Result<StopStrings, ApiError> {
    let limits = &app.settings.limits;
    let stops: Vec<&str> = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(list)) => {
            if list.len() > limits.stop_strings {
                let problem = format!("has {} strings; the limit is {}", list.len(), limits.stop_strings);
                return Err(ApiError::field("stop", problem));
            }
            let strings: Option<Vec<&str>> = list.iter().map(Value::as_str).collect();
            strings.ok_or_else(|| ApiError::field("stop", "must be a string or a list of strings"))?
        }
        Some(_) => return Err(ApiError::field("stop", "must be a string or a list of strings")),
    };
    if let Some(long) = stops.iter().find(|stop| stop.len() > limits.stop_bytes) {
        let problem = format!("has a string of {} bytes; the limit is {}", long.len(), limits.stop_bytes);
        return Err(ApiError::field("stop", problem));
    }
    StopStrings::new(stops.into_iter().map(str::to_owned).collect())
        .ok_or_else(|| ApiError::field("stop", "cannot be searched for: use shorter strings"))
}

fn sampling(fields: Fields) -> Result<Sampling, ApiError> {
    let temperature = fields.float("temperature")?.unwrap_or(1.0);
    let top_p = fields.float("top_p")?.unwrap_or(0.95);
    let top_k = fields.integer("top_k")?.unwrap_or(20);
    let top_k = u32::try_from(top_k.clamp(0, i128::from(u32::MAX))).unwrap_or(u32::MAX);
    let seed = match fields.integer("seed")? {
        None => None,
        Some(seed) if (i128::from(i64::MIN)..=i128::from(u64::MAX)).contains(&seed) => Some(seed as u64),
        Some(_) => return Err(ApiError::field("seed", "must be a 64-bit integer or null")),
    };
    let min_p = fields.float("min_p")?.unwrap_or(0.0);
    if !(0.0..=1.0).contains(&min_p) {
        return Err(ApiError::field("min_p", "must be between 0 and 1"));
    }
    Ok(Sampling { temperature, top_k, top_p, min_p, seed })
}

/// The reply budget that was asked for; `max_tokens` wins, 0 counts as not given.
fn budget(fields: Fields) -> Result<Option<usize>, ApiError> {
    let mut asked = None;
    for name in ["max_completion_tokens", "max_tokens"] {
        match fields.integer(name)? {
            None | Some(0) => {}
            Some(tokens) if tokens < 0 => return Err(ApiError::field(name, "must not be negative")),
            Some(tokens) => asked = Some(usize::try_from(tokens).unwrap_or(usize::MAX)),
        }
    }
    Ok(asked)
}

fn prompt_ids(app: &App, fields: Fields) -> Result<Vec<u32>, ApiError> {
    fields.boolean("add_special_tokens")?;
    let wrong = |problem: String| ApiError::field("prompt", problem);
    let vocab = app.service.info().vocab_size;
    let ids = match fields.get("prompt") {
        None => return Err(wrong("is missing: give a string or a list of token ids".into())),
        Some(Value::String(text)) => encode(app, fields, text)?,
        Some(Value::Array(items)) => ids_of(items, vocab, "prompt")?,
        Some(_) => return Err(wrong("must be a string or a flat list of token ids".into())),
    };
    if ids.is_empty() { Err(wrong("is empty".into())) } else { Ok(ids) }
}

/// The ids of a raw prompt's text.
fn encode(app: &App, fields: Fields, text: &str) -> Result<Vec<u32>, ApiError> {
    size(app, "prompt", text.len())?;
    let stages = app.chains.stages(fields.0, &app.text.tokenizer, app.settings.limits.prompt_bytes);
    Ok(app.text.encode_through(text, &stages)?)
}

/// The ids of a prompt with what plugins make of them. Images have their first rows `at` positions.
fn settled(
    app: &App,
    fields: Fields,
    ids: Vec<u32>,
    at: &[usize],
    images: &[Image],
) -> Result<Vec<u32>, ApiError> {
    let row = app.vision.as_ref().map_or(0, |vision| vision.ids[1]);
    let rows: Vec<_> = at.iter().zip(images).map(|(at, image)| (*at, image.tokens, row)).collect();
    app.chains.ids(fields.0, ids, app.service.info().vocab_size, &rows)
}

/// A flat list of ids inside the vocabulary.
fn ids_of(items: &[Value], vocab: usize, name: &str) -> Result<Vec<u32>, ApiError> {
    let wrong = |problem: String| ApiError::field(name, problem);
    let mut ids = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        if item.is_string() || item.is_array() {
            return Err(wrong("must be one prompt: a string, or one flat list of token ids".into()));
        }
        let Some(id) = item.as_i64() else {
            return Err(wrong(format!("item {at} is {item}, not an integer token id")));
        };
        match u32::try_from(id) {
            Ok(id) if (id as usize) < vocab => ids.push(id),
            _ => {
                let problem = format!("item {at} is token id {id}, outside the vocabulary of {vocab}");
                return Err(wrong(problem));
            }
        }
    }
    Ok(ids)
}

/// The ids of a `/detokenize` request.
///
/// # Errors
/// What the client is told.
pub fn token_ids(app: &App, body: &Map<String, Value>) -> Result<Vec<u32>, ApiError> {
    match body.get("tokens") {
        Some(Value::Array(items)) => ids_of(items, app.service.info().vocab_size, "tokens"),
        _ => Err(ApiError::field("tokens", "must be a list of token ids")),
    }
}

/// Fields that would ask for several replies.
fn counts(fields: Fields) -> Result<(), ApiError> {
    for name in ["n", "best_of"] {
        if fields.integer(name)?.is_some_and(|n| n != 1) {
            return Err(ApiError::field(name, "must be 1: a request gives one reply"));
        }
    }
    Ok(())
}

/// Whether log probabilities are told, and of how many alternatives. Chats have a switch and a number, completions the
/// number alone.
fn logprobs(fields: Fields, kind: Kind) -> Result<Option<u32>, ApiError> {
    let within = |name: &str, count: i128| match u32::try_from(count) {
        Ok(count) if count <= MAX_TOP => Ok(count),
        _ => Err(ApiError::field(name, format_args!("must be between 0 and {MAX_TOP}"))),
    };
    if fields.get("logprobs") == Some(&Value::Bool(false)) || kind == Kind::Chat {
        let on = fields.boolean("logprobs")?.unwrap_or(false);
        let top = fields.integer("top_logprobs")?.map(|top| within("top_logprobs", top)).transpose()?;
        return match top {
            Some(top) if top > 0 && !on => Err(ApiError::field("top_logprobs", "needs logprobs: true")),
            top => Ok(on.then(|| top.unwrap_or(0))),
        };
    }
    fields.integer("logprobs")?.map(|top| within("logprobs", top)).transpose()
}

/// Tokens of reasoning after which it is ended.
fn thinking_budget(app: &App, fields: Fields) -> Result<Option<ThinkingBudget>, ApiError> {
    let Some(tokens) = fields.integer("thinking_budget")? else { return Ok(None) };
    let Ok(tokens) = usize::try_from(tokens.min(i128::from(u32::MAX))) else {
        return Err(ApiError::field("thinking_budget", "must not be negative"));
    };
    match app.text.think_close {
        Some(close) => Ok(Some(ThinkingBudget { tokens, close })),
        None => Err(ApiError::field(
            "thinking_budget",
            "cannot be kept: this model has no token that ends reasoning",
        )),
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

/// Renders and encodes a chat; its images stand as rows in the prompt where the model can see.
fn render(app: &App, fields: Fields, mut request: ChatRequest) -> Result<(ChatPrompt, Vec<Image>), ApiError> {
    let stages = app.chains.stages(fields.0, &app.text.tokenizer, app.settings.limits.prompt_bytes);
    let done = |request: ChatRequest, images: Vec<Image>| {
        let mut prompt = app.text.encode_chat_through(request, &stages)?;
        prompt.ids = settled(app, fields, prompt.ids, &prompt.images, &images)?;
        Ok((prompt, images))
    };
    let Some(vision) = &app.vision else { return done(request, Vec::new()) };
    let mark = app
        .text
        .free_character(request.messages.iter().chain(&request.tools).chain(request.variables.values()))?;
    let limit = app.settings.limits.image();
    let images = vision
        .take(&mut request.messages, &limit, |number| Places::text(mark, number))
        .map_err(|problem| ApiError::invalid(problem.0).with_param("messages"))?;
    if !images.is_empty() {
        // Nobody could tell it from an image's own rows.
        let row = app.text.tokenizer.control_name(vision.ids[1]).unwrap_or_default();
        if !row.is_empty() && request.messages.iter().any(|message| holds(message, row)) {
            return Err(ApiError::field(
                "messages",
                format_args!("hold the text {row} beside images; leave it out"),
            ));
        }
        let tokens = images.iter().map(|image| image.tokens).collect();
        request.places = Some(Places { mark, tokens, ids: vision.ids });
    }
    done(request, images)
}

/// Whether a string of a document holds a text.
fn holds(value: &Value, text: &str) -> bool {
    match value {
        Value::String(string) => string.contains(text),
        Value::Array(items) => items.iter().any(|item| holds(item, text)),
        Value::Object(map) => map.values().any(|item| holds(item, text)),
        _ => false,
    }
}

/// The rows of images, at their positions.
#[allow(clippy::type_complexity)]
fn attach(
    app: &App,
    at: &[usize],
    images: Vec<Image>,
) -> Result<(Vec<Attachment>, Option<(usize, f64)>), ApiError> {
    let Some(vision) = &app.vision else { return Ok((Vec::new(), None)) };
    let count = images.len();
    let made = vision.rows(images, &app.settings.limits.image());
    let made = made.map_err(|problem| ApiError::invalid(problem.0).with_param("messages"))?;
    let attachments = at.iter().zip(made.rows).map(|(at, rows)| Attachment { at: *at, rows }).collect();
    Ok((attachments, Some((count, made.seconds))))
}

/// Template variables and the thinking switch.
fn chat(
    app: &App,
    fields: Fields,
    kwargs: Option<Map<String, Value>>,
    effort: Option<Effort>,
    tools: Vec<Value>,
) -> Result<ChatRequest, ApiError> {
    let mut variables = kwargs.unwrap_or_default();
    app.chains.variables(fields.0, &mut variables)?;
    let off = match variables.get("thinking") {
        Some(Value::Bool(thinking)) => Some(*thinking),
        Some(Value::Object(thinking)) => match thinking.get("type").and_then(Value::as_str) {
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            _ => None,
        },
        _ => None,
    };
    let thinking = match variables.get("enable_thinking") {
        None | Some(Value::Null) => off.unwrap_or(effort != Some(Effort::Off)),
        Some(Value::Bool(thinking)) => *thinking,
        Some(_) => {
            return Err(ApiError::field(
                "chat_template_kwargs",
                "has an enable_thinking that is not a boolean",
            ));
        }
    };
    match variables.get("reasoning_effort") {
        None | Some(Value::Null) => {
            let default = app.settings.default_effort.filter(|_| thinking).map(DefaultEffort::name);
            let named = match effort {
                Some(Effort::Named(name)) => Some(name),
                _ => default,
            };
            match named {
                Some(name) => variables.insert("reasoning_effort".into(), json!(name)),
                None => variables.shift_remove("reasoning_effort"),
            };
        }
        Some(Value::String(_)) => {}
        Some(_) => {
            return Err(ApiError::field(
                "chat_template_kwargs",
                "has a reasoning_effort that is not a string",
            ));
        }
    }
    if variables.get("clear_thinking").is_none_or(Value::is_null) {
        match app.settings.clear_thinking {
            ClearThinking::Template => variables.shift_remove("clear_thinking"),
            ClearThinking::Drop => variables.insert("clear_thinking".into(), json!(true)),
            ClearThinking::Keep => variables.insert("clear_thinking".into(), json!(false)),
        };
    }
    let messages = fields.get("messages").and_then(Value::as_array).cloned().unwrap_or_default();
    size(app, "messages", messages.iter().map(prompt_bytes).chain(tools.iter().map(text_bytes)).sum())?;
    Ok(ChatRequest { messages, tools, variables, thinking, places: None })
}

/// Bytes of all strings in a document.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(map) => map.iter().map(|(key, item)| key.len() + text_bytes(item)).sum(),
        _ => 8,
    }
}

/// Bytes of a message that can come into the prompt as text: images have bounds of their own.
fn prompt_bytes(message: &Value) -> usize {
    let images = message["content"].as_array().into_iter().flatten();
    let images = images.filter(|part| part["type"].as_str().is_some_and(|kind| KINDS.contains(&kind)));
    text_bytes(message) - images.map(text_bytes).sum::<usize>()
}

fn schema_size(app: &App, name: &str, bytes: usize) -> Result<(), ApiError> {
    let limit = app.settings.limits.schema_bytes;
    if bytes > limit {
        return Err(ApiError::field(
            name,
            format_args!("has {bytes} bytes of schemas; the limit is {limit}"),
        ));
    }
    Ok(())
}

fn size(app: &App, name: &str, bytes: usize) -> Result<(), ApiError> {
    let limit = app.settings.limits.prompt_bytes;
    if bytes > limit {
        return Err(ApiError::field(name, format_args!("holds {bytes} bytes of text; the limit is {limit}")));
    }
    Ok(())
}

/// The tokens a reply may have. The wording is `OpenAI`'s: agents parse it to shorten a conversation.
fn context(app: &App, kind: Kind, prompt: usize, budget: Option<usize>) -> Result<usize, ApiError> {
    let limit = app.service.info().context;
    let what = if kind == Kind::Chat { "messages" } else { "prompt" };
    let need = prompt.saturating_add(budget.unwrap_or(1));
    if need <= limit {
        return Ok(budget.unwrap_or_else(|| app.settings.max_tokens.min(limit - prompt)));
    }
    let start = format!("This model's maximum context length is {limit} tokens. However, ");
    let rest = if let Some(budget) = budget {
        format!(
            "you requested {need} tokens ({prompt} in the {what}, {budget} in the completion). Please reduce the length of \
             the {what} or completion."
        )
    } else {
        format!("your {what} resulted in {prompt} tokens. Please reduce the length of the {what}.")
    };
    let message = start + &rest;
    Err(ApiError::invalid(message).with_code("context_length_exceeded").with_param(what))
}
