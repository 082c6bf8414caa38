//! The small scheduler: requests enter in the order of their arrival, each where most of its prompt is kept; a prompt is
//! prefilled whole, while the others wait; what decodes, decodes together.

use plugfold_0120_batch_v2_api::place;
use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{
    PieceChoice, PlanFacts, Planner, PlannerObject, RequestFacts, SlotFacts, StoreOffer, Verdict,
};
use plugfold_abi::{List, OpError, Slice, TextBuf};

const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin.
pub struct Batch2;

impl Plugin for Batch2 {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, _: &Setup<'_>) -> Result<List<Offer>, OpError> {
        Ok(List::from(vec![Offer::of(PlannerObject::new(Scheduler))]))
    }
}

/// The planning policies.
pub struct Scheduler;

impl Planner for Scheduler {
    fn place(
        &self,
        facts: &PlanFacts<'_>,
        _: &RequestFacts<'_>,
        offers: Slice<'_, StoreOffer>,
        verdict: &mut Verdict,
    ) -> Result<(), OpError> {
        if !matches!(verdict, Verdict::Admit(_)) {
            return Ok(());
        }
        if let Some(slot) = place(facts, offers) {
            *verdict = Verdict::Admit(slot);
        }
        Ok(())
    }

    fn pieces(&self, facts: &PlanFacts<'_>, pieces: &mut List<PieceChoice>) -> Result<(), OpError> {
        let mut prompts: Vec<&SlotFacts> =
            facts.slots.iter().filter(|s| s.request != 0 && !s.decoding).collect();
        prompts.sort_by_key(|s| (s.admitted, s.request));
        pieces.clear();
        // Should less be resumed than planned, the prompt is still whole.
        pieces.extend(prompts.into_iter().map(|s| PieceChoice { slot: s.slot, tokens: s.prompt }));
        Ok(())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: Batch2);

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(slot: u32, request: u64, admitted: u64, decoding: bool) -> SlotFacts {
        SlotFacts { slot, request, prompt: 500, absorbed: 0, decoding, background: false, admitted }
    }

    fn facts(slots: &[SlotFacts]) -> PlanFacts<'_> {
        PlanFacts {
            now_s: 0.0,
            round: 1,
            last_piece_s: 0.0,
            last_decode_s: 0.0,
            slots: Slice::from(slots),
            waiting: Slice::default(),
            free_bytes: 0,
        }
    }

    #[test]
    fn the_manifest_is_sound() {
        let manifest = plugfold_manifest::Manifest::parse(MANIFEST, "plugin.toml").unwrap();
        assert_eq!(
            (manifest.label().as_str(), &manifest.conflicts[..]),
            ("0030-batch2", &["0120".to_owned()][..])
        );
    }

    #[test]
    fn whole_prompts_in_the_order_of_admission() {
        let slots = [slot(0, 9, 5, false), slot(1, 7, 4, false), slot(2, 3, 1, true), slot(3, 0, 9, false)];
        let mut pieces = List::from(vec![PieceChoice { slot: 3, tokens: 64 }]);
        Scheduler.pieces(&facts(&slots), &mut pieces).unwrap();
        assert_eq!(pieces[..], [PieceChoice { slot: 1, tokens: 500 }, PieceChoice { slot: 0, tokens: 500 }]);
    }

    #[test]
    fn a_request_goes_where_most_of_it_is_kept_else_where_nobody_was_for_longest() {
        let slots = [slot(0, 0, 9, false), slot(1, 7, 1, true), slot(2, 0, 3, false)];
        let place = |offers: &[(u32, u32)], given: Verdict| {
            let offer = |(slot, length): &(u32, u32)| StoreOffer {
                store: 0,
                ticket: 0,
                length: *length,
                price_ms: 0.0,
                slot: *slot,
            };
            let offers: Vec<StoreOffer> = offers.iter().map(offer).collect();
            let request = RequestFacts {
                request: 1,
                ids: Slice::default(),
                max_tokens: 1,
                background: false,
                draft: true,
                draft_layer: false,
                waited_s: 0.0,
                knobs: Slice::default(),
                tag: 0,
                grid: 1,
            };
            let mut verdict = given;
            Scheduler.place(&facts(&slots), &request, Slice::from(&offers[..]), &mut verdict).unwrap();
            verdict
        };
        let any = Verdict::Admit(0);
        assert_eq!(place(&[], any.clone()), Verdict::Admit(2));
        assert_eq!(place(&[(0, 5), (2, 4)], any.clone()), Verdict::Admit(0));
        assert_eq!(place(&[(1, 5)], any.clone()), Verdict::Admit(2), "a slot that is taken");
        assert_eq!(place(&[(0, 5), (u32::MAX, 6)], any), Verdict::Admit(2), "a store has more");
        assert_eq!(place(&[], Verdict::Block), Verdict::Block);
    }
}
