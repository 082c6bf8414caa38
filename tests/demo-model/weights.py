"""The parameters by their published names: first values, and saving in the published layout and dtypes.

While training, the experts of a layer are three stacked tensors (`mlp.experts.gate_proj` and so on); everything else
already has its published name and shape.
"""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import load_file, save_file

LM = "model.language_model."
VIS = "model.visual."
F32 = ("A_log", "dt_bias", "hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale", "e_score_correction_bias")
PART_BYTES = 15_500_000


def _mla(put, t, p):
    D, H, Q, R = t["hidden_size"], t["num_attention_heads"], t["q_lora_rank"], t["kv_lora_rank"]
    nope, vd = t["qk_nope_head_dim"], t["v_head_dim"]
    put(p + "q_a_proj.weight", (Q, D))
    put(p + "q_a_layernorm.weight", (Q,))
    put(p + "q_b_proj.weight", (H * nope, Q))
    put(p + "kv_a_proj_with_mqa.weight", (R, D))
    put(p + "kv_a_layernorm.weight", (R,))
    put(p + "kv_b_proj.weight", (H * (nope + vd), R))
    put(p + "o_proj.weight", (D, H * vd), gain=0.3)
    HI, dI, kp = t["index_n_heads"], t["index_head_dim"], t["index_kpool"]
    p += "indexer."
    put(p + "wq_b.weight", (HI * dI, Q))
    put(p + "wk.weight", (dI, D))
    put(p + "k_norm.weight", (dI,))
    put(p + "k_norm.bias", (dI,), fill=0.0)
    put(p + "weights_proj.weight", (HI, D))
    put(p + "index_kpool_compress_ape", (kp, dI), std=0.1)
    put(p + "index_kpool_compress_gate", (dI, D))


def _kda(put, t, p):
    la = t["linear_attn_config"]
    D, H, K, taps = t["hidden_size"], la["num_heads"], la["head_dim"], la["short_conv_kernel_size"]
    for c in "qkv":
        put(p + f"{c}_proj.weight", (H * K, D))
        put(p + f"{c}_conv1d.weight", (H * K, 1, taps), std=0.3)
    put(p + "f_a_proj.weight", (K, D), gain=0.5)
    put(p + "f_b_proj.weight", (H * K, K), gain=0.5)
    put(p + "b_proj.weight", (H, D), gain=0.5)
    put(p + "g_a_proj.weight", (K, D))
    put(p + "g_b_proj.weight", (H * K, K))
    put(p + "A_log", (H,), fill=0.0)
    put(p + "dt_bias", (H * K,), decay=True)
    put(p + "o_norm.weight", (K,))
    put(p + "o_proj.weight", (D, H * K), gain=0.3)


def _ffn(put, t, p, sparse):
    D, W = t["hidden_size"], t["moe_intermediate_size"]
    if not sparse:
        for n in ("gate", "up"):
            put(p + n + "_proj.weight", (t["intermediate_size"], D))
        put(p + "down_proj.weight", (D, t["intermediate_size"]), gain=0.3)
        return
    E = t["n_routed_experts"]
    put(p + "gate.weight", (E, D), gain=0.5)
    put(p + "gate.e_score_correction_bias", (E,), fill=0.0)
    for n in ("gate", "up"):
        put(p + f"experts.{n}_proj", (E, W, D))
        put(p + f"shared_experts.{n}_proj.weight", (W, D))
    put(p + "experts.down_proj", (E, D, W), gain=0.3)
    put(p + "shared_experts.down_proj.weight", (D, W), gain=0.3)


def _vision(put, v):
    W, I, O, P = v["hidden_size"], v["intermediate_size"], v["out_hidden_size"], v["projection_intermediate_size"]
    ps, ts, m, C = v["patch_size"], v["temporal_patch_size"], v["spatial_merge_size"], v["in_channels"]
    put(VIS + "patch_embed.proj.weight", (W, C, ts, ps, ps))
    put(VIS + "patch_embed.proj.bias", (W,), fill=0.0)
    for b in range(v["depth"]):
        n = f"{VIS}blocks.{b}."
        for name, size in (("norm1", W), ("norm2", W), ("attn.q_norm", W // v["num_heads"]), ("attn.k_norm", W // v["num_heads"])):
            put(n + name + ".weight", (size,))
        for name, rows, cols, gain in (("attn.qkv", 3 * W, W, 1.0), ("attn.proj", W, W, 0.3), ("mlp.gate_proj", I, W, 1.0),
                                       ("mlp.up_proj", I, W, 1.0), ("mlp.down_proj", W, I, 0.3)):
            put(n + name + ".weight", (rows, cols), gain=gain)
            put(n + name + ".bias", (rows,), fill=0.0)
    put(VIS + "post_layernorm.weight", (W,))
    put(VIS + "downsample.weight", (O, W, m, m))
    put(VIS + "downsample.bias", (O,), fill=0.0)
    put(VIS + "merger.proj.weight", (O, O))
    put(VIS + "merger.post_projection_norm.weight", (O,))
    put(VIS + "merger.post_projection_norm.bias", (O,), fill=0.0)
    for n in ("gate", "up"):
        put(VIS + f"merger.{n}_proj.weight", (P, O))
    put(VIS + "merger.down_proj.weight", (O, P))


def first_values(cfg: dict, seed: int) -> dict:
    """All parameters in float32, drawn from a seed."""
    t, v = cfg["text_config"], cfg["vision_config"]
    gen = torch.Generator().manual_seed(seed)
    w: dict = {}

    def put(name, shape, gain=1.0, std=None, fill=None, decay=False):
        if decay:                                   # per-step decays from nearly none to strong, evenly in the exponent
            share = 10 ** (-4 + 3.5 * torch.rand(shape, generator=gen))
            w[name] = torch.log(share / (1 - share))
        elif fill is not None:
            w[name] = torch.full(shape, fill)
        elif len(shape) == 1:
            w[name] = torch.ones(shape)
        else:
            fan = shape[-1] if len(shape) < 4 else math.prod(shape[1:])
            w[name] = torch.randn(shape, generator=gen) * (std if std is not None else gain / math.sqrt(fan))

    D, N = t["hidden_size"], t["hc_mult"]
    put(LM + "embed_tokens.weight", (t["vocab_size"], D), std=0.5)
    put(LM + "norm.weight", (D,))
    put("lm_head.weight", (t["vocab_size"], D), std=0.02)
    for i in range(t["num_hidden_layers"]):
        p = f"{LM}layers.{i}."
        for site in ("attn", "ffn"):
            put(p + f"hc_{site}_fn", ((2 + N) * N, N * D), gain=0.5)
            base = torch.randn((2 + N) * N, generator=gen) * 0.3
            base[:N] -= 1.1
            base[2 * N:] += 3.0 * torch.eye(N).flatten()
            w[p + f"hc_{site}_base"] = base
            put(p + f"hc_{site}_scale", (3,), fill=0.3)
        put(p + "input_layernorm.weight", (D,))
        put(p + "post_attention_layernorm.weight", (D,))
        (_kda if t["layer_types"][i] == "linear_attention" else _mla)(put, t, p + "self_attn.")
        _ffn(put, t, p + "mlp.", t["mlp_layer_types"][i] == "sparse")
    p = f"{LM}layers.{t['num_hidden_layers']}."
    for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"):
        put(p + name + ".weight", (D,))
    put(p + "eh_proj.weight", (D, 2 * D))
    _mla(put, t, p + "self_attn.")
    _ffn(put, t, p + "mlp.", True)
    _vision(put, v)
    return w


def published(w: dict) -> dict:
    """Experts unstacked, and the published dtypes."""
    out = {}
    for name, x in w.items():
        x = x.detach().float().cpu()
        if ".experts." in name:
            head, tail = name.split(".experts.")
            for e in range(x.shape[0]):
                out[f"{head}.experts.{e}.{tail}.weight"] = x[e].to(torch.bfloat16).contiguous()
        else:
            out[name] = (x if name.endswith(F32) else x.to(torch.bfloat16)).contiguous()
    return out


def save(w: dict, out) -> int:
    """Writes shards of less than 16 MB and their index; returns the bytes."""
    tensors, shards, size = published(w), [{}], 0
    for name, x in tensors.items():
        n = x.numel() * x.element_size()
        if size + n > PART_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = x
        size += n
    where = {}
    for old in out.glob("model-*.safetensors"):
        old.unlink()
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(out / file), metadata={"format": "pt"})
        (out / file).chmod(0o644)
        where.update(dict.fromkeys(shard, file))
    total = sum(x.numel() * x.element_size() for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return total


def load(folder, experts: int) -> dict:
    """A saved checkpoint back in float32 with stacked experts."""
    flat: dict = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        flat.update(load_file(str(file)))
    out, stacks = {}, {}
    for name, x in flat.items():
        if ".experts." in name:
            head, tail = name.split(".experts.")
            e, tail = tail.split(".", 1)
            stacks.setdefault(f"{head}.experts.{tail.removesuffix('.weight')}", [None] * experts)[int(e)] = x.float()
        else:
            out[name] = x.float()
    out.update({k: torch.stack(v) for k, v in stacks.items()})
    return out
