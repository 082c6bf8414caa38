//! `plugfold bench roofline --device cuda` without a GPU: that it runs, and times every operation there is. What it measures of
//! an emulated machine says nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use plugfold_abi::Provider as _;
use plugfold_cuda::roofline::{Effort, HostClock, Sizes, roofline};
use plugfold_cuda::{Machine, providers};
use plugfold_emulated::HostMachine;

#[test]
fn every_operation_is_timed_beside_the_limits() {
    let machine: Arc<dyn Machine> = Arc::new(HostMachine::guarded());
    let mut told = Vec::new();
    let measured = roofline(
        &machine,
        &HostClock(&*machine),
        &Sizes::least(),
        &Effort::LEAST,
        &|_| true,
        |limits, row| {
            told.push((*limits, row.map(|r| r.name.clone())));
        },
    )
    .expect("measured");
    let l = measured.limits;
    for (name, value) in
        [("bandwidth", l.bandwidth), ("rate", l.rate), ("decoding", l.decoding), ("launch", l.launch)]
    {
        assert!(value > 0.0 && value.is_finite(), "{name} {value}");
    }
    for row in &measured.rows {
        assert!(row.queued > 0.0 && row.recorded > 0.0 && row.host > 0.0, "{row:?}");
        assert!(row.bound.1 > 0.0 && row.memory > 0.0, "{row:?}");
    }
    // The limits first, then each row as soon as it was there.
    let names: Vec<Option<String>> = measured.rows.iter().map(|r| Some(r.name.clone())).collect();
    assert_eq!(told[0].1, None);
    assert_eq!(told[1..].iter().map(|t| t.1.clone()).collect::<Vec<_>>(), names);
    let timed: BTreeSet<String> = measured.rows.iter().map(|r| r.op.to_owned()).collect();
    let all: BTreeSet<String> =
        providers(&machine).iter().map(|p| p.op().expect("a name").to_string()).collect();
    assert_eq!(timed, all);
    for op in &all {
        assert!(
            measured.rows.iter().any(|r| r.op == op && r.rows == 1)
                || op == "kda.commit"
                || op.starts_with("vision."),
            "{op} is timed at one row"
        );
    }
}
