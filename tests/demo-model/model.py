"""A differentiable glm5_next for training.  Everything per token works on flat rows [B L, ...]; only attention and
KDA look at the sequences.  Sequences start at position 0 and are padded on the right, so no padding mask is needed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import kernels as k
from weights import LM, VIS


class Model:
    """`w` maps parameter names (weights.py) to float32 tensors; matrices are used in `dtype`."""

    def __init__(self, cfg: dict, w: dict, dtype=torch.float32, compiled=False):
        self.t, self.v, self.w, self.dtype = cfg["text_config"], cfg["vision_config"], w, dtype
        self.image_id = cfg["image_token_id"]
        self.eps = self.t["rms_norm_eps"]
        self.cast: dict = {}
        self.loads: dict = {}
        self.index_loss = 0.0
        self.select = True                       # apply the indexer's choice
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        for name in ("rms", "swiglu", "hc_in", "hc_out", "short_conv", "kda_out", "route", "expert_act", "cross_entropy"):
            setattr(self, name, wrap(getattr(k, name)))

    def fresh(self) -> None:
        """Forget the cast copies and the counters: call before every step."""
        self.cast, self.loads, self.index_loss = {}, {}, 0.0

    def m(self, name: str):
        """A matrix in the working dtype."""
        if name not in self.cast:
            self.cast[name] = self.w[name].to(self.dtype)
        return self.cast[name]

    def lin(self, x, name: str):
        return F.linear(x, self.m(name + ".weight"))

    # ------------------------------------------------------------------ blocks
    def kda(self, u, p, B, L, place):
        la = self.t["linear_attn_config"]
        H, K = la["num_heads"], la["head_dim"]
        q, key, v = (self.short_conv(self.lin(u, p + c + "_proj"), self.w[p + c + "_conv1d.weight"][:, 0], place)
                     .view(B, L, H, K) for c in "qkv")
        f = self.lin(self.lin(u, p + "f_a_proj"), p + "f_b_proj").view(B, L, H, K)
        b = self.lin(u, p + "b_proj").view(B, L, H)
        o = k.kda(q, key, v, f, b, self.w[p + "A_log"], self.w[p + "dt_bias"], la["gate_lower_bound"])
        gate = self.lin(self.lin(u, p + "g_a_proj"), p + "g_b_proj").view(B * L, H, K)
        y = self.kda_out(o.reshape(B * L, H, K), gate, self.w[p + "o_norm.weight"], self.eps)
        return self.lin(y.reshape(B * L, H * K), p + "o_proj")

    def latent(self, u, p, B, L):
        """q [B, L, H, d], k, v and the query residual that the indexer reads."""
        t = self.t
        H, d, vd = t["num_attention_heads"], t["qk_nope_head_dim"], t["v_head_dim"]
        a = self.rms(self.lin(u, p + "q_a_proj"), self.w[p + "q_a_layernorm.weight"], self.eps)
        c = self.rms(self.lin(u, p + "kv_a_proj_with_mqa"), self.w[p + "kv_a_layernorm.weight"], self.eps)
        q = self.lin(a, p + "q_b_proj").view(B, L, H, d)
        kv = self.lin(c, p + "kv_b_proj").view(B, L, H, d + vd)
        return q, kv[..., :d], kv[..., d:], a

    def choose(self, u, a, q, key, p, B, L):
        """The key mask [B, 1, L, L], or None for all earlier keys.

        While training, a quarter of the sequences add the indexer's distance from the attention to `index_loss`.
        """
        t, p = self.t, p + "indexer."
        kp, pools = t["index_kpool"], L // t["index_kpool"]
        if pools == 0:
            return None
        budget = t["index_topk"] // kp
        row = torch.arange(L, device=u.device)[:, None]
        complete = torch.arange(pools, device=u.device)[None] < (row + 1) // kp

        def scores(n):
            u_, a_ = u.detach()[:n * L], a.detach()[:n * L]
            s = index_scores(
                self.lin(a_, p + "wq_b").view(n, L, t["index_n_heads"], t["index_head_dim"]), self.lin(u_, p + "wk"),
                self.lin(u_, p + "weights_proj"), F.linear(u_, self.m(p + "index_kpool_compress_gate")),
                self.w[p + "index_kpool_compress_ape"], self.w[p + "k_norm.weight"], self.w[p + "k_norm.bias"], L, kp)
            return s.masked_fill(~complete, -1e30)

        if torch.is_grad_enabled():
            n = max(1, B // 4)
            self.index_loss = self.index_loss + index_distance(scores(n), complete, q[:n].detach(), key[:n].detach(), kp)
        if not self.select or pools <= budget:
            return None
        with torch.no_grad():
            score = scores(B)
            keep = (score >= score.topk(budget, dim=-1).values[..., -1:]) & complete
            keep = F.pad(keep.repeat_interleave(kp, -1), (0, L - pools * kp))
            at = torch.arange(L, device=u.device)[None]
            return ((keep | (at >= (row + 1) // kp * kp)) & (at <= row))[:, None]

    def mla(self, u, p, B, L):
        q, key, v, a = self.latent(u, p, B, L)
        mask = self.choose(u, a, q, key, p, B, L)
        y = attend(q, key, v, mask)
        return self.lin(y.reshape(B * L, -1), p + "o_proj"), (key, v, mask)

    def mlp(self, u, p):
        g, up = self.lin(u, p + "gate_proj"), self.lin(u, p + "up_proj")
        return self.lin(self.swiglu(g, up, self.t["swiglu_limit"]), p + "down_proj")

    def moe(self, u, p):
        """All experts on all rows, the unchosen ones with weight zero: wasteful, but three plain products."""
        t = self.t
        weight, load = self.route(u, self.w[p + "gate.weight"], self.w[p + "gate.e_score_correction_bias"],
                                  t["num_experts_per_tok"], t["routed_scaling_factor"])
        self.loads[p] = self.loads.get(p, 0) + load.detach()
        g = F.linear(u, self.m(p + "experts.gate_proj").flatten(0, 1))
        up = F.linear(u, self.m(p + "experts.up_proj").flatten(0, 1))
        down = self.m(p + "experts.down_proj").permute(1, 0, 2).flatten(1)
        y = F.linear(self.expert_act(g, up, weight, t["swiglu_limit"]), down)
        return y + self.mlp(u, p + "shared_experts.")

    # ------------------------------------------------------------------ the whole
    def embed(self, ids):
        return F.embedding(ids, self.m(LM + "embed_tokens.weight"))

    def run(self, ids, images=None):
        """ids [B, L] -> final normed rows [B, L, D]; `images` are the rows for the image placeholders, in order."""
        t, (B, L) = self.t, ids.shape
        e = self.embed(ids).view(B * L, -1)
        if images is not None:
            e = e.masked_scatter((ids.view(-1, 1) == self.image_id), images.to(e.dtype))
        x = e[:, None, :].expand(-1, t["hc_mult"], -1).contiguous()
        place = torch.arange(L, device=ids.device).repeat(B)[:, None]
        for i in range(t["num_hidden_layers"]):
            p = f"{LM}layers.{i}."
            u, post, comb = self.enter(x, p, "attn", "input_layernorm")
            if t["layer_types"][i] == "linear_attention":
                y = self.kda(u, p + "self_attn.", B, L, place)
            else:
                y, _ = self.mla(u, p + "self_attn.", B, L)
            x = self.hc_out(x, y, post, comb)
            u, post, comb = self.enter(x, p, "ffn", "post_attention_layernorm")
            y = self.moe(u, p + "mlp.") if t["mlp_layer_types"][i] == "sparse" else self.mlp(u, p + "mlp.")
            x = self.hc_out(x, y, post, comb)
        return self.rms(x.float().mean(1).to(x.dtype), self.w[LM + "norm.weight"], self.eps).view(B, L, -1)

    def enter(self, x, p, site, norm):
        t, w = self.t, self.w
        u, post, comb = self.hc_in(x, w[p + f"hc_{site}_fn"], w[p + f"hc_{site}_scale"], w[p + f"hc_{site}_base"],
                                   w[p + norm + ".weight"], self.eps, t["hc_eps"])
        return u, post, k.sinkhorn(comb, t["hc_sinkhorn_iters"], t["hc_eps"])

    def drafts(self, ids, rows, depth: int):
        """Chained MTP rows m_1 ... m_depth, each [B, L, D]; m_n at row i predicts token i + n + 1.

        Step n reads the true token i + n.  It attends to the rows of the first step up to i, by that step's own key
        choice, and to its own chain: as drafting does, where those later rows are appended and then thrown away.
        """
        (B, L), p = ids.shape, f"{LM}layers.{self.t['num_hidden_layers']}."
        e = self.embed(ids)
        h, out, chain = rows, [], []
        first = None
        for n in range(1, depth + 1):
            nxt = F.pad(e[:, n:], (0, 0, 0, n))
            if n == 1:
                nxt = torch.cat([torch.zeros_like(nxt[:, :1]), nxt[:, 1:]], 1)
            x = torch.cat([self.rms(nxt.reshape(B * L, -1), self.w[p + "enorm.weight"], self.eps),
                           self.rms(h.reshape(B * L, -1), self.w[p + "hnorm.weight"], self.eps)], -1)
            x = self.lin(x, p + "eh_proj")
            u = self.rms(x, self.w[p + "input_layernorm.weight"], self.eps)
            if n == 1:
                y, first = self.mla(u, p + "self_attn.", B, L)
            else:
                q, key, v, _ = self.latent(u, p + "self_attn.", B, L)
                chain.append((key, v))
                y = self.lin(attend_chain(q, *first, chain).reshape(B * L, -1), p + "self_attn.o_proj")
            x = x + y
            x = x + self.moe(self.rms(x, self.w[p + "post_attention_layernorm.weight"], self.eps), p + "mlp.")
            h = self.rms(x, self.w[p + "shared_head.norm.weight"], self.eps).view(B, L, -1)
            out.append(h)
        return out

    # ------------------------------------------------------------------ vision
    def vision(self, pixels, rows: int, columns: int):
        """pixels [B, rows columns, 1176] in merge-block order -> [B, rows columns / 4, D]."""
        v, g = self.v, lambda n: self.m(VIS + n)
        B, P, _ = pixels.shape
        heads, width = v["num_heads"], v["hidden_size"]
        dim, limit, eps = width // heads, v["swiglu_limit"], v["rms_norm_eps"]
        at = torch.tensor([(br + r, bc + c) for br in range(0, rows, 2) for bc in range(0, columns, 2)
                           for r in range(2) for c in range(2)], device=pixels.device, dtype=torch.float32)
        freq = 10000.0 ** -(torch.arange(dim // 4, device=pixels.device) * 4.0 / dim)
        angle = torch.cat([at[:, :1] * freq, at[:, 1:] * freq], -1)
        cos, sin = angle.cos()[None, None], angle.sin()[None, None]

        def turn(z):
            a, b = z.float().chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(z.dtype)

        x = F.linear(pixels.to(self.dtype), g("patch_embed.proj.weight").flatten(1), g("patch_embed.proj.bias"))
        for b in range(v["depth"]):
            n = f"blocks.{b}."
            y = k.rms(x, g(n + "norm1.weight"), eps)
            y = F.linear(y, g(n + "attn.qkv.weight"), g(n + "attn.qkv.bias")).view(B, P, 3, heads, dim)
            q, key, val = y.permute(2, 0, 3, 1, 4)
            q, key = turn(k.rms(q, g(n + "attn.q_norm.weight"), eps)), turn(k.rms(key, g(n + "attn.k_norm.weight"), eps))
            y = F.scaled_dot_product_attention(q, key, val).transpose(1, 2).reshape(B, P, width)
            x = x + F.linear(y, g(n + "attn.proj.weight"), g(n + "attn.proj.bias"))
            y = k.rms(x, g(n + "norm2.weight"), eps)
            y = k.swiglu(F.linear(y, g(n + "mlp.gate_proj.weight"), g(n + "mlp.gate_proj.bias")),
                         F.linear(y, g(n + "mlp.up_proj.weight"), g(n + "mlp.up_proj.bias")), limit)
            x = x + F.linear(y, g(n + "mlp.down_proj.weight"), g(n + "mlp.down_proj.bias"))
        x = k.rms(x, g("post_layernorm.weight"), eps)
        x = x.view(B, P // 4, 4, width).transpose(2, 3).reshape(B, P // 4, 4 * width)
        x = F.linear(F.linear(x, g("downsample.weight").flatten(1), g("downsample.bias")), g("merger.proj.weight"))
        x = F.gelu(F.layer_norm(x.float(), (x.shape[-1],), self.w[VIS + "merger.post_projection_norm.weight"],
                                self.w[VIS + "merger.post_projection_norm.bias"], 1e-5)).to(self.dtype)
        x = k.swiglu(F.linear(x, g("merger.gate_proj.weight")), F.linear(x, g("merger.up_proj.weight")), limit)
        return F.linear(x, g("merger.down_proj.weight"))


# ---------------------------------------------------------------------------------------------- attention
def attend(q, key, v, mask):
    """q, key, v [B, L, H, d] -> [B, L, H, d]"""
    q, key, v = q.transpose(1, 2), key.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, key, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


def earlier(L: int, device):
    return torch.ones(L, L, dtype=torch.bool, device=device).tril()


def attend_chain(q, key, v, mask, chain):
    """As `attend`, with one more key per row from each step of the draft chain."""
    scale, mask = q.shape[-1] ** -0.5, earlier(q.shape[1], q.device) if mask is None else mask
    s = (torch.einsum("blhd,bmhd->bhlm", q, key).float() * scale).masked_fill(~mask, -1e30)
    own = [(q.float() * ck.float()).sum(-1).transpose(1, 2)[..., None] * scale for ck, _ in chain]
    L = key.shape[1]
    prob = torch.softmax(torch.cat([s] + own, -1), -1).to(v.dtype)
    out = torch.einsum("bhlm,bmhd->blhd", prob[..., :L], v)
    for n, (_, cv) in enumerate(chain):
        out = out + prob[..., L + n].transpose(1, 2)[..., None] * cv
    return out


def index_scores(q, key, weight, gate, ape, norm, bias, L: int, kp: int):
    """q [B, L, HI, dI]; key, gate [B L, dI]; weight [B L, HI] -> scores [B, L, pools] in float32."""
    B, _, heads, dim = q.shape
    pools = L // kp
    key = F.layer_norm(key.float(), (dim,), norm, bias, 1e-6).view(B, L, dim)[:, :pools * kp].reshape(B, pools, kp, dim)
    share = torch.softmax(gate.float().view(B, L, dim)[:, :pools * kp].reshape(B, pools, kp, dim) + ape, 2)
    pool = (share * key).sum(2).to(q.dtype)
    dots = torch.relu(torch.einsum("blhd,bpd->blhp", q, pool).float() * dim ** -0.5)
    return (weight.float().view(B, L, heads, 1) * heads ** -0.5 * dots).sum(2)


def index_distance(scores, complete, q, key, kp: int):
    """Cross entropy of softmax(scores) against where the attention heads look, pool by pool."""
    with torch.no_grad():
        s = torch.einsum("blhd,bmhd->bhlm", q, key).float() * q.shape[-1] ** -0.5
        look = torch.softmax(s.masked_fill(~earlier(s.shape[-1], s.device), -1e30), -1).mean(1)
        pools = scores.shape[-1]
        look = look[..., :pools * kp].unflatten(-1, (pools, kp)).sum(-1) * complete
        look = look / (look.sum(-1, keepdim=True) + 1e-9)
    loss = -(look * torch.log_softmax(scores, -1)).sum(-1)
    return loss[:, kp - 1:].mean()
