//! From the text of a `config.json` to a [`ModelConfig`].

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::error::ConfigError;
use super::fields::{Fields, Findings, show};
use super::layers::layers;
use super::{
    HcConfig, IndexConfig, KdaConfig, MediaIds, MlaConfig, Mlp, ModelConfig, MoeConfig, Quantization,
    VisionConfig,
};

/// Longest configuration file that is read. Published ones have about 8 kB.
const MAX_BYTES: u64 = 16 << 20;
/// Most experts of all layers together; the published model has 12,384. Bounds the list of expected tensors.
const MAX_EXPERTS: usize = 131_072;
/// Widths of rows and of inner blocks.
const WIDTH: std::ops::RangeInclusive<usize> = 1..=1 << 20;
/// Heads, and channels of a head.
const SMALL: std::ops::RangeInclusive<usize> = 1..=4096;
/// Token ids from here on are not the tokenizer's.
const MAX_VOCAB: usize = 1 << 24;

/// Reads a whole configuration file of bounded length.
pub(crate) fn read(path: &Path) -> Result<String, ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes > MAX_BYTES {
        return Err(ConfigError::TooLong { path: path.to_owned(), bytes, limit: MAX_BYTES });
    }
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// The outermost object of a file.
pub(crate) fn object(name: &str, text: &str) -> Result<Map<String, Value>, ConfigError> {
    serde_json::from_str(text).map_err(|source| ConfigError::Json { name: name.to_owned(), source })
}

/// Parses `text`, which came from `name`, and the end-of-text ids of `generation`.
pub(super) fn parse(name: &str, text: &str, generation: Option<&str>) -> Result<ModelConfig, ConfigError> {
    let top = object(name, text)?;
    let generation = generation.map(|text| object("generation_config.json", text)).transpose()?;
    let findings = Findings::default();
    let config = model(&top, generation.as_ref(), &findings);
    let (problems, warnings) = findings.into_parts();
    if !problems.is_empty() {
        return Err(ConfigError::Unsupported { name: name.to_owned(), problems });
    }
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    Ok(ModelConfig { warnings, ..config })
}

/// Reads everything, noting problems as it goes. With problems noted the result is not to be used.
fn model(
    top: &Map<String, Value>,
    generation: Option<&Map<String, Value>>,
    findings: &Findings,
) -> ModelConfig {
    let head = Fields::new(top, "", findings);
    let model_type = architecture(head, findings);
    let text = match head.object("text_config") {
        Some(map) => Fields::new(map, "text_config", findings),
        None => head,
    };
    text_only_values(text);

    let linear_path = text.path("linear_attn_config");
    let linear = text.object("linear_attn_config").map(|map| Fields::new(map, &linear_path, findings));

    let vocab_size = text.size("vocab_size", 154_880, 2..=MAX_VOCAB);
    let hidden_size = text.size("hidden_size", 4096, 1..=1 << 16);
    let count = text.size("num_hidden_layers", 45, 1..=512);
    let mtp_layers = text.size("num_nextn_predict_layers", 0, 0..=1);
    let layers = layers(text, linear, count, mtp_layers);
    let sparse = layers.iter().filter(|l| l.mlp == Mlp::Sparse).count() + mtp_layers;

    let config = ModelConfig {
        model_type,
        vocab_size,
        hidden_size,
        context: text.size("max_position_embeddings", 1 << 20, 1..=1 << 24),
        dense_width: text.size("intermediate_size", 12_288, WIDTH),
        kda: kda(text, linear),
        mla: mla(text),
        index: index(text),
        moe: moe(text, sparse),
        hc: HcConfig {
            streams: text.size("hc_mult", 4, 1..=16),
            eps: text.number("hc_eps", 1e-6, |v| v >= 0.0, "a number from 0 up") as f32,
            sinkhorn_iters: text.size("hc_sinkhorn_iters", 20, 1..=1000),
        },
        rms_norm_eps: epsilon(text),
        swiglu_limit: clamp(text),
        tied_head: if head.get("tie_word_embeddings").is_some() {
            head.flag("tie_word_embeddings", false)
        } else {
            text.flag("tie_word_embeddings", false)
        },
        mtp_layers,
        mtp_shares_index: text.flag("index_share_for_mtp_iteration", true),
        vision: head
            .object("vision_config")
            .map(|map| vision(Fields::new(map, "vision_config", findings), hidden_size)),
        media: MediaIds {
            image_start: head.id("image_start_token_id").unwrap_or(154_830),
            image_end: head.id("image_end_token_id").unwrap_or(154_831),
            image: head.id("image_token_id").unwrap_or(154_854),
            video_start: head.id("video_start_token_id").unwrap_or(154_832),
            video_end: head.id("video_end_token_id").unwrap_or(154_833),
            video: head.id("video_token_id").unwrap_or(154_855),
        },
        eos_ids: eos(head, text, generation, findings, vocab_size),
        pad_id: text
            .id("pad_token_id")
            .or_else(|| head.id("pad_token_id"))
            .or(Some(154_820))
            .filter(|id| (*id as usize) < vocab_size),
        quantization: head.object("quantization_config").or_else(|| text.object("quantization_config")).map(
            |map| {
                let path = "quantization_config";
                quantization(Fields::new(map, path, findings))
            },
        ),
        layers,
        warnings: Vec::new(),
    };
    if config.vision.is_some() {
        media_inside(head, &config);
    }
    config
}

/// Checks `model_type` and `architectures`; returns the model type.
fn architecture(head: Fields, findings: &Findings) -> String {
    let model_type = head.get("model_type").and_then(Value::as_str);
    let known = |name: &str| matches!(name, "glm5_next" | "glm5_next_text");
    if !model_type.is_some_and(known) {
        head.refuse("model_type", "\"glm5_next\" or \"glm5_next_text\"");
    }
    for name in head.strings("architectures").unwrap_or_default() {
        if !name.starts_with("Glm5Next") {
            findings.problem("architectures", &show(&json!(name)), "\"Glm5NextForConditionalGeneration\"");
        }
    }
    model_type.unwrap_or_default().to_owned()
}

/// Fields of the text model for which this engine computes one value only.
fn text_only_values(text: Fields) {
    if !text.is_top() && text.get("model_type").is_some() {
        let known = ["glm5_next_text", "glm5_next"];
        if !text.get("model_type").and_then(Value::as_str).is_some_and(|name| known.contains(&name)) {
            text.refuse("model_type", "\"glm5_next_text\"");
        }
    }
    for (name, value) in [
        ("qk_rope_head_dim", json!(0)),
        ("scoring_func", json!("sigmoid")),
        ("topk_method", json!("noaux_tc")),
        ("moe_router_dtype", json!("float32")),
        ("hidden_act", json!("silu")),
        ("attention_bias", json!(false)),
        ("index_kpool_compress", json!(true)),
        ("index_kpool_always_select_tail", json!(true)),
        ("mla_use_nope", json!(true)),
        ("mhc", json!(true)),
    ] {
        text.only(name, &value);
    }
}

fn safe_gate(linear: &Fields) -> bool {
    linear.get("safe_gate").and_then(Value::as_bool) != Some(false)
}

fn kda(text: Fields, linear: Option<Fields>) -> KdaConfig {
    // linear_attn_config overrides the four linear_* fields, each under its own name.
    let size = |nested: &str, flat: &str, default, range: std::ops::RangeInclusive<usize>| match linear {
        Some(linear) if linear.get(nested).is_some() => linear.size(nested, default, range),
        _ => text.size(flat, default, range),
    };
    let bound = |fields: Fields, name: &str| {
        if fields.is_null(name) {
            return Some(None);
        }
        fields.get(name)?;
        Some(Some(fields.number(name, -5.0, |v| v < 0.0, "a number below 0, or null") as f32))
    };
    KdaConfig {
        heads: size("num_heads", "linear_num_heads", 64, SMALL),
        head_dim: size("head_dim", "linear_head_dim", 128, SMALL),
        taps: size("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 2..=64),
        // As transformers has it: beside `linear_attn_config`, no bound takes `safe_gate: false` as well.
        lower_bound: linear
            .and_then(|linear| bound(linear, "gate_lower_bound"))
            .or_else(|| bound(text, "linear_lower_bound"))
            .unwrap_or(Some(-5.0))
            .or_else(|| linear.filter(safe_gate).map(|_| -5.0)),
    }
}

fn mla(text: Fields) -> MlaConfig {
    let heads = text.size("num_attention_heads", 64, SMALL);
    let kv_heads = text.size_opt("num_key_value_heads", SMALL);
    if kv_heads.is_some_and(|kv_heads| kv_heads != heads) {
        text.refuse("num_key_value_heads", format!("{heads}, as num_attention_heads"));
    }
    if text.is_null("q_lora_rank") {
        text.refuse(
            "q_lora_rank",
            "a whole number: queries without the low-rank step are another architecture",
        );
    }
    MlaConfig {
        heads,
        q_rank: text.size("q_lora_rank", 1536, 1..=1 << 16),
        kv_rank: text.size("kv_lora_rank", 512, 1..=1 << 16),
        key_dim: text.size("qk_nope_head_dim", 256, SMALL),
        value_dim: text.size("v_head_dim", 256, SMALL),
    }
}

fn index(text: Fields) -> IndexConfig {
    let topk = text.size("index_topk", 2048, 1..=1 << 20);
    let pool = text.size_warned("index_kpool", 16, 4, 1..=1024);
    if !topk.is_multiple_of(pool) {
        text.refuse("index_topk", format!("a multiple of index_kpool, which is {pool}"));
    }
    IndexConfig {
        topk,
        pool,
        heads: text.size("index_n_heads", 32, SMALL),
        head_dim: text.size("index_head_dim", 128, SMALL),
    }
}

fn moe(text: Fields, sparse_layers: usize) -> MoeConfig {
    let moe = MoeConfig {
        experts: text.size("n_routed_experts", 288, 1..=16_384),
        per_token: text.size("num_experts_per_tok", 8, 1..=256),
        shared: text.size("n_shared_experts", 1, 1..=64),
        width: text.size("moe_intermediate_size", 2048, WIDTH),
        scale: text.number("routed_scaling_factor", 2.5, |v| v > 0.0, "a number above 0") as f32,
        normalize: text.flag("norm_topk_prob", true),
        groups: text.size("n_group", 1, 1..=1024),
        groups_kept: text.size("topk_group", 1, 1..=1024),
    };
    if sparse_layers == 0 {
        return moe;
    }
    if moe.experts.saturating_mul(sparse_layers) > MAX_EXPERTS {
        text.refuse(
            "n_routed_experts",
            format!("at most {} with {sparse_layers} sparse layers", MAX_EXPERTS / sparse_layers),
        );
    }
    if moe.per_token > moe.experts {
        text.refuse("num_experts_per_tok", format!("at most n_routed_experts, which is {}", moe.experts));
    }
    if moe.groups_kept > moe.groups {
        text.refuse("topk_group", format!("at most n_group, which is {}", moe.groups));
    }
    if moe.groups > 1 {
        let size = moe.experts / moe.groups;
        // A group's score is the sum of its two best experts.
        if !moe.experts.is_multiple_of(moe.groups) || size < 2 {
            let experts = moe.experts;
            text.refuse(
                "n_group",
                format!("a divisor of n_routed_experts = {experts} with at least 2 experts a group"),
            );
        } else if moe.per_token > size * moe.groups_kept {
            text.refuse(
                "num_experts_per_tok",
                format!("at most {}, the experts of topk_group groups", size * moe.groups_kept),
            );
        }
    }
    moe
}

fn epsilon(fields: Fields) -> f32 {
    fields.number("rms_norm_eps", 1e-5, |v| v > 0.0, "a number above 0") as f32
}

fn clamp(fields: Fields) -> f32 {
    if fields.is_null("swiglu_limit") {
        fields.refuse("swiglu_limit", "a number above 0");
    }
    fields.number("swiglu_limit", 10.0, |v| v > 0.0, "a number above 0") as f32
}

fn vision(fields: Fields, hidden: usize) -> VisionConfig {
    fields.only("attention_bias", &json!(true));
    fields.only("hidden_act", &json!("silu"));
    // The tower has no learned position table, so image_size decides nothing; its absence is still not silent.
    fields.size_warned("image_size", 336, 448, 1..=1 << 16);
    let theta = match fields.get("rope_parameters").and_then(Value::as_object) {
        Some(map) => {
            let rope = Fields::new(map, "vision_config.rope_parameters", fields.findings());
            rope.only("rope_type", &json!("default"));
            rope.number("rope_theta", 10_000.0, |v| v > 0.0, "a number above 0")
        }
        None => fields.number("rope_theta", 10_000.0, |v| v > 0.0, "a number above 0"),
    };
    let config = VisionConfig {
        depth: fields.size("depth", 24, 1..=512),
        hidden_size: fields.size("hidden_size", 1024, 1..=1 << 16),
        heads: fields.size("num_heads", 16, SMALL),
        width: fields.size("intermediate_size", 4096, WIDTH),
        channels: fields.size("in_channels", 3, 3..=3),
        patch: fields.size("patch_size", 14, 1..=64),
        temporal_patch: fields.size("temporal_patch_size", 2, 1..=8),
        merge: fields.size("spatial_merge_size", 2, 1..=8),
        out_hidden_size: fields.size_warned("out_hidden_size", 1536, 4096, 1..=1 << 16),
        projection_width: fields.size("projection_intermediate_size", 10_240, WIDTH),
        rope_theta: theta,
        rms_norm_eps: epsilon(fields),
        swiglu_limit: clamp(fields),
    };
    if !config.hidden_size.is_multiple_of(config.heads) || !config.head_dim().is_multiple_of(4) {
        fields.refuse(
            "hidden_size",
            format!(
                "num_heads = {} times a multiple of 4 (rows and columns turn half a head each)",
                config.heads
            ),
        );
    }
    if config.out_hidden_size != hidden {
        fields.refuse("out_hidden_size", format!("{hidden}, the hidden_size of the text model"));
    }
    config
}

/// End-of-text ids of all files, each once, those of `config.json` first.
fn eos(
    head: Fields,
    text: Fields,
    generation: Option<&Map<String, Value>>,
    findings: &Findings,
    vocab_size: usize,
) -> Vec<u32> {
    let mut sources = vec![text, head];
    if let Some(map) = generation {
        sources.push(Fields::new(map, "generation_config.json", findings));
    }
    let mut ids: Vec<u32> = Vec::new();
    for fields in sources {
        for id in fields.ids("eos_token_id") {
            if id as usize >= vocab_size {
                let path = fields.path("eos_token_id");
                findings.problem(
                    path,
                    &id.to_string(),
                    format!("ids below vocab_size, which is {vocab_size}"),
                );
            } else if !ids.contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

/// A vision tower needs its ids inside the vocabulary.
fn media_inside(head: Fields, config: &ModelConfig) {
    let ids = config.media;
    for (name, id) in [
        ("image_start_token_id", ids.image_start),
        ("image_end_token_id", ids.image_end),
        ("image_token_id", ids.image),
        ("video_start_token_id", ids.video_start),
        ("video_end_token_id", ids.video_end),
        ("video_token_id", ids.video),
    ] {
        if id as usize >= config.vocab_size {
            head.refuse(
                name,
                format!("an id below vocab_size, which is {} (default {id})", config.vocab_size),
            );
        }
    }
}

fn quantization(fields: Fields) -> Quantization {
    let method = fields.get("quant_method").and_then(Value::as_str);
    if method.is_none() {
        fields.refuse("quant_method", "the name of a storage format, such as \"fp8\"");
    }
    let mut block = [128, 128];
    if method == Some("fp8") {
        fields.only("fmt", &json!("e4m3"));
        if let Some(list) = fields.sizes("weight_block_size") {
            match list[..] {
                [rows, cols] if SMALL.contains(&rows) && SMALL.contains(&cols) => block = [rows, cols],
                _ => fields.refuse("weight_block_size", "two whole numbers from 1 to 4096"),
            }
        }
    }
    Quantization { method: method.unwrap_or_default().to_owned(), block }
}
