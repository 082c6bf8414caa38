//! Passes together, thin: sub-blocks (0082), exchanges in halves on a stream of their own (0084), sums of own rows instead of
//! all parts (0320), weights touched beside exchanges (0460). On the exact-integer model over two ranks, bit for bit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use plugfold_abi::{
    Base, BelowObject, Bits, Buffer, Call, Claim, DType, Extent, Granted, List, Maybe, OpError, Operand,
    Pass, PassContext, PassObject, Phase, Plan, Program, Provider, ProviderObject, Query, Reach, Span, Step,
    TextBuf,
};
use plugfold_engine::core::{Core, MtpRows, Want};
use plugfold_engine::hooks::Hooks;
use plugfold_kernels::cpu::operands::Operands;
use plugfold_tests::integer::on_ranks;
use plugfold_tests::model::{forward, ids, prefill};

/// Where sub-blocks begin.
const CUTS: [u32; 2] = [5, 12];
/// Streams of the exchanges and of the touches.
const EXCHANGES: u32 = 1;
const TOUCHES: u32 = 2;

fn pieces() -> Vec<Span> {
    let edges = [&[0][..], &CUTS, &[u32::MAX]].concat();
    edges.windows(2).map(|w| Span { start: w[0], end: w[1] }).collect()
}

fn fresh_event(program: &Program) -> u32 {
    let used = program.steps.iter().filter_map(|s| s.signal.into_option());
    used.max().map_or(1, |event| event + 1)
}

/// 0082: steps that work row by row run once a sub-block, steps over all rows once over all.
struct Lean;

impl Pass for Lean {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("lean".into())
    }
    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        if program.shape.phase != Phase::Prefill {
            return Ok(());
        }
        let buffers = program.buffers.clone();
        let picks = |s: &Step| {
            s.inputs.iter().chain(&s.outputs).any(|o| buffers[o.buffer as usize].extent.base == Base::OutRows)
        };
        let mut steps = List::new();
        for step in std::mem::take(&mut program.steps) {
            if step.reach != Reach::Row || picks(&step) {
                steps.push(step);
            } else {
                let pieces = pieces();
                let last = pieces.len() - 1;
                steps.extend(pieces.into_iter().enumerate().map(|(i, rows)| {
                    // A stream runs in order: what the last piece signals holds for all.
                    let signal = if i == last { step.signal } else { Maybe::RNone };
                    Step { rows, signal, ..step.clone() }
                }));
            }
        }
        program.steps = steps;
        Ok(())
    }
}

/// 0084: an exchange runs piece by piece on its own stream, from when its rows are there until somebody reads them.
struct Overlap {
    /// Planted: whoever reads does not wait.
    careless: bool,
}

impl Pass for Overlap {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("overlap".into())
    }
    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        if program.shape.phase != Phase::Prefill {
            return Ok(());
        }
        let mut event = fresh_event(program);
        let mut steps: List<Step> = List::new();
        // Buffer, rows and event of what is on its way.
        let mut coming: Vec<(u32, Span, u32)> = Vec::new();
        for mut step in std::mem::take(&mut program.steps) {
            if step.op.as_str() == "comm.sum" {
                let ready = match steps.iter_mut().rev().find(|s| s.stream == 0) {
                    Some(before) => *before.signal.get_or_insert_with(|| {
                        event += 1;
                        event
                    }),
                    None => return Err(OpError::new("an exchange of nothing")),
                };
                for rows in pieces() {
                    event += 1;
                    coming.push((step.outputs[0].buffer, rows, event));
                    steps.push(Step {
                        rows,
                        stream: EXCHANGES,
                        waits: List::from(vec![ready]),
                        signal: Maybe::RSome(event),
                        ..step.clone()
                    });
                }
                continue;
            }
            let meets = |rows: Span| rows.start < step.rows.end && step.rows.start < rows.end;
            let waits: Vec<u32> = coming
                .iter()
                .filter(|(buffer, rows, _)| step.inputs.iter().any(|i| i.buffer == *buffer) && meets(*rows))
                .map(|(.., event)| *event)
                .collect();
            if !self.careless {
                step.waits.extend(waits);
            }
            steps.push(step);
        }
        program.steps = steps;
        Ok(())
    }
}

/// 0320: each rank sums its own rows of all parts, and shares the sums; whoever read the parts reads one.
struct RowSplit;

impl Pass for RowSplit {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("row-split".into())
    }
    fn rewrite(&self, program: &mut Program, context: &PassContext<'_>) -> Result<(), OpError> {
        if program.shape.phase != Phase::Prefill || context.ranks == 1 {
            return Ok(());
        }
        let mut sums: Vec<(u32, Operand)> = Vec::new();
        let mut steps = std::mem::take(&mut program.steps);
        for step in &mut steps {
            if step.op.as_str() == "comm.sum" {
                let (parts, d) = (step.outputs[0].buffer, step.dims[0]);
                let known = sums.iter().find(|(p, _)| *p == parts).map(|(_, sum)| *sum);
                let sum = known.unwrap_or_else(|| {
                    program.buffers.push(Buffer {
                        name: format!("sum of {}", program.buffers[parts as usize].name).into(),
                        extent: Extent { base: Base::Rows, times: 1 },
                        cols: d,
                        dtype: DType::F32,
                        input: false,
                        output: false,
                    });
                    let sum = Operand { buffer: program.buffers.len() as u32 - 1, col: 0, cols: d };
                    sums.push((parts, sum));
                    sum
                });
                step.op = "comm.own_rows".into();
                step.outputs[0] = sum;
                continue;
            }
            for input in &mut step.inputs {
                if let Some((_, sum)) = sums.iter().find(|(parts, _)| *parts == input.buffer) {
                    *input = *sum;
                    // The number of parts is the last of the sizes of `hc.post` and `residual`.
                    let at = if step.op.as_str() == "hc.post" { 2 } else { 1 };
                    step.dims[at] = 1;
                }
            }
        }
        program.steps = steps;
        Ok(())
    }
}

struct OwnRows;

impl Provider for OwnRows {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok("comm.own_rows".into())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::own("own-rows"))))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        use plugfold_abi::Comm as _;
        let o = Operands::new("comm.own_rows", call)?;
        let (d, rows) = (o.size(0, "D")?, o.rows());
        let Some(comm) = call.comm else { return Err(OpError::new("one rank has nothing to sum")) };
        let (rank, ranks) = (comm.rank()? as usize, comm.ranks()? as usize);
        let partial = o.input::<f32>(0, "partial", rows, d)?;
        let mut out = o.output::<f32>(0, "sum", rows, d)?;
        // The transport has no swap: a gather carries the bytes.
        let mine: Vec<u8> =
            (0..rows).flat_map(|r| partial.row(r).iter().flat_map(|v| v.to_le_bytes())).collect();
        let mut all = vec![0; mine.len() * ranks];
        comm.gather(&mine, &mut all)?;
        let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let share = rows.div_ceil(ranks);
        let own = (rank * share).min(rows)..((rank + 1) * share).min(rows);
        let mut sums = vec![0.0f32; share * d];
        for (r, sum) in own.zip(sums.chunks_mut(d)) {
            for part in all.chunks(mine.len().max(1)) {
                for (i, s) in sum.iter_mut().enumerate() {
                    *s += number(&part[(r * d + i) * 4..]);
                }
            }
        }
        let sums: Vec<u8> = sums.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut shared = vec![0; sums.len() * ranks];
        comm.gather(&sums, &mut shared)?;
        for r in 0..rows {
            for (i, out) in out.row_mut(r).iter_mut().enumerate() {
                *out = number(&shared[(r * d + i) * 4..]);
            }
        }
        Ok(())
    }
}

/// 0460: beside every exchange of a window or a draft, the weight that is read next is touched.
struct Prefetch;

impl Pass for Prefetch {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("prefetch".into())
    }
    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        if program.shape.phase == Phase::Prefill {
            return Ok(());
        }
        let mut event = fresh_event(program);
        let mut steps: List<Step> = List::new();
        let old = std::mem::take(&mut program.steps);
        let mut last = None;
        for (i, step) in old.iter().enumerate() {
            let next = old[i..].iter().find(|s| s.op.as_str() == "dense");
            if let (true, Some(next)) = (step.op.as_str() == "comm.sum", next) {
                event += 1;
                last = Some(event);
                steps.push(Step {
                    op: "touch".into(),
                    layer: next.layer,
                    site: next.site,
                    inputs: List::new(),
                    outputs: List::new(),
                    weights: next.weights.clone(),
                    caches: List::new(),
                    dims: step.dims,
                    reach: Reach::Row,
                    stream: TOUCHES,
                    waits: List::new(),
                    signal: Maybe::RSome(event),
                    ..step.clone()
                });
            }
            steps.push(step.clone());
        }
        // Joined before the end.
        if let (Some(event), Some(end)) = (last, steps.iter_mut().rev().find(|s| s.stream == 0)) {
            end.waits.push(event);
        }
        program.steps = steps;
        Ok(())
    }
}

/// Reads a weight and keeps nothing of it.
struct Touch(Arc<AtomicU64>);

impl Provider for Touch {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok("touch".into())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::own("nothing"))))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        let Some(weight) = call.weights[0] else { return Err(OpError::new("touch: no weight")) };
        let plane = weight.planes[0];
        // SAFETY: weights live and stay unchanged as long as the engine; the plane spans these bytes.
        let bytes = unsafe { std::slice::from_raw_parts(plane.ptr.cast_const(), plane.span_bytes()) };
        let sink: u64 = bytes.iter().step_by(64).map(|b| u64::from(*b)).sum();
        std::hint::black_box(sink);
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A pass of the list.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Of {
    Lean,
    Overlap,
    RowSplit,
    Prefetch,
}

fn add(hooks: &mut Hooks, list: &[Of], touched: &Arc<AtomicU64>) {
    for pass in list {
        let (owner, object) = match pass {
            Of::Lean => ("0082", PassObject::new(Lean)),
            Of::Overlap => ("0084", PassObject::new(Overlap { careless: false })),
            Of::RowSplit => ("0320", PassObject::new(RowSplit)),
            Of::Prefetch => ("0460", PassObject::new(Prefetch)),
        };
        hooks.add_object(owner, object).unwrap();
    }
    hooks.add_object("0320", ProviderObject::new(OwnRows)).unwrap();
    hooks.add_object("0460", ProviderObject::new(Touch(touched.clone()))).unwrap();
}

/// Everything that a prompt, a window, a cut commit and two drafts give on one rank, as bits.
type Bitwise = (Vec<u32>, Vec<(String, Vec<u32>)>);

fn run(core: &mut Core) -> Bitwise {
    let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
    let mut all = bits(&prefill(core, 0, &ids(1, 37, 480), 37));
    let f = forward(core, Phase::Window, 0, &ids(2, 6, 480), Want::All);
    all.extend(bits(core.output(&f, "logits").unwrap()));
    let hidden = core.output(&f, "rows").unwrap().to_vec();
    core.commit(&f, &[4]).unwrap();
    let next = ids(3, 6, 480);
    let rows =
        [MtpRows { slot: 0, start: 37, next_ids: &next, hidden: &hidden, want: Want::All, embeds: &[] }];
    let f = core.mtp(&rows, true, None).unwrap();
    assert_eq!(f.failure, None);
    all.extend(bits(core.output(&f, "logits").unwrap()));
    (all, core.image(0))
}

fn ops(core: &mut Core, phase: Phase) -> Vec<String> {
    core.described(phase).unwrap().into_iter().map(|step| step.op).collect()
}

#[test]
fn passes_in_any_number_and_order_give_the_same_bits() {
    let plain = on_ranks(1, 2, |_, _| {}, run);
    let lists: &[&[Of]] = &[
        &[Of::Lean],
        &[Of::Overlap],
        &[Of::RowSplit],
        &[Of::Prefetch],
        &[Of::Lean, Of::Overlap],
        &[Of::Overlap, Of::Lean],
        &[Of::Lean, Of::Overlap, Of::RowSplit],
        &[Of::Lean, Of::RowSplit, Of::Prefetch],
        &[Of::Lean, Of::Overlap, Of::RowSplit, Of::Prefetch],
        &[Of::Prefetch, Of::Lean, Of::Overlap, Of::RowSplit],
    ];
    for list in lists {
        let touched = Arc::default();
        let got = on_ranks(
            1,
            2,
            |_, hooks| add(hooks, list, &touched),
            |core| {
                let got = run(core);
                let (prefill, window) = (ops(core, Phase::Prefill), ops(core, Phase::Window));
                let has = |ops: &[String], op: &str| ops.iter().any(|o| o == op);
                assert_eq!(has(&prefill, "comm.own_rows"), list.contains(&Of::RowSplit), "{list:?}");
                assert_eq!(has(&prefill, "comm.sum"), !list.contains(&Of::RowSplit), "{list:?}");
                assert_eq!(has(&window, "touch"), list.contains(&Of::Prefetch), "{list:?}");
                assert!(!has(&prefill, "touch"));
                got
            },
        );
        assert!(got == plain, "{list:?} changes bits");
        assert_eq!(touched.load(Ordering::Relaxed) > 0, list.contains(&Of::Prefetch), "{list:?}");
    }
}

#[test]
fn a_pass_that_forgets_a_wait_is_named() {
    let planted = |_: usize, hooks: &mut Hooks| {
        hooks.add_object("0082", PassObject::new(Lean)).unwrap();
        hooks.add_object("0084", PassObject::new(Overlap { careless: true })).unwrap();
    };
    let worlds = plugfold_engine::ranks::World::local(2).unwrap();
    for world in &worlds {
        let comm = Arc::new(plugfold_abi::CommObject::new(world.comm()));
        let split = plugfold_engine::split::Split { rank: world.rank(), ranks: 2 };
        let refused = plugfold_tests::integer::core(1, split, Some(comm), |hooks| planted(0, hooks));
        let told = refused.err().unwrap();
        assert!(told.contains("pass overlap of plugin 0084") && told.contains("a wait is missing"), "{told}");
    }
}
