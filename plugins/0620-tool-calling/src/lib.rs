//! Repairs around tool calls: arguments typed by the whole schema, calls that stand inside of the reasoning, and the reasoning
//! of earlier calls, which many clients drop.

mod history;
mod markup;
mod memory;
mod schema;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use plugfold_0610_structured_output_api::{Grammar as _, GrammarObject};
use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{
    Document as _, DocumentObject, Host as _, HostObject, Level, PromptLink, PromptLinkObject, Reply,
    ReplyLink, ReplyLinkObject, RequestLink, RequestLinkObject, Services as _, ServicesObject,
    Tokenizer as _, TokenizerObject, ToolCall,
};
use plugfold_abi::{KnobValue, Knobs, List, OpError, TextBuf};
use serde_json::{Map, Value};

use memory::Memory;

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");
/// The token that a model ends its calls with.
const OBSERVATION: &str = "<|observation|>";

/// The plugin.
#[derive(Default)]
pub struct ToolCalling {
    fixes: OnceLock<Fixes>,
}

impl Plugin for ToolCalling {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let Some(fixes) = Fixes::new(&setup.knobs)? else { return Ok(List::new()) };
        fixes.tell(setup.host())?;
        let _ = self.fixes.set(fixes.clone());
        Ok(List::from(vec![
            Offer::of(RequestLinkObject::new(fixes.clone())),
            Offer::of(PromptLinkObject::new(fixes.clone())),
            Offer::of(ReplyLinkObject::new(fixes)),
        ]))
    }
    fn connect(&self, services: &ServicesObject) -> Result<(), OpError> {
        let Some(fixes) = self.fixes.get() else { return Ok(()) };
        let found = services.find("grammar".into())?.into_option();
        let grammar = found.map(|found| found.get::<GrammarObject>()).transpose();
        let grammar = grammar.map_err(|e| OpError::new(format!("service grammar: {e}")))?;
        fixes.meet(grammar.as_deref())
    }
}

/// The repairs that are on.
#[derive(Clone)]
pub struct Fixes {
    names: Arc<[String]>,
    reasoning: bool,
    args: bool,
    thinkcalls: bool,
    memory: Arc<Mutex<Memory>>,
    /// Output formats are enforced: what is not a plain string is written as JSON.
    written: Arc<AtomicBool>,
    /// The id of [`OBSERVATION`], once the tokenizer is known.
    observation: Arc<OnceLock<Option<u32>>>,
}

impl Fixes {
    /// The repairs that these knobs ask for; `None` for none.
    ///
    /// # Errors
    /// A repair that cannot be had, numbers that are none.
    pub fn new(knobs: &Knobs<'_>) -> Result<Option<Self>, OpError> {
        let KnobValue::List(names) = &knobs.get("fixes")?.value else {
            return Err(OpError::invalid("fixes must be a list of names"));
        };
        let names: Arc<[String]> = names.iter().map(ToString::to_string).collect();
        let has = |name: &str| names.iter().any(|n| n == name);
        let number = |key: &str| -> Result<usize, OpError> {
            let value = knobs.int(key)?;
            usize::try_from(value).map_err(|_| OpError::invalid(format!("{key} is {value}: give 0 or more")))
        };
        let memory = Memory::new(number("keep_entries")?, number("keep_mb")?.saturating_mul(1 << 20));
        let (reasoning, args, thinkcalls) = (has("reasoning"), has("args"), has("thinkcalls"));
        let memory = Arc::new(Mutex::new(memory));
        let on = !names.is_empty();
        let fixes = Self {
            names,
            reasoning,
            args,
            thinkcalls,
            memory,
            written: Arc::default(),
            observation: Arc::default(),
        };
        Ok(on.then_some(fixes))
    }

    /// Asks structured output, where it is on, to hold every tool to its schema if that is wanted.
    ///
    /// # Errors
    /// It is wanted and not there.
    pub fn meet(&self, grammar: Option<&GrammarObject>) -> Result<(), OpError> {
        self.written.store(grammar.is_some(), Ordering::Relaxed);
        match grammar {
            _ if !self.names.iter().any(|name| name == "grammar") => Ok(()),
            Some(grammar) => grammar.strict_tools(),
            None => Err(OpError::invalid(
                "fixes has grammar, which needs structured output (plugin 0610), and that is not on: remove it, or list \
                 0610-structured-output and set its enabled",
            )),
        }
    }

    fn tell(&self, host: &HostObject) -> Result<(), OpError> {
        if host.rank()? != 0 {
            return Ok(());
        }
        host.log(Level::Info, format!("tool fixes: {}", self.names.join(", ")).as_str().into())
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The calls at the end of a reasoning that the model never closed, where nothing else can be meant.
    fn calls_in_thinking(&self, tools: &Tools, reply: &mut Reply) {
        let ended = reply.ended == "token"
            && reply.last.into_option().is_some()
            && self.observation.get().copied().flatten() == reply.last.into_option();
        if !ended || !reply.thinking || !reply.calls.is_empty() || !reply.text.trim().is_empty() {
            return;
        }
        let raw = reply.raw.to_string();
        let open = raw.trim_end();
        let open = open.strip_suffix("</think>").unwrap_or(open);
        if open.contains("</think>") {
            return;
        }
        let blocks = markup::trailing(open);
        let calls: Option<Vec<ToolCall>> = blocks.iter().map(|block| self.call(tools, open, block)).collect();
        let (Some(calls), Some(first)) = (calls, blocks.first()) else { return };
        let before = &open[..first.start];
        let before = before.rsplit_once("<think>").map_or(before, |(_, after)| after);
        reply.reasoning = before.trim_matches('\n').into();
        reply.text = TextBuf::new();
        reply.calls = calls.into();
    }

    /// A call of a block, if it is one of an offered tool.
    fn call(&self, tools: &Tools, text: &str, block: &markup::Block<'_>) -> Option<ToolCall> {
        let tool = tools.find(block.name)?;
        let arguments = if let Some(pairs) = &block.pairs {
            self.typed(tool, pairs)
        } else {
            let body = &text[block.start + "<tool_call>".len()..block.end - "</tool_call>".len()];
            let call: Value = serde_json::from_str(body.trim()).ok()?;
            history::arguments(&call["arguments"])
        };
        arguments.is_object().then(|| ToolCall {
            id: TextBuf::new(),
            name: tool.name.as_str().into(),
            arguments: arguments.to_string().into(),
        })
    }

    fn typed(&self, tool: &Tool, pairs: &[(&str, &str)]) -> Value {
        let mut arguments = Map::new();
        for (key, text) in pairs {
            let schema = &tool.parameters["properties"][*key];
            let written = self.written.load(Ordering::Relaxed) && schema["type"] != "string";
            let value = if let Some(Value::String(text)) =
                written.then(|| serde_json::from_str(text).ok()).flatten()
            {
                Value::String(text)
            } else if self.args {
                schema::value(schema, text)
            } else if schema["type"] == "string" {
                Value::String((*text).to_owned())
            } else {
                serde_json::from_str(text).unwrap_or_else(|_| Value::String((*text).to_owned()))
            };
            arguments.insert((*key).to_owned(), value);
        }
        Value::Object(arguments)
    }

    /// Types the arguments of calls by the whole schema, from the text that they were written in.
    fn type_arguments(&self, tools: &Tools, reply: &mut Reply) {
        let raw = reply.raw.to_string();
        let answer = if reply.thinking { raw.split_once("</think>").map_or("", |(_, a)| a) } else { &raw };
        let blocks = markup::blocks(answer);
        let mut written = blocks.iter();
        let mut typed = Vec::with_capacity(reply.calls.len());
        for call in &reply.calls {
            // Blocks between that no call came of name no offered tool.
            let Some(block) = written.find(|block| block.name.eq_ignore_ascii_case(&call.name)) else {
                return;
            };
            let arguments = match (&block.pairs, tools.find(block.name)) {
                (Some(pairs), Some(tool)) => self.typed(tool, pairs).to_string().into(),
                _ => call.arguments.clone(),
            };
            typed.push(ToolCall { arguments, ..call.clone() });
        }
        reply.calls = typed.into();
    }

    /// Remembers the reasoning of a reply that called tools.
    fn remember(&self, body: &DocumentObject, reply: &Reply) -> Result<(), OpError> {
        if !reply.thinking || reply.calls.is_empty() || reply.reasoning.trim().is_empty() {
            return Ok(());
        }
        let one = history::value(body, "/parallel_tool_calls")? == false;
        let calls = &reply.calls[..if one { 1 } else { reply.calls.len() }];
        let own = |call: &ToolCall| history::is_own_id(&call.id).then(|| call.id.to_string());
        let mut keys: Vec<String> = calls.iter().filter_map(own).collect();
        let asked = history::asked(body, body.len("/messages".into())?)?;
        let call = |call: &ToolCall| {
            (call.name.to_string(), history::arguments(&Value::String(call.arguments.to_string())))
        };
        keys.push(history::signature(&asked, &calls.iter().map(call).collect::<Vec<_>>()));
        self.memory().keep(&reply.reasoning, keys);
        Ok(())
    }
}

/// A tool of a request.
struct Tool {
    name: String,
    parameters: Value,
}

/// The tools that a request offers.
struct Tools(Vec<Tool>);

impl Tools {
    /// The tools of a body, after `tool_choice`; the server has checked them.
    fn of(body: &DocumentObject) -> Result<Self, OpError> {
        let choice = history::value(body, "/tool_choice")?;
        let named = choice["function"]["name"].as_str();
        if choice == "none" {
            return Ok(Self(Vec::new()));
        }
        let Value::Array(tools) = history::value(body, "/tools")? else { return Ok(Self(Vec::new())) };
        let tool = |tool: Value| {
            let function = if tool["function"].is_object() { tool["function"].clone() } else { tool };
            let name = function["name"].as_str()?.to_owned();
            let offered = named.is_none_or(|named| named == name);
            offered.then(|| Tool { name, parameters: function["parameters"].clone() })
        };
        Ok(Self(tools.into_iter().filter_map(tool).collect()))
    }

    fn find(&self, name: &str) -> Option<&Tool> {
        self.0.iter().find(|tool| tool.name.to_lowercase() == name.to_lowercase())
    }
}

impl RequestLink for Fixes {
    fn rewrite(&self, body: &DocumentObject) -> Result<(), OpError> {
        if self.reasoning && history::offers_tools(body)? {
            history::restore(body, &mut self.memory())?;
        }
        Ok(())
    }
}

impl PromptLink for Fixes {
    fn start(&self, tokenizer: &TokenizerObject) -> Result<List<u32>, OpError> {
        let controls = tokenizer.controls()?;
        let found = controls.iter().find(|control| control.text == OBSERVATION).map(|control| control.id);
        // A second start is the same tokenizer's.
        let _ = self.observation.set(found);
        Ok(List::new())
    }
}

impl ReplyLink for Fixes {
    fn parse(&self, body: &DocumentObject, reply: &mut Reply) -> Result<(), OpError> {
        if !(self.args || self.thinkcalls) || !history::offers_tools(body)? {
            return Ok(());
        }
        let tools = Tools::of(body)?;
        if self.thinkcalls && reply.calls.is_empty() {
            self.calls_in_thinking(&tools, reply);
        } else if self.args && !reply.calls.is_empty() {
            self.type_arguments(&tools, reply);
        }
        Ok(())
    }

    fn finish(&self, body: &DocumentObject, reply: &mut Reply) -> Result<(), OpError> {
        if self.reasoning && history::offers_tools(body)? {
            self.remember(body, reply)?;
        }
        Ok(())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: ToolCalling::default());
