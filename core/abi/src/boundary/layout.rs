//! Layouts as text: what two sides compare, and what a person reads when they differ.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

use abi_stable::type_layout::{TLData, TypeLayout};

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
    seen: BTreeSet<String>,
    lines: BTreeMap<String, String>,
}

/// A type's name with its parameters. The library's own names leave them out: of the generic types that cross, lists and
/// slices are told by what they point to, options and results by what they hold, pointers by their target.
fn name_of(layout: &'static TypeLayout) -> String {
    let own = layout.full_type().to_string();
    let targets = || layout.generics().type_params().iter().map(|p| name_of(p())).collect::<Vec<String>>();
    let fields = || layout.get_fields().map(|f| f.to_vec()).unwrap_or_default();
    let base = own.split('<').next().unwrap_or_default();
    match base {
        "RVec" | "Slice" | "SliceMut" => {
            let points = |n: &String| n.starts_with('*') || n.starts_with("NonNull");
            let pointer = fields().into_iter().find(|f| points(&f.full_type().to_string()));
            let element =
                pointer.and_then(|f| f.layout().generics().type_params().first().map(|p| name_of(p())));
            let element = element.unwrap_or_else(|| "?".into());
            format!("{base}<{element}>")
        }
        "ROption" | "RResult" => {
            let held: Vec<String> = fields().iter().map(|f| name_of(f.layout())).collect();
            format!("{base}<{}>", held.join(", "))
        }
        _ if own.starts_with('*') || own.starts_with('&') => {
            let kind = if own.contains(" mut ") { "&mut " } else { "&" };
            let kind = ["*const ", "*mut "].into_iter().find(|p| own.starts_with(p)).unwrap_or(kind);
            let targets = targets();
            if targets.is_empty() { own } else { format!("{kind}{}", targets.join(", ")) }
        }
        _ => own,
    }
}

fn shape(layout: &'static TypeLayout) -> String {
    format!("{}, {} bytes, aligned to {}", name_of(layout), layout.size(), layout.alignment())
}

impl Walk {
    fn visit(&mut self, layout: &'static TypeLayout) {
        let name = name_of(layout);
        if !self.seen.insert(name.clone()) {
            return;
        }
        self.lines
            .insert(name.clone(), format!("{} bytes, aligned to {}", layout.size(), layout.alignment()));
        if let TLData::Enum(data) = layout.data() {
            let variants: Vec<&str> = data.variant_names_iter().collect();
            self.lines.insert(format!("{name} variants"), variants.join(", "));
            self.lines.insert(format!("{name} numbers"), format!("{:?}", data.discriminants));
            self.lines.insert(format!("{name} fields of variants"), format!("{:?}", &data.field_count[..]));
        }
        let fields = layout.get_fields().map(|f| f.to_vec()).unwrap_or_default();
        for (i, field) in fields.iter().enumerate() {
            let mut line = shape(field.layout());
            for function in field.function_range().iter() {
                let arguments: Vec<String> = function.param_type_layouts.iter().map(|l| shape(l())).collect();
                let gives = function.return_type_layout().map(|l| l());
                line.clear();
                let _ = write!(line, "fn({})", arguments.join("; "));
                if let Some(gives) = gives {
                    let _ = write!(line, " -> {}", shape(gives));
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
        for parameter in layout.generics().type_params().iter() {
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
