"""Measures the shipped checkpoint on the evaluation set with the PyTorch model.

    python measure_eval.py OUT.json [--skills edit,tool]

Teacher-forced: a document counts as right when the best token is the expected one at every position that the model
writes, thinking included, in all its turns.  A greedy reply is then exactly the expected one.  (The other way round
it is stricter than eval/run.py, which does not look at the thinking.)  Draft n agrees when its best token is the main
model's; `tokens a round` is one plus the drafts accepted in a row, three at most.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import batches
import make_eval
import shape
import weights
from model import Model
from render import ASSETS, REPLY

BATCH = 32


def rows_of(model, head, enc, docs):
    """Per document: right, positions, and agreement of the drafts and runs of accepted drafts, summed."""
    coded = [enc.document(d) for d in docs]
    order = sorted(range(len(docs)), key=lambda i: len(coded[i][0]))
    right, drafts, runs, positions, wrong = 0, np.zeros((3, 2)), 0.0, 0, []
    for at in range(0, len(order), BATCH):
        part = order[at:at + BATCH]
        length = -(-max(len(coded[i][0]) for i in part) // 4) * 4
        b = batches.assemble([coded[i] for i in part], length, np.random.default_rng(0))
        ids, kind = torch.from_numpy(b.ids.astype(np.int64)).to(head.device), torch.from_numpy(b.kind).to(head.device)
        model.fresh()
        rows = model.run(ids)
        best = (rows @ head.T).argmax(-1)
        reply = torch.zeros_like(kind, dtype=torch.bool)
        reply[:, :-1] = kind[:, 1:] == REPLY
        good = torch.ones_like(reply)
        good[:, :-1] = (best[:, :-1] == ids[:, 1:]) | ~reply[:, :-1]
        right += int(good.all(1).sum())
        wrong += [docs[i].key for i, ok in zip(part, good.all(1).tolist()) if not ok]
        run = torch.ones_like(reply, dtype=torch.float)
        alive = reply.clone()
        for n, h in enumerate(model.drafts(ids, rows, 3)):
            guess = (h @ head.T).argmax(-1)
            hit, use = torch.zeros_like(reply), torch.zeros_like(reply)
            use[:, :-n - 1] = reply[:, n + 1:]
            hit[:, :-n - 1] = (guess[:, :-n - 1] == best[:, n + 1:]) & use[:, :-n - 1]
            drafts[n] += [float(hit.sum()), float(use.sum())]
            alive &= hit
            run += alive
        runs += float((run * reply).sum())
        positions += int(reply.sum())
    return {"items": len(docs), "right": right, "share": round(right / len(docs), 4),
            "draft": [round(a / max(1, n), 4) for a, n in drafts], "tokens_a_round": round(runs / max(1, positions), 3), "wrong": wrong}


@torch.no_grad()
def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("out", type=Path)
    ap.add_argument("--skills")
    a = ap.parse_args()
    cfg = shape.config()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    w = {n: x.to(device) for n, x in weights.load(ASSETS, cfg["text_config"]["n_routed_experts"]).items()}
    model, enc, table = Model(cfg, w), batches.Encoder(), {}
    for skill, docs in make_eval.sets().items():
        if a.skills and skill not in a.skills.split(","):
            continue
        table[skill] = rows_of(model, w["lm_head.weight"], enc, docs)
        print(skill, json.dumps(table[skill], ensure_ascii=False)[:600], flush=True)
        a.out.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
