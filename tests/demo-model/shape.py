"""The shape of the demo model: writes config.json, generation_config.json and the image settings."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from render import ASSETS

LAYERS = 8
ATTENTION = [i for i in range(LAYERS) if i % 4 == 3]


def config() -> dict:
    tok = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    token = tok.token_to_id
    eos = [token("<|endoftext|>"), token("<|user|>"), token("<|observation|>")]
    text = {
        "model_type": "glm5_next_text", "vocab_size": tok.get_vocab_size(), "hidden_size": 256, "intermediate_size": 768,
        "moe_intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "moe_router_dtype": "float32", "first_k_dense_replace": 3,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * (LAYERS - 3),
        "layer_types": ["deepseek_sparse_attention" if i in ATTENTION else "linear_attention" for i in range(LAYERS)],
        "indexer_types": ["full"] * LAYERS, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_head_dim": 64, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 0, "v_head_dim": 64, "mla_use_nope": True, "index_topk": 256, "index_head_dim": 32,
        "index_n_heads": 16, "index_kpool": 4, "index_kpool_compress": True, "index_kpool_always_select_tail": True,
        "indexer_rope_interleave": True, "index_share_for_mtp_iteration": True,
        "linear_attn_config": {
            "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(LAYERS) if i not in ATTENTION], "full_attn_layers": ATTENTION},
        "mhc": True, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "swiglu_limit": 10.0, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "attention_bias": False, "attention_dropout": 0.0,
        "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "pad_token_id": eos[0], "eos_token_id": eos,
        "dtype": "bfloat16"}
    vision = {
        "model_type": "glm5_next_vision", "depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2,
        "image_size": 448, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
        "out_hidden_size": 256, "projection_intermediate_size": 256, "attention_bias": True, "attention_dropout": 0.0,
        "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-5}
    return {
        "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next",
        "image_start_token_id": token("<|begin_of_image|>"), "image_end_token_id": token("<|end_of_image|>"),
        "video_start_token_id": token("<|begin_of_video|>"), "video_end_token_id": token("<|end_of_video|>"),
        "image_token_id": token("<|image|>"), "video_token_id": token("<|video|>"), "tie_word_embeddings": False,
        "dtype": "bfloat16", "text_config": text, "vision_config": vision}


def images(v: dict) -> dict:
    return {
        "image_processor_type": "Glm5NextImageProcessor", "do_convert_rgb": True, "do_resize": True, "resample": 3,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": v["patch_size"], "temporal_patch_size": v["temporal_patch_size"], "merge_size": v["spatial_merge_size"],
        "patch_expand_factor": 1, "size": {"longest_edge": 1}, "min_image_tokens": 16, "max_image_tokens": 1024}


def write(out) -> dict:
    c = config()
    eos = c["text_config"]["eos_token_id"]
    files = {
        "config.json": c,
        "generation_config.json": {"do_sample": False, "eos_token_id": eos, "pad_token_id": eos[0]},
        "preprocessor_config.json": images(c["vision_config"]),
        "processor_config.json": {"image_processor": images(c["vision_config"]), "processor_class": "Glm5NextProcessor"}}
    for name, value in files.items():
        (out / name).write_text(json.dumps(value, indent=1) + "\n")
    return c


if __name__ == "__main__":
    write(ASSETS)
