//! A model on a device: the same bits as on the host, in every output and in whole committed states. The device runs the CUDA
//! kernels on the CPU, and its memory cannot be reached from outside of them.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use plugfold::exact::{GATES, Setup, Verdict, run};
use plugfold_abi::Phase;
use plugfold_engine::checkpoint::Checkpoint;
use plugfold_engine::config::ModelConfig;
use plugfold_engine::core::{Core, CoreOptions, MtpRows, SeqRows, Want};
use plugfold_engine::rank::Options;
use plugfold_engine::split::Split;
use plugfold_engine::vision::VisionTower;
use plugfold_kernels::cpu::math::vision::Grid;
use plugfold_kernels::device::Device;
use plugfold_tests::goldens::{Goldens, tiny_dir};
use plugfold_tests::model::{emulated, forward, ids, prefill};

const VOCAB: u32 = 480;

fn load(dir: &Path, device: Option<Arc<dyn Device>>) -> Core {
    let options = CoreOptions { slots: 3, context: Some(256), device, ..CoreOptions::default() };
    Core::load(dir, &options, Split::WHOLE, None).unwrap()
}

/// Whatever a script computes is the same on the host and on a device.
fn same(dir: &Path, script: impl Fn(&mut Core) -> Vec<(String, Vec<u32>)>) {
    let want = script(&mut load(dir, None));
    let got = script(&mut load(dir, Some(emulated(true))));
    assert_eq!(want.len(), got.len());
    for ((what, want), (_, got)) in want.iter().zip(&got) {
        let first = want.iter().zip(got).position(|(a, b)| a != b);
        assert!(want.len() == got.len() && first.is_none(), "{what} differs first at element {first:?}");
    }
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn prompts_windows_and_commits() {
    same(&tiny_dir(), |core| {
        let mut all = Vec::new();
        // Below and past the dense limit of 36 positions.
        for (slot, n) in [(0, 5), (1, 90)] {
            let logits = prefill(core, slot, &ids(n as u64, n, VOCAB), 32);
            all.push((format!("logits after {n}"), bits(&logits)));
        }
        let window = ids(5, 4, VOCAB);
        let rows = [0, 1].map(|slot| SeqRows { slot, tokens: &window, want: Want::All, embeds: &[] });
        let f = core.forward(Phase::Window, &rows, None, true).unwrap();
        assert_eq!(f.failure, None);
        for name in ["logits", "rows", "layer.0", "layer.3"] {
            all.push((name.into(), bits(core.output(&f, name).unwrap())));
        }
        core.commit(&f, &[1, 3]).unwrap();
        let f = core.forward(Phase::Window, &rows[1..], Some(20), false).unwrap();
        all.push(("values".into(), bits(core.output(&f, "values").unwrap())));
        all.push(("ids".into(), bits(core.output(&f, "ids").unwrap())));
        for slot in [0, 1] {
            all.extend(core.image(slot));
        }
        all
    });
}

#[test]
fn snapshots_drafts_and_rows_in_place_of_embeddings() {
    same(&tiny_dir(), |core| {
        let prompt = ids(3, 44, VOCAB);
        let mut all = Vec::new();
        core.begin(0);
        let width = core.config().hidden_size;
        let image: Vec<f32> = (0..width).map(|i| (i as f32 / 7.0).sin() * 0.05).collect();
        let embeds: Vec<Option<&[f32]>> =
            (0..44).map(|i| (i == 9 || i == 30).then_some(&image[..])).collect();
        let rows = [SeqRows { slot: 0, tokens: &prompt, want: Want::Last, embeds: &embeds }];
        let f = core.forward(Phase::Prefill, &rows, None, false).unwrap();
        assert_eq!(f.failure, None);
        let hidden = core.output(&f, "rows").unwrap().to_vec();
        core.commit(&f, &[44]).unwrap();
        let snapshot = core.snapshot(0).unwrap();
        let f = forward(core, Phase::Window, 0, &[7, 8], Want::All);
        all.push(("window".into(), bits(core.output(&f, "logits").unwrap())));
        core.commit(&f, &[2]).unwrap();
        core.begin(0);
        assert!(core.restore(&snapshot).unwrap());
        let f = forward(core, Phase::Window, 0, &[7, 8], Want::All);
        all.push(("window after a restore".into(), bits(core.output(&f, "logits").unwrap())));
        assert_eq!(all[0].1, all[1].1);
        let next_ids = ids(8, 44, VOCAB);
        let at = [MtpRows {
            slot: 0,
            start: 0,
            next_ids: &next_ids,
            hidden: &hidden,
            want: Want::Last,
            embeds: &embeds,
        }];
        let f = core.mtp(&at, true, None).unwrap();
        assert_eq!(f.failure, None);
        all.push(("draft head".into(), bits(core.output(&f, "logits").unwrap())));
        all.push(("its rows".into(), bits(core.output(&f, "rows").unwrap())));
        all.extend(core.image(0));
        all
    });
}

/// A promise of the engine, on a device. The others take minutes here; `plugfold exact --device cuda` tries all on a GPU.
fn holds(gate: &str, ranks: usize) {
    let gate = GATES.iter().find(|g| g.name == gate).unwrap();
    let options = Options { context: Some(128), ..Options::new(tiny_dir()) };
    let devices = (0..ranks).map(|_| Some(emulated(false))).collect();
    let verdict = run(gate, &Setup { devices, ..Setup::bare(options, ranks) });
    assert!(matches!(verdict, Verdict::Holds(_)), "{}: {verdict}", gate.name);
}

#[test]
fn a_forward_commits_nothing_on_a_device() {
    holds("commits", 1);
}

#[test]
fn ranks_on_devices_agree() {
    holds("ranks", 2);
}

fn tower(device: Option<&Arc<dyn Device>>) -> VisionTower {
    let config = ModelConfig::from_dir(&tiny_dir()).unwrap();
    let tensors = Checkpoint::open(&tiny_dir()).unwrap().check(&config).unwrap();
    VisionTower::load(&tensors, &config.vision.unwrap(), device).unwrap()
}

/// Images of several sizes and a video of two frames: what the host makes of them, the device makes of them.
#[test]
fn images_and_videos_on_a_device() {
    let goldens = Goldens::tiny();
    let (host, device) = (tower(None), tower(Some(&emulated(true))));
    let grid = |name: &str| {
        let g = goldens.ids(name);
        Grid { frames: g[0] as usize, height: g[1] as usize, width: g[2] as usize }
    };
    let mut all = vec![("video".to_owned(), goldens.f32("video.pixel_values"), vec![grid("video.grid_thw")])];
    for i in 0..2 {
        let pixels = goldens.f32(&format!("image.{i}.pixel_values"));
        all.push((format!("image {i}"), pixels, vec![grid(&format!("image.{i}.grid_thw"))]));
    }
    // Two images in one call.
    let both = all[1..].iter().fold((Vec::new(), Vec::new()), |(mut pixels, mut grids), (_, p, g)| {
        pixels.extend_from_slice(p);
        grids.extend_from_slice(g);
        (pixels, grids)
    });
    all.push(("both images".into(), both.0, both.1));
    for (name, pixels, grids) in &all {
        let want = host.downsampled(pixels, grids).unwrap();
        assert_eq!(
            bits(&device.downsampled(pixels, grids).unwrap()),
            bits(&want),
            "{name}: before the merger"
        );
        let want = host.rows(pixels, grids).unwrap();
        assert!(!want.is_empty());
        assert_eq!(bits(&device.rows(pixels, grids).unwrap()), bits(&want), "{name}: rows");
    }
    let wrong = [Grid { frames: 1, height: 3, width: 4 }];
    let refused = device.rows(&vec![0.0; 12 * 1176], &wrong).unwrap_err().to_string();
    assert!(refused.contains("multiples of 2"), "{refused}");
}
