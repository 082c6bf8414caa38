use super::*;

const SETTINGS: Settings = Settings { piece: 100, share: 0.5, reserve: 1000, admit: 500 };

fn batch() -> Batch {
    Batch::new(SETTINGS, None)
}

fn free(slot: u32, admitted: u64) -> SlotFacts {
    SlotFacts { slot, request: 0, prompt: 0, absorbed: 0, decoding: false, background: false, admitted }
}

fn held(slot: u32, request: u64, prompt: u32, absorbed: u32) -> SlotFacts {
    let decoding = absorbed == prompt;
    SlotFacts { request, prompt, absorbed, decoding, admitted: request, ..free(slot, 0) }
}

fn background(slot: SlotFacts) -> SlotFacts {
    SlotFacts { background: true, ..slot }
}

fn request(number: u64, background: bool) -> RequestFacts<'static> {
    RequestFacts {
        request: number,
        ids: Slice::default(),
        max_tokens: 1,
        background,
        draft: true,
        draft_layer: false,
        waited_s: 0.0,
        knobs: Slice::default(),
        tag: 0,
        grid: 1,
    }
}

fn facts<'a>(slots: &'a [SlotFacts], waiting: &'a [RequestFacts<'a>]) -> PlanFacts<'a> {
    PlanFacts {
        now_s: 0.0,
        round: 1,
        last_piece_s: 0.0,
        last_decode_s: 0.0,
        slots: Slice::from(slots),
        waiting: Slice::from(waiting),
        free_bytes: u64::MAX,
    }
}

fn offer(slot: u32, length: u32) -> StoreOffer {
    StoreOffer { store: 0, ticket: 0, length, price_ms: 0.0, slot }
}

#[test]
fn foreground_goes_first_each_in_the_order_of_arrival() {
    let waiting = [request(3, true), request(4, false), request(5, true), request(6, false)];
    let mut queue: List<u64> = vec![3, 4, 5, 6].into();
    batch().order(&facts(&[], &waiting), &mut queue).unwrap();
    assert_eq!(queue[..], [4, 6, 3, 5]);
}

#[test]
fn the_background_request_admitted_last_steps_aside() {
    let running = [background(held(0, 7, 5, 5)), background(held(1, 9, 5, 2)), held(2, 11, 5, 5)];
    let aside = |slots: &[SlotFacts], waiting: &[RequestFacts<'_>], free_bytes: u64| {
        let mut out = List::new();
        batch().step_aside(&PlanFacts { free_bytes, ..facts(slots, waiting) }, &mut out).unwrap();
        out.to_vec()
    };
    let one = [request(20, false)];
    let two = [request(20, false), request(21, false)];
    assert_eq!(aside(&running, &one, u64::MAX), [1]);
    assert_eq!(aside(&running, &two, u64::MAX), [1, 0]);
    assert_eq!(
        aside(&running, &[request(20, true)], u64::MAX),
        [0; 0],
        "background yields to foreground only"
    );
    assert_eq!(aside(&[running[0], free(1, 0)], &one, u64::MAX), [0; 0], "a slot is free");
    assert_eq!(aside(&[running[2]], &one, u64::MAX), [0; 0], "foreground never yields");
    assert_eq!(aside(&running, &one, 499), [0; 0], "memory would keep the other out");
    assert_eq!(aside(&running[..1], &one, 499), [0], "alone it may enter");
}

#[test]
fn a_request_goes_where_most_of_it_is_kept_else_where_nobody_was_for_longest() {
    let slots = [free(0, 9), held(1, 5, 4, 4), free(2, 3), free(3, 7)];
    let place = |offers: &[StoreOffer], given: Verdict| {
        let mut verdict = given;
        batch().place(&facts(&slots, &[]), &request(30, false), Slice::from(offers), &mut verdict).unwrap();
        verdict
    };
    let any = Verdict::Admit(0);
    assert_eq!(place(&[], any.clone()), Verdict::Admit(2));
    assert_eq!(place(&[offer(0, 10), offer(3, 20)], any.clone()), Verdict::Admit(3));
    assert_eq!(
        place(&[offer(3, 20), offer(0, 20)], any.clone()),
        Verdict::Admit(0),
        "ties go to the lower slot"
    );
    assert_eq!(place(&[offer(1, 20)], any.clone()), Verdict::Admit(2), "a slot that is taken");
    assert_eq!(
        place(&[offer(3, 20), offer(u32::MAX, 30)], any),
        Verdict::Admit(2),
        "a store has more: anywhere"
    );
    assert_eq!(place(&[], Verdict::Hold), Verdict::Hold);
}

#[test]
fn a_request_waits_for_memory_while_others_run() {
    let admit = |slots: &[SlotFacts], free_bytes| {
        let mut verdict = Verdict::Admit(0);
        batch()
            .admit(&PlanFacts { free_bytes, ..facts(slots, &[]) }, &request(30, false), &mut verdict)
            .unwrap();
        verdict
    };
    assert_eq!(admit(&[free(0, 0), held(1, 5, 4, 4)], 499), Verdict::Block);
    assert_eq!(admit(&[free(0, 0), held(1, 5, 4, 4)], 500), Verdict::Admit(0));
    assert_eq!(admit(&[free(0, 0), free(1, 0)], 0), Verdict::Admit(0), "alone it may enter");
}

#[test]
fn one_piece_a_round_of_the_prompt_with_the_fewest_tokens_left() {
    let pieces = |batch: &Batch, slots: &[SlotFacts], last: (f64, f64)| {
        let mut out = List::from(vec![PieceChoice { slot: 9, tokens: 9 }]);
        let facts = PlanFacts { last_piece_s: last.0, last_decode_s: last.1, ..facts(slots, &[]) };
        batch.pieces(&facts, &mut out).unwrap();
        out.iter().map(|p| (p.slot, p.tokens)).collect::<Vec<_>>()
    };
    let b = batch();
    assert_eq!(pieces(&b, &[held(0, 5, 900, 0), held(1, 6, 500, 100)], (0.0, 0.0)), [(1, 100)]);
    assert_eq!(
        pieces(&b, &[held(0, 5, 400, 0), held(1, 6, 500, 100)], (1.0, 0.0)),
        [(0, 100)],
        "ties: first come"
    );
    let beside = [held(0, 5, 900, 0), held(1, 6, 5, 5)];
    assert_eq!(pieces(&b, &beside, (0.0, 0.0)), [(0, 100)]);
    assert_eq!(pieces(&b, &beside, (1.0, 0.4)), [], "0.6 s are owed");
    assert_eq!(pieces(&b, &beside, (0.0, 0.5)), []);
    assert_eq!(pieces(&b, &beside, (0.0, 0.5)), [(0, 100)], "paid");
    assert_eq!(pieces(&b, &[held(0, 5, 900, 0)], (9.0, 0.1)), [(0, 100)], "nobody decodes");
    assert_eq!(pieces(&b, &[held(1, 6, 5, 5)], (0.0, 0.0)), []);
    pieces(&b, &beside, (0.0, 0.0));
    let seen: Vec<_> = b.slots().unwrap().iter().map(|s| (s.slot, s.request, s.decoding, s.left)).collect();
    assert_eq!(seen, [(0, 5, false, 900), (1, 6, true, 0)], "what other plugins see");
}

#[test]
fn pieces_of_prompts_with_a_grid_end_on_it() {
    let b = batch();
    let grid = |number: u64, grid: u32| {
        let asked = RequestFacts { grid, ..request(number, false) };
        let mut verdict = Verdict::Admit(0);
        b.place(&facts(&[free(0, 0)], &[]), &asked, Slice::default(), &mut verdict).unwrap();
        let mut out = List::new();
        b.pieces(&facts(&[held(0, number, 9999, 0)], &[]), &mut out).unwrap();
        out[0].tokens
    };
    assert_eq!([grid(1, 1), grid(2, 64), grid(3, 100), grid(4, 128)], [100, 64, 100, 128]);
    assert_eq!(b.state().grids.len(), 1, "those of requests that are gone are forgotten");
}

#[test]
fn slots_fit_what_is_left_of_memory() {
    let link = Slots { settings: SETTINGS, host: None };
    let fit =
        |slots, slot_bytes, free_bytes| link.fit(&SlotMemory { slots, slot_bytes, free_bytes }).unwrap();
    assert_eq!(fit(4, 100, 1400), 4);
    assert_eq!(fit(4, 100, 1399), 3);
    assert_eq!(fit(4, 100, 900), 1, "one slot there always is");
    assert_eq!(fit(4, 0, 2000), 4);
    let mut limits =
        Limits { context: 1, slots: 3, window_rows: 8, prefill_rows: 64, prefill_rows_max: 64, piece: 64 };
    link.raise(&mut limits).unwrap();
    assert_eq!((limits.piece, limits.slots), (100, 3));
}
