use super::*;
use plugfold_abi::points::Rule;

const W: usize = 2;

/// A layer whose picks depend on every row of its caches below: a wrong, missing or stale row shows.
#[derive(Default)]
struct Layer {
    caches: Mutex<BTreeMap<u32, Vec<(u32, u32)>>>,
    calls: Mutex<Vec<usize>>,
    /// Position and way of each draw.
    drawn: Mutex<Vec<(u32, Draw)>>,
    probability: f32,
    fail: bool,
}

impl Layer {
    fn new() -> Self {
        Self { probability: 0.9, ..Self::default() }
    }
}

fn pick(rows: &[(u32, u32)]) -> u32 {
    rows.iter().fold(17, |h: u32, (id, bits)| (h ^ id).wrapping_mul(0x0100_0193).rotate_left(9) ^ bits) % 1000
}

fn own(token: u32) -> Vec<f32> {
    vec![token as f32, -1.0]
}

impl Forwards for Layer {
    fn hidden_size(&self) -> Result<u32, OpError> {
        Ok(W as u32)
    }

    fn head(&self, rows: Slice<'_, HeadRows<'_>>) -> Result<List<HeadOut>, OpError> {
        if self.fail {
            return Err(OpError::new("planted"));
        }
        self.calls.lock().unwrap().push(rows.len());
        let mut caches = self.caches.lock().unwrap();
        let mut out = List::new();
        for r in rows.iter() {
            let cache = caches.entry(r.slot).or_default();
            assert!(
                r.start as usize <= cache.len(),
                "rows {} to {} were never written",
                cache.len(),
                r.start
            );
            assert_eq!(r.hidden.len(), r.next_ids.len() * W);
            if r.pick {
                self.drawn.lock().unwrap().push((r.position + r.next_ids.len() as u32, r.draw));
            }
            cache.truncate(r.start as usize);
            cache.extend(r.next_ids.iter().zip(r.hidden.chunks(W)).map(|(id, h)| (*id, h[0].to_bits())));
            if r.pick {
                let token = pick(cache);
                out.push(HeadOut { token, probability: self.probability, hidden: own(token).into() });
            }
        }
        Ok(out)
    }
}

/// The model's row at a position: depends on all tokens up to it.
fn row(ids: &[u32]) -> Vec<f32> {
    vec![ids.iter().fold(3u32, |h, id| h.wrapping_mul(31) ^ id) as f32, 0.5]
}

fn hidden(ids: &[u32], from: usize) -> Vec<f32> {
    (from..ids.len()).flat_map(|i| row(&ids[..=i])).collect()
}

/// Chains as they have to be: from the whole text, at once.
fn oracle(ids: &[u32], first: usize, budget: usize) -> Vec<u32> {
    let mut cache: Vec<(u32, u32)> =
        (first..ids.len() - 1).map(|i| (ids[i + 1], row(&ids[..=i])[0].to_bits())).collect();
    let mut out = vec![pick(&cache)];
    while out.len() < budget {
        let last = out[out.len() - 1];
        cache.push((last, own(last)[0].to_bits()));
        out.push(pick(&cache));
    }
    out
}

fn absorb(chains: &Chains, layer: &Layer, slot: u32, ids: &[u32], from: usize) {
    let rows = hidden(ids, from);
    let absorbed = Absorbed {
        slot,
        start: from as u32,
        tokens: Slice::from(&ids[from..]),
        hidden: Slice::from(&rows[..]),
    };
    chains.absorb(&absorbed, &ForwardsObject::lend(layer)).unwrap();
}

/// `ids`: committed tokens and the pending one.
fn ask(slot: u32, ids: &[u32], budget: u32, floor: f32) -> Ask<'_> {
    Ask {
        slot,
        length: ids.len() as u32 - 1,
        pending: ids[ids.len() - 1],
        budget,
        rule: Rule { floor, min_match: 0 },
        draw: Draw::BEST,
        ids: Slice::from(ids),
    }
}

fn propose(chains: &Chains, layer: &Layer, asks: &[Ask<'_>]) -> Vec<Vec<u32>> {
    let out = chains.propose(Slice::from(asks), &ForwardsObject::lend(layer)).unwrap();
    out.iter().map(|p| p.tokens.to_vec()).collect()
}

fn text(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) ^ seed) % 500).collect()
}

#[test]
fn drafts_are_those_of_the_whole_text_however_it_came_in() {
    for (chunk, windows) in [(1, 1), (3, 2), (64, 5), (300, 3)] {
        let (chains, layer) = (Chains::default(), Layer::new());
        let ids = text(320, 1);
        let prompt = 290;
        chains.begun(0, Slice::default(), 0).unwrap();
        for from in (0..prompt).step_by(chunk) {
            absorb(&chains, &layer, 0, &ids[..prompt.min(from + chunk)], from);
        }
        let mut length = prompt;
        while length + windows < ids.len() {
            let seen = &ids[..=length];
            let drafts = propose(&chains, &layer, &[ask(0, seen, 4, 0.0)]);
            assert_eq!(drafts[0], oracle(seen, 0, 4), "chunks of {chunk}, length {length}");
            absorb(&chains, &layer, 0, &ids[..length + windows], length);
            length += windows;
        }
    }
}

#[test]
fn many_sequences_share_each_step_and_stop_one_by_one() {
    let (chains, layer) = (Chains::default(), Layer::new());
    let texts: Vec<Vec<u32>> = (0..4).map(|i| text(20 + i, i as u32)).collect();
    for (slot, ids) in texts.iter().enumerate() {
        chains.begun(slot as u32, Slice::default(), 0).unwrap();
        absorb(&chains, &layer, slot as u32, &ids[..ids.len() - 1], 0);
    }
    layer.calls.lock().unwrap().clear();
    let budgets = [1, 3, 0, 7];
    let asks: Vec<Ask<'_>> =
        texts.iter().zip(budgets).enumerate().map(|(i, (ids, b))| ask(i as u32, ids, b, 0.0)).collect();
    let drafts = propose(&chains, &layer, &asks);
    for ((ids, budget), drafts) in texts.iter().zip(budgets).zip(&drafts) {
        let want = if budget == 0 { Vec::new() } else { oracle(ids, 0, budget as usize) };
        assert_eq!(drafts, &want);
    }
    assert_eq!(*layer.calls.lock().unwrap(), [3, 2, 2, 1, 1, 1, 1], "one call a step");
}

#[test]
fn a_chain_stops_before_the_draft_whose_product_falls_below_the_floor() {
    let ids = text(12, 5);
    // 0.9, 0.81, 0.729, 0.6561 ...
    for (floor, drafts) in
        [(0.0, 7), (0.95, 1), (0.9, 1), (0.85, 1), (0.81, 2), (0.7, 3), (0.66, 3), (0.65, 4)]
    {
        let (chains, layer) = (Chains::default(), Layer::new());
        absorb(&chains, &layer, 0, &ids[..11], 0);
        let floor = floor - 1e-4 * f32::from(u8::from(floor > 0.0));
        let got = propose(&chains, &layer, &[ask(0, &ids, 7, floor)]);
        assert_eq!(got[0].len(), drafts, "floor {floor}");
    }
    // The first goes to verification whatever its probability; nothing is run after it in vain.
    let (chains, layer) = (Chains::default(), Layer { probability: 0.01, ..Layer::new() });
    absorb(&chains, &layer, 0, &ids[..11], 0);
    let before = layer.calls.lock().unwrap().len();
    assert_eq!(propose(&chains, &layer, &[ask(0, &ids, 7, 0.35)])[0].len(), 1);
    assert_eq!(layer.calls.lock().unwrap().len(), before + 1);
}

#[test]
fn a_used_slot_shows_nothing_of_the_sequence_before() {
    let (chains, layer) = (Chains::default(), Layer::new());
    let (a, b) = (text(40, 1), text(30, 2));
    absorb(&chains, &layer, 0, &a[..39], 0);
    propose(&chains, &layer, &[ask(0, &a, 5, 0.0)]);
    chains.ended(0).unwrap();
    chains.begin(0).unwrap();
    chains.begun(0, Slice::from(&b[..]), 0).unwrap();
    absorb(&chains, &layer, 0, &b[..29], 0);
    assert_eq!(propose(&chains, &layer, &[ask(0, &b, 5, 0.0)])[0], oracle(&b, 0, 5));
}

#[test]
fn resumed_equals_fresh_proposals_included() {
    let ids = text(120, 9);
    for (cut, windows) in [(64, 0), (65, 0), (3, 0), (64, 2), (90, 3)] {
        let (chains, layer) = (Chains::default(), Layer::new());
        chains.begin(0).unwrap();
        absorb(&chains, &layer, 0, &ids[..cut], 0);
        let mut length = cut;
        for _ in 0..windows {
            propose(&chains, &layer, &[ask(0, &ids[..=length], 3, 0.0)]);
            absorb(&chains, &layer, 0, &ids[..length + 2], length);
            length += 2;
        }
        let mut record = List::new();
        chains.save(0, &mut record).unwrap();
        // The sequence goes on elsewhere and ends; its rows stay in the slot up to the snapshot.
        propose(&chains, &layer, &[ask(0, &ids[..=length], 7, 0.0)]);
        chains.ended(0).unwrap();

        chains.begin(0).unwrap();
        chains.load(0, Slice::from(&record[..])).unwrap();
        chains.begun(0, Slice::from(&ids[..]), length as u32).unwrap();
        absorb(&chains, &layer, 0, &ids[..119], length);
        assert_eq!(
            propose(&chains, &layer, &[ask(0, &ids, 6, 0.0)])[0],
            oracle(&ids, 0, 6),
            "{cut}, {windows}"
        );
    }
}

#[test]
fn rows_of_an_unknown_past_are_not_read() {
    // The state was resumed without this part's record: the context begins at the resumed length.
    let (chains, layer) = (Chains::default(), Layer::new());
    let ids = text(60, 4);
    layer.caches.lock().unwrap().insert(0, vec![(7, 7); 50]);
    chains.begin(0).unwrap();
    chains.begun(0, Slice::from(&ids[..]), 40).unwrap();
    absorb(&chains, &layer, 0, &ids[..59], 40);
    assert_eq!(propose(&chains, &layer, &[ask(0, &ids, 5, 0.0)])[0], oracle(&ids, 40, 5));

    // Its rows are not at their positions: no snapshot may carry them.
    let mut record = List::new();
    chains.save(0, &mut record).unwrap();
    assert!(record.is_empty());
    assert_eq!(chains.draft_rows(0).unwrap(), DraftRows::Broken);

    // A record of another length is as good as none.
    let record = Lane::default().save();
    chains.begin(0).unwrap();
    chains.load(0, Slice::from(&record[..])).unwrap();
    chains.begun(0, Slice::from(&ids[..]), 32).unwrap();
    absorb(&chains, &layer, 0, &ids[..59], 32);
    assert_eq!(propose(&chains, &layer, &[ask(0, &ids, 5, 0.0)])[0], oracle(&ids, 32, 5));
}

#[test]
fn rows_that_follow_from_the_ids_are_told() {
    let (chains, layer) = (Chains::default(), Layer::new());
    assert_eq!(chains.draft_rows(0).unwrap(), DraftRows::Good(0), "nothing yet");
    let ids = text(90, 4);
    absorb(&chains, &layer, 0, &ids[..64], 0);
    assert_eq!(chains.draft_rows(0).unwrap(), DraftRows::Good(63), "the last row waits for its token");
    absorb(&chains, &layer, 0, &ids[..66], 64);
    assert_eq!(chains.draft_rows(0).unwrap(), DraftRows::Good(63), "a window's rows wait for the next chain");
    assert_eq!(chains.backlog(0).unwrap(), 2);
}

#[test]
fn each_draft_is_drawn_as_its_request_draws_at_its_own_position() {
    let (chains, layer) = (Chains::default(), Layer::new());
    let ids = text(40, 3);
    absorb(&chains, &layer, 0, &ids[..30], 0);
    let draw = Draw { temperature: 0.7, top_k: 5, top_p: 0.9, min_p: 0.1, seed: 77 };
    for length in [30, 33] {
        absorb(&chains, &layer, 0, &ids[..length], 30.min(length));
        layer.drawn.lock().unwrap().clear();
        propose(&chains, &layer, &[Ask { draw, ..ask(0, &ids[..=length], 4, 0.0) }]);
        // The pending token is at `length`, so the drafts' positions follow it.
        let want: Vec<(u32, Draw)> = (1..5).map(|i| (length as u32 + i, draw)).collect();
        assert_eq!(*layer.drawn.lock().unwrap(), want);
    }
}

#[test]
fn a_sequence_without_rows_gets_no_drafts() {
    let (chains, layer) = (Chains::default(), Layer::new());
    let ids = text(9, 4);
    assert_eq!(propose(&chains, &layer, &[ask(5, &ids, 3, 0.0)]), [Vec::<u32>::new()]);
    absorb(&chains, &layer, 5, &ids[..4], 0);
    assert_eq!(propose(&chains, &layer, &[ask(5, &ids, 3, 0.0)]), [Vec::<u32>::new()], "its rows end before");
    assert!(layer.calls.lock().unwrap().is_empty());
    let mut record = List::new();
    chains.save(8, &mut record).unwrap();
    assert!(record.is_empty());
    chains.load(8, Slice::default()).unwrap();
}

#[test]
fn the_backlog_of_a_sequence_that_others_draft_for_stays_bounded() {
    let (chains, layer) = (Chains::default(), Layer::new());
    let ids = text(900, 8);
    let mut most = 0;
    for from in (0..897).step_by(3) {
        absorb(&chains, &layer, 0, &ids[..from + 3], from);
        most = most.max(chains.backlog(0).unwrap());
    }
    assert!((200..=BACKLOG as u32).contains(&most), "{most}");
    assert_eq!(propose(&chains, &layer, &[ask(0, &ids[..898], 3, 0.0)])[0], oracle(&ids[..898], 0, 3));
}

#[test]
fn a_layer_that_fails_leaves_the_rows_for_the_next_time() {
    let (chains, mut layer) = (Chains::default(), Layer::new());
    let ids = text(12, 6);
    absorb(&chains, &layer, 0, &ids[..11], 0);
    layer.fail = true;
    let failed = chains.propose(Slice::from(&[ask(0, &ids, 3, 0.0)][..]), &ForwardsObject::lend(&layer));
    assert_eq!(failed.unwrap_err().message.as_str(), "planted");
    layer.fail = false;
    assert_eq!(propose(&chains, &layer, &[ask(0, &ids, 3, 0.0)])[0], oracle(&ids, 0, 3));
}

#[test]
fn rows_of_another_width_are_refused() {
    let (chains, layer) = (Chains::default(), Layer::new());
    let rows = [0.0; 5];
    let absorbed =
        Absorbed { slot: 1, start: 0, tokens: Slice::from(&[1, 2][..]), hidden: Slice::from(&rows[..]) };
    let told = chains.absorb(&absorbed, &ForwardsObject::lend(&layer)).unwrap_err();
    assert!(told.message.contains("5 hidden numbers with 2 tokens of slot 1"), "{told}");
}
