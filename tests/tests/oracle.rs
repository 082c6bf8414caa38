//! The tiny checkpoint against goldens made by other implementations, within the bounds of their authors.
#![allow(clippy::unwrap_used)]

use plugfold_abi::Phase;
use plugfold_engine::checkpoint::Checkpoint;
use plugfold_engine::config::ModelConfig;
use plugfold_engine::core::{MtpRows, SeqRows, Want};
use plugfold_engine::vision::VisionTower;
use plugfold_kernels::cpu::math::vision::Grid;
use plugfold_tests::goldens::{Goldens, fixtures, tiny_dir, within};
use plugfold_tests::model::{argmax, extend, forward, on_ranks, options, prefill, tiny_core};

const LENGTHS: [usize; 6] = [1, 5, 64, 65, 200, 700];

fn logits_match(ranks: usize) {
    let goldens = Goldens::tiny();
    on_ranks(&options(&tiny_dir(), 1, 64), ranks, |rank| {
        for n in LENGTHS {
            let ids = goldens.ids(&format!("text.{n}.input_ids"));
            let got = rank.trace(&ids, false).unwrap();
            within(&format!("text.{n}"), &got.logits, &goldens.f32(&format!("text.{n}.logits")), 1e-4);
        }
    });
}

#[test]
fn logits_of_every_prompt_length_on_one_rank() {
    logits_match(1);
}

#[test]
fn logits_of_every_prompt_length_on_two_ranks() {
    logits_match(2);
}

#[test]
fn logits_of_every_prompt_length_on_three_ranks_of_unequal_shares() {
    logits_match(3);
}

#[test]
fn streams_after_every_layer_and_the_final_row() {
    let goldens = Goldens::tiny();
    let ids = goldens.ids("trace.input_ids");
    for ranks in [1, 2] {
        on_ranks(&options(&tiny_dir(), 1, 64), ranks, |rank| {
            let trace = rank.trace(&ids, true).unwrap();
            for (i, streams) in trace.streams.iter().enumerate() {
                let golden = goldens.f32(&format!("trace.layer.{i}.streams"));
                within(&format!("streams after layer {i}"), streams, &golden, 5e-5);
            }
            within("final rows", &trace.rows, &goldens.f32("trace.final_norm"), 5e-5);
        });
    }
}

/// [head, key channel, value channel] against the engine's own order of a state.
#[test]
fn recurrent_and_convolution_states() {
    let goldens = Goldens::tiny();
    let ids = goldens.ids("trace.input_ids");
    let mut core = tiny_core(1, 128);
    prefill(&mut core, 0, &ids, 16);
    let (heads, dim, channels) = (4, 32, 3 * 128);
    for (name, bits) in core.image(0) {
        let values: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
        let Some((family, layer)) = name.split_once(" layer ") else { panic!("{name}") };
        match family {
            "kda.state" => {
                let golden = goldens.f32(&format!("trace.state.kda.{layer}.recurrent_state"));
                // The reference keeps [key][value] or [value][key]; both hold the same numbers.
                let transposed: Vec<f32> = (0..heads * dim * dim)
                    .map(|i| golden[i / (dim * dim) * dim * dim + i % dim * dim + i / dim % dim])
                    .collect();
                let direct = plugfold_tests::goldens::relative(&values, &golden);
                let turned = plugfold_tests::goldens::relative(&values, &transposed);
                assert!(direct.min(turned) < 5e-5, "{name}: {direct:.2e} or {turned:.2e}");
            }
            "kda.conv" => {
                let golden = goldens.f32(&format!("trace.state.kda.{layer}.conv_state"));
                let rows: Vec<f32> = (1..4)
                    .flat_map(|t| (0..channels).map(move |c| (c, t)))
                    .map(|(c, t)| golden[c * 4 + t])
                    .collect();
                within(&name, &values, &rows, 5e-5);
            }
            _ => {}
        }
    }
}

#[test]
fn greedy_continuations() {
    let goldens = Goldens::tiny();
    let mut core = tiny_core(1, 1024);
    for n in [5, 65, 200, 700] {
        let ids = goldens.ids(&format!("greedy.{n}.input_ids"));
        let (tokens, logits) =
            (goldens.ids(&format!("greedy.{n}.tokens")), goldens.f32(&format!("greedy.{n}.logits")));
        let mut row = prefill(&mut core, 0, &ids, 64);
        for (i, (token, golden)) in tokens.iter().zip(logits.chunks(512)).enumerate() {
            within(&format!("greedy.{n} step {i}"), &row, golden, 1e-4);
            assert_eq!(argmax(&row), *token, "greedy.{n} step {i}");
            let f = forward(&mut core, Phase::Window, 0, &[*token], Want::Last);
            row = core.output(&f, "logits").unwrap().to_vec();
            core.commit(&f, &[1]).unwrap();
        }
    }
}

#[test]
fn the_draft_head_and_its_chains() {
    let goldens = Goldens::tiny();
    let mut core = tiny_core(1, 1024);
    for n in [5, 65, 200] {
        let ids = goldens.ids(&format!("greedy.{n}.input_ids"));
        core.begin(0);
        let f = forward(&mut core, Phase::Prefill, 0, &ids, Want::Nothing);
        let hidden = core.output(&f, "rows").unwrap().to_vec();
        core.commit(&f, &[n]).unwrap();
        let next_ids = goldens.ids(&format!("mtp.{n}.next_ids"));
        for (name, zero_first) in [("zero_first", true), ("plain", false)] {
            let rows = goldens.f32(&format!("mtp.{n}.{name}.rows"));
            let logits = goldens.f32(&format!("mtp.{n}.{name}.logits"));
            let at = [MtpRows {
                slot: 0,
                start: 0,
                next_ids: &next_ids,
                hidden: &hidden,
                want: Want::All,
                embeds: &[],
            }];
            let f = core.mtp(&at, zero_first, None).unwrap();
            assert_eq!(f.failure, None);
            let all = core.output(&f, "rows").unwrap().to_vec();
            let got = core.output(&f, "logits").unwrap().to_vec();
            let tail = |v: &[f32], golden: &[f32]| v[v.len() - golden.len()..].to_vec();
            within(&format!("mtp.{n}.{name} rows"), &tail(&all, &rows), &rows, 1e-4);
            within(&format!("mtp.{n}.{name} logits"), &tail(&got, &logits), &logits, 1e-4);
            let tokens = goldens.ids(&format!("mtp.{n}.{name}.chain_tokens"));
            let chain = goldens.f32(&format!("mtp.{n}.{name}.chain_logits"));
            let mut row = all[all.len() - 128..].to_vec();
            let mut token = argmax(&got[got.len() - 512..]);
            for (i, (want, golden)) in tokens.iter().zip(chain.chunks(512)).enumerate() {
                assert_eq!(token, *want, "mtp.{n}.{name} chain step {i}");
                let at = [MtpRows {
                    slot: 0,
                    start: n + i,
                    next_ids: &[token],
                    hidden: &row,
                    want: Want::All,
                    embeds: &[],
                }];
                let f = core.mtp(&at, zero_first, None).unwrap();
                let logits = core.output(&f, "logits").unwrap().to_vec();
                within(&format!("mtp.{n}.{name} chain step {i}"), &logits, golden, 1e-4);
                row = core.output(&f, "rows").unwrap().to_vec();
                token = argmax(&logits);
            }
        }
    }
}

/// Checkpoints of other shapes: grouped selection of experts, two shared experts, weights that are not normalized,
/// pools of three and two tokens, three streams, sizes that are multiples of nothing, an unbounded decay.
#[test]
fn logits_of_models_of_other_shapes() {
    for (name, lengths) in [("odd", vec![1, 3, 20, 21, 22, 90]), ("soft", vec![1, 9, 10, 11, 60])] {
        let dir = fixtures().join(name);
        let goldens = Goldens::open(&dir.join("goldens.safetensors"));
        for ranks in [1, 2] {
            on_ranks(&options(&dir, 1, 16), ranks, |rank| {
                for &n in &lengths {
                    let ids = goldens.ids(&format!("text.{n}.input_ids"));
                    let got = rank.trace(&ids, false).unwrap();
                    let golden = goldens.f32(&format!("text.{n}.logits"));
                    within(&format!("{name} text.{n} on {ranks} ranks"), &got.logits, &golden, 1e-4);
                }
            });
        }
    }
}

fn tower() -> VisionTower {
    let config = ModelConfig::from_dir(&tiny_dir()).unwrap();
    let tensors = Checkpoint::open(&tiny_dir()).unwrap().check(&config).unwrap();
    VisionTower::load(&tensors, &config.vision.unwrap(), None).unwrap()
}

fn grid(goldens: &Goldens, name: &str) -> Grid {
    let g = goldens.ids(name);
    Grid { frames: g[0] as usize, height: g[1] as usize, width: g[2] as usize }
}

#[test]
fn the_vision_tower() {
    let goldens = Goldens::tiny();
    let tower = tower();
    for i in 0..3 {
        let pixels = goldens.f32(&format!("image.{i}.pixel_values"));
        let grids = [grid(&goldens, &format!("image.{i}.grid_thw"))];
        let down = tower.downsampled(&pixels, &grids).unwrap();
        within(&format!("downsampled {i}"), &down, &goldens.f32(&format!("vision.{i}.downsampled")), 5e-5);
        let rows = tower.rows(&pixels, &grids).unwrap();
        within(&format!("rows {i}"), &rows, &goldens.f32(&format!("vision.{i}.rows")), 5e-5);
    }
    let wrong = [Grid { frames: 1, height: 3, width: 4 }];
    assert!(tower.rows(&vec![0.0; 12 * 1176], &wrong).unwrap_err().to_string().contains("multiples of 2"));
}

/// Two frame groups inside a video span: the tower's rows go into the prompt at the image ids.
#[test]
fn a_prompt_with_a_video() {
    let goldens = Goldens::tiny();
    let rows = tower().rows(&goldens.f32("video.pixel_values"), &[grid(&goldens, "video.grid_thw")]).unwrap();
    let ids = goldens.ids("video.input_ids");
    let mut next = rows.chunks(128);
    let embeds: Vec<Option<&[f32]>> =
        ids.iter().map(|id| if *id == 500 { next.next() } else { None }).collect();
    assert!(next.next().is_none(), "as many rows as placeholders");
    let mut core = tiny_core(1, 1024);
    core.begin(0);
    let all = [SeqRows { slot: 0, tokens: &ids, want: Want::All, embeds: &embeds }];
    let f = core.forward(Phase::Prefill, &all, None, false).unwrap();
    within("video", core.output(&f, "logits").unwrap(), &goldens.f32("video.logits"), 2e-4);
}

/// Image rows stand in for the embeddings of placeholders; the rows are the goldens' own, so only the text model is
/// tested here.
#[test]
fn prompts_with_image_rows() {
    let goldens = Goldens::tiny();
    let mut core = tiny_core(1, 1024);
    for name in ["one", "two"] {
        let ids = goldens.ids(&format!("mm.{name}.input_ids"));
        let images = goldens.ids(&format!("mm.{name}.images"));
        let rows: Vec<f32> = images.iter().flat_map(|i| goldens.f32(&format!("vision.{i}.rows"))).collect();
        let mut next = rows.chunks(128);
        let embeds: Vec<Option<&[f32]>> =
            ids.iter().map(|id| if *id == 500 { next.next() } else { None }).collect();
        assert!(next.next().is_none(), "as many rows as placeholders");
        core.begin(0);
        let mut got = Vec::new();
        for (tokens, embeds) in ids.chunks(24).zip(embeds.chunks(24)) {
            let rows = [SeqRows { slot: 0, tokens, want: Want::All, embeds }];
            let f = core.forward(Phase::Prefill, &rows, None, false).unwrap();
            assert_eq!(f.failure, None);
            got.extend_from_slice(core.output(&f, "logits").unwrap());
            core.commit(&f, &[tokens.len()]).unwrap();
        }
        within(&format!("mm.{name}"), &got, &goldens.f32(&format!("mm.{name}.logits")), 2e-4);
        let mut token = argmax(&got[got.len() - 512..]);
        for (i, want) in goldens.ids(&format!("mm.{name}.greedy_tokens")).into_iter().enumerate() {
            assert_eq!(token, want, "mm.{name} greedy step {i}");
            token = argmax(&extend(&mut core, 0, &[token], 1));
        }
    }
}
