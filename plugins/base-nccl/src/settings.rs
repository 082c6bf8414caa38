//! NCCL is set up by variables of the environment, which it reads once in a process: they are set before it is loaded.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::{Knobs, OpError};

/// Variables that have a knob of their own, with its key.
const OWN: [(&str, &str); 5] = [
    ("NCCL_SOCKET_IFNAME", "socket_ifname"),
    ("NCCL_IB_HCA", "ib_hca"),
    ("NCCL_MIN_NCHANNELS", "min_nchannels"),
    ("NCCL_MAX_NCHANNELS", "max_nchannels"),
    ("NCCL_PROTO", "proto"),
];
/// Variables that this transport decides: name, its only value, why.
const DECIDED: [(&str, &str, &str); 2] = [
    ("NCCL_COMM_BLOCKING", "0", "calls that block could not be given up when a rank is gone"),
    (
        "NCCL_GRAPH_REGISTER",
        "0",
        "NCCL would agree on buffers between ranks while a forward is recorded, and ranks may record one at different times",
    ),
];
/// Protocols of NCCL.
const PROTOCOLS: [&str; 3] = ["LL", "LL128", "SIMPLE"];
/// Longest value, in bytes.
const MOST: usize = 4096;

/// Serializes looks at the environment and changes of it by ranks that are threads of one process.
static TURN: Mutex<()> = Mutex::new(());

/// A variable's value, and who wants it.
type Wanted = BTreeMap<String, (String, String)>;

/// What NCCL is to be set up with.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    wanted: Mutex<Wanted>,
    opened: Mutex<bool>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A list of protocols as NCCL takes it. What NCCL does not know it would pass over without a word.
fn proto(text: &str) -> Result<(), String> {
    let names = text.strip_prefix('^').unwrap_or(text);
    let known = |name: &str| PROTOCOLS.contains(&name.trim().to_ascii_uppercase().as_str());
    match names.split(',').find(|name| !known(name)) {
        Some(other) => {
            Err(format!("{other:?} is no protocol: LL, LL128 and Simple are, with commas between them"))
        }
        None => Ok(()),
    }
}

/// Refuses a value of a variable that could not act.
fn check(name: &str, value: &str) -> Result<(), String> {
    if value.is_empty() || value.len() > MOST || value.chars().any(char::is_control) {
        return Err(format!("{name} needs a value of 1 to {MOST} bytes in one line"));
    }
    if let Some((_, only, why)) = DECIDED.iter().find(|(decided, ..)| *decided == name)
        && value != *only
    {
        return Err(format!("{name} is {only}: {why}"));
    }
    if name == "NCCL_PROTO" { proto(value) } else { Ok(()) }
}

/// The list of further variables, sorted by name.
pub(crate) fn further(text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut all = BTreeMap::new();
    for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=').ok_or_else(|| format!("{part:?}: give NAME=VALUE"))?;
        let (name, value) = (name.trim(), value.trim());
        let fits = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        if !name.starts_with("NCCL_") || name.len() < 6 || !name.chars().all(fits) {
            return Err(format!("{name:?} is no variable of NCCL: they begin with NCCL_"));
        }
        if let Some((_, key)) = OWN.iter().find(|(own, _)| *own == name) {
            return Err(format!("{name} has a knob of its own, {key}"));
        }
        check(name, value)?;
        if all.insert(name.to_owned(), value.to_owned()).is_some() {
            return Err(format!("{name} is given twice"));
        }
    }
    Ok(all)
}

/// As [`further`] reads it.
pub(crate) fn written(all: &BTreeMap<String, String>) -> String {
    all.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(";")
}

impl Settings {
    /// Takes the knobs.
    ///
    /// # Errors
    /// A value that could not act.
    pub fn take(&self, knobs: &Knobs<'_>) -> Result<(), OpError> {
        let mut all = Wanted::new();
        for (name, key) in OWN {
            let value = knobs.get(key)?.value.to_string();
            if !value.is_empty() {
                check(name, &value).map_err(|why| OpError::invalid(format!("{key} is {value:?}: {why}")))?;
                all.insert(name.into(), (value, format!("the knob base-nccl.{key}")));
            }
        }
        let number = |name: &str| all.get(name).and_then(|(value, _)| value.parse::<i64>().ok());
        if let (Some(least), Some(most)) = (number("NCCL_MIN_NCHANNELS"), number("NCCL_MAX_NCHANNELS"))
            && least > most
        {
            let text = format!("min_nchannels is {least}, more than max_nchannels, {most}");
            return Err(OpError::invalid(text));
        }
        let text = knobs.get("env")?.value.to_string();
        let more = further(&text).map_err(|why| OpError::invalid(format!("env is {text:?}: {why}")))?;
        all.extend(more.into_iter().map(|(name, value)| (name, (value, "the knob base-nccl.env".into()))));
        *lock(&self.wanted) = all;
        Ok(())
    }

    /// Sets a variable for another plugin.
    ///
    /// # Errors
    /// A value that could not act, another's word for it, a communicator that exists already.
    pub fn set(&self, name: &str, value: &str, by: &str) -> Result<(), OpError> {
        let refuse = |why: String| Err(OpError::invalid(format!("{name}={value} of plugin {by}: {why}")));
        if !name.starts_with("NCCL_") {
            return refuse("variables of NCCL begin with NCCL_".into());
        }
        if let Err(why) = check(name, value) {
            return refuse(why);
        }
        if *lock(&self.opened) {
            return refuse("a communicator has been opened; this has to be said before".into());
        }
        let mut wanted = lock(&self.wanted);
        match wanted.get(name) {
            Some((other, who)) if other != value => refuse(format!("{who} says {other}")),
            Some(_) => Ok(()),
            None => {
                wanted.insert(name.into(), (value.into(), format!("plugin {by}")));
                Ok(())
            }
        }
    }

    /// Sets the variables of this process; whatever else the environment has stays.
    ///
    /// # Errors
    /// A variable that the environment has otherwise.
    pub fn apply(&self) -> Result<(), String> {
        *lock(&self.opened) = true;
        let wanted = lock(&self.wanted).clone();
        let own = |(name, only, why): &(&str, &str, &str)| {
            ((*name).to_owned(), ((*only).to_owned(), format!("base-nccl ({why})")))
        };
        let all: Wanted = DECIDED.iter().map(own).chain(wanted).collect();
        let _turn = lock(&TURN);
        for (name, (value, who)) in &all {
            match std::env::var(name) {
                Ok(there) if there == *value => {}
                Ok(there) => {
                    return Err(format!(
                        "{name} is {there:?} in the environment, but {value:?} by {who}: take one of them away"
                    ));
                }
                Err(_) => {
                    // SAFETY: a rank opens its transport while it starts, before its engine has threads that look at the
                    // environment; ranks in one process take turns above.
                    unsafe { std::env::set_var(name, value) };
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use plugfold_abi::{Knob, KnobValue, Maybe, Slice};

    use super::*;

    fn taken(values: &[(&str, KnobValue)]) -> Result<Settings, OpError> {
        let keys = ["socket_ifname", "ib_hca", "min_nchannels", "max_nchannels", "proto", "env"];
        let value = |key: &str| {
            values.iter().find(|(k, _)| *k == key).map_or_else(|| KnobValue::text(""), |(_, v)| v.clone())
        };
        let knob = |key: &str| Knob { key: key.into(), value: value(key), id: Maybe::RNone };
        let all = keys.map(knob);
        let settings = Settings::default();
        settings.take(&Knobs { all: Slice::from(&all[..]) })?;
        Ok(settings)
    }

    fn refused(values: &[(&str, KnobValue)]) -> String {
        taken(values).unwrap_err().to_string()
    }

    #[test]
    fn every_knob_acts_or_is_refused() {
        let text = KnobValue::text;
        let settings = taken(&[
            ("socket_ifname", text("eth0")),
            ("max_nchannels", KnobValue::Int(4)),
            ("proto", text("^ll128")),
            ("env", text("NCCL_PLUGFOLD_TEST=1;")),
        ])
        .unwrap();
        settings.apply().unwrap();
        let said = |name: &str| std::env::var(name).unwrap();
        assert_eq!(said("NCCL_SOCKET_IFNAME"), "eth0");
        assert_eq!(said("NCCL_MAX_NCHANNELS"), "4");
        assert_eq!((said("NCCL_PROTO"), said("NCCL_PLUGFOLD_TEST")), ("^ll128".into(), "1".into()));
        assert_eq!((said("NCCL_COMM_BLOCKING"), said("NCCL_GRAPH_REGISTER")), ("0".into(), "0".into()));
        // Another start in this process with other words finds those of the first.
        let other = taken(&[("socket_ifname", text("eth1"))]).unwrap().apply().unwrap_err();
        assert!(other.contains("NCCL_SOCKET_IFNAME is \"eth0\" in the environment"), "{other}");
        assert!(other.contains("base-nccl.socket_ifname"), "{other}");
        let late = settings.set("NCCL_PROTO", "LL", "0040").unwrap_err().to_string();
        assert!(late.contains("has been opened"), "{late}");
        for (values, words) in [
            ([("proto", text("LL,LL256")), ("env", text(""))], "\"LL256\" is no protocol"),
            (
                [("min_nchannels", KnobValue::Int(8)), ("max_nchannels", KnobValue::Int(4))],
                "min_nchannels is 8",
            ),
            ([("env", text("NCCL_PROTO=LL")), ("proto", text(""))], "a knob of its own, proto"),
            ([("env", text("NCCL_COMM_BLOCKING=1")), ("proto", text(""))], "NCCL_COMM_BLOCKING is 0"),
            ([("env", text("LD_PRELOAD=x")), ("proto", text(""))], "begin with NCCL_"),
            ([("env", text("NCCL_A=1;NCCL_A=2")), ("proto", text(""))], "twice"),
            ([("env", text("NCCL_A")), ("proto", text(""))], "give NAME=VALUE"),
        ] {
            let told = refused(&values);
            assert!(told.contains(words), "{told}");
        }
    }

    #[test]
    fn plugins_set_what_nobody_has_set_otherwise() {
        let settings = taken(&[("proto", KnobValue::text("LL"))]).unwrap();
        settings.set("NCCL_PROTO", "LL", "0040").unwrap();
        settings.set("NCCL_ALGO", "Ring", "0040").unwrap();
        let told = settings.set("NCCL_PROTO", "LL128", "0040").unwrap_err().to_string();
        assert!(told.contains("plugin 0040") && told.contains("the knob base-nccl.proto says LL"), "{told}");
        let told = settings.set("NCCL_ALGO", "Tree", "0230").unwrap_err().to_string();
        assert!(told.contains("plugin 0040 says Ring"), "{told}");
        assert!(settings.set("NCCL_COMM_BLOCKING", "1", "0230").is_err());
        assert_eq!(written(&further(" NCCL_B=2 ;NCCL_A=1").unwrap()), "NCCL_A=1;NCCL_B=2");
    }
}
