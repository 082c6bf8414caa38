"""Muon for the hidden matrices, Adam for the rest, and the schedule."""

from __future__ import annotations

import torch

from weights import VIS

NOT_MUON = ("embed_tokens", "lm_head", "indexer", "mlp.gate.", "hc_", "conv1d", "b_proj", VIS)


def orthogonal(g, steps: int = 5):
    """The nearest orthogonal matrix of each g [n, r, c] with r <= c, by Newton-Schulz iterations in bf16."""
    x = g.bfloat16() if g.is_cuda else g.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x


class Muon:
    def __init__(self, params, momentum=0.95, decay=0.1):
        self.groups: dict = {}
        for p in params:
            r, c = p.shape[-2:]
            self.groups.setdefault((min(r, c), max(r, c)), []).append(p)
        self.momentum, self.decay, self.state = momentum, decay, {}

    @staticmethod
    def flat(x):
        x = x if x.ndim == 3 else x[None]
        return x if x.shape[1] <= x.shape[2] else x.mT

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for size, params in self.groups.items():
            g = torch.cat([self.flat(p.grad) for p in params])
            buf = self.state.setdefault(size, torch.zeros_like(g))
            buf.lerp_(g, 1 - self.momentum)
            u = orthogonal(g.lerp(buf, self.momentum)).float() * (0.2 * size[1] ** 0.5 * -lr)
            at = 0
            torch._foreach_mul_(params, 1 - lr * self.decay)
            for p in params:
                n = p.shape[0] if p.ndim == 3 else 1
                part = u[at:at + n]
                if p.shape[-2] > p.shape[-1]:
                    part = part.mT
                p.add_(part.reshape(p.shape))
                at += n


class Schedule:
    """The learning rate's factor over the time's share: up in `warm`, constant until `hold`, then down until the end.

    `cool` begins the way down now, because the held-out set is as wanted; the end then comes earlier by as much.
    """

    def __init__(self, warm: float, hold: float):
        self.warm, self.hold, self.end = warm, hold, 1.0

    def cool(self, share: float) -> None:
        if share < self.hold:
            self.hold, self.end = share, self.end - (self.hold - share)

    def factor(self, share: float) -> float:
        if share < self.warm:
            return max(share / self.warm, 0.02)
        if share < self.hold:
            return 1.0
        return max(0.0, (self.end - share) / (self.end - self.hold)) * 0.98 + 0.02


class Optimizer:
    """`step(factor)`: the factor is the schedule's, for the learning rates."""

    def __init__(self, w: dict, muon_lr: float, adam_lr: float):
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        text = {n: p for n, p in w.items() if not n.endswith("e_score_correction_bias")}
        matrices = [p for n, p in text.items() if p.ndim >= 2 and not any(x in n for x in NOT_MUON)]
        chosen = {id(p) for p in matrices}
        self.muon = Muon(matrices)
        rest = [(n, p) for n, p in text.items() if id(p) not in chosen and not n.startswith(VIS)]
        fused = rest[0][1].is_cuda
        self.rest = [p for _, p in rest]
        self.adam = torch.optim.AdamW(
            [{"params": [p for n, p in rest if p.ndim >= 2], "gain": 1.0}, {"params": [p for n, p in rest if p.ndim < 2], "gain": 0.5}],
            lr=adam_lr, betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0, fused=fused)
        self.tower = torch.optim.AdamW([p for n, p in text.items() if n.startswith(VIS)], lr=adam_lr, betas=(0.9, 0.97),
                                       weight_decay=0.01, fused=fused)

    def step(self, f: float, image: bool) -> None:
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0, foreach=True)
        for g in self.adam.param_groups:
            g["lr"] = self.adam_lr * f * g["gain"]
        self.adam.step()
        self.muon.step(self.muon_lr * f)
        if image:
            for g in self.tower.param_groups:
                g["lr"] = self.adam_lr * 0.5 * f
            self.tower.step()
            self.tower.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)
        for params in self.muon.groups.values():
            for p in params:
                p.grad = None
