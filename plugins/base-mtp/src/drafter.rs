//! The drafter, the part that carries its rows over snapshots, and the service.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{
    Absorbed, Ask, DraftRows, Drafter, Draw, Forwards, ForwardsObject, HeadOut, HeadRows, Proposal,
    StatePart, Wants,
};
use plugfold_abi::{List, OpError, Slice, TextBuf};
use plugfold_base_mtp_api::Mtp;

use crate::lane::{Lane, Rows};

/// Rows that may wait for the layer. More are run at once, in portions of this size.
const BACKLOG: usize = 256;
/// A window's rows wait for the next chain; of more rows at once, which are a prompt's, none but the last does.
const WINDOW: usize = 16;
/// Version of the record.
const VERSION: u32 = 1;

/// Chains of drafts over the multi-token-prediction layer.
#[derive(Default)]
pub struct Chains(Mutex<BTreeMap<u32, Lane>>);

/// A chain that goes on.
struct Link<'a> {
    ask: &'a Ask<'a>,
    /// Its place among the proposals.
    at: usize,
    rows: Rows,
    /// The product of its picks' probabilities.
    product: f32,
}

impl Chains {
    fn lanes(&self) -> MutexGuard<'_, BTreeMap<u32, Lane>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn width_of(forwards: &ForwardsObject) -> Result<usize, OpError> {
    Ok(forwards.hidden_size()? as usize)
}

/// Runs one step of several chains; gives what the layer picked, one a chain.
fn step(links: &[Link<'_>], forwards: &ForwardsObject) -> Result<List<HeadOut>, OpError> {
    let rows: Vec<HeadRows<'_>> = links
        .iter()
        .map(|l| HeadRows {
            slot: l.ask.slot,
            start: l.rows.start,
            position: l.rows.position,
            next_ids: Slice::from(&l.rows.next[..]),
            hidden: Slice::from(&l.rows.hidden[..]),
            pick: true,
            draw: l.ask.draw,
        })
        .collect();
    let out = forwards.head(Slice::from(&rows[..]))?;
    if out.len() != links.len() {
        return Err(OpError::new(format!("{} picks for {} chains", out.len(), links.len())));
    }
    Ok(out)
}

impl Drafter for Chains {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("mtp".into())
    }

    fn wants(&self) -> Result<Wants, OpError> {
        Ok(Wants { hidden: true, mtp_layer: true })
    }

    fn begun(&self, slot: u32, _: Slice<'_, u32>, resumed: u32) -> Result<(), OpError> {
        let mut lanes = self.lanes();
        // A record that was loaded for the resumed rows is told apart at the first row absorbed: it ends where that begins.
        if resumed == 0 || !lanes.contains_key(&slot) {
            lanes.insert(slot, Lane::from(resumed));
        }
        Ok(())
    }

    fn absorb(&self, absorbed: &Absorbed<'_>, forwards: &ForwardsObject) -> Result<(), OpError> {
        let width = width_of(forwards)?;
        if absorbed.hidden.len() != absorbed.tokens.len() * width {
            return Err(OpError::new(format!(
                "{} hidden numbers with {} tokens of slot {}, where a row has {width}",
                absorbed.hidden.len(),
                absorbed.tokens.len(),
                absorbed.slot
            )));
        }
        let mut lanes = self.lanes();
        let lane = lanes.entry(absorbed.slot).or_default();
        lane.absorb(absorbed.start, &absorbed.tokens, &absorbed.hidden, width);
        let least = if absorbed.tokens.len() > WINDOW { 1 } else { BACKLOG };
        while lane.paired() >= least {
            let rows = lane.pairs(BACKLOG, width);
            let head = HeadRows {
                slot: absorbed.slot,
                start: rows.start,
                position: rows.position,
                next_ids: Slice::from(&rows.next[..]),
                hidden: Slice::from(&rows.hidden[..]),
                pick: false,
                draw: Draw::BEST,
            };
            forwards.head(Slice::from(&[head][..]))?;
            lane.seen(rows.next.len(), width);
        }
        Ok(())
    }

    fn propose(
        &self,
        asks: Slice<'_, Ask<'_>>,
        forwards: &ForwardsObject,
    ) -> Result<List<Proposal>, OpError> {
        let width = width_of(forwards)?;
        let mut lanes = self.lanes();
        let mut out: List<Proposal> = asks.iter().map(|_| Proposal::default()).collect();
        let mut links = Vec::new();
        for (at, ask) in asks.get_ref().iter().enumerate() {
            let lane = lanes.get(&ask.slot).filter(|l| ask.budget > 0 && l.end(width) == ask.length);
            let rows = lane.and_then(|l| l.caught_up(ask.pending, width));
            links.extend(rows.map(|rows| Link { ask, at, rows, product: 1.0 }));
        }
        let mut first = true;
        while !links.is_empty() {
            let picks = step(&links, forwards)?;
            let mut on = Vec::with_capacity(links.len());
            for (link, pick) in links.into_iter().zip(picks) {
                let seen = link.rows.next.len();
                if first && let Some(lane) = lanes.get_mut(&link.ask.slot) {
                    lane.seen(seen, width);
                }
                let product = link.product * pick.probability;
                // The first draft goes to verification whatever its probability: its price is paid.
                if !first && product < link.ask.rule.floor {
                    continue;
                }
                let proposal = &mut out[link.at];
                proposal.tokens.push(pick.token);
                proposal.probabilities.push(pick.probability);
                let more = proposal.tokens.len() < link.ask.budget as usize;
                // A product below the floor can only fall.
                if more && product >= link.ask.rule.floor {
                    let (start, position) = (link.rows.start + seen as u32, link.rows.position + seen as u32);
                    let rows = Rows { start, position, next: vec![pick.token], hidden: pick.hidden.into() };
                    on.push(Link { rows, product, ..link });
                }
            }
            links = on;
            first = false;
        }
        Ok(out)
    }

    fn ended(&self, slot: u32) -> Result<(), OpError> {
        self.lanes().remove(&slot);
        Ok(())
    }
}

impl StatePart for Chains {
    fn id(&self) -> Result<TextBuf, OpError> {
        Ok("mtp".into())
    }

    fn version(&self) -> Result<u32, OpError> {
        Ok(VERSION)
    }

    fn begin(&self, slot: u32) -> Result<(), OpError> {
        self.lanes().remove(&slot);
        Ok(())
    }

    fn draft_rows(&self, slot: u32) -> Result<DraftRows, OpError> {
        let lanes = self.lanes();
        Ok(match lanes.get(&slot) {
            // Row `i` follows from the ids up to `i + 1`, which are all committed.
            Some(lane) if lane.is_whole() => DraftRows::Good(lane.rows()),
            Some(_) => DraftRows::Broken,
            None => DraftRows::Good(0),
        })
    }

    fn save(&self, slot: u32, out: &mut List<u8>) -> Result<(), OpError> {
        // A sequence without drafts has no lane, and one whose rows are not at their positions nothing that another could
        // use: what resumes without a record begins a context of its own.
        if let Some(lane) = self.lanes().get(&slot).filter(|l| l.is_whole()) {
            out.extend_from_slice(&lane.save());
        }
        Ok(())
    }

    fn load(&self, slot: u32, record: Slice<'_, u8>) -> Result<(), OpError> {
        let mut lanes = self.lanes();
        if record.is_empty() {
            lanes.remove(&slot);
        } else {
            lanes.insert(slot, Lane::load(&record)?);
        }
        Ok(())
    }
}

impl Mtp for Chains {
    fn backlog(&self, slot: u32) -> Result<u32, OpError> {
        Ok(self.lanes().get(&slot).map_or(0, |l| l.paired() as u32))
    }
}

#[cfg(test)]
mod tests;
