//! What does not fit is refused, naming the operation, the operand and both values.

use plugfold_abi::{Addressing, Phase};

use super::{Family, Matrix, Run, Seq, dense, one, plain, stack};

fn refused(run: &mut Run<'_>, words: &[&str]) {
    let message = run.go().expect_err("must be refused").message;
    assert!(message.starts_with(&format!("{}: ", run.op)), "{message}");
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

fn product<'a>() -> Run<'a> {
    let mut run = Run::new("dense");
    run.inputs = vec![Matrix::f32(&[0.5; 10], 5)];
    run.outputs = vec![Matrix::out(2, 3)];
    run.weights = vec![dense(&[1.0; 15], 3, 5)];
    run.dims = &[3, 5];
    run.seqs = &[Seq { slot: 0, parity: 0, start: 0, rows: 2, keep: 0 }];
    run
}

#[test]
fn operands_of_another_shape_or_type() {
    assert!(product().go().is_ok());
    let mut run = product();
    run.inputs = vec![Matrix::f32(&[0.5; 12], 6)];
    refused(&mut run, &["input rows", "F32 [2, 6]", "F32 [2, 5]"]);
    run.inputs = vec![Matrix::i32(&[1; 10], 5)];
    refused(&mut run, &["input rows", "I32 [2, 5]", "F32 [2, 5]"]);
    let mut run = product();
    run.outputs = vec![Matrix::out(3, 3)];
    refused(&mut run, &["output rows", "[3, 3]", "[2, 3]"]);
    let mut run = product();
    run.outputs.clear();
    refused(&mut run, &["output rows", "[0, 0]", "[2, 3]"]);
}

#[test]
fn weights_of_another_shape_or_format() {
    let mut run = product();
    run.weights = vec![dense(&[1.0; 20], 4, 5)];
    refused(&mut run, &["weight matrix", "1 x [4, 5]", "1 x [3, 5]"]);
    run.weights = vec![plain(&[1.0; 15])];
    run.weights[0].n = 3;
    run.weights[0].k = 5;
    refused(&mut run, &["weight matrix", "plain.f32", "panel16.bf16 or panel16.f32"]);
    run.weights = vec![dense(&[1.0; 15], 3, 5)];
    run.weights[0].data.pop();
    refused(&mut run, &["weight matrix", "79", "80"]);
    run.weights.clear();
    refused(&mut run, &["weight matrix", "missing"]);
    let mut run = product();
    run.weights.push(plain(&[1.0; 4]));
    refused(&mut run, &["weight bias", "holds 4", "must be 3"]);
}

#[test]
fn sizes_of_zero() {
    let mut run = product();
    run.dims = &[3, 0];
    refused(&mut run, &["size k", "is 0"]);
}

#[test]
fn caches_of_another_shape_and_rows_outside_them() {
    let mut cache = Family::new(2, 1, 8, 6, Addressing::Linear);
    let mut run = Run::new("mla.write");
    run.inputs = vec![Matrix::f32(&[0.5; 8], 4)];
    run.weights = vec![dense(&[1.0; 24], 6, 4)];
    run.dims = &[1, 4, 2, 4];
    run.caches = vec![&mut cache];
    run.seqs = &[Seq { slot: 1, parity: 0, start: 7, rows: 2, keep: 0 }];
    refused(&mut run, &["rows 7..9 of slot 1", "mla.kv", "8 rows a slot"]);
    run.seqs = &[Seq { slot: 2, parity: 0, start: 0, rows: 2, keep: 0 }];
    refused(&mut run, &["slot 2", "2 slots"]);
    run.seqs = &[Seq { slot: 0, parity: 0, start: 0, rows: 2, keep: 0 }];
    assert!(run.go().is_ok());
    run.dims = &[1, 3, 2, 4];
    refused(&mut run, &["cache mla.kv", "24 bytes", "20 bytes"]);
    let mut cache = Family::new(2, 1, 8, 6, Addressing::State);
    run.dims = &[1, 4, 2, 4];
    run.caches = vec![&mut cache];
    refused(&mut run, &["cache mla.kv", "State", "Linear"]);
}

#[test]
fn lists_that_show_what_must_not_be_seen() {
    let mut cache = Family::new(1, 1, 8, 6, Addressing::Linear);
    let seqs = [Seq { slot: 0, parity: 0, start: 4, rows: 1, keep: 0 }];
    let mut run = Run::new("mla.sparse");
    run.inputs = vec![Matrix::f32(&[0.5; 4], 4), Matrix::i32(&[0, 2, 5], 3), Matrix::i32(&[3], 1)];
    run.outputs = vec![Matrix::out(1, 2)];
    run.caches = vec![&mut cache];
    run.dims = &[1, 4, 2, 4, 3];
    run.params = &[1.0];
    run.seqs = &seqs;
    refused(&mut run, &["0..=5", "position 4"]);
    run.inputs[1] = Matrix::i32(&[2, 0, 1], 3);
    refused(&mut run, &["must ascend"]);
    run.inputs[1] = Matrix::i32(&[-1, 0, 1], 3);
    refused(&mut run, &["-1..=1"]);
    run.inputs[2] = Matrix::i32(&[0], 1);
    refused(&mut run, &["has 0 keys"]);
    run.inputs[2] = Matrix::i32(&[4], 1);
    refused(&mut run, &["has 4 keys", "1 to 3"]);
}

#[test]
fn windows_longer_than_the_replay_records_and_keeps_longer_than_windows() {
    let family = |buffers, rows, row| Family::new(1, buffers, rows, row, Addressing::State);
    let (mut state, mut window, mut replay) = (family(2, 1, 4), family(2, 1, 18), family(1, 2, 13));
    let mut run = Run::new("kda.mix");
    run.inputs = vec![
        Matrix::f32(&[0.5; 18], 6),
        Matrix::f32(&[0.5; 6], 2),
        Matrix::f32(&[0.5; 6], 2),
        Matrix::f32(&[0.5; 3], 1),
    ];
    run.outputs = vec![Matrix::out(3, 2)];
    run.weights = vec![plain(&[0.5; 24]), plain(&[0.5; 2]), plain(&[0.5]), plain(&[0.5; 2])];
    run.caches = vec![&mut state, &mut window, &mut replay];
    run.dims = &[1, 2, 4, 0];
    run.params = &[1e-5];
    run.seqs = &[Seq { slot: 0, parity: 0, start: 0, rows: 3, keep: 4 }];
    refused(&mut run, &["rows 0..3 of slot 0", "kda.replay", "2 rows"]);
    run.phase = Phase::Prefill;
    assert!(run.go().is_ok());
    run.op = "kda.commit";
    refused(&mut run, &["keep 4 rows of sequence 0, which has 3"]);
    let mut single = family(1, 1, 4);
    run.caches[0] = &mut single;
    refused(&mut run, &["kda.state", "one buffer", "two"]);
}

#[test]
fn expert_lists_that_are_not_lists() {
    let mut run = Run::new("moe.group");
    run.inputs = vec![Matrix::i32(&[0, 3], 2)];
    run.outputs = vec![Matrix::out_i32(2, 1), Matrix::out_i32(4, 1)];
    run.dims = &[3, 2];
    run.seqs = &[Seq { slot: 0, parity: 0, start: 0, rows: 1, keep: 0 }];
    refused(&mut run, &["row 0 asks for expert 3, there are 3"]);

    let mut run = Run::new("moe.up");
    run.inputs = vec![Matrix::f32(&[0.5; 4], 4), Matrix::i32(&[0, 2], 1), Matrix::i32(&[0, 1, 1, 2], 1)];
    run.outputs = vec![Matrix::out(2, 2)];
    run.weights = vec![stack(&[0.5; 24], 2, 4, 3)];
    run.dims = &[3, 2, 1, 4];
    run.seqs = &[Seq { slot: 0, parity: 0, start: 0, rows: 1, keep: 0 }];
    refused(&mut run, &["pair 2, there are 2"]);
    run.inputs[1] = Matrix::i32(&[0, 1], 1);
    assert!(run.go().is_ok());
    run.inputs[2] = Matrix::i32(&[0, 1, 0, 2], 1);
    refused(&mut run, &["input starts", "must rise from 0 to 2"]);
    run.inputs[2] = Matrix::i32(&[0, 1, 1, 1], 1);
    refused(&mut run, &["input starts", "to 1", "to 2"]);

    let mut run = Run::new("moe.pick");
    run.inputs = vec![Matrix::f32(&[0.5; 6], 6)];
    run.outputs = vec![Matrix::out_i32(1, 3), Matrix::out(1, 3)];
    run.weights = vec![plain(&[0.0; 6])];
    run.dims = &[6, 3, 3, 1, 1];
    run.params = &[1.0];
    let seqs = [one(1)];
    run.seqs = &seqs;
    refused(&mut run, &["3 of 6 experts", "1 of 3 groups"]);
}
