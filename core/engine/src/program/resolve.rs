//! Which provider runs each step: first whose bits, then which kernel.

use std::collections::HashMap;
use std::sync::Arc;

use plugfold_abi::{
    Addressing, Below, CacheView, Call, Claim, MAX_CACHES, MAX_WEIGHTS, OpError, Pass, Plan, Program,
    Provider, Query, Text,
};

use super::{Placement, ProgramError, check, check_placement, place};
use crate::state::CacheTable;
use crate::weights::WeightTable;

/// All providers and passes, in the order in which they were added: later providers are outer, later passes run later.
#[derive(Clone, Default)]
pub struct Registry {
    providers: HashMap<String, Vec<Arc<dyn Provider>>>,
    passes: Vec<Arc<dyn Pass>>,
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
    #[error("program {kind}: pass {pass}: {reason}")]
    Pass {
        /// Which program.
        kind: String,
        /// The pass.
        pass: String,
        /// Why.
        reason: String,
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
        role: &'static str,
    },
    /// A cache family that the builder names does not exist in that layer.
    #[error("{op} of layer {layer} wants cache family {family}, which that layer has not")]
    NoCache {
        /// Operation.
        op: String,
        /// Layer.
        layer: u32,
        /// Family.
        family: &'static str,
    },
}

/// A provider with the plan of its claim.
pub(crate) type Link = (Arc<dyn Provider>, Plan);

/// What a step was resolved to.
pub(crate) struct ResolvedStep {
    /// Providers of the chosen arithmetic, outermost first.
    pub chain: Vec<Link>,
    /// Name of the arithmetic.
    pub bits: String,
    /// Indices into the weight table.
    pub weights: [Option<usize>; MAX_WEIGHTS],
    /// Cache views.
    pub caches: [CacheView; MAX_CACHES],
}

/// A program with memory and providers: ready to run.
pub struct Resolved {
    /// The program.
    pub program: Program,
    /// Where its buffers lie.
    pub placement: Placement,
    pub(crate) steps: Vec<ResolvedStep>,
}

impl Resolved {
    /// The distinct arithmetic names in force, sorted: what a tag is computed from.
    pub fn bits(&self) -> Vec<String> {
        let mut all: Vec<String> = self
            .program
            .steps
            .iter()
            .zip(&self.steps)
            .map(|(step, r)| format!("{}={}", step.op, r.bits))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Per step: operation, layer, the provider's owner and the arithmetic.
    pub fn describe(&self) -> Vec<(String, u32, String, String)> {
        let owner = |r: &ResolvedStep| r.chain.first().map_or_else(String::new, |l| l.0.owner().to_owned());
        self.program
            .steps
            .iter()
            .zip(&self.steps)
            .map(|(s, r)| (s.op.clone(), s.layer, owner(r), r.bits.clone()))
            .collect()
    }
}

impl Registry {
    /// Adds a provider outside of those already there.
    pub fn add(&mut self, provider: Arc<dyn Provider>) {
        self.providers.entry(provider.op().to_owned()).or_default().push(provider);
    }

    /// Adds a pass after those already there.
    pub fn add_pass(&mut self, pass: Arc<dyn Pass>) {
        self.passes.push(pass);
    }

    /// Runs the passes over a program, checking it after each so that the one at fault is named.
    fn rewrite(&self, program: &mut Program) -> Result<(), ResolveError> {
        for pass in &self.passes {
            let refused = |reason: String| ResolveError::Pass {
                kind: program.shape.kind.clone(),
                pass: pass.name().to_owned(),
                reason,
            };
            let mut next = program.clone();
            pass.rewrite(&mut next).map_err(|e| refused(e.to_string()))?;
            check(&next).map_err(|e| refused(e.to_string()))?;
            *program = next;
        }
        Ok(())
    }

    /// The reference providers of the CPU.
    pub fn reference_cpu() -> Self {
        let mut registry = Self::default();
        for provider in plugfold_kernels::cpu::reference() {
            registry.add(Arc::from(provider));
        }
        registry
    }

    /// Runs the passes over a program, checks it, places its buffers and finds the providers of its steps.
    ///
    /// # Errors
    /// An unsound program, a step that nobody runs, a weight or cache family that is missing.
    pub fn resolve(
        &self,
        mut program: Program,
        weights: &WeightTable,
        caches: &CacheTable,
    ) -> Result<Resolved, ResolveError> {
        let unsound = |source| ResolveError::Program { kind: program.shape.kind.clone(), source };
        check(&program).map_err(unsound)?;
        self.rewrite(&mut program)?;
        let unsound = |source| ResolveError::Program { kind: program.shape.kind.clone(), source };
        let placement = place(&program).map_err(unsound)?;
        check_placement(&program, &placement).map_err(unsound)?;
        let mut steps = Vec::with_capacity(program.steps.len());
        for step in &program.steps {
            let mut at = [None; MAX_WEIGHTS];
            let mut formats = [Text::EMPTY; MAX_WEIGHTS];
            for (i, &role) in step.weights.iter().enumerate() {
                let missing = || ResolveError::NoWeight { op: step.op.clone(), layer: step.layer, role };
                let index = weights.find(step.layer, step.site, role).ok_or_else(missing)?;
                at[i] = Some(index);
                formats[i] = weights.get(index).format;
            }
            let mut views = [CacheView::EMPTY; MAX_CACHES];
            for (view, &family) in views.iter_mut().zip(&step.caches) {
                let missing = || ResolveError::NoCache { op: step.op.clone(), layer: step.layer, family };
                *view = caches.view(family, step.layer).ok_or_else(missing)?;
            }
            let has_cache = !step.caches.is_empty();
            let query = Query {
                op: Text::from(step.op.as_str()),
                layer: step.layer,
                site: step.site,
                phase: program.shape.phase,
                device_class: Text::from("cpu"),
                rows: program.shape.rows,
                seqs: program.shape.seqs,
                dims: step.dims,
                weight_formats: formats,
                cache_format: if has_cache { views[0].format } else { Text::EMPTY },
                addressing: if has_cache { views[0].addressing } else { Addressing::State },
            };
            let (chain, bits) = self.choose(&query).ok_or_else(|| ResolveError::NoProvider {
                op: step.op.clone(),
                layer: step.layer,
                formats: formats.iter().filter(|f| !f.is_empty()).map(|f| f.get_str().to_owned()).collect(),
                cache: query.cache_format.get_str().to_owned(),
            })?;
            steps.push(ResolvedStep { chain, bits, weights: at, caches: views });
        }
        Ok(Resolved { program, placement, steps })
    }

    /// The outermost claim with bits of its own decides the arithmetic; the claims with exactly those bits run.
    fn choose(&self, query: &Query<'_>) -> Option<(Vec<Link>, String)> {
        let claims: Vec<(Arc<dyn Provider>, plugfold_abi::Granted)> = self
            .providers
            .get(query.op.get_str())?
            .iter()
            .filter_map(|p| match p.claim(query) {
                Claim::Yes(granted) => Some((p.clone(), granted)),
                Claim::No => None,
            })
            .collect();
        let own = |g: &plugfold_abi::Granted| matches!(g.bits, plugfold_abi::Bits::Own(_));
        let decides = claims.iter().rev().find(|(_, g)| own(g))?;
        let bits = decides.1.bits.name().to_owned();
        let chain = claims
            .iter()
            .rev()
            .filter(|(_, g)| g.bits.name() == bits)
            .map(|(p, g)| (p.clone(), g.plan))
            .collect();
        Some((chain, bits))
    }
}

/// The rest of a chain, as the provider above it sees it.
pub(crate) struct Rest<'a>(pub &'a [Link]);

impl Below for Rest<'_> {
    fn run(&self, call: &Call<'_>) -> Result<(), OpError> {
        match self.0 {
            [] => Err(OpError::new("nothing lies beneath the reference")),
            [(provider, plan), rest @ ..] => provider.run(call, plan, &Rest(rest)),
        }
    }
}
