//! `/openapi.json`.

use axum::http::Method;
use serde_json::{Map, Value, json};

use super::{Body, Kind};
use crate::http::routes::{Paths, ROUTES, Route};

/// The document, from the route table.
pub fn openapi() -> Value {
    let mut paths = Map::new();
    let mut schemas = Map::new();
    schemas.insert("Error".into(), error());
    for route in &ROUTES {
        if let Some(body) = route.body {
            schemas.insert(body.name.into(), schema(body));
        }
        let method = if route.method == Method::GET { "get" } else { "post" };
        for path in route.paths.shown() {
            let entry = paths.entry(*path).or_insert_with(|| json!({}));
            entry[method] = operation(route, path);
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {"title": "Plugfold", "version": env!("CARGO_PKG_VERSION"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    })
}

fn operation(route: &Route, path: &str) -> Value {
    let mut operation = json!({"summary": route.purpose, "description": route.detail});
    let id = path.trim_matches('/').replace(['/', '{', '}', '.'], "_");
    operation["operationId"] = json!(format!("{}_{id}", route.method.as_str().to_lowercase()));
    if let Paths::Under(_, _, name) = route.paths {
        operation["parameters"] =
            json!([{"name": name, "in": "path", "required": true, "schema": {"type": "string"}}]);
    }
    if let Some(body) = route.body {
        let reference = format!("#/components/schemas/{}", body.name);
        operation["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": {"$ref": reference}}}});
    }
    let mut content = Map::new();
    for answer in route.answers {
        content.insert(answer.kind.into(), json!({"schema": {"description": answer.what}}));
    }
    let refusal = |what: &str| {
        json!({"description": what,
               "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}})
    };
    let mut replies = json!({"200": {"description": route.purpose, "content": content}});
    if route.body.is_some() {
        for (status, what) in [
            ("400", "a field is wrong; the message names it"),
            ("408", "the body came too slowly"),
            ("413", "the body is over the limit"),
            ("415", "the body is compressed"),
            ("500", "the engine failed at this request"),
            ("503", "the engine takes no requests now"),
        ] {
            replies[status] = refusal(what);
        }
    }
    if matches!(route.paths, Paths::Under(..)) {
        replies["404"] = json!({"description": "nothing of that name"});
    }
    if route.open {
        operation["security"] = json!([]);
        replies["503"] = json!({"description": "strict health: the engine has failed or stalls"});
    } else {
        replies["401"] = refusal("no API key, or none that is known");
    }
    operation["responses"] = replies;
    operation
}

fn error() -> Value {
    let text = json!({"type": ["string", "null"]});
    json!({"type": "object", "properties": {"error": {
        "type": "object",
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "code": text, "param": text},
    }}})
}

fn schema(body: &Body) -> Value {
    let mut properties = Map::new();
    for field in body.all() {
        let mut property = kind(&field.kind, !body.required.contains(&field.name));
        let default =
            if field.default.is_empty() { String::new() } else { format!(" Default: {}.", field.default) };
        property["description"] = json!(format!("{}{default}", field.note));
        properties.insert(field.name.into(), property);
    }
    json!({"type": "object", "required": body.required, "properties": properties})
}

fn kind(of: &Kind, null: bool) -> Value {
    let typed = |name: &str| if null { json!({"type": [name, "null"]}) } else { json!({"type": name}) };
    match of {
        Kind::Flag => typed("boolean"),
        Kind::Text => typed("string"),
        Kind::Names(names) => {
            let mut values: Vec<Value> = names.iter().map(|name| json!(name)).collect();
            values.extend(null.then_some(Value::Null));
            json!({"enum": values})
        }
        Kind::Integer(low, high) => {
            let mut schema = typed("integer");
            if *low != i64::MIN {
                schema["minimum"] = json!(low);
            }
            if *high != i64::MAX {
                schema["maximum"] = json!(high);
            }
            schema
        }
        Kind::Number(low, high) => {
            let mut schema = typed("number");
            if low.is_finite() {
                schema["minimum"] = json!(low);
            }
            if high.is_finite() {
                schema["maximum"] = json!(high);
            }
            schema
        }
        Kind::Object => typed("object"),
        Kind::List(item) => {
            let mut schema = typed("array");
            schema["items"] = kind(item, false);
            schema
        }
        Kind::Any(kinds) => {
            let mut schemas: Vec<Value> = kinds.iter().map(|k| kind(k, false)).collect();
            schemas.extend(null.then(|| json!({"type": "null"})));
            json!({"anyOf": schemas})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_described_and_every_reference_leads_somewhere() {
        let document = openapi();
        for route in &ROUTES {
            let method = route.method.as_str().to_lowercase();
            for path in route.paths.shown() {
                assert!(document["paths"][path][&method].is_object(), "{method} {path}");
            }
        }
        let text = document.to_string();
        for part in text.split("#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
        let chat = &document["components"]["schemas"]["ChatCompletion"]["properties"];
        assert_eq!(chat["top_logprobs"]["maximum"], 20);
        assert_eq!(chat["messages"]["type"], "array");
    }
}
