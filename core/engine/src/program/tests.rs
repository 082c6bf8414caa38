//! The checker accepts what the builder writes and finds every planted fault.

use plugfold_abi::{
    Base, Buffer, DType, Extent, List, MAX_DIMS, MAX_PARAMS, Maybe, Operand, Phase, Program, Reach, Shape,
    Span, Step,
};

use super::build::{Builder, kinds};
use super::{ProgramError, check, check_placement, place};
use crate::config::ModelConfig;
use crate::split::Split;

fn tiny() -> ModelConfig {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny");
    ModelConfig::from_dir(dir.as_ref()).unwrap()
}

fn shape(kind: &str, phase: Phase, out_rows: u32, select: bool) -> Shape {
    Shape {
        kind: kind.into(),
        phase,
        rows: 16,
        seqs: 4,
        out_rows,
        select,
        candidates: out_rows.min(1) * 4,
        words: List::new(),
        knobs: List::new(),
    }
}

fn all_programs(ranks: usize) -> Vec<Program> {
    let config = tiny();
    let builder = Builder { config: &config, split: Split { rank: 0, ranks } };
    let mut all = Vec::new();
    for kind in [kinds::FORWARD, kinds::MTP, kinds::COMMIT] {
        for phase in [Phase::Window, Phase::Draft, Phase::Prefill] {
            for (out_rows, select) in [(0, false), (1, true), (16, true)] {
                all.push(builder.build(&shape(kind, phase, out_rows, select)));
            }
        }
    }
    all
}

#[test]
fn everything_the_builder_writes_is_sound() {
    for ranks in [1, 2, 4] {
        for program in all_programs(ranks) {
            assert_eq!(check(&program), Ok(()), "{:?}", program.shape);
            let placement = place(&program, &[]).unwrap();
            assert_eq!(check_placement(&program, &placement, &[]), Ok(()));
            let apart: usize = placement.sizes.iter().sum();
            let much = program.shape.kind.as_str() == kinds::FORWARD;
            assert!(
                !much || placement.total * 4 < apart,
                "buffers share memory: {} of {apart}",
                placement.total
            );
        }
    }
}

fn forward() -> Program {
    let config = tiny();
    Builder { config: &config, split: Split { rank: 0, ranks: 2 } }.build(&shape(
        kinds::FORWARD,
        Phase::Window,
        16,
        true,
    ))
}

/// The step of an operation in a layer.
fn at(program: &Program, op: &str, layer: u32) -> usize {
    program.steps.iter().position(|s| s.op.as_str() == op && s.layer == layer).unwrap()
}

fn split_rows(program: &mut Program, step: usize, first: Span, second: Span) {
    let mut other = program.steps[step].clone();
    program.steps[step].rows = first;
    program.steps[step].seqs = first;
    other.rows = second;
    other.seqs = second;
    program.steps.insert(step + 1, other);
}

#[test]
fn planted_faults_are_found() {
    let low = Span { start: 0, end: 8 };
    let high = Span { start: 8, end: u32::MAX };

    // A fork whose result is read without a wait.
    let mut p = forward();
    let i = at(&p, "moe.logits", 4);
    p.steps[i].stream = 1;
    p.steps[i].waits.clear();
    assert!(matches!(check(&p), Err(ProgramError::Unwritten { .. })), "missing wait");

    // The same fork done right: signal before, wait after.
    let mut p = forward();
    let i = at(&p, "moe.logits", 4);
    p.steps[i - 1].signal = Maybe::RSome(1);
    p.steps[i].stream = 1;
    p.steps[i].waits = List::from(vec![1]);
    p.steps[i].signal = Maybe::RSome(2);
    p.steps[i + 1].waits = List::from(vec![2]);
    assert_eq!(check(&p), Ok(()), "a joined fork is sound");

    // A wait for nothing.
    p.steps[i].waits = List::from(vec![9]);
    assert!(matches!(check(&p), Err(ProgramError::Wait { event: 9, .. })));

    // Rows missing, and rows twice, of a row-local call and of a call that writes caches.
    for (op, layer) in [("dense", 0), ("kda.mix", 0), ("mla.write", 2), ("idx.write", 2)] {
        let mut p = forward();
        let i = at(&p, op, layer);
        split_rows(&mut p, i, low, high);
        assert_eq!(check(&p), Ok(()), "{op} in two halves");
        let mut missing = p.clone();
        missing.steps.remove(i + 1);
        assert!(check(&missing).is_err(), "{op}: rows missing");
        let mut twice = p.clone();
        twice.steps[i + 1].rows.start = 4;
        twice.steps[i + 1].seqs.start = 4;
        assert!(check(&twice).is_err(), "{op}: rows twice");
    }

    // A fork that nothing joins.
    let mut p = forward();
    let last = p.steps.len() - 1;
    p.steps[last].stream = 1;
    p.steps[last - 1].signal = Maybe::RSome(1);
    p.steps[last].waits = List::from(vec![1]);
    assert_eq!(check(&p), Err(ProgramError::OpenFork { stream: 1 }));

    // Two exchanges on two streams.
    let mut p = forward();
    let sums: Vec<usize> = (0..p.steps.len()).filter(|&i| p.steps[i].op.as_str() == "comm.sum").collect();
    let i = sums[1];
    p.steps[i].stream = 1;
    assert!(check(&p).is_err(), "swapped collectives");

    // An operand outside its buffer.
    let mut p = forward();
    let i = at(&p, "kda.mix", 0);
    p.steps[i].inputs[0].col += 1000;
    assert!(matches!(check(&p), Err(ProgramError::Operand { .. })));

    // A cache that is written while it is read.
    let mut p = forward();
    let i = at(&p, "mla.write", 2);
    p.steps[i - 1].signal = Maybe::RSome(1);
    p.steps[i].stream = 1;
    p.steps[i].waits = List::from(vec![1]);
    let end = p.steps.len() - 1;
    p.steps[i].signal = Maybe::RSome(2);
    p.steps[end].waits = List::from(vec![2]);
    assert!(matches!(check(&p), Err(ProgramError::CacheRace { family, .. }) if family == "mla.kv"));

    // Memory reused while still in use.
    let p = forward();
    let mut placement = place(&p, &[]).unwrap();
    let i = at(&p, "hc.post", 0);
    let (x, parts) = (p.steps[i].inputs[0].buffer, p.steps[i].inputs[1].buffer);
    placement.offsets[parts as usize] = placement.offsets[x as usize];
    assert!(matches!(check_placement(&p, &placement, &[]), Err(ProgramError::Overlap { .. })), "slot reuse");
}

/// Two streams that hand over by events: memory of one may serve the other only after the hand-over.
#[test]
fn placement_respects_streams() {
    let buffer = |name: &str| Buffer {
        name: name.into(),
        extent: Extent { base: Base::Rows, times: 1 },
        cols: 16,
        dtype: DType::F32,
        input: false,
        output: false,
    };
    let operand = |buffer| Operand { buffer, col: 0, cols: 16 };
    let step = |inputs: &[u32], outputs: &[u32], stream, waits: &[u32], signal: Option<u32>| Step {
        op: "norm".into(),
        layer: 0,
        site: 0,
        rows: Span::ALL,
        seqs: Span::ALL,
        inputs: inputs.iter().map(|&b| operand(b)).collect(),
        outputs: outputs.iter().map(|&b| operand(b)).collect(),
        weights: List::new(),
        caches: List::new(),
        dims: [0; MAX_DIMS],
        params: [0.0; MAX_PARAMS],
        reach: Reach::Row,
        stream,
        waits: waits.into(),
        signal: signal.into(),
    };
    let program = |joined: bool| Program {
        shape: shape("forward", Phase::Window, 0, false),
        buffers: ["a", "b", "c", "d"].into_iter().map(buffer).collect(),
        steps: List::from(vec![
            step(&[], &[0], 0, &[], Some(1)),
            step(&[0], &[1], 1, &[1], Some(2)),
            step(&[], &[2], 0, if joined { &[2] } else { &[] }, None),
            step(&[1, 2], &[3], 0, &[2], None),
        ]),
    };
    for joined in [true, false] {
        let p = program(joined);
        assert_eq!(check(&p), Ok(()));
        let placement = place(&p, &[]).unwrap();
        assert_eq!(
            placement.offsets[0] == placement.offsets[2],
            joined,
            "c may take a's place only after the join"
        );
    }
}

/// A fusion may write what its last step gives while it still reads what its first step takes.
#[test]
fn steps_that_run_together_overwrite_nothing_of_each_other() {
    let p = forward();
    let apart = place(&p, &[]).unwrap();
    let units = (0..p.steps.len() - 3).map(|i| i..i + 3);
    let mut unsound = 0;
    for unit in units {
        let together = [unit];
        unsound += usize::from(check_placement(&p, &apart, &together).is_err());
        let placement = place(&p, &together).unwrap();
        assert_eq!(check_placement(&p, &placement, &together), Ok(()), "{together:?}");
    }
    assert!(unsound > 0, "memory is reused inside of some unit, where nobody says that it is one");
}
