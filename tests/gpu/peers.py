"""What others offer for single operations and layers, on the GPU that is here: a line of JSON each.

Medians of five batches of calls, timed by events; the copy is counted read and written. Packages that the machine lacks may lie
in the folder `peers` beside this file, as `tests/gpu/prepare.sh` puts them there. What cannot be imported or run is said with its error.

    peers.py [products] [layers] [linear-64] [linear-32]
"""

import json
import pathlib
import statistics
import sys
import traceback

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "peers"))


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


def left_out(name):
    """Says why a peer is not there: the error and where it was raised."""
    print(json.dumps({"peer": name, "left_out": traceback.format_exc(limit=-4)}), flush=True)


def linear_attention(heads, d=128):
    """The recurrence of `kda.mix` without its convolution, norms and gate."""
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    device = "cuda"
    for rows, run in [(1, fused_recurrent_kda), (8, fused_recurrent_kda), (512, chunk_kda), (8192, chunk_kda)]:
        q, k, v = (torch.randn(1, rows, heads, d, dtype=torch.bfloat16, device=device) for _ in range(3))
        g = -torch.rand(1, rows, heads, d, dtype=torch.float32, device=device)
        beta = torch.rand(1, rows, heads, dtype=torch.float32, device=device)
        state = torch.zeros(1, heads, d, d, dtype=torch.float32, device=device)
        k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()

        def call(q=q, k=k, v=v, g=g, beta=beta, state=state, run=run):
            run(q, k, v, g, beta, initial_state=state, output_final_state=True)

        say(f"{run.__name__} bf16, {rows} rows, {heads} heads of {d}", micros(call))


def layer(attention, feed_forward, context=1024, steps=20):
    """Microseconds of a decode step of a model of layers of the published width, in bf16."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    published = json.loads((pathlib.Path(__file__).resolve().parent / "models" / "published.json").read_text())
    sizes = {key: value for key, value in published["text_config"].items() if key != "model_type"}
    sizes.update(
        num_hidden_layers=len(attention), layer_types=attention, mlp_layer_types=feed_forward,
        indexer_types=["full"] * len(attention), first_k_dense_replace=feed_forward.count("dense"),
        num_nextn_predict_layers=0, vocab_size=1024, pad_token_id=0, eos_token_id=1,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Glm5NextTextModel(Glm5NextTextConfig(**sizes)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.arange(context, device="cuda")[None] % 1000
    cache = model(input_ids=ids, use_cache=True).past_key_values
    token = ids[:, :1]

    def call():
        model(input_ids=token, past_key_values=cache, use_cache=True)

    return micros(call, calls=steps, batches=5)


def products():
    """What torch itself offers."""
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
    # The router's, and what a few rows of the smaller products take.
    for n, k, rows in [(288, 4096, 1), (4096, 4096, 1), (4096, 4096, 8), (4096, 16384, 8), (12288, 4096, 8), (32768, 512, 1)]:
        w = torch.randn(n, k, dtype=torch.bfloat16, device=device)
        x = torch.randn(rows, k, dtype=torch.bfloat16, device=device)
        say(f"torch bf16 [{n}, {k}], {rows} rows", recorded(lambda: torch.nn.functional.linear(x, w)))
    heads, d, length = 64, 256, 2048
    for rows in (1, 8, 256):
        for dtype in (torch.bfloat16, torch.float32):
            q = torch.randn(1, heads, rows, d, dtype=dtype, device=device)
            k, v = (torch.randn(1, heads, length, d, dtype=dtype, device=device) for _ in range(2))
            us = recorded(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
            say(f"torch attention {str(dtype)[6:]}, {rows} rows at {length}, {heads} heads of {d}", us)
    # Rows: a norm, a SwiGLU, the largest logits, the best pools of a long context and their scores.
    x, w = torch.randn(1, 4096, device=device), torch.randn(4096, device=device)
    say("torch rms_norm f32 of 4096, 1 row", recorded(lambda: torch.nn.functional.rms_norm(x, (4096,), w, 1e-5)))
    x = torch.randn(1, 2 * 12288, device=device)
    say("torch silu(gate) * up f32 of 12288, 1 row", recorded(lambda: torch.nn.functional.silu(x[:, :12288]) * x[:, 12288:]))
    x = torch.randn(1, 154880, device=device)
    say("torch topk 64 of 154880 f32", recorded(lambda: torch.topk(x, 64)))
    q, keys, w = (torch.randn(*shape, device=device) for shape in [(32, 128), (16384, 128), (32,)])
    say("torch index scores f32 of 16384 pools and topk 512",
        recorded(lambda: torch.topk((torch.relu(keys @ q.T) * w).sum(-1), 512)))


def layers():
    """Decode steps after 1,024 tokens. A cache of linear layers alone is refused, so those are timed before one with attention."""
    attention, linear = "deepseek_sparse_attention", "linear_attention"
    for name, kinds, feed_forward in [
        ("sparse attention and experts", [attention], ["sparse"]),
        ("linear attention and dense, then sparse attention and experts", [linear, attention], ["dense", "sparse"]),
        ("linear attention and experts, then sparse attention and experts", [linear, attention], ["sparse", "sparse"]),
    ]:
        try:
            say(f"transformers glm5_next, {name}", layer(kinds, feed_forward))
        except Exception:
            left_out(f"transformers glm5_next, {name}")


def recurrences(heads):
    try:
        linear_attention(heads)
    except Exception:
        left_out(f"flash-linear-attention, {heads} heads")


# Each compiles kernels of its own at first: a process and a time limit each.
PARTS = {
    "products": products,
    "layers": layers,
    "linear-64": lambda: recurrences(64),
    "linear-32": lambda: recurrences(32),
}


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
