//! The view that links have of a request body.

use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{Document, DocumentObject};
use plugfold_abi::{Maybe, OpError, Text, TextBuf};
use serde_json::{Map, Value};

use crate::http::body::deeper_than;

/// How much links may write into one body.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes of JSON that all links together may set for one request.
    pub bytes: usize,
    /// Levels of objects and lists of the whole body.
    pub depth: usize,
}

/// A body that may be read only.
pub struct Frozen<'b>(pub &'b Map<String, Value>);

impl Frozen<'_> {
    /// Lends it to a link.
    pub fn lend<R>(&self, call: impl FnOnce(&DocumentObject) -> R) -> R {
        call(&DocumentObject::lend(self))
    }
}

impl Document for Frozen<'_> {
    fn get(&self, path: Text<'_>) -> Result<Maybe<TextBuf>, OpError> {
        Ok(json(self.0, path.get_str()))
    }
    fn kind(&self, path: Text<'_>) -> Result<TextBuf, OpError> {
        Ok(kind(self.0, path.get_str()).into())
    }
    fn len(&self, path: Text<'_>) -> Result<u32, OpError> {
        Ok(length(self.0, path.get_str()))
    }
    fn set(&self, path: Text<'_>, _: Text<'_>) -> Result<(), OpError> {
        Err(read_only(path.get_str()))
    }
    fn remove(&self, path: Text<'_>) -> Result<(), OpError> {
        Err(read_only(path.get_str()))
    }
}

fn read_only(path: &str) -> OpError {
    OpError::new(format!("the body cannot be changed here, at {path:?}: do it in request.rewrite"))
}

/// A body that links may change.
pub struct Draft {
    bounds: Bounds,
    state: Mutex<State>,
}

struct State {
    body: Map<String, Value>,
    written: usize,
}

impl Draft {
    /// A body, and how much may be written into it.
    pub fn new(body: Map<String, Value>, bounds: Bounds) -> Self {
        Self { bounds, state: Mutex::new(State { body, written: 0 }) }
    }

    /// The body with what links made of it.
    pub fn into_body(self) -> Map<String, Value> {
        self.state.into_inner().unwrap_or_else(PoisonError::into_inner).body
    }

    /// Lends it to a link.
    pub fn lend<R>(&self, call: impl FnOnce(&DocumentObject) -> R) -> R {
        call(&DocumentObject::lend(self))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Document for Draft {
    fn get(&self, path: Text<'_>) -> Result<Maybe<TextBuf>, OpError> {
        Ok(json(&self.state().body, path.get_str()))
    }

    fn kind(&self, path: Text<'_>) -> Result<TextBuf, OpError> {
        Ok(kind(&self.state().body, path.get_str()).into())
    }

    fn len(&self, path: Text<'_>) -> Result<u32, OpError> {
        Ok(length(&self.state().body, path.get_str()))
    }

    fn set(&self, path: Text<'_>, json: Text<'_>) -> Result<(), OpError> {
        let (path, json, Bounds { bytes, depth }) = (path.get_str(), json.get_str(), self.bounds);
        let wrong = |what: String| OpError::new(format!("set {path:?} in the body: {what}"));
        let mut state = self.state();
        let written = state.written.saturating_add(json.len());
        if written > bytes {
            return Err(wrong(format!("{written} bytes are written into it by now; the limit is {bytes}")));
        }
        let above = path.matches('/').count();
        if above > depth || deeper_than(json.as_bytes(), depth - above) {
            return Err(wrong(format!("it would have more than {depth} levels of objects and lists")));
        }
        let value: Value =
            serde_json::from_str(json).map_err(|e| wrong(format!("the value is not JSON: {e}")))?;
        put(&mut state.body, path, value).map_err(wrong)?;
        state.written = written;
        Ok(())
    }

    fn remove(&self, path: Text<'_>) -> Result<(), OpError> {
        let path = path.get_str();
        let Some((parent, last)) = path.rsplit_once('/') else {
            return Err(OpError::new(format!("remove {path:?} from the body: it must stay an object")));
        };
        let mut state = self.state();
        let last = unescaped(last);
        if parent.is_empty() {
            state.body.shift_remove(&last);
            return Ok(());
        }
        match find_mut(&mut state.body, parent) {
            Some(Value::Object(map)) => {
                map.shift_remove(&last);
            }
            Some(Value::Array(items)) => {
                if let Some(at) = index(&last).filter(|at| *at < items.len()) {
                    items.remove(at);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn put(body: &mut Map<String, Value>, path: &str, value: Value) -> Result<(), String> {
    let Some((parent, last)) = path.rsplit_once('/') else {
        if !path.is_empty() {
            return Err("a path is empty or begins with /".into());
        }
        let Value::Object(whole) = value else { return Err("the body must stay an object".into()) };
        *body = whole;
        return Ok(());
    };
    let last = unescaped(last);
    if parent.is_empty() {
        body.insert(last, value);
        return Ok(());
    }
    match find_mut(body, parent) {
        Some(Value::Object(map)) => {
            map.insert(last, value);
        }
        Some(Value::Array(items)) => match index(&last) {
            Some(at) if at < items.len() => items[at] = value,
            Some(at) if at == items.len() => items.push(value),
            None if last == "-" => items.push(value),
            _ => return Err(format!("a list of {} items has no place {last:?}", items.len())),
        },
        _ => return Err("there is no object or list to hold it".into()),
    }
    Ok(())
}

/// The first name of a path, and the path behind it.
fn split(path: &str) -> Option<(String, &str)> {
    let rest = path.strip_prefix('/')?;
    let (first, tail) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    Some((unescaped(first), tail))
}

fn find<'v>(body: &'v Map<String, Value>, path: &str) -> Option<&'v Value> {
    let (first, tail) = split(path)?;
    body.get(&first)?.pointer(tail)
}

fn find_mut<'v>(body: &'v mut Map<String, Value>, path: &str) -> Option<&'v mut Value> {
    let (first, tail) = split(path)?;
    body.get_mut(&first)?.pointer_mut(tail)
}

fn unescaped(name: &str) -> String {
    name.replace("~1", "/").replace("~0", "~")
}

/// A place in a list, written as JSON pointers write it.
fn index(name: &str) -> Option<usize> {
    let canonical = name == "0" || !name.starts_with(['0', '+']);
    canonical.then(|| name.parse().ok()).flatten()
}

fn json(body: &Map<String, Value>, path: &str) -> Maybe<TextBuf> {
    let text = if path.is_empty() {
        serde_json::to_string(body).ok()
    } else {
        find(body, path).map(Value::to_string)
    };
    text.map_or(Maybe::RNone, |text| Maybe::RSome(text.into()))
}

fn kind(body: &Map<String, Value>, path: &str) -> &'static str {
    if path.is_empty() {
        return "object";
    }
    match find(body, path) {
        None => "",
        Some(Value::Null) => "null",
        Some(Value::Bool(_)) => "bool",
        Some(Value::Number(_)) => "number",
        Some(Value::String(_)) => "string",
        Some(Value::Array(_)) => "array",
        Some(Value::Object(_)) => "object",
    }
}

fn length(body: &Map<String, Value>, path: &str) -> u32 {
    let length = if path.is_empty() {
        body.len()
    } else {
        match find(body, path) {
            Some(Value::Array(items)) => items.len(),
            Some(Value::Object(map)) => map.len(),
            Some(Value::String(text)) => text.len(),
            _ => 0,
        }
    };
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const BOUNDS: Bounds = Bounds { bytes: 64, depth: 4 };

    fn body() -> Map<String, Value> {
        let body = json!({"a": [1, {"b/c": "xyz"}], "m~": null, "s": "é"});
        body.as_object().cloned().unwrap_or_default()
    }

    fn got(document: &impl Document, path: &str) -> Option<String> {
        document.get(path.into()).unwrap().map(|t| t.to_string()).into_option()
    }

    #[test]
    fn values_are_read_by_their_pointers() {
        let body = body();
        let view = Frozen(&body);
        for (path, json, kind, len) in [
            ("/a", Some(r#"[1,{"b/c":"xyz"}]"#), "array", 2),
            ("/a/0", Some("1"), "number", 0),
            ("/a/1/b~1c", Some(r#""xyz""#), "string", 3),
            ("/m~0", Some("null"), "null", 0),
            ("/s", Some(r#""é""#), "string", 2),
            ("/a/2", None, "", 0),
            ("/a/01", None, "", 0),
            ("a", None, "", 0),
            ("/x/y", None, "", 0),
        ] {
            assert_eq!(got(&view, path).as_deref(), json, "{path}");
            assert_eq!(view.kind(path.into()).unwrap().as_str(), kind, "{path}");
            assert_eq!(view.len(path.into()), Ok(len), "{path}");
        }
        assert_eq!((view.kind("".into()).unwrap().as_str(), view.len("".into())), ("object", Ok(3)));
        assert!(view.set("/a".into(), "1".into()).unwrap_err().message.contains("request.rewrite"));
        assert!(view.remove("/a".into()).is_err());
    }

    #[test]
    fn values_are_set_and_removed_where_their_parent_is() {
        let draft = Draft::new(body(), BOUNDS);
        let set =
            |path: &str, json: &str| draft.set(path.into(), json.into()).map_err(|e| e.message.to_string());
        for (path, json) in [("/n", "1"), ("/a/0", "2"), ("/a/2", "3"), ("/a/-", "4"), ("/a/1/k", "[]")] {
            set(path, json).unwrap();
        }
        assert_eq!(got(&draft, "/a").unwrap(), r#"[2,{"b/c":"xyz","k":[]},3,4]"#);
        for (path, json, told) in [
            ("/x/y", "1", "no object or list"),
            ("/s/0", "1", "no object or list"),
            ("/a/9", "1", "no place \"9\""),
            ("/a/+1", "1", "no place"),
            ("n", "1", "begins with /"),
            ("", "[]", "must stay an object"),
            ("/n", "{", "not JSON"),
            ("/n", "[[[[1]]]]", "4 levels"),
            ("/a/1/k/0", "[[]]", "4 levels"),
        ] {
            let error = set(path, json).unwrap_err();
            assert!(error.contains(told) && error.contains(path), "{path} {json}: {error}");
        }
        for path in ["/a/0", "/m~0", "/a/9", "/x/y", "/none"] {
            draft.remove(path.into()).unwrap();
        }
        assert!(draft.remove("".into()).is_err());
        set("/n", &format!("\"{}\"", "x".repeat(40))).unwrap();
        let error = set("/n", &format!("\"{}\"", "x".repeat(40))).unwrap_err();
        assert!(error.contains("the limit is 64"), "{error}");
        let left = Value::Object(draft.into_body());
        assert_eq!(left, json!({"a": [{"b/c": "xyz", "k": []}, 3, 4], "s": "é", "n": "x".repeat(40)}));
    }

    #[test]
    fn the_whole_body_can_be_replaced() {
        let draft = Draft::new(body(), BOUNDS);
        draft.set("".into(), "{\"z\":1}".into()).unwrap();
        assert_eq!(got(&draft, "").unwrap(), "{\"z\":1}");
        assert_eq!(draft.into_body().len(), 1);
    }
}
