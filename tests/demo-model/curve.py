"""Draws log.jsonl: loss.csv (the numbers) and loss.png (loss, and exact held-out documents per skill)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIELDS = ("minute", "step", "tokens", "lr", "loss", "right", "draft1", "draft2", "draft3", "index")
NOT_SKILLS = {"minute", "event", "step", "tokens"}


def main() -> None:
    rows = [json.loads(x) for x in (HERE / "log.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "loss" in r]
    tests = [r for r in rows if r.get("event") in ("held-out", "end")]
    with (HERE / "loss.csv").open("w", newline="") as f:
        out = csv.DictWriter(f, FIELDS, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        out.writerows(steps)
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), dpi=80)
    left.semilogy([r["minute"] for r in steps], [r["loss"] for r in steps])
    left.set(xlabel="minutes", ylabel="loss per written token", title="training")
    for skill in [k for k in tests[-1] if k not in NOT_SKILLS]:
        right.plot([r["minute"] for r in tests], [r[skill][0] for r in tests], label=skill)
    right.set(xlabel="minutes", ylabel="share of documents exact", title="held-out, teacher-forced")
    right.legend(fontsize=7, ncol=2)
    fig.tight_layout()
    fig.savefig(HERE / "loss.png")


if __name__ == "__main__":
    main()
