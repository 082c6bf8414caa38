//! Passes: programs that are rewritten before they run.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use plugfold_abi::{
    List, Maybe, OpError, Pass, PassContext, PassObject, Phase, Program, Reach, Span, TextBuf,
};
use plugfold_engine::core::{Core, CoreOptions, SeqRows, Want};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::split::Split;
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{ids, prefill, tiny_core};

/// Cuts every row-local call into calls over rows 0..3, 3..10 and the rest, the middle one on a second stream.
struct CutRows;

impl Pass for CutRows {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("cut-rows".into())
    }
    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        let mut event = 1000;
        let mut steps = List::new();
        for mut step in std::mem::take(&mut program.steps) {
            // Rows that are picked from anywhere are no rows of the table.
            let local = step.reach == Reach::Row
                && !["rows.pick", "head", "sample.candidates"].contains(&step.op.as_str());
            if !local {
                steps.push(step);
                continue;
            }
            let [mut low, mut middle, mut high] = [step.clone(), step.clone(), step.clone()];
            low.rows = Span { start: 0, end: 3 };
            middle.rows = Span { start: 3, end: 10 };
            high.rows = Span { start: 10, end: u32::MAX };
            // Everything before is visible to the second stream, and the third part waits for it.
            low.signal = Maybe::RSome(event);
            (middle.stream, middle.waits, middle.signal) = (1, vec![event].into(), Maybe::RSome(event + 1));
            high.waits.push(event + 1);
            event += 2;
            step = high;
            steps.extend([low, middle, step]);
        }
        program.steps = steps;
        Ok(())
    }
}

fn core_with(pass: impl Pass + 'static) -> Result<Core, String> {
    let mut hooks = Hooks::default();
    hooks.add_object("planted", PassObject::new(pass)).unwrap();
    let hooks = Arc::new(hooks);
    let options = CoreOptions { slots: 2, context: Some(256), hooks, ..CoreOptions::default() };
    Core::load(&tiny_dir(), &options, Split::WHOLE, None).map_err(|e| e.to_string())
}

#[test]
fn rows_cut_over_two_streams_keep_every_bit() {
    let mut plain = tiny_core(2, 256);
    let mut cut = core_with(CutRows).unwrap();
    let run = |core: &mut Core| {
        prefill(core, 0, &ids(1, 40, 480), 16);
        prefill(core, 1, &ids(2, 9, 480), 16);
        let (a, b) = (ids(3, 8, 480), ids(4, 5, 480));
        let rows = [
            SeqRows { slot: 1, tokens: &a, want: Want::All, embeds: &[] },
            SeqRows { slot: 0, tokens: &b, want: Want::Last, embeds: &[] },
        ];
        let f = core.forward(Phase::Window, &rows, Some(8), false).unwrap();
        let logits: Vec<u32> = core.output(&f, "logits").unwrap().iter().map(|v| v.to_bits()).collect();
        core.commit(&f, &[4, 5]).unwrap();
        (logits, core.image(0), core.image(1))
    };
    assert_eq!(run(&mut plain), run(&mut cut));
    assert_eq!(plain.tag(&[]).unwrap(), cut.tag(&[]).unwrap(), "a pass changes no arithmetic");
}

/// Leaves waits out.
struct Careless;

impl Pass for Careless {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("careless".into())
    }
    fn rewrite(&self, program: &mut Program, context: &PassContext<'_>) -> Result<(), OpError> {
        CutRows.rewrite(program, context)?;
        // The first stream never waits for the second.
        program.steps.iter_mut().filter(|s| s.stream == 0).for_each(|s| s.waits.clear());
        Ok(())
    }
}

/// Refuses everything.
struct Unwilling;

impl Pass for Unwilling {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("unwilling".into())
    }
    fn rewrite(&self, _: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        Err(OpError::new("not for this shape"))
    }
}

#[test]
fn a_pass_at_fault_is_named_at_the_start() {
    let careless = core_with(Careless).err().unwrap();
    assert!(
        careless.contains("pass careless of plugin planted") && careless.contains("a wait is missing"),
        "{careless}"
    );
    let unwilling = core_with(Unwilling).err().unwrap();
    assert!(unwilling.contains("pass unwilling of plugin planted: not for this shape"), "{unwilling}");
}
