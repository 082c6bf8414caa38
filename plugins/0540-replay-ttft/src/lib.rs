//! The state of a prompt is kept strictly before its end. To resume, at least one token has to be left to compute: a state at
//! the end serves every longer prompt, but never the same one again.

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Mark, Planner, PlannerObject, RequestFacts};
use plugfold_abi::{Knobs, List, OpError, TextBuf};

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");
/// Tokens from one point to the next at which a prompt's state is kept, where its arithmetic allows any.
const GRID: u32 = 64;
/// The reason of a mark that stands for its prompt.
const PROMPT: &str = "prompt";

/// The plugin.
pub struct ReplayTtft;

impl Plugin for ReplayTtft {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let marks = BeforeEnd::new(&setup.knobs)?;
        Ok(marks.map_or_else(List::new, |marks| List::from(vec![Offer::of(PlannerObject::new(marks))])))
    }
}

/// Marks the last grid point before the end of a prompt.
pub struct BeforeEnd;

impl BeforeEnd {
    /// The planner, unless it is off.
    ///
    /// # Errors
    /// No such knob; tokens that are to be held back.
    pub fn new(knobs: &Knobs<'_>) -> Result<Option<Self>, OpError> {
        if !knobs.bool("emit_first")? {
            return Err(OpError::invalid(
                "emit_first is 0, but nothing holds tokens back that could be handed out later: remove the setting",
            ));
        }
        Ok(knobs.bool("before_end")?.then_some(Self))
    }
}

/// The last point before the end of a prompt at which its state may be kept.
fn point(tokens: u32, grid: u32) -> u32 {
    let step = if GRID.is_multiple_of(grid) { GRID } else { grid.max(1) };
    tokens.saturating_sub(1) / step * step
}

impl Planner for BeforeEnd {
    fn marks(&self, request: &RequestFacts<'_>, _: u32, marks: &mut List<Mark>) -> Result<(), OpError> {
        if !request.draft {
            // Such a request neither resumes nor leaves anything.
            return Ok(());
        }
        let at = point(request.ids.len() as u32, request.grid);
        marks.retain(|mark| mark.at != at && mark.reason != PROMPT);
        marks.push(Mark { at, reason: PROMPT.into() });
        Ok(())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: ReplayTtft);

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::{Knob, KnobValue, Maybe, Slice};

    #[test]
    fn the_point_is_strictly_before_the_end_and_on_the_grid() {
        for (tokens, at) in
            [(1, 0), (63, 0), (64, 0), (65, 64), (127, 64), (128, 64), (129, 128), (8192, 8128), (8193, 8192)]
        {
            for grid in [1, 4, 64] {
                assert_eq!(point(tokens, grid), at, "{tokens} tokens, grid {grid}");
            }
        }
        // Arithmetic of a coarser grid, or of one beside it.
        assert_eq!((point(300, 128), point(257, 128), point(256, 128), point(100, 48)), (256, 256, 128, 96));
    }

    #[test]
    fn marks_of_others_stay_where_they_are_but_for_the_prompts() {
        let ids = [0; 200];
        let request = |draft| RequestFacts {
            request: 1,
            ids: Slice::from(&ids[..]),
            max_tokens: 1,
            background: false,
            draft,
            draft_layer: false,
            waited_s: 0.0,
            knobs: Slice::from(&[][..]),
            tag: 0,
            grid: 1,
        };
        let mark = |at, reason: &str| Mark { at, reason: reason.into() };
        let given = [mark(64, "fork"), mark(192, "periodic"), mark(200, "prompt")];
        let mut marks = List::from(given.to_vec());
        BeforeEnd.marks(&request(true), 0, &mut marks).unwrap();
        assert_eq!(marks[..], [mark(64, "fork"), mark(192, "prompt")]);
        let mut marks = List::from(given.to_vec());
        BeforeEnd.marks(&request(false), 0, &mut marks).unwrap();
        assert_eq!(marks[..], given, "a request without drafts is left alone");
    }

    #[test]
    fn off_and_what_cannot_be_had() {
        let of = |before: bool, first: bool| {
            let knob = |key: &str, on| Knob { key: key.into(), value: KnobValue::Bool(on), id: Maybe::RNone };
            let knobs = [knob("before_end", before), knob("emit_first", first)];
            BeforeEnd::new(&Knobs { all: Slice::from(&knobs[..]) }).map(|planner| planner.is_some())
        };
        assert_eq!((of(true, true).unwrap(), of(false, true).unwrap()), (true, false));
        assert!(of(true, false).unwrap_err().to_string().contains("emit_first"));
    }
}
