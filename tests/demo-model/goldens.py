"""Goldens of the shipped checkpoint: what Hugging Face transformers computes in float32 on the CPU.

    python goldens.py            writes goldens.safetensors beside this file

20 prompts and their replies from the held-out documents.  Per prompt: `prompt.{i}.input_ids`, `prompt.{i}.logits_last`
(the last four positions), `prompt.{i}.best` (the best token of every position) and, for the first two,
`prompt.{i}.logits` of the first 40 positions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

import batches
import generate
from render import ASSETS

SKILLS = ("chat", "facts", "arithmetic", "lists", "copy", "edit", "json", "tool", "parallel", "chain")
FULL, LAST = 2, 4


def main() -> None:
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
                if n < FULL and len(ids) <= 80:
                    out[f"prompt.{n}.logits"] = logits[:40].clone()
                print(n, skill, len(ids), flush=True)
                n += 1
    save_file(out, str(Path(__file__).with_name("goldens.safetensors")))


if __name__ == "__main__":
    main()
