//! The map of the catalogue (`docs/hooks.toml`) is complete, consistent and printed.

use std::collections::BTreeSet;

use plugfold_tests::hooks::{
    Bits, Class, Effect, Fold, Map, Scope, TEXT, catalogue_page, catalogue_problems, expect, hooks_page, map,
    problems, table_operations,
};

/// Every entry of the catalogue.
const CATALOGUE: [&str; 84] = [
    "0001", "0002", "0003", "0004", "0005", "0006", "0010", "0020", "0030", "0040", "0050", "0060", "0065",
    "0070", "0071", "0080", "0081", "0082", "0083", "0084", "0085", "0090", "0091", "0092", "0093", "0110",
    "0120", "0130", "0140", "0150", "0160", "0170", "0180", "0190", "0200", "0210", "0220", "0230", "0240",
    "0250", "0260", "0270", "0280", "0290", "0300", "0310", "0320", "0330", "0335", "0340", "0350", "0360",
    "0370", "0380", "0390", "0400", "0410", "0420", "0430", "0440", "0450", "0460", "0470", "0490", "0500",
    "0510", "0520", "0530", "0540", "0550", "0560", "0570", "0580", "0590", "0600", "0610", "0620", "0630",
    "0640", "0650", "0660", "0670", "0680", "0690",
];

/// Every name that a shell-style profile may set.
const PROFILE_NAMES: [&str; 178] = [
    "CANARY",
    "CANARY_MIN_TPR",
    "CANARY_MIN_TPS",
    "CONFIG",
    "CONTAINER_RT",
    "CONTEXT",
    "CPUSET",
    "DRAFTER",
    "EXTRA_ARGS",
    "FORCE_CONTEXT",
    "GLM53_TF_ADMIT_FREE_FLOOR_GB",
    "GLM53_TF_ADMIT_MEM",
    "GLM53_TF_ALLOC_TRIM_GB",
    "GLM53_TF_ASSISTANT_ENDS",
    "GLM53_TF_ATTN_BM32",
    "GLM53_TF_AUTO_FDRAFTS",
    "GLM53_TF_B12X",
    "GLM53_TF_BATCH",
    "GLM53_TF_BATCH_ADMIT_GB",
    "GLM53_TF_BATCH_CAPTURE_AFTER",
    "GLM53_TF_BATCH_GRAPH_ROWS",
    "GLM53_TF_BATCH_MAX_GRAPHS",
    "GLM53_TF_BATCH_MTP",
    "GLM53_TF_BATCH_PAD",
    "GLM53_TF_BATCH_PARITY_KEY",
    "GLM53_TF_BATCH_PIECE",
    "GLM53_TF_BATCH_PREFILL_SHARE",
    "GLM53_TF_BATCH_RESERVE_GB",
    "GLM53_TF_BATCH_ROW_MS",
    "GLM53_TF_BATCH_SESSIONS",
    "GLM53_TF_BATCH_SHORT",
    "GLM53_TF_BOOT_WARMUP",
    "GLM53_TF_CALIB",
    "GLM53_TF_CALIB_DIR",
    "GLM53_TF_CALIB_ONLINE",
    "GLM53_TF_CLEAR_THINKING",
    "GLM53_TF_COMM_BACKEND",
    "GLM53_TF_CPU_PIN",
    "GLM53_TF_CPU_PIN_EVERY",
    "GLM53_TF_DECODE_KERNELS",
    "GLM53_TF_DECODE_OVERLAP",
    "GLM53_TF_DEC_EXPERT_LOADS",
    "GLM53_TF_DEC_EXPERT_LOADS_CFG",
    "GLM53_TF_DEFAULT_EFFORT",
    "GLM53_TF_DEPTH",
    "GLM53_TF_DISCONNECT",
    "GLM53_TF_DISCONNECT_POLL_MS",
    "GLM53_TF_DRAFT_DUMP",
    "GLM53_TF_DRAFT_DUMP_TAPS",
    "GLM53_TF_DRAFT_DUMP_WHAT",
    "GLM53_TF_DROP_OWN_CACHE",
    "GLM53_TF_EFFORT_FIELD",
    "GLM53_TF_EMIT_FIRST",
    "GLM53_TF_EXPERT_LOOP",
    "GLM53_TF_EXPERT_LOOP_CFG",
    "GLM53_TF_FAST_EXPERTS",
    "GLM53_TF_FAST_GATHER",
    "GLM53_TF_FAST_PREFILL",
    "GLM53_TF_FP8_PREFILL",
    "GLM53_TF_GRAMMAR",
    "GLM53_TF_GRAMMAR_THREADS",
    "GLM53_TF_HEALTH",
    "GLM53_TF_KEEP_REASONING_ENTRIES",
    "GLM53_TF_KEEP_REASONING_MB",
    "GLM53_TF_KV_DTYPE",
    "GLM53_TF_KV_POOL_CHECK",
    "GLM53_TF_KV_POOL_PAGE",
    "GLM53_TF_KV_POOL_SLACK",
    "GLM53_TF_KV_POOL_TOKENS",
    "GLM53_TF_L2PF",
    "GLM53_TF_L2PF_MB",
    "GLM53_TF_LATENT_KV",
    "GLM53_TF_LEAN_BLOCK",
    "GLM53_TF_LEAN_PREFILL",
    "GLM53_TF_LONGCTX_GRAPHS",
    "GLM53_TF_LOOKUP",
    "GLM53_TF_LOOKUP_MIN",
    "GLM53_TF_MAX_DRAFT_ROWS",
    "GLM53_TF_MLA_EXPAND",
    "GLM53_TF_MOE_GLUE",
    "GLM53_TF_MTP_PREFILL_CACHE",
    "GLM53_TF_MULTI_PREFILL",
    "GLM53_TF_MULTI_PREFILL_ROWS",
    "GLM53_TF_MULTI_PREFILL_WAIT_MS",
    "GLM53_TF_NONEXPERT",
    "GLM53_TF_PREFILL_OVERLAP",
    "GLM53_TF_PREFILL_PP",
    "GLM53_TF_PREFILL_ROWS",
    "GLM53_TF_PREFILL_ROWS_MAX",
    "GLM53_TF_PREFIX_SHARE",
    "GLM53_TF_PREFIX_SHARE_KEEP",
    "GLM53_TF_PREFIX_SHARE_MAX",
    "GLM53_TF_PREFIX_SHARE_MIN",
    "GLM53_TF_PREFIX_SHARE_POINTS",
    "GLM53_TF_PREFIX_SHARE_WAIT",
    "GLM53_TF_PREPARED",
    "GLM53_TF_PREPARED_THREADS",
    "GLM53_TF_PREPARED_VERIFY",
    "GLM53_TF_PREPARED_WRITE",
    "GLM53_TF_PROFILE",
    "GLM53_TF_REASONING_FIELDS",
    "GLM53_TF_REQUEST_LOG",
    "GLM53_TF_REQUEST_LOG_KEEP",
    "GLM53_TF_REQUEST_LOG_MB",
    "GLM53_TF_REQUEST_LOG_PROMPTS",
    "GLM53_TF_REQUEST_LOG_SALT",
    "GLM53_TF_ROCE_FALLBACK",
    "GLM53_TF_ROCE_MARK",
    "GLM53_TF_ROCE_MAX_KB",
    "GLM53_TF_ROCE_TIMEOUT_S",
    "GLM53_TF_SELECT_SCRATCH",
    "GLM53_TF_SESSION_DISK",
    "GLM53_TF_SESSION_DISK_GAIN",
    "GLM53_TF_SESSION_DISK_GIB",
    "GLM53_TF_SESSION_DISK_MIN",
    "GLM53_TF_SESSION_DISK_QUEUE_GIB",
    "GLM53_TF_SESSION_DISK_THREADS",
    "GLM53_TF_SESSION_DISK_VERIFY",
    "GLM53_TF_SESSION_DISK_WRITE",
    "GLM53_TF_SESSION_EVERY",
    "GLM53_TF_SESSION_FORK_MIN",
    "GLM53_TF_SESSION_GIB",
    "GLM53_TF_SESSION_RESERVE_GIB",
    "GLM53_TF_SNAPSHOT_BEFORE_END",
    "GLM53_TF_SNAPSHOT_GRID",
    "GLM53_TF_SNAPSHOT_TAIL",
    "GLM53_TF_SOLO_PIECE",
    "GLM53_TF_STALL_PREFILL_TPS",
    "GLM53_TF_STALL_S",
    "GLM53_TF_SWITCH_US",
    "GLM53_TF_TOKCACHE",
    "GLM53_TF_TOKCACHE_ENTRIES",
    "GLM53_TF_TOOL_FIXES",
    "GLM53_TF_VISION",
    "GLM53_TF_VISION_CACHE_MB",
    "GLM53_TF_VISION_PREP_MB",
    "GPUWATCH_PREFLIGHT",
    "HEAD_CPUSET",
    "HEAD_HF",
    "HEAD_IP",
    "HEAD_PREPARED",
    "HEAD_SESSIONS",
    "HOST",
    "IMAGE",
    "LOG_MAX_FILE",
    "LOG_MAX_SIZE",
    "MALLOC_ARENA_MAX",
    "MASTER_PORT",
    "MAX_TOKENS",
    "MEM_GATE_DROP_CACHES",
    "MEM_GATE_GIB",
    "MEM_GATE_TIMEOUT",
    "MODEL_PATH",
    "MTP_DRAFTS",
    "NAME",
    "NCCL_IB_HCA",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_PASSTHROUGH",
    "NCCL_SOCKET_IFNAME",
    "NO_DRAFTS",
    "PATCHES",
    "PORT",
    "PREFLIGHT",
    "READY_TIMEOUT",
    "SERVED_NAME",
    "SLOT_RETRIES",
    "START_ATTEMPTS",
    "START_DROP_CACHES_GIB",
    "STATE_DIR",
    "WARMUP_LENGTHS",
    "WATCH_ALERT",
    "WATCH_HEAL",
    "WORKER_CPUSET",
    "WORKER_HF",
    "WORKER_PREPARED",
    "WORKER_SESSIONS",
    "WORKER_SSH",
];

fn table() -> BTreeSet<String> {
    table_operations(include_str!("../../core/abi/src/ops.rs"))
}

/// The map's text with one piece replaced.
fn planted(from: &str, to: &str) -> Map {
    assert!(TEXT.contains(from), "the map no longer contains {from:?}: plant this fault elsewhere");
    Map::parse(&TEXT.replacen(from, to, 1)).unwrap_or_else(|error| panic!("{from} -> {to}: {error}"))
}

#[test]
fn every_entry_is_there_once() {
    assert_eq!(catalogue_problems(map(), &CATALOGUE), Vec::<String>::new());
}

#[test]
fn a_missing_or_doubled_entry_is_named() {
    assert_eq!(
        catalogue_problems(&planted("id = \"0060\"", "id = \"0064\""), &CATALOGUE),
        ["0060: missing", "0064: not in the catalogue"]
    );
    let doubled = catalogue_problems(&planted("id = \"0006\"", "id = \"0005\""), &CATALOGUE);
    assert_eq!(doubled, ["0005: written 2 times", "0006: missing"]);
}

#[test]
fn the_map_holds() {
    let found = problems(map(), &table());
    assert!(found.is_empty(), "docs/hooks.toml:\n{}", found.join("\n"));
}

#[test]
fn faults_are_found() {
    let faults = [
        (
            "points = [\"plan.spans\", \"limits\"]",
            "points = [\"plan.cuts\", \"limits\"]",
            "0003: `plan.cuts` is no hook point",
        ),
        (
            "requires = [\"0003\"]",
            "requires = [\"0009\"]",
            "0004: requires names `0009`, which does not exist",
        ),
        ("over = [\"0004\", \"0001\"]", "over = [\"0004\", \"0002x\"]", "0060: over names `0002x`"),
        ("conflicts = [\"0120\"]", "conflicts = [\"0121\"]", "0030: conflicts names `0121`"),
        ("op = \"idx.select\"", "op = \"idx.pick\"", "0004: operation `idx.pick` is in no table"),
        ("op = \"moe.fast\", what", "op = \"moe.quick\", what", "0080: operation `moe.fast` is in no table"),
        ("op = \"touch.weights\", what", "op = \"touch\", what", "operation `touch` is 0040's already"),
        (", effect = \"speed\", where = \"all\" }", ", where = \"all\" }", "no effect"),
        (
            "key = \"depth\", env = [\"GLM53_TF_DEPTH\"]",
            "key = \"depth\", env = [\"GLM53_TF_LOOKUP\"]",
            "environment name `GLM53_TF_LOOKUP` is 0020's already",
        ),
        ("key = \"lookup_min\"", "key = \"lookup\"", "0020: knob `0020.lookup` is 0020's already"),
        ("request_key = \"depth\"", "request_key = \"lookup\"", "request key `lookup` is 0020's already"),
        (
            "knob = \"0001.nonexpert\"",
            "knob = \"0001.precision\"",
            "0470: extends knob `0001.precision`, which nobody owns",
        ),
        (
            "fold = \"split\", request_key = \"b12x\"",
            "fold = \"any\", request_key = \"b12x\"",
            "0240: knob `bits`: it changes bits per request",
        ),
        (
            "{ service = \"costs\", need = \"required\"",
            "{ service = \"prices\", need = \"required\"",
            "wants service `prices`, which nobody offers",
        ),
        (
            "requires = [\"0110\", \"0120\"]",
            "requires = [\"0120\"]",
            "0180: needs service `session-store` of 0110",
        ),
        (
            "over = [\"0060\", \"0081\", \"0190\"]",
            "over = [\"0060\"]",
            "`kda.mix` by `kda-chunk64` and by `kda-tile16`",
        ),
        (
            "bits = \"of(kda-chunk64)\"",
            "bits = \"of(kda-chunk32)\"",
            "`kda.scan` of `kda-chunk32`, which nobody has",
        ),
        (
            "bits = \"of(latent-fma)\"",
            "bits = \"own(latent-fma2)\"",
            "0390: shown as SameBits, but a claim is NewArithmetic",
        ),
        ("extends = [\"0004\"]", "extends = [\"0060\"]", "wait for each other by requires, extends and over"),
        (
            "knob = \"0620.fixes\"",
            "knob = \"0500.enabled\"",
            "0690: extends knob `0500.enabled` of a plugin that it neither requires nor extends",
        ),
        (
            "choices = [\"q8\"] }",
            "choices = [\"q4\"] }",
            "0470: `0001.nonexpert` has one of these choices already",
        ),
        ("holes = [\"planning\"]", "holes = [\"plan\"]", "hole `plan` is not described"),
    ];
    for (from, to, expected) in faults {
        let found = problems(&planted(from, to), &table());
        assert!(
            found.iter().any(|text| text.contains(expected)),
            "{from} -> {to}: expected {expected:?}, found {found:#?}"
        );
    }
}

#[test]
fn unknown_fields_and_bits_are_refused() {
    for (from, to, expected) in [
        ("uses = ", "use = ", "unknown field `use`"),
        ("bits = \"own(dense-q4)\"", "bits = \"dense-q4\"", "write own(name) or of(name)"),
        ("phases = [\"W\", \"D\", \"P\"]", "phases = [\"V\"]", "`V` is no phase; valid are W, D, P"),
        ("class = \"new-arithmetic\"", "class = \"fast\"", "`fast` is no class"),
    ] {
        let error = Map::parse(&TEXT.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(expected), "{from}: {error}");
    }
}

#[test]
fn the_pages_are_fresh() {
    let renew = "renew it with `cargo run -p plugfold-tests --bin hooks-doc`";
    assert!(hooks_page(map()) == include_str!("../../docs/HOOKS.md"), "docs/HOOKS.md is stale: {renew}");
    assert!(
        catalogue_page(map()) == include_str!("../../host/assets/catalogue.toml"),
        "host/assets/catalogue.toml is stale: {renew}"
    );
}

#[test]
fn every_profile_name_has_a_knob() {
    let aliases = map().aliases();
    let unknown: Vec<&&str> = PROFILE_NAMES.iter().filter(|name| !aliases.contains_key(**name)).collect();
    assert!(unknown.is_empty(), "no knob owns {unknown:?}");
}

#[test]
fn an_entry_is_found_by_id() {
    let latent = expect("0060");
    assert_eq!((latent.name.as_str(), latent.class), ("latent-kv", Some(Class::NewArithmetic)));
    assert!(latent.claims.iter().any(|claim| claim.bits == Bits::Own("latent-fma".to_owned())));
    let loop_ = expect("0006").knobs.iter().find(|knob| knob.key == "expert_loop").unwrap();
    assert_eq!(
        (loop_.scope, loop_.effect, loop_.fold),
        (Scope::Both, Some(Effect::Speed), Some(Fold::Split))
    );
    assert_eq!(map().aliases()["GLM53_TF_BATCH"], "engine.slots");
}

#[test]
#[should_panic(expected = "no entry `0042`")]
fn an_unknown_id_is_named() {
    let _ = expect("0042");
}
