"""The loss, and teacher-forced measurements on the held-out documents.

A document is "exact" when the model's best token equals the text at every position that the model writes: then a
greedy reply is that text.  Draft n "agrees" at a position when its best token is the main model's best token.
"""

from __future__ import annotations

import numpy as np
import torch

from batches import PROMPT_WEIGHT, Batch
from model import Model
from render import REPLY
from skills_image import SIDE

DRAFTS = (0.25, 0.15, 0.1)
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def to_device(b: Batch, device) -> Batch:
    def move(x):
        return torch.from_numpy(x).to(device)
    images = None if b.images is None else move(b.images)
    return Batch(move(b.ids.astype(np.int32)).long(), move(b.kind), move(b.picked).long(), images)


def patches(images):
    """uint8 [B, side, side, 3] -> [B, patches, 1176] as the image processor orders them."""
    mean, std = (torch.tensor(x, device=images.device) for x in (MEAN, STD))
    x = ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2)
    n = SIDE // 28
    x = x.view(-1, 3, n, 2, 14, n, 2, 14).permute(0, 2, 5, 3, 6, 1, 4, 7)            # block row, block column, row, column, c, y, x
    x = x.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)
    return x.reshape(images.shape[0], SIDE * SIDE // 196, 1176)


def run(model: Model, b: Batch):
    images = None
    if b.images is not None:
        images = model.vision(patches(b.images), SIDE // 14, SIDE // 14).flatten(0, 1)
    return model.run(b.ids, images)


def loss_of(model: Model, b: Batch, chain: bool = True):
    """(loss, sums for the log); without `chain` only the first draft is trained, at its full weight."""
    rows = run(model, b)
    L, D = b.ids.shape[1], rows.shape[-1]
    drafts = model.drafts(b.ids, rows, len(DRAFTS) if chain else 1)
    ids, kind = b.ids.reshape(-1), b.kind.reshape(-1)
    at = b.picked.clamp(min=0)
    head = model.m("lm_head.weight")
    limit = ids.numel() - 1

    def one(h, ahead, prompt_weight):
        to = (at + ahead).clamp(max=limit)
        k = kind[to]
        weight = (k == REPLY).float() + (k == 1).float() * prompt_weight
        weight = weight * (b.picked >= 0) * (at % L + ahead < L)
        return *model.cross_entropy(h.reshape(-1, D)[at], head, ids[to], weight), weight

    loss, good, weight = one(rows, 1, PROMPT_WEIGHT)
    is_reply = (weight == 1).float()
    count = is_reply.sum() + 1
    parts = {"count": count.detach(), "loss": loss.detach(), "right": (good * is_reply).sum()}
    for n, (h, share) in enumerate(zip(drafts, DRAFTS), 1):
        extra, good, weight = one(h, n + 1, 0.0)
        loss = loss + share * extra * (2 if n > 1 else 1)              # the chain is trained in every second step
        parts[f"draft{n}"] = (good * weight).sum() * (2 if n > 1 else 1)
    parts["index"] = torch.as_tensor(model.index_loss).detach() * count
    return loss / count + 0.5 * model.index_loss, parts


@torch.no_grad()
def held_out(cfg, w, dtype, device, test) -> dict:
    """{skill: [share exact, token accuracy, agreement of the three drafts]} with the given weights."""
    model = Model(cfg, w, dtype)
    head = w["lm_head.weight"].to(dtype)
    table: dict = {}
    for skill, raw in test:
        model.fresh()
        b = to_device(raw, device)
        rows = run(model, b)
        best = (rows @ head.T).argmax(-1)
        reply = torch.zeros_like(b.kind, dtype=torch.bool)
        reply[:, :-1] = b.kind[:, 1:] == REPLY
        good = best[:, :-1] == b.ids[:, 1:]
        right = (good | ~reply[:, :-1])
        row = [right.all(1).sum(), b.ids.shape[0], (good & reply[:, :-1]).sum(), reply.sum()]
        for n, h in enumerate(model.drafts(b.ids, rows, len(DRAFTS)), 1):
            guess = (h @ head.T).argmax(-1)
            use = reply[:, n:]
            row += [((guess[:, :-n] == best[:, n:]) & use).sum(), use.sum()]
        old = table.get(skill, [0] * len(row))
        table[skill] = [x + float(y) for x, y in zip(old, row)]
    return {s: [round(r[i] / max(1, r[i + 1]), 4) for i in range(0, len(r), 2)] for s, r in table.items()}


