//! Reading fields of a request body, with the contract's rules for numbers.

use serde_json::{Map, Value};

use super::error::ApiError;

/// A request body. `null` counts as absent everywhere.
#[derive(Clone, Copy)]
pub struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// A field that is there and not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// `20`, `20.0` and `"20"`; not `20.5`, not a boolean.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn integer(&self, name: &str) -> Result<Option<i128>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match integer(value) {
            Some(number) => Ok(Some(number)),
            None => Err(ApiError::field(name, "must be an integer or null")),
        }
    }

    /// Numbers and numeric strings; not NaN, not infinite, not a boolean.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn float(&self, name: &str) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = match value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => text.trim().parse().ok(),
            _ => None,
        };
        match number {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(ApiError::field(name, "must be a finite number or null")),
        }
    }

    /// `true` or `false`.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(ApiError::field(name, "must be a boolean or null")),
        }
    }

    /// A string.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::field(name, "must be a string or null")),
        }
    }

    /// An object.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(_) => Err(ApiError::field(name, "must be an object or null")),
        }
    }

    /// A list of at most `limit` items.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn list(&self, name: &str, limit: usize) -> Result<Option<&'a [Value]>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(items)) if items.len() <= limit => Ok(Some(items)),
            Some(Value::Array(items)) => {
                Err(ApiError::field(name, format_args!("has {} items; the limit is {limit}", items.len())))
            }
            Some(_) => Err(ApiError::field(name, "must be a list or null")),
        }
    }
}

/// The integer a JSON value stands for, by the contract's rules.
fn integer(value: &Value) -> Option<i128> {
    match value {
        Value::Number(number) => {
            let whole = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
            whole.or_else(|| number.as_f64().filter(|n| n.fract() == 0.0 && n.is_finite()).map(|n| n as i128))
        }
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers() {
        let of = |value: Value| {
            let map = json!({"x": value}).as_object().cloned().unwrap();
            let fields = Fields(&map);
            (fields.integer("x").ok(), fields.float("x").ok())
        };
        assert_eq!(of(json!(20)), (Some(Some(20)), Some(Some(20.0))));
        assert_eq!(of(json!(20.0)), (Some(Some(20)), Some(Some(20.0))));
        assert_eq!(of(json!("20")), (Some(Some(20)), Some(Some(20.0))));
        assert_eq!(of(json!(20.5)), (None, Some(Some(20.5))));
        assert_eq!(of(json!(null)), (Some(None), Some(None)));
        assert_eq!(of(json!(1e18)), (Some(Some(1_000_000_000_000_000_000)), Some(Some(1e18))));
        assert_eq!(of(json!(u64::MAX)).0, Some(Some(i128::from(u64::MAX))));
        for wrong in [json!(true), json!("NaN"), json!("inf"), json!([1]), json!({}), json!("")] {
            assert_eq!(of(wrong.clone()), (None, None), "{wrong}");
        }
    }
}
