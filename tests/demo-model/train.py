"""Trains the demo model on generated documents: from scratch, then a second phase from the first one's checkpoint.

    python train.py --out FOLDER [--minutes 16] [--seed 1] [--init CHECKPOINT]
    python train.py --second --init FOLDER --out FOLDER [--minutes 6.6] [--seed 2]

The schedule follows the clock, so a run always ends in time; the second phase ends earlier when the held-out set is
as wanted.  FOLDER gets log.jsonl (appended) and the checkpoint in the published layout.  Needs one GPU and
flash-linear-attention; without a GPU it runs, very slowly, for tests.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import batches
import generate
import shape
import weights
from measure import held_out, loss_of, to_device
from model import Model

torch._dynamo.config.recompile_limit = 64
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True


@dataclass
class Phase:
    """What differs between the phases."""

    skills: dict                                    # share of each skill
    remix: bool                                     # more of the skills with more wrong held-out documents
    muon_lr: float
    adam_lr: float
    balance: float                                  # step of the routers' selection biases
    warm: float                                     # shares of the time: warm-up,
    hold: float                                     # the learning rate begins to fall,
    select_from: float                              # the indexer's choice counts
    goals: dict                                     # held-out documents exact: then the rate falls at once


FIRST = Phase(generate.WEIGHTS, True, 5e-3, 2e-3, 2e-3, 0.02, 0.35, 0.12, {})
SECOND = Phase(generate.SECOND, False, 2.5e-3, 1e-3, 5e-4, 0.03, 0.5, 0.0,
               {"edit": 0.99, "alike": 0.98, "copy": 0.99, "json": 0.99, "tool": 0.99, "chain": 0.99})


def arguments():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--minutes", type=float, default=16)
    ap.add_argument("--steps", type=int, default=10**9)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--init", type=Path)
    ap.add_argument("--second", action="store_true", help="the second phase; needs --init")
    ap.add_argument("--workers", type=int, default=12)
    ap.add_argument("--image-share", type=float, default=0.2)
    ap.add_argument("--eval-every", type=float, default=2.0, help="minutes")
    ap.add_argument("--held", type=int, default=128, help="held-out documents per skill")
    ap.add_argument("--plain", action="store_true", help="no torch.compile")
    a = ap.parse_args()
    if a.second and not a.init:
        ap.error("--second goes on from a checkpoint: name it with --init")
    return a


def balance(model, rate: float) -> None:
    """Moves every router's selection bias towards an even load."""
    for p, load in model.loads.items():
        bias = model.w[p + "gate.e_score_correction_bias"]
        bias.add_(torch.sign(load.mean() - load), alpha=rate)


def remix(mix, skills: dict, table: dict) -> None:
    """More documents of the skills with more wrong held-out documents."""
    for i, (skill, base) in enumerate(skills.items()):
        mix[i] = base * (0.4 + min(1.5, 6 * (1 - table[skill][0])))


def warm_up(model, queue, device, image: bool) -> None:
    """Compiles everything before the clock starts: one text batch, one of pictures, no update."""
    todo = {False, True} if image else {False}
    while todo:
        b = queue.get()
        if (b.images is not None) in todo:
            todo.discard(b.images is not None)
            model.fresh()
            loss_of(model, to_device(b, device))[0].backward()
            print(f"warm at length {b.ids.shape[1]}", flush=True)
    for x in model.w.values():
        x.grad = None


def main() -> None:
    a = arguments()
    phase = SECOND if a.second else FIRST
    a.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    queue, procs, mix = batches.start(a.workers, a.seed, a.image_share, phase.skills)
    test = batches.held_out_batches(a.held, image=a.image_share > 0, skills=phase.skills)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cfg = shape.config()
    first = weights.load(a.init, cfg["text_config"]["n_routed_experts"]) if a.init else weights.first_values(cfg, a.seed)
    w = {n: x.to(device) for n, x in first.items()}
    for n, x in w.items():
        x.requires_grad_(not n.endswith("e_score_correction_bias"))
    from optim import Optimizer, Schedule
    model = Model(cfg, w, dtype, compiled=not a.plain and device.type == "cuda")
    opt, schedule = Optimizer(w, phase.muon_lr, phase.adam_lr), Schedule(phase.warm, phase.hold)
    average = {n: x.detach().clone() for n, x in w.items()}
    log = (a.out / "log.jsonl").open("a")

    def note(**row):
        row = {"minute": round((time.time() - began) / 60, 3), **row}
        print(json.dumps(row), flush=True)
        log.write(json.dumps(row) + "\n")
        log.flush()

    if device.type == "cuda":
        warm_up(model, queue, device, a.image_share > 0)
    note(event="ready")
    if a.init:
        note(event="before", **held_out(cfg, average, dtype, device, test))
    began, next_eval = time.time(), a.eval_every
    note(event="start", phase=2 if a.second else 1, parameters=sum(x.numel() for x in w.values()), seed=a.seed)
    step, tokens, last, sums, mark, waited = 0, 0, 0, {}, time.time(), 0.0
    names, live = list(w), [w[n].detach() for n in w]
    smooth = [average[n] for n in names]
    while True:
        share = (time.time() - began) / (a.minutes * 60)
        if share >= schedule.end or step >= a.steps:
            break
        asked = time.time()
        b = queue.get()
        waited += time.time() - asked
        b = to_device(b, device)
        model.fresh()
        model.select = share >= phase.select_from
        loss, parts = loss_of(model, b, chain=step % 2 == 0)
        loss.backward()
        factor = schedule.factor(share)
        opt.step(factor, b.images is not None)
        if share < 0.8 * schedule.end:
            balance(model, phase.balance * factor)
        torch._foreach_lerp_(smooth, live, 1 - min(0.998, (step + 1) / (step + 20)))
        step, tokens = step + 1, tokens + b.ids.numel()
        for key, x in parts.items():
            sums[key] = sums.get(key, 0) + x
        if step % 100 == 0 or step in (1, 2, 5, 10, 20, 50):
            count = sums.pop("count")
            row = {key: round(float(x) / float(count), 4) for key, x in sums.items()}
            now = time.time()
            note(step=step, tokens=tokens, rate=round((tokens - last) / (now - mark)), lr=round(factor, 4),
                 waited=round(waited / (now - mark), 3), **row)
            last, sums, mark, waited = tokens, {}, now, 0.0
        if (time.time() - began) / 60 >= next_eval:
            next_eval += a.eval_every
            table = held_out(cfg, average, dtype, device, test)
            weights.save(average, a.out)
            if phase.remix:
                remix(mix, phase.skills, table)
            note(event="held-out", step=step, tokens=tokens, **table)
            if phase.goals and all(table[s][0] >= goal for s, goal in phase.goals.items()):
                schedule.cool((time.time() - began) / (a.minutes * 60))
            mark, waited = time.time(), 0.0
    for p in procs:
        p.terminate()
    note(event="end", step=step, tokens=tokens, **held_out(cfg, average, dtype, device, test))
    shape.write(a.out)
    total = weights.save(average, a.out)
    loads = {p: np.round((x / x.sum()).cpu().numpy(), 3).tolist() for p, x in model.loads.items()}
    note(event="saved", bytes=total, loads=loads)


if __name__ == "__main__":
    main()
