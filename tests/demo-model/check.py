"""Checks the fast kernels against their plain forms on a GPU, and says where a training step spends its time.

    python check.py             kernels
    python check.py profile     time
"""

from __future__ import annotations

import sys
import time

import torch

import batches
import kernels as k
import shape
import weights
from measure import loss_of, to_device
from model import Model
from optim import Optimizer


def worst(a, b) -> float:
    return ((a.float() - b.float()).abs().max() / (b.float().abs().max() + 1e-12)).item()


def both(fast, plain, inputs, name: str, bound: float) -> bool:
    grads, outs = [], []
    for f in (fast, plain):
        xs = [x.clone().requires_grad_() for x in inputs]
        y = f(*xs)
        gen = torch.Generator(device="cuda").manual_seed(3)
        (y.float() * torch.randn(y.shape, device="cuda", generator=gen)).sum().backward()
        outs.append(y.detach())
        grads.append([x.grad for x in xs])
    errors = [worst(outs[0], outs[1])] + [worst(a, b) for a, b in zip(*grads)]
    ok = max(errors) < bound
    print(name, "ok" if ok else "WRONG", " ".join(f"{e:.1e}" for e in errors), flush=True)
    return ok


def kernels() -> bool:
    torch.manual_seed(0)
    c = torch.randn(5000, 4, 4, device="cuda") * 2
    ok = both(lambda x: k.sinkhorn_fast(x, 20, 1e-6), lambda x: k.sinkhorn_plain(x, 20, 1e-6), [c], "sinkhorn", 1e-4)
    B, L, H, K = 2, 150, 4, 64
    shapes = [(B, L, H, K)] * 3
    x = [torch.randn(s, device="cuda") for s in shapes]
    x += [torch.randn(B, L, H, K, device="cuda") * 2 - 2, torch.randn(B, L, H, device="cuda"), torch.randn(H, device="cuda") * 0.3,
          torch.randn(H * K, device="cuda")]
    x = [y.bfloat16().float() for y in x]

    def fast(q, key, v, f, b, a_log, dt):
        return k.kda_fast(*(y.bfloat16() for y in (q, key, v, f, b)), a_log, dt, -5.0)
    return both(fast, lambda *y: k.kda_plain(*y, -5.0), x, "kda", 4e-2) and ok


def profile(image_share: float = 0.0) -> None:
    queue, procs, _ = batches.start(8, 99, image_share)
    cfg = shape.config()
    w = {n: x.cuda().requires_grad_(not n.endswith("e_score_correction_bias")) for n, x in weights.first_values(cfg, 1).items()}
    model, opt = Model(cfg, w, torch.bfloat16, compiled=True), Optimizer(w, 5e-3, 2e-3)
    by_length: dict = {}
    while len(by_length) < 3:
        b = queue.get()
        by_length.setdefault(b.ids.shape[1], b)
    for p in procs:
        p.terminate()
    from torch.profiler import ProfilerActivity
    for n, (length, b) in enumerate(sorted(by_length.items())):
        b = to_device(b, torch.device("cuda"))

        def step():
            model.fresh()
            loss, _ = loss_of(model, b)
            loss.backward()
            opt.step(1.0, False)
        began = time.time()
        step()
        torch.cuda.synchronize()
        first = time.time() - began
        step()
        torch.cuda.synchronize()
        began = time.time()
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        print(f"length {length}: first step {first:.1f} s, then {(time.time() - began) * 250:.0f} ms; "
              f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        if n == 1:
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
                step()
                torch.cuda.synchronize()
            print(prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=32, max_name_column_width=60), flush=True)


if __name__ == "__main__":
    torch._dynamo.config.recompile_limit = 64
    torch.backends.cuda.matmul.allow_tf32 = True
    if sys.argv[1:] == ["profile"]:
        profile()
    else:
        sys.exit(0 if kernels() else 1)
