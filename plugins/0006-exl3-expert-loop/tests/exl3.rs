//! Both products on stacks coded in EXL3, called as the engine calls them. Any words are a valid trellis.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use half::f16;
use plugfold_0006_exl3_expert_loop::{Half, Looped, SETTINGS};
use plugfold_abi::{
    Below, BelowObject, Call, Claim, DType, OpError, Phase, Provider, ProviderObject, Query, RoundTable,
    Slice, Text, View, Weight, formats,
};
use plugfold_kernels::cpu::exl3::{Codebook, Cut, Header, Lines, Plan, Rate, Slots};
use plugfold_kernels::cpu::reference;
use plugfold_tests::model::ids;

const EXPERTS: usize = 3;
/// Rows of each expert.
const MEMBERS: [usize; EXPERTS] = [33, 0, 17];
const WIDTH: usize = 128;

/// Planes of a stack `[EXPERTS][n, WIDTH]`.
fn stack(n: usize) -> (Vec<u32>, Lines) {
    let rate = Rate::from_bits(3.0).unwrap();
    let header = Header { k: WIDTH, n, rate, codebook: Codebook::Mcg, bias: false };
    let mut plan = Plan::default();
    for matrix in 0..EXPERTS {
        plan.trellis(&Cut { matrix, output: 0, input: 0, rows: 0..n, cols: 0..WIDTH }, &header, false);
    }
    let mut data = Lines::zeroed(plan.lines());
    for (seed, slots) in plan.slots(data.words_mut()).into_iter().enumerate() {
        let Slots::Trellis { trellis, suh, svh, .. } = slots else { panic!("{slots:?}") };
        trellis.copy_from_slice(&ids(seed as u64 + 1, trellis.len(), u32::MAX));
        for scales in [suh.unwrap(), svh] {
            let values = ids(seed as u64 + 50, scales.len(), 1000);
            scales.iter_mut().zip(values).for_each(|(s, v)| *s = f16::from_f32((v as f32 - 500.0) / 1000.0));
        }
    }
    (plan.words(), data)
}

fn view<T>(data: &[T], cols: usize, dtype: DType) -> View {
    let (rows, cols) = ((data.len() / cols) as u32, cols as u32);
    View { ptr: data.as_ptr().cast::<u8>().cast_mut(), rows, cols, stride: cols, dtype }
}

struct Nothing;
impl Below for Nothing {
    fn run(&self, _: &Call<'_>) -> Result<(), OpError> {
        Err(OpError::new("nothing lies beneath"))
    }
}

/// Runs a product as the provider's claim says; gives the bits of the output.
fn run(provider: &ProviderObject, half: Half, x: &[f32], order: &[i32], starts: &[i32]) -> Vec<u32> {
    let (op, n) = if half == Half::Up { ("moe.up", 2 * WIDTH) } else { ("moe.down", WIDTH) };
    let (table, data) = stack(n);
    let weight = Weight {
        role: Text::from("experts"),
        format: Text::from(formats::EXL3_SEGMENTS),
        n: n as u32,
        k: WIDTH as u32,
        count: EXPERTS as u32,
        planes: [view(&table, 16, DType::U32), view(data.words(), 16, DType::U32), View::EMPTY, View::EMPTY],
    };
    let rows = order.len();
    let (zeros, counts) = (vec![0u32; rows], [rows as u32]);
    let positions: Vec<u32> = (0..rows as u32).collect();
    let round = RoundTable {
        tokens: Slice::from(&zeros[..]),
        positions: Slice::from(&positions[..]),
        row_seq: Slice::from(&zeros[..]),
        seq_first: Slice::from(&[0][..]),
        seq_rows: Slice::from(&counts[..]),
        seq_start: Slice::from(&[0][..]),
        seq_slot: Slice::from(&[0][..]),
        seq_parity: Slice::from(&[0][..]),
        seq_keep: Slice::from(&counts[..]),
        ..RoundTable::default()
    };
    let mut out = vec![f32::NAN; rows * n];
    let mut call = Call::of(op, Phase::Prefill, &round);
    call.inputs[0] = view(x, WIDTH, DType::F32);
    call.inputs[1] = view(order, 1, DType::I32);
    call.inputs[2] = view(starts, 1, DType::I32);
    let (ptr, cols) = (out.as_mut_ptr().cast::<u8>(), n as u32);
    call.outputs[0] = View { ptr, rows: rows as u32, cols, stride: cols, dtype: DType::F32 };
    call.weights[0] = Some(&weight);
    call.dims[..4].copy_from_slice(&[EXPERTS as u32, 1, WIDTH as u32, WIDTH as u32]);
    let mut query = Query::of(op, Phase::Prefill);
    (query.device_class, query.rows) = (Text::from("cpu"), rows as u32);
    query.weight_formats[0] = weight.format;
    let Claim::Yes(granted) = provider.claim(&query).unwrap() else {
        panic!("{op} of {rows} rows is not claimed")
    };
    provider.run(&call, &granted.plan, &BelowObject::lend(&Nothing)).unwrap();
    out.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn coded_stacks_give_the_bits_of_the_reference_and_of_each_row_alone() {
    let rows: usize = MEMBERS.iter().sum();
    // Even rows and odd rows, as far as they go.
    let expert = |row: usize| if row.is_multiple_of(2) && row < 2 * MEMBERS[2] { 2 } else { 0 };
    let of = |e: usize| (0..rows).filter(move |r| expert(*r) == e).map(|r| r as i32);
    let order: Vec<i32> = of(0).chain(of(2)).collect();
    let starts = [0, MEMBERS[0] as i32, MEMBERS[0] as i32, rows as i32];
    let x: Vec<f32> = ids(9, rows * WIDTH, 1 << 16).into_iter().map(|i| i as f32 / 32768.0 - 1.0).collect();
    for (half, op) in [(Half::Up, "moe.up"), (Half::Down, "moe.down")] {
        let plain = reference().into_iter().find(|p| p.op().unwrap() == op).unwrap();
        let want = run(&plain, half, &x, &order, &starts);
        assert!(want.iter().all(|v| f32::from_bits(*v).is_finite()), "all was written");
        for tiles in SETTINGS {
            let looped = ProviderObject::new(Looped { half, tiles, knob: 0, on: true, note: None });
            assert_eq!(run(&looped, half, &x, &order, &starts), want, "{op}, {tiles:?}");
        }
        let n = want.len() / rows;
        for row in [0, 1, 33, rows - 1] {
            let alone: Vec<i32> = (0..=EXPERTS).map(|e| i32::from(e > expert(row))).collect();
            let one = run(&plain, half, &x[row * WIDTH..][..WIDTH], &[0], &alone);
            assert_eq!(one[..], want[row * n..][..n], "{op}, row {row} alone");
        }
    }
}
