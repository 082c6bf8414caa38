"""The two pieces that need more than plain PyTorch to be fast: Sinkhorn and the gated delta rule.

Each has a plain form, used on the CPU and to check the fast one.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:                                     # no GPU, no Triton: the plain forms remain
    triton = None


# ------------------------------------------------------------------------------------------------ Sinkhorn
def sinkhorn_plain(c, iters: int, eps: float):
    c = torch.softmax(c, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


if triton is not None:
    @triton.jit
    def _sinkhorn_forward(c_ptr, out_ptr, sums_ptr, rows, eps, STEPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
        """c [rows, N, N] after the softmax; sums [2 STEPS + 1, rows, N] keeps every divisor."""
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, N)
        ok = at[:, None, None] < rows
        cell = at[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
        line = at[:, None] * N + i[None, :]
        okl = at[:, None] < rows
        c = tl.load(c_ptr + cell, mask=ok, other=1.0)
        s = tl.sum(c, axis=1) + eps
        tl.store(sums_ptr + line, s, mask=okl)
        c = c / s[:, None, :]
        for k in range(STEPS):
            s = tl.sum(c, axis=2) + eps
            tl.store(sums_ptr + (2 * k + 1) * rows * N + line, s, mask=okl)
            c = c / s[:, :, None]
            s = tl.sum(c, axis=1) + eps
            tl.store(sums_ptr + (2 * k + 2) * rows * N + line, s, mask=okl)
            c = c / s[:, None, :]
        tl.store(out_ptr + cell, c, mask=ok)

    @triton.jit
    def _sinkhorn_backward(y_ptr, dy_ptr, dx_ptr, sums_ptr, rows, STEPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
        """Walks the divisions back: x = y s, dx = (dy - sum(dy y)) / s."""
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, N)
        ok = at[:, None, None] < rows
        cell = at[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
        line = at[:, None] * N + i[None, :]
        okl = at[:, None] < rows
        y = tl.load(y_ptr + cell, mask=ok, other=1.0)
        d = tl.load(dy_ptr + cell, mask=ok, other=0.0)
        for j in range(STEPS):
            k = STEPS - 1 - j
            s = tl.load(sums_ptr + (2 * k + 2) * rows * N + line, mask=okl, other=1.0)
            d = (d - tl.sum(d * y, axis=1)[:, None, :]) / s[:, None, :]
            y = y * s[:, None, :]
            s = tl.load(sums_ptr + (2 * k + 1) * rows * N + line, mask=okl, other=1.0)
            d = (d - tl.sum(d * y, axis=2)[:, :, None]) / s[:, :, None]
            y = y * s[:, :, None]
        s = tl.load(sums_ptr + line, mask=okl, other=1.0)
        d = (d - tl.sum(d * y, axis=1)[:, None, :]) / s[:, None, :]
        tl.store(dx_ptr + cell, d, mask=ok)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, c, iters, eps):
        rows, n, _ = c.shape
        c = c.contiguous()
        out = torch.empty_like(c)
        sums = torch.empty(2 * iters - 1, rows, n, device=c.device, dtype=c.dtype)
        _sinkhorn_forward[(triton.cdiv(rows, 128),)](c, out, sums, rows, eps, STEPS=iters - 1, N=n, BLOCK=128)
        ctx.save_for_backward(out, sums)
        ctx.iters = iters
        return out

    @staticmethod
    def backward(ctx, grad):
        out, sums = ctx.saved_tensors
        rows, n, _ = out.shape
        grad = grad.contiguous()
        dx = torch.empty_like(out)
        _sinkhorn_backward[(triton.cdiv(rows, 128),)](out, grad, dx, sums, rows, STEPS=ctx.iters - 1, N=n, BLOCK=128)
        return dx, None, None


@torch.compiler.disable
def sinkhorn_fast(c, iters: int, eps: float):
    return _Sinkhorn.apply(torch.softmax(c, -1) + eps, iters, eps)


def sinkhorn(c, iters: int, eps: float):
    return sinkhorn_fast(c, iters, eps) if c.is_cuda else sinkhorn_plain(c, iters, eps)


# ------------------------------------------------------------------------------------------------ gated delta rule
def kda_plain(q, k, v, f, b, a_log, dt_bias, bound: float):
    """q, k, v [B, L, H, K] after the convolution; f raw gate; b raw beta [B, L, H].  One step at a time."""
    B, L, H, K = q.shape
    q = q.float() * torch.rsqrt(q.float().square().sum(-1, keepdim=True) + 1e-6) * K ** -0.5
    k = k.float() * torch.rsqrt(k.float().square().sum(-1, keepdim=True) + 1e-6)
    g = bound * torch.sigmoid(a_log.exp()[:, None] * (f.float() + dt_bias.view(H, K)))
    beta, v = torch.sigmoid(b.float()), v.float()
    state, out = q.new_zeros(B, H, K, K), []
    for i in range(L):
        state = state * g[:, i].exp()[..., None]
        seen = torch.einsum("bhkv,bhk->bhv", state, k[:, i])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], beta[:, i, :, None] * (v[:, i] - seen))
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
    return torch.stack(out, 1)


def kda_chunked(q, k, v, f, b, a_log, dt_bias, bound: float, chunk: int = 16):
    """The same in chunks: inside a chunk by a triangular solve, between chunks through the state.  16 rows keep every
    exponential below e^80."""
    B, L, H, K = q.shape
    pad = -L % chunk

    def split(x):
        x = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, pad)).transpose(1, 2)
        return x.reshape(B, H, -1, chunk, *x.shape[3:])
    q, k, v = split(q), split(k), split(v)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * K ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g = split(bound * torch.sigmoid(a_log.exp()[:, None] * (f.float() + dt_bias.view(H, K)))).cumsum(-2)
    beta = split(torch.sigmoid(b.float()))[..., None]
    up, down, last = k * g.exp(), k * (-g).exp(), g[..., -1:, :]
    rows = (beta * (up @ down.mT)).tril(-1) + torch.eye(chunk, device=q.device)
    both = torch.linalg.solve_triangular(rows, beta * torch.cat([v, up], -1), upper=False, unitriangular=True)
    own, through = both[..., :K], both[..., K:]
    q = q * g.exp()
    seen, carry = (q @ down.mT).tril(), (k * (last - g).exp()).mT
    state, out = q.new_zeros(B, H, K, K), []
    for n in range(q.shape[2]):
        new = own[:, :, n] - through[:, :, n] @ state
        out.append(q[:, :, n] @ state + seen[:, :, n] @ new)
        state = state * last[:, :, n].exp().mT + carry[:, :, n] @ new
    return torch.stack(out, 2).reshape(B, H, -1, K)[:, :, :L].transpose(1, 2)


def first_choice(configs):
    """One launch setting instead of minutes of measuring: four warps, two stages, blocks of up to 64."""
    def cost(c):
        blocks = sum(abs(x - 64) for n, x in c.kwargs.items() if isinstance(x, int) and n.startswith("B"))
        return abs(c.num_warps - 4), abs(c.num_stages - 2), blocks
    return min(configs, key=cost)


@functools.cache
def chunk_kda():
    """flash-linear-attention's kernel, imported with its autotuners held to one setting each."""
    from triton.runtime import autotuner
    original = autotuner.Autotuner.__init__

    def init(self, fn, arg_names, configs, *rest, **named):
        original(self, fn, arg_names, [first_choice(configs)] if configs else configs, *rest, **named)
    autotuner.Autotuner.__init__ = init
    from fla.ops.kda import chunk_kda as kernel
    autotuner.Autotuner.__init__ = original
    return kernel


@torch.compiler.disable
def kda_fast(q, k, v, f, b, a_log, dt_bias, bound: float):
    """flash-linear-attention's chunked kernel with the gate, beta and the norms inside."""
    out, _ = chunk_kda()(
        q, k, v, f, b, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        safe_gate=True, lower_bound=bound, disable_recompute=True, A_log=a_log, dt_bias=dt_bias)
    return out


def kda(q, k, v, f, b, a_log, dt_bias, bound: float):
    return (kda_fast if q.is_cuda else kda_chunked)(q, k, v, f, b, a_log, dt_bias, bound)


# ------------------------------------------------------------------------------------------------ small pieces
def rms(x, weight, eps: float):
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight).to(x.dtype)


def swiglu(g, u, limit: float):
    return F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


def hc_in(x, fn, scale, base, norm, eps: float, hc_eps: float):
    """Streams x [T, N, D] -> the normed block input [T, D], post [T, N] and the logits of the mixing matrix [T, N, N]."""
    n = x.shape[1]
    y = x.float()
    flat = y.flatten(1)
    m = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(m[:, n:2 * n] * scale[1] + base[n:2 * n])
    comb = (m[:, 2 * n:] * scale[2] + base[2 * n:]).view(-1, n, n)
    h = (pre[:, :, None] * y).sum(1)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * norm
    return h.to(x.dtype), post, comb


def hc_out(x, y, post, comb):
    """The new streams: post_j y + sum over i of comb_ij x_i."""
    mixed = (comb[:, :, :, None] * x.float()[:, :, None, :]).sum(1)
    return (mixed + post[:, :, None] * y.float()[:, None, :]).to(x.dtype)


def short_conv(x, kernel, place):
    """Causal depthwise convolution over rows [T, C] of many sequences; `place` [T, 1] is the position in its own."""
    taps = kernel.shape[-1]
    y = x.float() * kernel[:, taps - 1]
    for back in range(1, taps):
        moved = F.pad(x, (0, 0, back, 0))[:x.shape[0]].float()
        y = y + torch.where(place >= back, moved, 0.0) * kernel[:, taps - 1 - back]
    return F.silu(y).to(x.dtype)


def kda_out(o, gate, weight, eps: float):
    """o, gate [T, H, K]: norm over K, times the weight and the logistic gate."""
    y = o.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
    return (y * torch.sigmoid(gate.float())).to(gate.dtype)


def route(x, gate, bias, k: int, factor: float):
    """[T, E] weights, zero for the experts that were not chosen, and how often each was chosen."""
    s = torch.sigmoid(x.float() @ gate.T)
    chosen = torch.zeros_like(s).scatter(1, (s + bias).topk(k, dim=-1).indices, 1.0)
    kept = s * chosen
    return kept / (kept.sum(-1, keepdim=True) + 1e-20) * factor, chosen.sum(0)


def expert_act(g, u, weight, limit: float):
    """g, u [T, E W], weight [T, E]: the clamped SwiGLU of every expert times its weight."""
    rows, experts = weight.shape
    a = swiglu(g.float(), u.float(), limit).view(rows, experts, -1) * weight[:, :, None]
    return a.view(rows, -1).to(g.dtype)


def cross_entropy(rows, head, targets, weights):
    """Sum of the weighted losses, and per row whether the best token is the target."""
    logits = rows @ head.T
    loss = F.cross_entropy(logits.float(), targets, reduction="none")
    return (loss * weights).sum(), (logits.detach().argmax(-1) == targets)
