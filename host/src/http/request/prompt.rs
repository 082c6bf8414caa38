//! The prompt of a request: rendered, encoded, within its bounds.

use plugfold_engine::service::Attachment;
use serde_json::{Map, Value, json};

use super::{Effort, Kind, NotReady};
use crate::http::app::{App, ClearThinking, DefaultEffort};
use crate::http::error::ApiError;
use crate::http::fields::Fields;
use crate::text::chat::Places;
use crate::text::{ChatPrompt, ChatRequest};
use crate::vision::{Image, NotTaken, is_image};

pub(super) fn prompt_ids(app: &App, fields: Fields) -> Result<Vec<u32>, ApiError> {
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
pub(super) fn encode(app: &App, fields: Fields, text: &str) -> Result<Vec<u32>, ApiError> {
    size(app, "prompt", text.len())?;
    let stages = app.chains.stages(fields.0, &app.text.tokenizer, app.settings.limits.prompt_bytes);
    Ok(app.text.encode_through(text, &stages)?)
}

/// The ids of a prompt with what plugins make of them. Images have their first rows `at` positions.
pub(super) fn settled(
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

/// Renders and encodes a chat; its images stand as rows in the prompt where the model can see.
pub(super) fn render(
    app: &App,
    fields: Fields,
    mut request: ChatRequest,
) -> Result<(ChatPrompt, Vec<Image>), NotReady> {
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
    let images =
        vision.take(&mut request.messages, &limit, |number| Places::text(mark, number)).map_err(|stop| {
            match stop {
                NotTaken::Problem(problem) => ApiError::invalid(problem.0).with_param("messages").into(),
                NotTaken::Elsewhere(wanted) => NotReady::Images(wanted),
            }
        })?;
    if !images.is_empty() {
        // Nobody could tell it from an image's own rows.
        let row = app.text.tokenizer.control_name(vision.ids[1]).unwrap_or_default();
        if !row.is_empty() && request.messages.iter().any(|message| holds(message, row)) {
            let problem = format_args!("hold the text {row} beside images; leave it out");
            return Err(ApiError::field("messages", problem).into());
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
pub(super) fn attach(
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
pub(super) fn chat(
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
pub(super) fn text_bytes(value: &Value) -> usize {
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
    text_bytes(message) - images.filter(|part| is_image(part)).map(text_bytes).sum::<usize>()
}

fn size(app: &App, name: &str, bytes: usize) -> Result<(), ApiError> {
    let limit = app.settings.limits.prompt_bytes;
    if bytes > limit {
        return Err(ApiError::field(name, format_args!("holds {bytes} bytes of text; the limit is {limit}")));
    }
    Ok(())
}

/// The tokens a reply may have. The wording is `OpenAI`'s: agents parse it to shorten a conversation.
pub(super) fn context(
    app: &App,
    kind: Kind,
    prompt: usize,
    budget: Option<usize>,
) -> Result<usize, ApiError> {
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
