use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    Attention, ConfigError, HcConfig, IndexConfig, Indexer, KdaConfig, MediaIds, MlaConfig, Mlp, ModelConfig,
    MoeConfig, Problem, Quantization, VisionConfig,
};
use crate::checkpoint::{Dtype, inventory};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny");

fn tiny() -> Value {
    serde_json::from_str(&std::fs::read_to_string(Path::new(TINY).join("config.json")).unwrap()).unwrap()
}

/// Sets the fields of `changes`, dotted paths from the top, in `config`; `null` in the form of `"-"` removes one.
fn with(mut config: Value, changes: &Value) -> Value {
    for (path, value) in changes.as_object().unwrap() {
        let mut at = &mut config;
        let (parents, last) =
            path.rsplit_once('.').map_or((vec![], path.as_str()), |(p, l)| (p.split('.').collect(), l));
        for parent in parents {
            at = &mut at[parent];
        }
        if *value == json!("-") {
            at.as_object_mut().unwrap().remove(last);
        } else {
            at[last] = value.clone();
        }
    }
    config
}

fn parse(config: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(&config.to_string())
}

fn problems(config: &Value) -> Vec<Problem> {
    match parse(config) {
        Err(ConfigError::Unsupported { problems, .. }) => problems,
        other => panic!("{config}: {other:?}"),
    }
}

#[test]
fn every_field_of_the_tiny_checkpoint_is_read() {
    let config = ModelConfig::from_dir(Path::new(TINY)).unwrap();
    let own = Attention::Mla { indexer: Indexer::Own };
    let shared = Attention::Mla { indexer: Indexer::Shared };
    let attention: Vec<Attention> = config.layers.iter().map(|l| l.attention).collect();
    let kda = Attention::Kda;
    assert_eq!(attention, [kda, kda, own, shared, kda, kda, own, kda]);
    let dense: Vec<bool> = config.layers.iter().map(|l| l.mlp == Mlp::Dense).collect();
    assert_eq!(dense, [true, true, false, false, false, false, false, false]);
    assert_eq!(
        config.mla_layers().collect::<Vec<_>>(),
        [(2, Indexer::Own), (3, Indexer::Shared), (6, Indexer::Own)]
    );
    let expected = ModelConfig {
        model_type: "glm5_next".to_owned(),
        vocab_size: 512,
        hidden_size: 128,
        context: 4096,
        layers: config.layers.clone(),
        dense_width: 256,
        kda: KdaConfig { heads: 4, head_dim: 32, taps: 4, lower_bound: Some(-5.0) },
        mla: MlaConfig { heads: 4, q_rank: 96, kv_rank: 64, key_dim: 32, value_dim: 32 },
        index: IndexConfig { topk: 32, pool: 4, heads: 16, head_dim: 32 },
        moe: MoeConfig {
            experts: 16,
            per_token: 4,
            shared: 1,
            width: 64,
            scale: 2.5,
            normalize: true,
            groups: 1,
            groups_kept: 1,
        },
        hc: HcConfig { streams: 4, eps: 1e-6, sinkhorn_iters: 20 },
        rms_norm_eps: 1e-5,
        swiglu_limit: 2.0,
        tied_head: false,
        mtp_layers: 1,
        mtp_shares_index: true,
        vision: Some(VisionConfig {
            depth: 2,
            hidden_size: 64,
            heads: 4,
            width: 96,
            channels: 3,
            patch: 14,
            temporal_patch: 2,
            merge: 2,
            out_hidden_size: 128,
            projection_width: 192,
            rope_theta: 10_000.0,
            rms_norm_eps: 1e-5,
            swiglu_limit: 2.0,
        }),
        media: MediaIds {
            image_start: 502,
            image_end: 503,
            image: 500,
            video_start: 504,
            video_end: 505,
            video: 501,
        },
        eos_ids: vec![508, 509, 510],
        pad_id: Some(508),
        quantization: None,
        warnings: Vec::new(),
    };
    assert_eq!(config, expected);
    assert_eq!((config.index.pools(), config.hc.coefficients(), config.kda.channels()), (8, 24, 128));
}

#[test]
fn absent_fields_take_the_defaults_of_transformers() {
    let config = parse(&json!({ "model_type": "glm5_next_text" })).unwrap();
    let mla: Vec<usize> = config.mla_layers().map(|(i, _)| i).collect();
    assert_eq!(mla, [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43]);
    assert!(config.mla_layers().all(|(_, indexer)| indexer == Indexer::Own));
    assert_eq!(config.layers.iter().take_while(|l| l.mlp == Mlp::Dense).count(), 3);
    assert_eq!(config.layers.iter().filter(|l| l.mlp == Mlp::Sparse).count(), 42);
    assert_eq!((config.vocab_size, config.hidden_size, config.dense_width), (154_880, 4096, 12_288));
    assert_eq!(config.context, 1_048_576);
    assert_eq!(config.kda, KdaConfig { heads: 64, head_dim: 128, taps: 4, lower_bound: Some(-5.0) });
    assert_eq!(config.mla, MlaConfig { heads: 64, q_rank: 1536, kv_rank: 512, key_dim: 256, value_dim: 256 });
    assert_eq!(config.index, IndexConfig { topk: 2048, pool: 16, heads: 32, head_dim: 128 });
    let moe = MoeConfig {
        experts: 288,
        per_token: 8,
        shared: 1,
        width: 2048,
        scale: 2.5,
        normalize: true,
        groups: 1,
        groups_kept: 1,
    };
    assert_eq!(config.moe, moe);
    assert_eq!(config.hc, HcConfig { streams: 4, eps: 1e-6, sinkhorn_iters: 20 });
    assert_eq!((config.rms_norm_eps, config.swiglu_limit), (1e-5, 10.0));
    assert_eq!((config.mtp_layers, config.tied_head, config.vision), (0, false, None));
    assert_eq!((config.pad_id, config.eos_ids), (Some(154_820), vec![]));
    assert_eq!(config.warnings.len(), 1, "{:?}", config.warnings);
    assert!(config.warnings[0].starts_with("index_kpool is absent: using 16"), "{:?}", config.warnings);
}

#[test]
fn defaults_that_the_published_model_contradicts_are_never_silent() {
    let absent = json!({ "text_config.index_kpool": "-", "vision_config.image_size": "-" });
    let warnings = parse(&with(tiny(), &absent)).unwrap().warnings;
    assert!(
        warnings.iter().any(|w| w.contains("text_config.index_kpool is absent: using 16")),
        "{warnings:?}"
    );
    assert!(
        warnings.iter().any(|w| w.contains("vision_config.image_size is absent: using 336")),
        "{warnings:?}"
    );
    // 1536 does not fit a text model of width 128, and then this is refused as well.
    let found = problems(&with(tiny(), &json!({ "vision_config.out_hidden_size": "-" })));
    assert_eq!(found.len(), 1);
    assert_eq!(
        (found[0].field.as_str(), found[0].value.as_str()),
        ("vision_config.out_hidden_size", "absent")
    );
}

#[test]
fn redundant_fields_that_contradict_are_told_of() {
    for (changes, field) in [
        (json!({ "text_config.first_k_dense_replace": 3 }), "text_config.first_k_dense_replace is 3"),
        (
            json!({ "text_config.linear_attn_config.kda_layers": [0, 1] }),
            "text_config.linear_attn_config.kda_layers contradicts",
        ),
        (
            json!({ "text_config.linear_attn_config.full_attn_layers": [0] }),
            "text_config.linear_attn_config.full_attn_layers contradicts",
        ),
    ] {
        let config = parse(&with(tiny(), &changes)).unwrap();
        assert_eq!(config.layers, parse(&tiny()).unwrap().layers);
        assert_eq!(config.warnings.len(), 1);
        assert!(config.warnings[0].starts_with(field), "{:?}", config.warnings);
    }
}

#[test]
fn the_flat_form_is_the_nested_one_without_vision() {
    let nested = with(tiny(), &json!({ "vision_config": "-" }));
    let mut flat = nested["text_config"].clone();
    flat["model_type"] = json!("glm5_next_text");
    flat["architectures"] = json!(["Glm5NextForCausalLM"]);
    let nested = parse(&nested).unwrap();
    let flat = parse(&flat).unwrap();
    assert_eq!(flat.media.image, 154_854);
    assert_eq!(ModelConfig { model_type: nested.model_type.clone(), media: nested.media, ..flat }, nested);
}

/// Accepted variations and what they change.
#[test]
fn variations_are_understood() {
    let kinds = |config: &ModelConfig| -> String {
        config
            .layers
            .iter()
            .map(|layer| match layer.attention {
                Attention::Kda => 'k',
                Attention::Mla { indexer: Indexer::Own } => 'O',
                Attention::Mla { indexer: Indexer::Shared } => 's',
            })
            .collect()
    };
    let no_types = json!({ "text_config.indexer_types": "-" });
    let indexer = |changes: Value| kinds(&parse(&with(with(tiny(), &no_types), &changes)).unwrap());
    assert_eq!(indexer(json!({})), "kkOOkkOk");
    assert_eq!(indexer(json!({ "text_config.index_topk_pattern": "FFFSFFFF" })), "kkOskkOk");
    assert_eq!(indexer(json!({ "text_config.index_topk_pattern": "SSFSSSFSF" })), "kkOskkOk");
    let words = json!(["full", "full", "full", "shared", "F", "S", "full", "S"]);
    assert_eq!(indexer(json!({ "text_config.index_topk_pattern": words })), "kkOskkOk");
    // "full" where max(i - offset + 1, 0) % freq is 0: with 2 and 1 at the even layers.
    let every = |freq: i64, offset: i64| {
        indexer(json!({ "text_config.index_topk_freq": freq, "text_config.index_skip_topk_offset": offset }))
    };
    assert_eq!(every(2, 1), "kkOskkOk");
    assert_eq!(every(1, 5), "kkOOkkOk");

    let config = |changes: Value| parse(&with(tiny(), &changes)).unwrap();
    let spelled = json!([
        "linear_attention",
        "linear_attention",
        "indexed_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "deepseek_sparse_attention",
        "linear_attention",
        "deepseek_sparse_attention"
    ]);
    assert_eq!(kinds(&config(json!({ "text_config.layer_types": spelled }))), "kkOskkOk");
    let one_based = json!({
        "text_config.linear_attn_config.kda_layers": [1, 2, 5, 6, 8],
        "text_config.linear_attn_config.full_attn_layers": [3, 4, 7, 9],
    });
    assert_eq!(kinds(&config(one_based)), "kkOskkOk");

    let flat_linear = json!({ "text_config.linear_attn_config": "-", "text_config.linear_num_heads": 8,
        "text_config.linear_head_dim": 16, "text_config.linear_conv_kernel_dim": 3, "text_config.linear_lower_bound": -4 });
    let kda = config(flat_linear).kda;
    assert_eq!(kda, KdaConfig { heads: 8, head_dim: 16, taps: 3, lower_bound: Some(-4.0) });
    let both = json!({ "text_config.linear_num_heads": 8, "text_config.linear_lower_bound": -4 });
    assert_eq!(config(both).kda, KdaConfig { heads: 4, head_dim: 32, taps: 4, lower_bound: Some(-5.0) });
    let safe = json!({ "text_config.linear_attn_config.gate_lower_bound": null });
    assert_eq!(config(safe).kda.lower_bound, Some(-5.0));
    let unbounded = json!({ "text_config.linear_attn_config.gate_lower_bound": null,
        "text_config.linear_attn_config.safe_gate": false });
    assert_eq!(config(unbounded).kda.lower_bound, None);

    assert_eq!(config(json!({ "text_config.eos_token_id": 7, "eos_token_id": [9, 7] })).eos_ids, [7, 9]);
    assert!(config(json!({ "tie_word_embeddings": true })).tied_head);
    assert!(config(json!({ "tie_word_embeddings": "-", "text_config.tie_word_embeddings": true })).tied_head);
    assert_eq!(config(json!({ "text_config.num_nextn_predict_layers": "-" })).mtp_layers, 0);
    assert_eq!(config(json!({ "text_config.num_key_value_heads": "-" })).mla.heads, 4);
    assert_eq!(config(json!({ "text_config.hidden_size": 128.0 })).hidden_size, 128);
    let theta = json!({ "vision_config.rope_parameters": { "rope_theta": 500.0, "rope_type": "default" } });
    assert_eq!(config(theta).vision.unwrap().rope_theta, 500.0);
    let fp8 = json!({ "quantization_config": { "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 32] } });
    assert_eq!(config(fp8).quantization, Some(Quantization { method: "fp8".to_owned(), block: [64, 32] }));
    let exl3 = json!({ "quantization_config": { "quant_method": "exl3", "bits": 3.5 } });
    assert_eq!(config(exl3).quantization.unwrap().method, "exl3");
    let grouped = json!({ "text_config.n_group": 4, "text_config.topk_group": 2 });
    assert_eq!((config(grouped.clone()).moe.groups, config(grouped).moe.groups_kept), (4, 2));
}

/// Each change makes the configuration unusable, and exactly the named fields say why.
#[test]
fn what_cannot_be_run_is_refused_by_name() {
    let huge = json!(1u64 << 40);
    let cases = [
        (json!({ "model_type": "llama" }), "model_type"),
        (json!({ "model_type": "-" }), "model_type"),
        (json!({ "model_type": 5 }), "model_type"),
        (json!({ "architectures": ["LlamaForCausalLM"] }), "architectures"),
        (json!({ "architectures": "Glm5NextForConditionalGeneration" }), "architectures"),
        (json!({ "text_config": [] }), "text_config"),
        (json!({ "text_config.model_type": "glm4_text" }), "text_config.model_type"),
        (json!({ "text_config.qk_rope_head_dim": 64 }), "text_config.qk_rope_head_dim"),
        (json!({ "text_config.scoring_func": "softmax" }), "text_config.scoring_func"),
        (json!({ "text_config.topk_method": "greedy" }), "text_config.topk_method"),
        (json!({ "text_config.moe_router_dtype": "bfloat16" }), "text_config.moe_router_dtype"),
        (json!({ "text_config.hidden_act": "gelu" }), "text_config.hidden_act"),
        (json!({ "text_config.attention_bias": true }), "text_config.attention_bias"),
        (json!({ "text_config.index_kpool_compress": false }), "text_config.index_kpool_compress"),
        (
            json!({ "text_config.index_kpool_always_select_tail": false }),
            "text_config.index_kpool_always_select_tail",
        ),
        (json!({ "text_config.mla_use_nope": false }), "text_config.mla_use_nope"),
        (json!({ "text_config.mhc": false }), "text_config.mhc"),
        (json!({ "text_config.index_topk": 30 }), "text_config.index_topk"),
        (json!({ "text_config.index_kpool": 5 }), "text_config.index_topk"),
        (json!({ "text_config.num_key_value_heads": 2 }), "text_config.num_key_value_heads"),
        (json!({ "text_config.q_lora_rank": null }), "text_config.q_lora_rank"),
        (json!({ "text_config.swiglu_limit": null }), "text_config.swiglu_limit"),
        (json!({ "text_config.swiglu_limit": 0 }), "text_config.swiglu_limit"),
        (json!({ "text_config.rms_norm_eps": 0 }), "text_config.rms_norm_eps"),
        (json!({ "text_config.rms_norm_eps": 1e-60 }), "text_config.rms_norm_eps"),
        (json!({ "text_config.rms_norm_eps": "1e-5" }), "text_config.rms_norm_eps"),
        (json!({ "text_config.routed_scaling_factor": 1e300 }), "text_config.routed_scaling_factor"),
        (json!({ "text_config.hc_eps": -1e-6 }), "text_config.hc_eps"),
        (json!({ "text_config.hc_mult": 0 }), "text_config.hc_mult"),
        (json!({ "text_config.hc_sinkhorn_iters": 0 }), "text_config.hc_sinkhorn_iters"),
        (json!({ "text_config.vocab_size": 0 }), "text_config.vocab_size"),
        (json!({ "text_config.vocab_size": huge }), "text_config.vocab_size"),
        (json!({ "text_config.intermediate_size": huge }), "text_config.intermediate_size"),
        (json!({ "text_config.num_attention_heads": -4 }), "text_config.num_attention_heads"),
        (json!({ "text_config.v_head_dim": 32.5 }), "text_config.v_head_dim"),
        (json!({ "text_config.kv_lora_rank": "64" }), "text_config.kv_lora_rank"),
        (json!({ "text_config.max_position_embeddings": 0 }), "text_config.max_position_embeddings"),
        (json!({ "text_config.num_nextn_predict_layers": 2 }), "text_config.num_nextn_predict_layers"),
        (json!({ "text_config.norm_topk_prob": "yes" }), "text_config.norm_topk_prob"),
        (json!({ "text_config.num_experts_per_tok": 17 }), "text_config.num_experts_per_tok"),
        (json!({ "text_config.n_routed_experts": 0 }), "text_config.n_routed_experts"),
        (json!({ "text_config.n_shared_experts": 0 }), "text_config.n_shared_experts"),
        (json!({ "text_config.n_group": 3 }), "text_config.n_group"),
        (json!({ "text_config.n_group": 16 }), "text_config.n_group"),
        (json!({ "text_config.topk_group": 2 }), "text_config.topk_group"),
        (json!({ "text_config.n_group": 8 }), "text_config.num_experts_per_tok"),
        (json!({ "text_config.layer_types": ["linear_attention"] }), "text_config.layer_types"),
        (json!({ "text_config.layer_types": "linear_attention" }), "text_config.layer_types"),
        (json!({ "text_config.mlp_layer_types": vec!["rubbish"; 8] }), "text_config.mlp_layer_types"),
        (json!({ "text_config.indexer_types": ["full"] }), "text_config.indexer_types"),
        (json!({ "text_config.linear_attn_config": 4 }), "text_config.linear_attn_config"),
        (
            json!({ "text_config.linear_attn_config.num_heads": 0 }),
            "text_config.linear_attn_config.num_heads",
        ),
        (
            json!({ "text_config.linear_attn_config.short_conv_kernel_size": 1 }),
            "text_config.linear_attn_config.short_conv_kernel_size",
        ),
        (
            json!({ "text_config.linear_attn_config.gate_lower_bound": 5 }),
            "text_config.linear_attn_config.gate_lower_bound",
        ),
        (json!({ "text_config.first_k_dense_replace": "two" }), "text_config.first_k_dense_replace"),
        (
            json!({ "text_config.linear_attn_config.kda_layers": [-1] }),
            "text_config.linear_attn_config.kda_layers",
        ),
        (json!({ "text_config.eos_token_id": 512 }), "text_config.eos_token_id"),
        (json!({ "text_config.eos_token_id": "</s>" }), "text_config.eos_token_id"),
        (json!({ "image_token_id": 512 }), "image_token_id"),
        (json!({ "image_token_id": "-" }), "image_token_id"),
        (json!({ "video_end_token_id": -1 }), "video_end_token_id"),
        (json!({ "vision_config": 1 }), "vision_config"),
        (json!({ "vision_config.attention_bias": false }), "vision_config.attention_bias"),
        (json!({ "vision_config.hidden_act": "gelu" }), "vision_config.hidden_act"),
        (json!({ "vision_config.num_heads": 5 }), "vision_config.hidden_size"),
        (json!({ "vision_config.num_heads": 32 }), "vision_config.hidden_size"),
        (json!({ "vision_config.in_channels": 4 }), "vision_config.in_channels"),
        (json!({ "vision_config.out_hidden_size": 64 }), "vision_config.out_hidden_size"),
        (
            json!({ "vision_config.rope_parameters": { "rope_type": "yarn" } }),
            "vision_config.rope_parameters.rope_type",
        ),
        (json!({ "quantization_config": {} }), "quantization_config.quant_method"),
        (
            json!({ "quantization_config": { "quant_method": "fp8", "fmt": "e5m2" } }),
            "quantization_config.fmt",
        ),
        (
            json!({ "quantization_config": { "quant_method": "fp8", "weight_block_size": [0, 128] } }),
            "quantization_config.weight_block_size",
        ),
        (
            json!({ "quantization_config": { "quant_method": "fp8", "weight_block_size": [128] } }),
            "quantization_config.weight_block_size",
        ),
    ];
    for (changes, field) in cases {
        let changed = with(tiny(), &changes);
        let found = problems(&changed);
        // Some of these make other fields wrong too; the cause is always named.
        assert!(found.iter().any(|p| p.field == field), "{changes}: {found:?}");
        let text = parse(&changed).unwrap_err().to_string();
        assert!(text.contains(field) && text.contains("supported"), "{text}");
    }
}

#[test]
fn a_choice_can_only_be_taken_over_from_the_layer_before() {
    let mla = "deepseek_sparse_attention";
    let kda = "linear_attention";
    for (layers, indexers, layer) in [
        ([mla, kda, kda], ["shared", "full", "full"], "layer 0: there is no layer before it"),
        ([mla, kda, mla], ["full", "full", "shared"], "layer 2: layer 1 is linear attention"),
        ([mla, mla, mla], ["full", "shared", "shared"], "layer 2: layer 1 is shared too"),
    ] {
        let config = json!({ "model_type": "glm5_next_text", "num_hidden_layers": 3, "layer_types": layers,
            "indexer_types": indexers });
        let found = problems(&config);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].supported.contains(layer), "{found:?}");
    }
}

#[test]
fn all_problems_are_told_at_once() {
    let changes = json!({ "model_type": "llama", "text_config.hidden_act": "gelu", "text_config.hidden_size": 0,
        "text_config.index_topk": 30, "vision_config.num_heads": 0 });
    let text = parse(&with(tiny(), &changes)).unwrap_err().to_string();
    for part in [
        "model_type is \"llama\"; supported: \"glm5_next\" or \"glm5_next_text\"",
        "text_config.hidden_act is \"gelu\"; supported: only \"silu\"",
        "text_config.hidden_size is 0; supported: a whole number from 1 to 65536",
        "text_config.index_topk is 30; supported: a multiple of index_kpool, which is 4",
        "vision_config.num_heads is 0",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

#[test]
fn files_that_are_no_configuration_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    assert!(matches!(ModelConfig::from_dir(dir.path()), Err(ConfigError::Read { .. })));
    for text in ["", "{", "[]", "3", "\"glm5_next\"", "{\"model_type\": NaN}", "{}{}"] {
        std::fs::write(&path, text).unwrap();
        assert!(matches!(ModelConfig::from_dir(dir.path()), Err(ConfigError::Json { .. })), "{text}");
    }
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(matches!(ModelConfig::from_dir(dir.path()), Err(ConfigError::Read { .. })));
    std::fs::write(&path, "[".repeat(100_000)).unwrap();
    assert!(matches!(ModelConfig::from_dir(dir.path()), Err(ConfigError::Json { .. })));
    std::fs::File::create(&path).unwrap().set_len((16 << 20) + 1).unwrap();
    assert!(matches!(ModelConfig::from_dir(dir.path()), Err(ConfigError::TooLong { .. })));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(matches!(ModelConfig::from_dir(dir.path()), Err(ConfigError::Read { .. })));
}

#[test]
fn the_end_ids_of_the_generation_settings_are_added() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, value: &Value| std::fs::write(dir.path().join(name), value.to_string()).unwrap();
    write("config.json", &tiny());
    write("generation_config.json", &json!({ "eos_token_id": [509, 11], "temperature": 0.6 }));
    assert_eq!(ModelConfig::from_dir(dir.path()).unwrap().eos_ids, [508, 509, 510, 11]);
    write("generation_config.json", &json!({ "eos_token_id": 600 }));
    let error = ModelConfig::from_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("generation_config.json.eos_token_id is 600"), "{error}");
}

/// Two figures known of the published model: its tensors and the bytes they take in the 16-bit release.
#[test]
fn the_published_configuration_counts_the_published_tensors() {
    let config = ModelConfig::from_json(PUBLISHED).unwrap();
    assert_eq!(config.warnings, Vec::<String>::new());
    let tensors = inventory(&config);
    assert_eq!(tensors.len(), 38_770);
    let bytes: usize =
        tensors.iter().map(|t| t.shape.iter().product::<usize>() * t.dtypes[0].bitsize() / 8).sum();
    assert_eq!(bytes, 642_646_653_816);
    // The 8-bit release adds a table of scales to every matrix that it stores in blocks.
    assert_eq!(tensors.iter().filter(|t| t.dtypes.contains(&Dtype::F8_E4M3)).count(), 76_108 - 38_770);
}

/// The configuration of the published model, by the table of its fields.
pub(crate) const PUBLISHED: &str = include_str!("testdata/published.json");

/// Any JSON value, small.
fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0u64..100).prop_map(Value::from),
        "[a-z_]{0,12}".prop_map(Value::from),
        prop::collection::vec(any::<u32>().prop_map(Value::from), 0..4).prop_map(Value::from),
        prop::collection::vec("[FSa-z_]{0,8}".prop_map(Value::from), 0..9).prop_map(Value::from),
        Just(json!({})),
    ]
}

/// Every dotted path of the tiny configuration's fields.
fn paths() -> Vec<String> {
    let mut paths = Vec::new();
    for (top, inner) in tiny().as_object().unwrap() {
        paths.push(top.clone());
        for (name, deeper) in inner.as_object().into_iter().flatten() {
            paths.push(format!("{top}.{name}"));
            paths.extend(deeper.as_object().into_iter().flatten().map(|(n, _)| format!("{top}.{name}.{n}")));
        }
    }
    paths
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever stands in a field, reading ends in a configuration or in an error, and a configuration that is
    /// accepted has a finite list of tensors whose sizes can be multiplied out.
    #[test]
    fn no_value_panics(changes in prop::collection::vec((prop::sample::select(paths()), value()), 1..4)) {
        let mut config = tiny();
        for (path, value) in changes {
            // A parent that was replaced has no fields any more.
            let mut at = Some(&mut config);
            let parts: Vec<&str> = path.split('.').collect();
            for part in &parts[..parts.len() - 1] {
                at = at.and_then(|v| v.get_mut(*part));
            }
            if let Some(map) = at.and_then(Value::as_object_mut) {
                map.insert(parts[parts.len() - 1].to_owned(), value);
            }
        }
        if let Ok(config) = parse(&config) {
            let mut total = 0usize;
            for tensor in inventory(&config) {
                let elements = tensor.shape.iter().try_fold(4usize, |n, d| n.checked_mul(*d)).unwrap();
                total = total.checked_add(elements).unwrap();
            }
            prop_assert!(total > 0);
        }
    }
}
