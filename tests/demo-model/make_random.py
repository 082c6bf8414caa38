"""Writes a complete checkpoint of the final shape with random weights.

    python make_random.py FOLDER [seed]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import shape
import weights
from render import ASSETS


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    cfg = shape.write(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(ASSETS / name, out / name)
    w = weights.first_values(cfg, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    total = weights.save(w, out)
    print(f"{sum(x.numel() for x in w.values()):,} parameters, {total:,} bytes")


if __name__ == "__main__":
    main()
