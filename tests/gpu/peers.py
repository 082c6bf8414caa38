"""What others offer for single operations, on the GPU that is here: a line of JSON each.

Medians of five batches of calls, timed by events; the copy is counted read and written.
"""

import json
import statistics

import torch


def micros(call, calls=20, batches=5):
    """Microseconds of a call, launched after one another."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(batches):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def recorded(call):
    """The same call in a graph of twenty."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    return micros(graph.replay, calls=3) / 20


def say(name, us, **more):
    print(json.dumps({"peer": name, "us": round(us, 2), **more}), flush=True)


def main():
    torch.manual_seed(0)
    device = "cuda"
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    us = micros(lambda: b.copy_(a))
    say("torch copy of 1 GiB", us, tb_per_s=round(2 * (1 << 30) / us / 1e6, 3))
    del a, b
    for n, k, rows in [(24576, 4096, 1), (4096, 16384, 1), (12288, 4096, 1), (154880, 4096, 1), (24576, 4096, 8),
                       (24576, 4096, 512), (24576, 4096, 4096)]:
        w = torch.randn(n, k, dtype=torch.bfloat16, device=device)
        x = torch.randn(rows, k, dtype=torch.bfloat16, device=device)
        us = recorded(lambda: torch.nn.functional.linear(x, w))
        say(f"torch bf16 [{n}, {k}], {rows} rows", us, tb_per_s=round(2 * n * k / us / 1e6, 3),
            tflops=round(2 * n * k * rows / us / 1e6, 1))
    # Experts of one row: eight of 288, gate and up.
    w = torch.randn(288, 4096, 4096, dtype=torch.bfloat16, device=device)
    x = torch.randn(1, 1, 4096, dtype=torch.bfloat16, device=device).expand(8, 1, 4096).contiguous()
    pick = torch.arange(8, device=device) * 31
    us = recorded(lambda: torch.bmm(x, w[pick].transpose(1, 2)))
    say("torch bf16 8 of 288 experts [4096, 4096] gathered, 1 row", us)
    del w
    heads, d, length = 64, 256, 2048
    for rows in (1, 8):
        q = torch.randn(1, heads, rows, d, dtype=torch.bfloat16, device=device)
        k, v = (torch.randn(1, heads, length, d, dtype=torch.bfloat16, device=device) for _ in range(2))
        us = recorded(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
        say(f"torch attention bf16, {rows} rows at {length}, {heads} heads of {d}", us)
    try:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
    except ImportError as error:
        print(json.dumps({"peer": "flash-linear-attention", "left_out": str(error)}))
        return
    heads, d = 64, 128
    for rows, run in [(1, fused_recurrent_kda), (8, fused_recurrent_kda), (512, chunk_kda), (8192, chunk_kda)]:
        q, k, v = (torch.randn(1, rows, heads, d, dtype=torch.bfloat16, device=device) for _ in range(3))
        g = -torch.rand(1, rows, heads, d, dtype=torch.float32, device=device)
        beta = torch.rand(1, rows, heads, dtype=torch.float32, device=device)
        state = torch.zeros(1, heads, d, d, dtype=torch.float32, device=device)
        k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()

        def call(q=q, k=k, v=v, g=g, beta=beta, state=state, run=run):
            run(q, k, v, g, beta, initial_state=state, output_final_state=True)

        say(f"{run.__name__} bf16, {rows} rows, {heads} heads of {d}", micros(call))


if __name__ == "__main__":
    with torch.no_grad():
        main()
