"""Draws log.jsonl: loss.csv (the numbers) and loss.png (loss, and exact held-out documents per skill)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIELDS = ("minute", "step", "tokens", "lr", "loss", "right", "draft1", "draft2", "draft3", "index")
NOT_SKILLS = {"minute", "event", "step", "tokens"}


def read() -> list:
    """The rows of all phases, minutes, steps and tokens counted on from one to the next."""
    out, done, last = [], dict.fromkeys(("minute", "step", "tokens"), 0), {}
    for line in (HERE / "log.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("event") == "start":
            done = {key: last.get(key, 0) for key in done}
        row.update({key: round(row[key] + x, 3) for key, x in done.items() if key in row})
        if "loss" in row or row.get("event") in ("held-out", "end"):
            last.update({key: row[key] for key in done if key in row})
            out.append(row)
    return out


def main() -> None:
    rows = read()
    steps = [r for r in rows if "loss" in r]
    tests = [r for r in rows if "loss" not in r]
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
        have = [r for r in tests if skill in r]
        right.plot([r["minute"] for r in have], [r[skill][0] for r in have], label=skill)
    right.set(xlabel="minutes", ylabel="share of documents exact", title="held-out, teacher-forced")
    right.legend(fontsize=7, ncol=2)
    fig.tight_layout()
    fig.savefig(HERE / "loss.png")


if __name__ == "__main__":
    main()
