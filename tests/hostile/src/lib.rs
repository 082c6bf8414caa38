//! A plugin that misbehaves on demand, to prove that no plugin harms more than it must.
//!
//! What it does is `STEP-DEED` or `STEP-DEED@RANK`, from the variable `PLUGFOLD_TEST_HOSTILE` or, from its configuration on,
//! from its knob `mode`. Steps: `load` (the library's constructor), `root`, `describe`, `configure`, `publish`, `connect`,
//! `memory`, `prepare`, `check`, `digest`, `calibrate`, `ready`, `call` (its hook), `drop`. Deeds: `panic`, `error`,
//! `abort`, `exit`, `hang`; of single steps also those that `Mode::configure` and `Hostile` name.

plugfold_abi::fixed_layouts!();

use std::sync::OnceLock;

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Memory, Plugin, Setup};
use plugfold_abi::points::{
    Host as _, Limits, ObserverObject, ServicesObject, SpanChoice, SpanFacts, Spans, SpansObject,
};
use plugfold_abi::{KnobValue, List, Maybe, OpError, Text, TextBuf};

const MANIFEST: &str = include_str!("../plugin.toml");
/// Names the deed before there is a configuration.
const VARIABLE: &str = "PLUGFOLD_TEST_HOSTILE";

/// Interfaces that look like the host's and are not.
mod foreign {
    plugfold_abi::interface! {
        /// The name and version of the host's `spans`, another layout.
        "spans", 0: Spans, SpansObject, SpansTable {
            /// Takes what the host does not give.
            fn spans(&self, begin: u64, end: u64) -> u64;
            /// Is not there.
            fn more(&self) -> bool;
        }
    }
    impl Spans for super::Hostile {
        fn spans(&self, _: u64, _: u64) -> Result<u64, plugfold_abi::OpError> {
            Ok(0)
        }
        fn more(&self) -> Result<bool, plugfold_abi::OpError> {
            Ok(false)
        }
    }

    plugfold_abi::interface! {
        /// A version that the host does not know.
        "spans", 99: Later, LaterObject, LaterTable {
            /// Does nothing.
            fn spans(&self) -> ();
        }
    }
    impl Later for super::Hostile {
        fn spans(&self) -> Result<(), plugfold_abi::OpError> {
            Ok(())
        }
    }

    plugfold_abi::interface! {
        /// Nobody knows it.
        "telepathy", 3: Telepathy, TelepathyObject, TelepathyTable {
            /// Does nothing.
            fn think(&self) -> ();
        }
    }
    impl Telepathy for super::Hostile {
        fn think(&self) -> Result<(), plugfold_abi::OpError> {
            Ok(())
        }
    }
}

/// A deed, the step at which it is done and the rank that does it.
#[derive(Clone, Default)]
struct Mode {
    step: String,
    deed: String,
    rank: Option<u32>,
}

impl Mode {
    fn parse(text: &str) -> Self {
        let (text, rank) = text.split_once('@').map_or((text, None), |(t, r)| (t, r.parse().ok()));
        let (step, deed) = text.split_once('-').unwrap_or((text, ""));
        Self { step: step.into(), deed: deed.into(), rank }
    }

    fn from_environment() -> Self {
        std::env::var(VARIABLE).map_or_else(|_| Self::default(), |text| Self::parse(&text))
    }

    /// The deed of a step, where it is this rank's.
    fn at(&self, step: &str, rank: u32) -> &str {
        let mine = self.step == step && self.rank.is_none_or(|r| r == rank);
        if mine { &self.deed } else { "" }
    }
}

/// What any step can do.
fn commit(deed: &str, step: &str) -> Result<(), OpError> {
    match deed {
        "panic" => panic!("hostile: a panic at {step}"),
        "error" => Err(OpError::new(format!("hostile: an error at {step}"))),
        "fatal" => Err(OpError::fatal(format!("hostile: the end at {step}"))),
        "abort" => std::process::abort(),
        "exit" => std::process::exit(0),
        "hang" => loop {
            std::thread::park();
        },
        _ => Ok(()),
    }
}

/// Runs when the library is loaded, before anything of it was asked for.
extern "C" fn constructor() {
    // A panic cannot leave a constructor: it aborts.
    let _ = commit(Mode::from_environment().at("load", 0), "load");
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

#[derive(Default)]
struct Hostile {
    mode: OnceLock<(Mode, u32)>,
}

impl Hostile {
    fn root() -> Self {
        let done = commit(Mode::from_environment().at("root", 0), "root");
        assert!(done.is_ok(), "hostile: an error at root");
        Self::default()
    }

    fn step(&self, step: &str) -> Result<(), OpError> {
        commit(self.deed(step), step)
    }

    fn deed(&self, step: &str) -> &str {
        self.mode.get().map_or("", |(mode, rank)| mode.at(step, *rank))
    }
}

impl Plugin for Hostile {
    fn describe(&self) -> Result<TextBuf, OpError> {
        let mode = Mode::from_environment();
        let deed = mode.at("describe", 0);
        commit(deed, "describe")?;
        let lie = || MANIFEST.replace("on demand", "never");
        Ok(if deed == "lie" { lie().into() } else { MANIFEST.into() })
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let mode = match setup.knobs.text("mode")? {
            "" => Mode::from_environment(),
            text => Mode::parse(text),
        };
        let rank = setup.host.rank()?;
        let (mode, rank) = self.mode.get_or_init(|| (mode, rank));
        let deed = mode.at("configure", *rank);
        commit(deed, "configure")?;
        let hook = || Hook { mode: mode.clone(), rank: *rank };
        let offers = match deed {
            "nothing" => Vec::new(),
            "undeclared" => vec![Offer::of(SpansObject::new(hook())), Offer::of(ObserverObject::new(hook()))],
            "layout" => vec![Offer::of(foreign::SpansObject::new(Hostile::default()))],
            "version" => vec![Offer::of(foreign::LaterObject::new(Hostile::default()))],
            "unknown" => vec![Offer::of(foreign::TelepathyObject::new(Hostile::default()))],
            _ => vec![Offer::of(SpansObject::new(hook()))],
        };
        Ok(List::from(offers))
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        self.step("publish").map(|()| List::new())
    }

    fn connect(&self, _: &ServicesObject) -> Result<(), OpError> {
        self.step("connect")
    }

    fn memory(&self, _: &Limits) -> Result<Memory, OpError> {
        self.step("memory")?;
        let much = self.deed("memory") == "much";
        Ok(Memory { host: if much { u64::MAX / 2 } else { 0 }, device: 0 })
    }

    fn prepare(&self, _: &Limits) -> Result<(), OpError> {
        self.step("prepare")
    }

    fn self_check(&self) -> Result<Maybe<TextBuf>, OpError> {
        self.step("check")?;
        let fails = self.deed("check") == "fails";
        Ok(if fails { Maybe::RSome("hostile: two is not three".into()) } else { Maybe::RNone })
    }

    fn digest(&self) -> Result<List<TextBuf>, OpError> {
        self.step("digest")?;
        let own = self.deed("digest") == "own";
        Ok(List::from(vec![TextBuf::from(format!("mood = {}", if own { "odd" } else { "even" }))]))
    }

    fn calibrate(&self) -> Result<(), OpError> {
        self.step("calibrate")
    }

    fn ready(&self) -> Result<(), OpError> {
        self.step("ready")
    }

    fn parse(&self, key: Text<'_>, text: Text<'_>) -> Result<TextBuf, OpError> {
        let text = text.get_str().trim().to_ascii_lowercase();
        assert!(key.get_str() == "mood" && text != "panic", "hostile: a panic at parse");
        match text.strip_prefix("odd:").map(str::parse::<u8>) {
            Some(Ok(number)) => Ok(format!("odd:{number}").into()),
            None if text == "calm" => Ok(text.into()),
            _ => Err(OpError::invalid("hostile: no mood of mine")),
        }
    }

    fn veto(&self, key: Text<'_>, value: &KnobValue) -> Result<Maybe<TextBuf>, OpError> {
        Ok(match (key.get_str(), value.as_text()) {
            ("mood", Some("odd:9")) => Maybe::RSome("hostile: nine is too odd".into()),
            ("mood", Some("odd:13")) => panic!("hostile: a panic at veto"),
            _ => Maybe::RNone,
        })
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.step("drop");
    }
}

/// Its hook, which leaves chunks as they are.
struct Hook {
    mode: Mode,
    rank: u32,
}

impl Spans for Hook {
    fn spans(&self, _: &SpanFacts<'_>, chunks: &mut List<SpanChoice>) -> Result<(), OpError> {
        let deed = self.mode.at("call", self.rank);
        match deed {
            "empty" => chunks.clear(),
            "backward" => chunks.reverse(),
            _ => {}
        }
        commit(deed, "call")
    }
}

impl plugfold_abi::points::Observer for Hook {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(0)
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        let _ = commit(self.mode.at("drop", self.rank), "drop");
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: Hostile::root());
