//! The arithmetic of one call, and the providers that run it.

use std::sync::Arc;

use plugfold_abi::{Bits, Claim, Granted, Provider, Query, value_of};

use super::{Entry, HookError, Link, REFERENCE, Registry, ResolveError, TwoArithmetics};

/// The outcome for one call.
pub(super) struct Chosen {
    pub chain: Vec<Link>,
    pub bits: String,
    pub grid: u32,
    pub decides: Arc<str>,
}

/// Whether the plugin of `outer` may stand above `inner`.
pub(super) fn above(outer: &Entry, inner: &str) -> bool {
    inner == REFERENCE || inner == &*outer.owner || outer.over.iter().any(|o| o == inner)
}

impl Registry {
    /// Claims on a call, in list order.
    fn claims(&self, query: &Query<'_>) -> Result<Vec<(&Entry, Link, Granted)>, ResolveError> {
        let mut claims = Vec::new();
        let all = self.providers.get(query.op.get_str()).map_or(&[][..], Vec::as_slice);
        for entry in all {
            if !selected(entry, query) {
                continue;
            }
            let answer = entry.provider.claim(query).map_err(|error| ResolveError::Claim {
                op: query.op.get_str().into(),
                error: HookError { owner: entry.owner.to_string(), error },
            })?;
            let (runs, granted) = match answer {
                Claim::No => continue,
                Claim::Yes(granted) => (entry, granted),
                Claim::As(name, granted) => {
                    let found = all.iter().find(|e| *e.name == *name);
                    let missing = || ResolveError::NoSuchProvider {
                        op: query.op.get_str().into(),
                        owner: entry.owner.to_string(),
                        to: name.to_string(),
                    };
                    (found.ok_or_else(missing)?, granted)
                }
            };
            let link = runs.link(&entry.owner, granted.plan);
            claims.push((entry, link, granted));
        }
        Ok(claims)
    }

    /// The outermost claim with bits of its own decides the arithmetic; the claims with exactly those bits run.
    pub(super) fn choose(&self, query: &Query<'_>) -> Result<Option<Chosen>, ResolveError> {
        let claims = self.claims(query)?;
        let own: Vec<&(&Entry, Link, Granted)> =
            claims.iter().filter(|(_, _, g)| matches!(g.bits, Bits::Own(_))).collect();
        for pair in own.windows(2) {
            let ((below, _, a), (outer, _, b)) = (pair[0], pair[1]);
            if !above(outer, &below.owner) && a.bits != b.bits {
                return Err(ResolveError::TwoArithmetics(Box::new(TwoArithmetics {
                    op: query.op.get_str().into(),
                    phase: query.phase,
                    layer: query.layer,
                    first: below.owner.to_string(),
                    second: outer.owner.to_string(),
                    bits_first: a.bits.name().into(),
                    bits_second: b.bits.name().into(),
                })));
            }
        }
        let Some((entry, _, decides)) = own.last() else { return Ok(None) };
        let (bits, grid) = (decides.bits.name().to_owned(), decides.grid);
        let chosen = claims.iter().rev().filter(|(_, _, g)| g.bits.name() == bits);
        let chain = chosen.map(|(_, link, _)| link.clone()).collect();
        Ok(Some(Chosen { chain, bits, grid, decides: entry.owner.clone() }))
    }
}

/// Whether the knob of a provider's family stands on it.
pub(super) fn selected(entry: &Entry, query: &Query<'_>) -> bool {
    entry.member.as_ref().is_none_or(|member| {
        value_of(query.knobs, member.knob).is_some_and(|v| v.to_string() == member.value.as_str())
    })
}
