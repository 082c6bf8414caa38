//! `moe.up` and `moe.down` of calls in which an expert may have more than 16 rows: its weights are read once for all of
//! them. Only the place of work differs from the reference, never a sum.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Host, HostObject, Level};
use plugfold_abi::{
    BelowObject, Bits, Call, Claim, Granted, KnobId, KnobValue, List, OpError, Phase, Plan, Provider,
    ProviderObject, Query, Text, TextBuf, formats, value_of,
};
use plugfold_kernels::cpu::math::moe::Tiles;
use plugfold_kernels::cpu::{down_tiled, up_tiled};

const MANIFEST: &str = include_str!("../plugin.toml");

/// Rows up to which a call is the reference's: an expert then has one tile of rows at most.
pub const ONE_TILE: u32 = 16;
/// Weights that it multiplies by.
const FORMATS: [&str; 3] = [formats::PANEL16_BF16, formats::PANEL16_F32, formats::EXL3_SEGMENTS];
/// The settings that there are.
pub const SETTINGS: [Tiles; 4] = [
    Tiles { columns: 4, members: 2 },
    Tiles { columns: 8, members: 1 },
    Tiles { columns: 4, members: 1 },
    Tiles { columns: 2, members: 4 },
];

/// Reads `expert_loop_cfg`.
///
/// # Errors
/// A setting that does not exist, with those that do.
pub fn tiles(value: &KnobValue) -> Result<Tiles, OpError> {
    let text = value.to_string();
    let found = SETTINGS.into_iter().find(|t| format!("{},{}", t.columns, t.members) == text);
    found.ok_or_else(|| {
        OpError::invalid(format!("expert_loop_cfg is {text}: give one of 4,2 or 8,1 or 4,1 or 2,4 (nt,mg)"))
    })
}

/// The plugin.
pub struct ExpertLoop;

impl Plugin for ExpertLoop {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let knobs = setup.knobs;
        let tiles = tiles(&knobs.get("expert_loop_cfg")?.value)?;
        let (knob, on) = (knobs.id("expert_loop")?, knobs.bool("expert_loop")?);
        plugfold_kernels::cpu::threads_of(setup.host)?;
        let note = Note { host: setup.host(), said: Arc::default() };
        let offers = [Half::Up, Half::Down].map(|half| {
            let looped = Looped { half, tiles, knob, on, note: Some(note.clone()) };
            Offer::of(ProviderObject::new(looped))
        });
        Ok(offers.into_iter().collect())
    }
}

/// Which of the two products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// `moe.up`.
    Up,
    /// `moe.down`.
    Down,
}

/// Where it is said, once, that the setting places nothing.
#[derive(Clone)]
pub struct Note {
    /// The host.
    pub host: &'static HostObject,
    /// Whether it was said.
    pub said: Arc<AtomicBool>,
}

/// The provider of one of the products.
#[derive(Clone)]
pub struct Looped {
    /// Which.
    pub half: Half,
    /// How work is cut.
    pub tiles: Tiles,
    /// Number of the switch.
    pub knob: KnobId,
    /// Where it stands for a request that says nothing.
    pub on: bool,
    /// Who is told of a setting that does nothing.
    pub note: Option<Note>,
}

impl Looped {
    const fn name(&self) -> &'static str {
        match self.half {
            Half::Up => "moe.up",
            Half::Down => "moe.down",
        }
    }

    /// Coded stacks run the reference's own routine, which has no tiles to place.
    fn tell(&self) -> Result<(), OpError> {
        let Some(note) = self.note.as_ref().filter(|_| self.tiles != SETTINGS[0]) else { return Ok(()) };
        if note.said.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let text = format!(
            "expert_loop_cfg = {},{} does nothing here: experts are coded in EXL3, and their routine on the CPU has no tiles \
             to place",
            self.tiles.columns, self.tiles.members
        );
        note.host.log(Level::Warn, Text::from(text.as_str()))
    }
}

impl Provider for Looped {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.name().into())
    }

    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        let [first, rest @ ..] = query.weight_formats;
        let weights = FORMATS.contains(&first.get_str()) && rest.iter().all(|f| f.is_empty());
        let on = value_of(query.knobs, self.knob).map_or(self.on, KnobValue::as_bool);
        let mine = query.op.get_str() == self.name()
            && query.device_class.get_str() == "cpu"
            && query.phase != Phase::Draft
            && query.rows > ONE_TILE;
        if !(mine && weights && on) {
            return Ok(Claim::No);
        }
        if first.get_str() == formats::EXL3_SEGMENTS {
            self.tell()?;
        }
        let mut plan: Plan = [0; 64];
        // Both are single digits: see SETTINGS.
        (plan[0], plan[1]) = (self.tiles.columns as u8, self.tiles.members as u8);
        Ok(Claim::Yes(Granted { bits: Bits::of("ref"), plan, grid: 1 }))
    }

    fn run(&self, call: &Call<'_>, plan: &Plan, _: &BelowObject) -> Result<(), OpError> {
        let tiles = Tiles { columns: plan[0].into(), members: plan[1].into() };
        match self.half {
            Half::Up => up_tiled(call, tiles),
            Half::Down => down_tiled(call, tiles),
        }
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: ExpertLoop);

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::Slice;

    const UP: Looped = Looped { half: Half::Up, tiles: SETTINGS[3], knob: 1, on: true, note: None };

    fn query<'a>(rows: u32, format: &'a str, knobs: &'a [KnobValue]) -> Query<'a> {
        let mut query = Query::of("moe.up", Phase::Prefill);
        (query.rows, query.device_class, query.knobs) = (rows, Text::from("cpu"), Slice::from(knobs));
        query.weight_formats[0] = Text::from(format);
        query
    }

    fn claims(provider: &Looped, query: &Query<'_>) -> bool {
        match provider.claim(query).unwrap() {
            Claim::Yes(granted) => {
                assert_eq!(
                    (granted.bits, granted.grid, granted.plan[0], granted.plan[1]),
                    (Bits::of("ref"), 1, 2, 4)
                );
                true
            }
            _ => false,
        }
    }

    #[test]
    fn the_manifest_is_sound_and_an_unknown_setting_is_refused_with_those_that_exist() {
        let manifest = plugfold_manifest::Manifest::parse(MANIFEST, "plugin.toml").unwrap();
        assert_eq!(manifest.label(), "0006-exl3-expert-loop");
        let knob = manifest.knobs.iter().find(|k| k.key == "expert_loop_cfg").unwrap();
        let pair = |a: &str, b: &str| KnobValue::List(vec![a.into(), b.into()].into());
        let unknown = |_: &str| None;
        for (a, b) in [("4", "2"), ("8", "1"), ("4", "1"), ("2", "4")] {
            knob.check(&pair(a, b), &unknown).unwrap();
            let read = tiles(&pair(a, b)).unwrap();
            assert_eq!((read.columns.to_string(), read.members.to_string()), (a.into(), b.into()));
        }
        for (a, b) in [("2", "2"), ("0", "0"), ("1", "4"), ("8", "2")] {
            let told = tiles(&pair(a, b)).unwrap_err().to_string();
            assert!(told.contains("4,2 or 8,1 or 4,1 or 2,4"), "{told}");
            let told = knob.check(&pair(a, b), &unknown).unwrap_err().to_string();
            assert!(["4,2", "8,1", "4,1", "2,4"].iter().all(|s| told.contains(s)), "{told}");
        }
    }

    #[test]
    fn a_setting_that_places_nothing_is_said_once() {
        for (tiles, format, lines) in [
            (SETTINGS[3], formats::EXL3_SEGMENTS, 1),
            (SETTINGS[3], formats::PANEL16_BF16, 0),
            (SETTINGS[0], formats::EXL3_SEGMENTS, 0),
        ] {
            let host = plugfold_tests::host::Alone::default();
            let note = Note { host: host.object(), said: Arc::default() };
            for half in [Half::Up, Half::Down] {
                let one = Looped { half, tiles, note: Some(note.clone()), ..UP };
                let mut asked = query(64, format, &[]);
                asked.op = Text::from(one.name());
                for _ in 0..2 {
                    one.claim(&asked).unwrap();
                }
            }
            let told = host.lines();
            assert_eq!(told.len(), lines, "{told:?}");
            assert!(told.iter().all(|l| l.contains("expert_loop_cfg = 2,4 does nothing here")), "{told:?}");
        }
    }

    #[test]
    fn calls_of_one_tile_stay_with_the_reference() {
        for (rows, mine) in [(1, false), (16, false), (17, true), (4096, true)] {
            assert_eq!(claims(&UP, &query(rows, formats::EXL3_SEGMENTS, &[])), mine, "{rows} rows");
        }
    }

    #[test]
    fn a_request_switches_it_and_only_known_weights_are_claimed() {
        let values = |on| [KnobValue::Int(0), KnobValue::Bool(on)];
        let off = Looped { on: false, ..UP };
        for (on, load) in [(true, UP), (true, off.clone())] {
            assert!(claims(&load.clone(), &query(64, formats::PANEL16_BF16, &values(on))));
            assert!(!claims(&load, &query(64, formats::PANEL16_BF16, &values(!on))));
        }
        assert!(
            !claims(&off, &query(64, formats::PANEL16_F32, &[])),
            "the value at load, where nobody resolved one"
        );
        assert!(!claims(&UP, &query(64, formats::ROWS_BF16, &[])));
        let other = Query { device_class: Text::from("sm_90"), ..query(64, formats::PANEL16_F32, &[]) };
        assert!(!claims(&UP, &other));
        let down = Looped { half: Half::Down, ..UP };
        assert!(!claims(&down, &query(64, formats::PANEL16_F32, &[])), "another operation");
        let draft = Query { phase: Phase::Draft, ..query(64, formats::PANEL16_F32, &[]) };
        assert!(!claims(&UP, &draft));
    }
}
