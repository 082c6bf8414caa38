"""Goldens of the shipped checkpoint: what Hugging Face transformers computes in float32 on the CPU.

    python goldens.py            writes goldens.safetensors beside this file

20 prompts and their replies from the held-out documents.  Per prompt: `prompt.{i}.input_ids`, `prompt.{i}.logits_last`
(every logit of the last two positions), and of every position `prompt.{i}.best` (the best token), `prompt.{i}.top`
(its logit) and `prompt.{i}.lse` (the logarithm of the sum of all exponentials, into which every logit goes).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import batches
import generate
from render import ASSETS

SKILLS = ("chat", "facts", "arithmetic", "lists", "copy", "edit", "json", "tool", "parallel", "chain")
LAST = 2


def main() -> None:
    sys.modules["fla"] = None                       # transformers' own form of KDA, also where the GPU kernel is installed
    from transformers import Glm5NextForConditionalGeneration
    model = Glm5NextForConditionalGeneration.from_pretrained(
        str(ASSETS), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    enc, out, n = batches.Encoder(), {}, 0
    with torch.no_grad():
        for turn in range(2):
            for skill in SKILLS:
                ids, _ = enc.document(generate.draw_held(skill, 20_000 + turn))
                ids = ids[:900]
                logits = model(input_ids=torch.tensor([ids])).logits[0].float()
                out[f"prompt.{n}.input_ids"] = torch.tensor(ids, dtype=torch.int32)
                out[f"prompt.{n}.logits_last"] = logits[-LAST:].clone()
                out[f"prompt.{n}.best"] = logits.argmax(-1).to(torch.int32)
                out[f"prompt.{n}.top"] = logits.max(-1).values.clone()
                out[f"prompt.{n}.lse"] = logits.double().logsumexp(-1).float()
                print(n, skill, len(ids), flush=True)
                n += 1
    save_file(out, str(Path(__file__).with_name("goldens.safetensors")))


if __name__ == "__main__":
    main()
