//! Case 36: all ranks run the same set.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use plugfold::knobs::{Resolved, Sources};
use plugfold::plugins::life::{Chosen, Plugins, choose};
use plugfold::plugins::settle::Settled;
use plugfold::plugins::{Listed, Search};
use plugfold_abi::KnobValue;
use plugfold_engine::ranks::World;
use plugfold_manifest::Manifest;
use plugins::{HOSTILE, Place, ROWS, hostile_as, patch};

/// What a rank is started with.
struct Rank {
    chosen: Vec<Chosen>,
    settled: Settled,
}

fn rank(folders: Vec<PathBuf>, names: &[&str]) -> Rank {
    let listed =
        |(i, name): (usize, &&str)| Listed { name: (*name).into(), place: format!("p.toml:{}", i + 1) };
    let list: Vec<Listed> = names.iter().enumerate().map(listed).collect();
    let chosen = choose(&list, &Search::only(folders), "cpu").unwrap();
    let manifests = chosen.iter().map(|c| c.library.manifest.clone()).collect();
    let resolved = Resolved::new(&Sources::default(), manifests).unwrap();
    let settled = Settled::of(&resolved, chosen.iter().map(|c| c.library.manifest.id.as_str()));
    Rank { chosen, settled }
}

/// What each of two ranks says when they start.
fn start(ranks: [Rank; 2]) -> [Result<Vec<String>, String>; 2] {
    let cache = tempfile::tempdir().unwrap();
    let worlds = World::local(2).unwrap();
    let since = Instant::now();
    let told = std::thread::scope(|scope| {
        let cache = cache.path();
        let run = |(rank, world): (Rank, World)| {
            scope.spawn(move || {
                let plugins = Plugins::load(rank.chosen, &rank.settled, &world, "cpu", cache);
                world.goodbye();
                plugins.map(|p| p.manifests().map(Manifest::label).collect()).map_err(|e| e.to_string())
            })
        };
        let threads: Vec<_> = ranks.into_iter().zip(worlds).map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    told.try_into().unwrap()
}

fn both(told: &[Result<Vec<String>, String>; 2], words: &[&str]) {
    for rank in told {
        let rank = rank.as_ref().unwrap_err();
        for word in words {
            assert!(rank.contains(word), "no {word:?} in {rank}");
        }
    }
}

#[test]
fn case_36_the_same_set_starts() {
    let folders = || vec![plugins::built().to_owned()];
    let told = start([rank(folders(), &[ROWS, HOSTILE]), rank(folders(), &[ROWS, HOSTILE])]);
    assert_eq!(told, [Ok(vec![ROWS.into(), HOSTILE.into()]), Ok(vec![ROWS.into(), HOSTILE.into()])]);
}

#[test]
fn case_36_another_order_or_one_more_is_told_with_both_values() {
    let folders = || vec![plugins::built().to_owned()];
    let told = start([rank(folders(), &[ROWS, HOSTILE]), rank(folders(), &[HOSTILE, ROWS])]);
    both(
        &told,
        &["plugin 1: rank 0 has `0003-prefill-rows 0.1.0, build ", "rank 1 has `9900-hostile 0.1.0, build "],
    );
    let told = start([rank(folders(), &[ROWS, HOSTILE]), rank(folders(), &[ROWS])]);
    both(
        &told,
        &["plugin 2: rank 0 has `9900-hostile", "rank 1 has no such line", "start every rank with the same"],
    );
}

#[test]
fn case_36_another_version_or_build_is_told_with_both_values() {
    let place = Place::new();
    let mut other = hostile_as("9904", "hostilo");
    let here = place.put("9904-hostilo", &other);
    let there = place.path("there");
    std::fs::create_dir(&there).unwrap();
    patch(&mut other, "version = \"0.1.0\"", "version = \"0.2.0\"");
    let text = String::from_utf8_lossy(&other);
    let build = text.split("\nbuild=").nth(1).unwrap()[..16].to_owned();
    patch(&mut other, &build, "0123456789abcdef");
    std::fs::write(there.join(here.file_name().unwrap()), &other).unwrap();
    let told = start([rank(vec![place.path("plugins")], &["9904"]), rank(vec![there], &["9904"])]);
    let line = format!(
        "rank 0 has `9904-hostilo 0.1.0, build {build}`, rank 1 has `9904-hostilo 0.2.0, build 0123456789abcdef`"
    );
    both(&told, &[&line]);
}

#[test]
fn case_36_one_knob_is_told_with_both_values() {
    let folders = || vec![plugins::built().to_owned()];
    let mut other = rank(folders(), &[ROWS]);
    other.settled.rows[0][0].value = KnobValue::Int(128);
    other.settled.lines[0].1 = "128".into();
    let told = start([rank(folders(), &[ROWS]), other]);
    both(&told, &["knob 0003.prefill_rows: rank 0 has `64`, rank 1 has `128`"]);
}
