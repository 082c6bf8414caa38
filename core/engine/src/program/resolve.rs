//! Which provider runs each step: first whose bits, then which kernel.

mod choose;
mod fuse;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use plugfold_abi::points::Observer;
use plugfold_abi::{
    Addressing, CacheKind, CacheView, DType, MAX_CACHES, MAX_INPUTS, MAX_OUTPUTS, MAX_WEIGHTS, OpError,
    Operand, Pass, PassContext, PassObject, Plan, Program, Provider, ProviderObject, Query, Reach, Slice,
    Step, Text, ops,
};
use plugfold_kernels::device::{Device, DeviceError};

use super::{Placement, ProgramError, check, check_placement, place};
use crate::hooks::{Calls, HookError, Hooks};
use crate::state::CacheTable;
use crate::weights::WeightTable;

/// Class of the device where the engine has none: the host.
pub const HOST: &str = "cpu";
/// Owner of the reference providers.
pub const REFERENCE: &str = "ref";
/// Operations that a fusion may cover at most.
pub const MAX_COVER: usize = 8;

/// A provider as the resolver knows it; what is constant was asked once.
#[derive(Clone)]
pub(crate) struct Entry {
    pub owner: Arc<str>,
    /// `owner/name`.
    pub name: Arc<str>,
    pub over: Arc<[String]>,
    pub covers: Arc<[String]>,
    pub member: Option<plugfold_abi::Member>,
    pub provider: Arc<ProviderObject>,
    pub calls: Arc<Calls>,
}

impl Entry {
    /// A link that runs this provider, for who claimed the call.
    fn link(&self, claimer: &Arc<str>, plan: Plan) -> Link {
        let (owner, claimer) = (self.owner.clone(), claimer.clone());
        Link { owner, claimer, provider: self.provider.clone(), calls: self.calls.clone(), plan }
    }
}

/// All providers and passes, in list order: later providers are outer, later passes run later.
#[derive(Clone)]
pub struct Registry {
    providers: HashMap<String, Vec<Entry>>,
    fusions: Vec<Entry>,
    passes: Vec<(Arc<str>, Arc<PassObject>)>,
    /// Operations whose calls observers ask for.
    watched: Vec<String>,
    device: Arc<str>,
    rank: (u32, u32),
}

/// A program that cannot be run with the providers at hand.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The program is unsound.
    #[error("program {kind}: {source}")]
    Program {
        /// Which program.
        kind: String,
        /// Why.
        source: ProgramError,
    },
    /// A pass that refuses a program, or after which it is unsound.
    #[error("program {kind}: pass {pass} of plugin {owner}: {reason}")]
    Pass {
        /// Which program.
        kind: String,
        /// The pass.
        pass: String,
        /// Its plugin.
        owner: String,
        /// Why.
        reason: String,
    },
    /// A device without room for the program's buffers.
    #[error("buffers of a program: {0}")]
    Device(#[from] DeviceError),
    /// A provider that fails instead of answering.
    #[error("claim on {op}: {error}")]
    Claim {
        /// Operation.
        op: String,
        /// Who, and what it said.
        error: HookError,
    },
    /// Two arithmetics, neither above the other.
    #[error(transparent)]
    TwoArithmetics(Box<TwoArithmetics>),
    /// A claim sends a call to a provider that is not there.
    #[error("{op}: plugin {owner} sends its calls to provider {to}, which no loaded plugin has for {op}")]
    NoSuchProvider {
        /// Operation.
        op: String,
        /// Who claimed.
        owner: String,
        /// To whom.
        to: String,
    },
    /// Nobody runs a step.
    #[error(
        "no provider runs {op} (layer {layer}, weights {formats:?}, cache {cache:?}): load a plugin that claims it"
    )]
    NoProvider {
        /// Operation.
        op: String,
        /// Layer.
        layer: u32,
        /// Weight formats.
        formats: Vec<String>,
        /// Cache format.
        cache: String,
    },
    /// A weight that the builder names is not loaded.
    #[error("{op} of layer {layer} wants weight {role}, which is not loaded")]
    NoWeight {
        /// Operation.
        op: String,
        /// Layer.
        layer: u32,
        /// Role.
        role: String,
    },
    /// A cache family that the builder names does not exist in that layer.
    #[error("{op} of layer {layer} wants cache family {family}, which that layer has not")]
    NoCache {
        /// Operation.
        op: String,
        /// Layer.
        layer: u32,
        /// Family.
        family: String,
    },
}

/// Two plugins that each bring an arithmetic of their own for one call, neither above the other.
#[derive(Debug, thiserror::Error)]
#[error(
    "{op} ({phase:?}, layer {layer}): plugins {first} and {second} each bring an arithmetic of their own ({bits_first}, \
     {bits_second}); name one in the other's `over`, or take one off the list"
)]
pub struct TwoArithmetics {
    /// Operation.
    pub op: String,
    /// Phase.
    pub phase: plugfold_abi::Phase,
    /// Layer.
    pub layer: u32,
    /// Listed first.
    pub first: String,
    /// Listed later.
    pub second: String,
    /// Bits of the first.
    pub bits_first: String,
    /// Bits of the second.
    pub bits_second: String,
}

/// A provider with the plan of its claim.
#[derive(Clone)]
pub(crate) struct Link {
    pub owner: Arc<str>,
    /// Who claimed the call: another plugin, where a claim sends calls to a provider by name.
    pub claimer: Arc<str>,
    pub provider: Arc<ProviderObject>,
    pub calls: Arc<Calls>,
    pub plan: Plan,
}

/// How a step runs.
pub(crate) enum Fused {
    /// By itself.
    Alone,
    /// With so many steps, itself included, by a fusion.
    First(Link, usize),
    /// By the fusion that began before it.
    Inside,
}

/// What a step was resolved to.
pub(crate) struct ResolvedStep {
    /// Providers of the chosen arithmetic, outermost first.
    pub chain: Vec<Link>,
    /// Name of the arithmetic.
    pub bits: String,
    /// Multiples at which states may be kept.
    pub grid: u32,
    /// Who decides the arithmetic.
    pub decides: Arc<str>,
    /// Indices into the weight table.
    pub weights: [Option<usize>; MAX_WEIGHTS],
    /// Cache views.
    pub caches: [CacheView; MAX_CACHES],
    pub fused: Fused,
    /// Whether other ranks take part in it.
    pub exchange: bool,
    /// What it adds to the hash of exchanges.
    pub mark: u64,
    /// Whether an observer asks for its calls.
    pub watched: bool,
}

/// Outputs that every round reads: their places are known, so that nobody looks for names in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// `[rows, hidden]`, what the head reads.
    Rows = 0,
    /// `[wanted rows, this rank's share of the vocabulary]`.
    Logits = 1,
    /// `[wanted rows, candidates]`.
    Values = 2,
    /// Ids of the candidates.
    Ids = 3,
}

/// A program with memory and providers: ready to run.
pub struct Resolved {
    /// The program.
    pub program: Program,
    /// Where its buffers lie.
    pub placement: Placement,
    pub(crate) steps: Vec<ResolvedStep>,
    /// Its number among the programs of its core.
    pub(crate) number: u64,
    /// The step after the last head: the first that may read late fields. Without a head, the end.
    pub(crate) late: usize,
    /// Places of [`Read`] among the buffers.
    pub(crate) reads: [Option<usize>; 4],
    /// Place of the input buffer.
    pub(crate) hidden: Option<usize>,
}

/// A step as `plugins resolve` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Described {
    /// Operation.
    pub op: String,
    /// Layer.
    pub layer: u32,
    /// Who runs it.
    pub owner: String,
    /// Arithmetic.
    pub bits: String,
    /// Whether a fusion runs it with its neighbours.
    pub fused: bool,
}

impl Resolved {
    /// The distinct arithmetic names in force, sorted: what a tag is computed from.
    pub fn bits(&self) -> Vec<String> {
        let steps = self.program.steps.iter().zip(&self.steps);
        let mut all: Vec<String> = steps.map(|(step, r)| format!("{}={}", step.op, r.bits)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Positions at which states that this program made may be kept: multiples of this.
    pub fn grid(&self) -> u32 {
        self.steps.iter().map(|s| s.grid).fold(1, common_grid)
    }

    /// Per step: operation, layer, the plugin that runs it and the arithmetic.
    pub fn describe(&self) -> Vec<Described> {
        let mut fusion: Option<Arc<str>> = None;
        let each = |(step, r): (&Step, &ResolvedStep)| {
            match &r.fused {
                Fused::Alone => fusion = None,
                Fused::First(link, _) => fusion = Some(link.owner.clone()),
                Fused::Inside => {}
            }
            let alone = || r.chain.first().map_or_else(String::new, |l| l.owner.to_string());
            Described {
                op: step.op.to_string(),
                layer: step.layer,
                owner: fusion.as_ref().map_or_else(alone, ToString::to_string),
                bits: r.bits.clone(),
                fused: fusion.is_some(),
            }
        };
        self.program.steps.iter().zip(&self.steps).map(each).collect()
    }
}

/// A number for an exchange: equal on all ranks that make the same one.
fn mark(step: &Step) -> u64 {
    let words = [u64::from(step.layer), u64::from(step.site)];
    let words = words.into_iter().chain(step.op.bytes().map(u64::from));
    words.fold(0xcbf2_9ce4_8422_2325, |h, w| (h ^ w).wrapping_mul(0x0000_0100_0000_01b3))
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The positions that are multiples of both.
pub(crate) fn common_grid(a: u32, b: u32) -> u32 {
    let (a, b) = (a.max(1), b.max(1));
    a / gcd(a, b) * b
}

impl Registry {
    /// The reference providers of a device, or of the CPU where there is none, and the hooks of plugins.
    ///
    /// # Errors
    /// A provider that cannot say what it is.
    pub fn new(
        hooks: &Hooks,
        rank: u32,
        ranks: u32,
        device: Option<&Arc<dyn Device>>,
    ) -> Result<Self, HookError> {
        let mut registry = Self {
            providers: HashMap::new(),
            fusions: Vec::new(),
            passes: Vec::new(),
            watched: Vec::new(),
            device: device.map_or(HOST, |d| d.class()).into(),
            rank: (rank, ranks),
        };
        for provider in device.map_or_else(plugfold_kernels::cpu::reference, |d| d.providers()) {
            registry.add(REFERENCE, &Arc::from([]), Arc::new(provider), Arc::default())?;
        }
        for h in &hooks.providers {
            registry.add(&h.owner, &h.over, h.hook.clone(), h.calls.clone())?;
        }
        for h in &hooks.observers {
            let asked = h.call(Observer::watches)?;
            registry.watched.extend(asked.iter().map(ToString::to_string));
        }
        registry.passes = hooks.passes.iter().map(|h| (h.owner.clone(), h.hook.clone())).collect();
        Ok(registry)
    }

    fn add(
        &mut self,
        owner: &str,
        over: &Arc<[String]>,
        provider: Arc<ProviderObject>,
        calls: Arc<Calls>,
    ) -> Result<(), HookError> {
        let named = |error: OpError| HookError { owner: owner.into(), error };
        let op = provider.op().map_err(named)?.to_string();
        let name = provider.name().map_err(named)?;
        let covers: Arc<[String]> =
            provider.covers().map_err(named)?.iter().map(ToString::to_string).collect();
        if covers.len() > MAX_COVER || covers.first().is_some_and(|c| *c != op) {
            let text = format!(
                "provider {name} covers {covers:?}: give at most {MAX_COVER} operations, the first being {op}"
            );
            return Err(named(OpError::new(text)));
        }
        let entry = Entry {
            owner: owner.into(),
            name: format!("{owner}/{name}").into(),
            over: over.clone(),
            member: provider.family().map_err(named)?.into_option(),
            provider,
            covers,
            calls,
        };
        let all = if entry.covers.is_empty() {
            self.providers.entry(op.clone()).or_default()
        } else {
            &mut self.fusions
        };
        // Claims name providers, so a name must mean one.
        if entry.covers.is_empty() && all.iter().any(|e| e.name == entry.name) {
            let text = format!("two providers of {op} are called {name}: give each a name of its own");
            return Err(named(OpError::new(text)));
        }
        all.push(entry);
        Ok(())
    }

    /// Names of the passes with their plugins, in order.
    pub fn passes(&self) -> Vec<(String, String)> {
        let name = |p: &PassObject| p.name().map_or_else(|e| e.to_string(), |n| n.to_string());
        self.passes.iter().map(|(owner, pass)| (owner.to_string(), name(pass))).collect()
    }

    /// Runs the passes over a program, checking it after each so that the one at fault is named.
    fn rewrite(&self, program: &mut Program) -> Result<(), ResolveError> {
        let context =
            PassContext { rank: self.rank.0, ranks: self.rank.1, device_class: Text::from(&*self.device) };
        for (owner, pass) in &self.passes {
            let refused = |reason: String| ResolveError::Pass {
                kind: program.shape.kind.to_string(),
                pass: pass.name().map_or_else(|_| "unnamed".into(), |n| n.to_string()),
                owner: owner.to_string(),
                reason,
            };
            let mut next = program.clone();
            pass.rewrite(&mut next, &context).map_err(|e| refused(e.to_string()))?;
            check(&next).map_err(|e| refused(e.to_string()))?;
            *program = next;
        }
        Ok(())
    }

    /// Runs the passes over a program, checks it, finds the providers of its steps and places its buffers.
    ///
    /// # Errors
    /// An unsound program, a step that nobody runs, a weight or cache family that is missing.
    pub fn resolve(
        &self,
        mut program: Program,
        weights: &WeightTable,
        caches: &CacheTable,
    ) -> Result<Resolved, ResolveError> {
        let kind = program.shape.kind.to_string();
        let unsound = |source| ResolveError::Program { kind: kind.clone(), source };
        check(&program).map_err(unsound)?;
        self.rewrite(&mut program)?;
        let mut steps = Vec::with_capacity(program.steps.len());
        for step in &program.steps {
            let parts = Self::parts(&program, step, weights, caches)?;
            let query = parts.query(&program, step, &self.device);
            let chosen = self.choose(&query)?.ok_or_else(|| ResolveError::NoProvider {
                op: step.op.to_string(),
                layer: step.layer,
                formats: parts
                    .formats
                    .iter()
                    .filter(|f| !f.is_empty())
                    .map(|f| f.get_str().to_owned())
                    .collect(),
                cache: query.caches[0].format.get_str().to_owned(),
            })?;
            steps.push(ResolvedStep {
                chain: chosen.chain,
                bits: chosen.bits,
                grid: chosen.grid,
                decides: chosen.decides,
                weights: parts.weights,
                caches: parts.views,
                fused: Fused::Alone,
                exchange: step.reach == Reach::Exchange || ops::is_collective(&step.op),
                mark: mark(step),
                watched: self.watched.iter().any(|op| *op == step.op.as_str()),
            });
        }
        self.fuse(&program, &mut steps, weights, caches)?;
        let together: Vec<Range<usize>> = steps
            .iter()
            .enumerate()
            .filter_map(|(i, s)| if let Fused::First(_, n) = s.fused { Some(i..i + n) } else { None })
            .collect();
        let placement = place(&program, &together).map_err(unsound)?;
        check_placement(&program, &placement, &together).map_err(unsound)?;
        let head = program.steps.iter().rposition(|s| s.op.as_str() == "head");
        let late = head.map_or(program.steps.len(), |at| at + 1);
        let named = |name: &str| program.buffers.iter().position(|b| b.output && b.name.as_str() == name);
        let reads = ["rows", "logits", "values", "ids"].map(named);
        let hidden = program.buffers.iter().position(|b| b.input && b.name.as_str() == "hidden");
        Ok(Resolved { program, placement, steps, number: 0, late, reads, hidden })
    }

    fn parts<'s>(
        program: &Program,
        step: &'s Step,
        weights: &WeightTable,
        caches: &CacheTable,
    ) -> Result<Parts<'s>, ResolveError> {
        let mut parts = Parts {
            weights: [None; MAX_WEIGHTS],
            roles: [Text::EMPTY; MAX_WEIGHTS],
            formats: [Text::EMPTY; MAX_WEIGHTS],
            views: [CacheView::EMPTY; MAX_CACHES],
            families: step.caches.len(),
            inputs: [DType::F32; MAX_INPUTS],
            outputs: [DType::F32; MAX_OUTPUTS],
        };
        let phase = program.shape.phase;
        for (i, role) in step.weights.iter().enumerate().take(MAX_WEIGHTS) {
            let missing = || ResolveError::NoWeight {
                op: step.op.to_string(),
                layer: step.layer,
                role: role.to_string(),
            };
            let index = weights.find(step.layer, step.site, role, phase).ok_or_else(missing)?;
            parts.weights[i] = Some(index);
            parts.roles[i] = Text::from(role.as_str());
            parts.formats[i] = weights.get(index).format;
        }
        for (view, family) in parts.views.iter_mut().zip(&step.caches) {
            let missing = || ResolveError::NoCache {
                op: step.op.to_string(),
                layer: step.layer,
                family: family.to_string(),
            };
            *view = caches.view(family, step.layer).ok_or_else(missing)?;
        }
        let dtype = |o: &Operand| program.buffers[o.buffer as usize].dtype;
        parts.inputs.iter_mut().zip(&step.inputs).for_each(|(t, o)| *t = dtype(o));
        parts.outputs.iter_mut().zip(&step.outputs).for_each(|(t, o)| *t = dtype(o));
        Ok(parts)
    }
}

/// What a step's operands are.
struct Parts<'s> {
    weights: [Option<usize>; MAX_WEIGHTS],
    roles: [Text<'s>; MAX_WEIGHTS],
    formats: [Text<'static>; MAX_WEIGHTS],
    views: [CacheView; MAX_CACHES],
    families: usize,
    inputs: [DType; MAX_INPUTS],
    outputs: [DType; MAX_OUTPUTS],
}

impl Parts<'_> {
    fn query<'q>(&'q self, program: &'q Program, step: &'q Step, device: &'q str) -> Query<'q> {
        let mut kinds = [CacheKind::NONE; MAX_CACHES];
        for (kind, view) in kinds.iter_mut().zip(&self.views).take(self.families) {
            *kind = CacheKind { format: view.format, addressing: view.addressing };
        }
        debug_assert!(
            kinds[0].addressing == Addressing::State || self.families > 0,
            "no family, no addressing"
        );
        Query {
            op: Text::from(step.op.as_str()),
            program: Text::from(program.shape.kind.as_str()),
            layer: step.layer,
            site: step.site,
            phase: program.shape.phase,
            device_class: Text::from(device),
            rows: program.shape.rows,
            seqs: program.shape.seqs,
            dims: step.dims,
            weight_roles: self.roles,
            weight_formats: self.formats,
            caches: kinds,
            input_types: self.inputs,
            output_types: self.outputs,
            words: Slice::from(&program.shape.words[..]),
            knobs: Slice::from(&program.shape.knobs[..]),
        }
    }
}
