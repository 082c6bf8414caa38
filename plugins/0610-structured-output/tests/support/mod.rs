//! What tests of structured output share: the demo model's vocabulary, and replies that say whatever the grammar allows.
#![allow(dead_code)] // each test file uses its part

use std::path::{Path, PathBuf};
use std::sync::Arc;

use plugfold_0610_structured_output::asked::{Asked, wanted};
use plugfold_0610_structured_output::compiler::Compiler;
use plugfold_0610_structured_output::matcher::{Stand, Tracker};
use plugfold_0610_structured_output::tokens::Tokens;
use plugfold_0610_structured_output::{Settings, compiler::Compiled};
use serde_json::Value;

/// The demo model.
pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../host/assets/demo-model")
}

/// Its tokens.
pub fn tokens() -> Tokens {
    Tokens::of_folder(&demo()).unwrap()
}

/// What ends a reply: `<|endoftext|>`, `<|user|>`, `<|observation|>`.
pub const ENDS: [u32; 3] = [4064, 4071, 4073];
/// Closes the reasoning.
pub const THINK_END: u32 = 4085;

/// The defaults, with time enough for any machine.
pub fn patient() -> Settings {
    let mut settings = Settings::default();
    settings.bounds.time = std::time::Duration::from_secs(300);
    settings
}

/// A compiler with these settings.
pub fn compiler_of(settings: Settings) -> Arc<Compiler> {
    Arc::new(Compiler::new(tokens(), settings.bounds).unwrap())
}

/// A compiler with the defaults.
pub fn compiler() -> Arc<Compiler> {
    compiler_of(patient())
}

/// What a body asks for.
pub fn asked(body: &Value) -> Asked {
    wanted(body, true, false).unwrap_or_else(|e| panic!("{body}: {} {}", e.field, e.what)).unwrap()
}

/// A schema as a request asks for it.
pub fn schema(schema: &Value) -> Asked {
    asked(&serde_json::json!({"guided_json": schema}))
}

/// A reply that has not begun.
pub fn tracker(compiler: &Compiler, compiled: &Compiled) -> Tracker {
    Tracker::new(compiled.matcher(), Arc::from(&ENDS[..]), None, compiler.tokens.width)
}

/// Numbers that look drawn, the same for the same seed.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n.max(1)
    }
}

/// The tokens of a mask.
pub fn open(mask: &[u32]) -> Vec<u32> {
    let bits = |(i, word): (usize, &u32)| {
        let word = *word;
        (0..32).filter(move |b| word >> b & 1 == 1).map(move |b| i as u32 * 32 + b)
    };
    mask.iter().enumerate().flat_map(bits).collect()
}

/// Chooses a next token: any, with a liking for what closes things, so that replies come to an end.
pub fn choose(compiler: &Compiler, mask: &[u32], step: usize, dice: &mut Dice) -> u32 {
    let open = open(mask);
    let ends: Vec<u32> = open.iter().copied().filter(|id| ENDS.contains(id)).collect();
    if !ends.is_empty() && dice.below(if step > 60 { 1 } else { 4 }) == 0 {
        return ends[dice.below(ends.len())];
    }
    let trie = compiler.tokens.env.tok_trie();
    let closes = |id: &&u32| {
        let bytes = trie.token(**id);
        !bytes.is_empty() && bytes.iter().all(|b| br#"}]")"#.contains(b)) || bytes.starts_with(b"\xff<")
    };
    let closing: Vec<u32> = open.iter().filter(closes).copied().collect();
    if !closing.is_empty() && dice.below(if step > 60 { 1 } else { 3 }) == 0 {
        return closing[dice.below(closing.len())];
    }
    open[dice.below(open.len())]
}

/// A reply of random tokens under a grammar: its ids, and its text once it has ended by itself.
pub fn babble(
    compiler: &Compiler,
    compiled: &Compiled,
    seed: u64,
    most: usize,
) -> (Vec<u32>, Option<String>) {
    let mut tracker = tracker(compiler, compiled);
    let mut dice = Dice::new(seed);
    let mut mask = vec![0; compiler.tokens.words()];
    let (mut ids, mut bytes) = (Vec::new(), Vec::new());
    for step in 0..most {
        tracker
            .mask(&mut mask)
            .unwrap_or_else(|e| panic!("after {:?}: {e}", String::from_utf8_lossy(&bytes)));
        let id = choose(compiler, &mask, step, &mut dice);
        assert!(tracker.accept(id).unwrap(), "{id} is in the mask and not accepted");
        ids.push(id);
        if tracker.stand() == Stand::Over {
            return (ids, Some(String::from_utf8(bytes).unwrap()));
        }
        bytes.extend(compiler.tokens.env.tok_trie().token(id).iter().filter(|b| **b != 0xff));
    }
    (ids, None)
}
