//! Layouts as text: what two sides compare, and what a person reads when they differ.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

use abi_stable::std_types::UTypeId;
use abi_stable::type_layout::{TLData, TLField, TLPrimitive, TypeLayout};

use super::Interface;

/// The layout of an interface as lines `Type.field: type, size, alignment`: all types that cross with it, sorted.
/// Made once a table and kept.
pub fn layout_text<I: Interface>() -> &'static str {
    // Not by name: two interfaces of one name are just what a layout has to tell apart.
    static MADE: OnceLock<Mutex<HashMap<usize, &'static str>>> = OnceLock::new();
    let mut made = MADE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    made.entry(std::ptr::from_ref(I::table_layout()).addr()).or_insert_with(|| {
        let mut walk = Walk::default();
        walk.visit(I::table_layout());
        let lines: Vec<String> = walk.lines.into_iter().map(|(k, v)| format!("{k}: {v}")).collect();
        Box::leak(lines.join("\n").into_boxed_str())
    })
}

#[derive(Default)]
struct Walk {
    /// Every type that was met, with the name that it goes by here.
    names: HashMap<UTypeId, String>,
    taken: HashSet<String>,
    visited: HashSet<UTypeId>,
    lines: BTreeMap<String, String>,
}

/// Nesting of type parameters that is written out.
const DEEPEST: usize = 8;

/// A type as a person writes it, without lifetimes. Layouts of generic types do not list their parameters: they are read
/// from what holds them, a marker or the variants.
fn written(layout: &'static TypeLayout, depth: usize) -> String {
    if depth == DEEPEST {
        return layout.name().to_owned();
    }
    let fields = || layout.get_fields().map(|f| f.to_vec()).unwrap_or_default();
    let parameters: Vec<&'static TypeLayout> = match layout.data() {
        TLData::Enum(_) if layout.package().as_str() == "abi_stable" => {
            fields().iter().map(TLField::layout).collect()
        }
        _ => layout.generics().type_params().iter().map(|p| p()).collect(),
    };
    let marked = fields().into_iter().map(|f| f.layout()).filter(|l| l.name() == "PhantomData");
    let marked = marked.flat_map(|l| l.generics().type_params().iter().map(|p| p()));
    let parameters = if parameters.is_empty() { marked.collect() } else { parameters };
    let all: Vec<String> = parameters.into_iter().map(|p| written(p, depth + 1)).collect();
    let all = all.join(", ");
    match layout.data() {
        TLData::Primitive(TLPrimitive::SharedRef) => format!("&{all}"),
        TLData::Primitive(TLPrimitive::MutRef) => format!("&mut {all}"),
        TLData::Primitive(TLPrimitive::ConstPtr) => format!("*const {all}"),
        TLData::Primitive(TLPrimitive::MutPtr) => format!("*mut {all}"),
        TLData::Primitive(TLPrimitive::Array) => {
            let len: Vec<String> =
                layout.generics().const_params().iter().map(|c| format!("{c:?}")).collect();
            format!("[{all}; {}]", len.join(", "))
        }
        _ if all.is_empty() => layout.name().to_owned(),
        _ => format!("{}<{all}>", layout.name()),
    }
}

impl Walk {
    /// The name of a type, no other's: where two are written alike, the later one is numbered.
    fn name(&mut self, layout: &'static TypeLayout) -> String {
        let id = layout.get_utypeid();
        if let Some(name) = self.names.get(&id) {
            return name.clone();
        }
        let plain = written(layout, 0);
        let mut name = plain.clone();
        let mut number = 2;
        while !self.taken.insert(name.clone()) {
            name = format!("{plain} ({number})");
            number += 1;
        }
        self.names.insert(id, name.clone());
        name
    }

    fn shape(&mut self, layout: &'static TypeLayout) -> String {
        format!("{}, {} bytes, aligned to {}", self.name(layout), layout.size(), layout.alignment())
    }

    fn visit(&mut self, layout: &'static TypeLayout) {
        if !self.visited.insert(layout.get_utypeid()) {
            return;
        }
        let name = self.name(layout);
        let size = format!("{} bytes, aligned to {}", layout.size(), layout.alignment());
        self.lines.insert(name.clone(), size);
        if let TLData::Enum(data) = layout.data() {
            let variants: Vec<&str> = data.variant_names_iter().collect();
            self.lines.insert(format!("{name} variants"), variants.join(", "));
            self.lines.insert(format!("{name} numbers"), format!("{:?}", data.discriminants));
            self.lines.insert(format!("{name} fields of variants"), format!("{:?}", &data.field_count[..]));
        }
        let fields = layout.get_fields().map(|f| f.to_vec()).unwrap_or_default();
        for (i, field) in fields.iter().enumerate() {
            let mut line = self.shape(field.layout());
            for function in field.function_range() {
                let arguments: Vec<String> =
                    function.param_type_layouts.iter().map(|l| self.shape(l())).collect();
                let gives = function.return_type_layout().map(|l| l());
                line.clear();
                let _ = write!(line, "fn({})", arguments.join("; "));
                if let Some(gives) = gives {
                    let _ = write!(line, " -> {}", self.shape(gives));
                    self.visit(gives);
                }
                for argument in function.param_type_layouts.iter() {
                    self.visit(argument());
                }
            }
            self.lines.insert(format!("{name}.{i:02} {}", field.name()), line);
            self.visit(field.layout());
        }
        for field in layout.phantom_fields().to_vec() {
            self.visit(field.layout());
        }
        for parameter in layout.generics().type_params() {
            self.visit(parameter());
        }
    }
}

/// A line of a layout on which two sides differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Type and field.
    pub at: String,
    /// What this side has; `None`: it has no such field.
    pub ours: Option<String>,
    /// What the other side has.
    pub theirs: Option<String>,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let said = |v: &Option<String>| v.clone().unwrap_or_else(|| "absent".into());
        write!(f, "{}: here {}; there {}", self.at, said(&self.ours), said(&self.theirs))
    }
}

/// All lines in which two layout texts differ; empty when they are equal.
pub fn differences(ours: &str, theirs: &str) -> Vec<Difference> {
    if ours == theirs {
        return Vec::new();
    }
    let table = |text: &str| -> BTreeMap<String, String> {
        let pair = |l: &str| l.split_once(": ").map(|(k, v)| (k.to_owned(), v.to_owned()));
        text.lines().filter_map(pair).collect()
    };
    let (ours, theirs) = (table(ours), table(theirs));
    let keys: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    keys.into_iter()
        .filter(|k| ours.get(*k) != theirs.get(*k))
        .map(|k| Difference { at: k.clone(), ours: ours.get(k).cloned(), theirs: theirs.get(k).cloned() })
        .collect()
}
