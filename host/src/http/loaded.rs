//! `GET /plugins`: what is loaded, with the value in force of every knob and how a request may set it.

use axum::http::StatusCode;
use axum::response::Response;
use plugfold_abi::KnobValue;
use plugfold_manifest::{KnobType, Manifest, OwnedKnob};
use serde_json::{Value, json};

use super::app::App;
use super::error::json_response;
use crate::knobs::{KnobTable, Resolved};

/// The plugins of a start as the route lists them, in the given order. Values of secret knobs are not in it.
pub fn describe<'m>(
    manifests: impl IntoIterator<Item = &'m Manifest>,
    resolved: &Resolved,
    table: &KnobTable,
) -> Vec<Value> {
    let defaults = table.echo(table.defaults());
    let plugin = |manifest: &Manifest| {
        let mine = resolved.all().filter(|(knob, _)| knob.owner == manifest.id);
        let knobs: Vec<Value> = mine
            .map(|(knob, value)| {
                let request = knob.schema.request_key.as_ref().filter(|_| knob.schema.per_request());
                let mut told = describe_knob(knob, &value.value);
                told["from"] = json!(value.origin.to_string());
                if let Some(key) = request {
                    told["request_key"] = json!(key);
                    told["request_default"] = defaults.get(key).cloned().unwrap_or_default();
                }
                told
            })
            .collect();
        json!({"id": manifest.id, "name": manifest.label(), "version": manifest.version, "title": manifest.title,
               "class": manifest.class().to_string(), "knobs": knobs})
    };
    manifests.into_iter().map(plugin).collect()
}

fn describe_knob(knob: &OwnedKnob, value: &KnobValue) -> Value {
    let schema = &knob.schema;
    let switch = schema.request_on.is_some() && schema.request_off.is_some();
    let form = match schema.type_ {
        _ if switch => "switch",
        KnobType::Bool => "switch",
        KnobType::Int if schema.words.is_empty() => "int",
        KnobType::Float if schema.words.is_empty() => "float",
        KnobType::Enum => "enum",
        _ => "text",
    };
    let shown = match value {
        KnobValue::Text(text) if schema.secret && !text.as_str().is_empty() => "(not shown)".to_owned(),
        KnobValue::Bool(on) => u8::from(*on).to_string(),
        value => value.to_string(),
    };
    json!({"key": schema.key, "value": shown, "form": form, "choices": schema.choices, "scope": schema.scope.to_string(),
           "effect": schema.effect().to_string(), "values": schema.allowed(&|_: &str| None), "help": schema.help})
}

/// Answers the route.
pub fn plugins(app: &App) -> Response {
    json_response(StatusCode::OK, &json!({"object": "list", "data": *app.settings.plugins}))
}
