"""Writes the held-out evaluation set: eval/<skill>.jsonl, 64 requests each in OpenAI chat form.

    python make_eval.py
    python make_eval.py --first 40000 --count 512 --skills edit,alike --out FOLDER      another set, never looked at

Every line has `id`, `skill`, `request` and `turns`.  A turn expects either `calls` (name and arguments, in any order;
then `results` holds the texts of the tool messages to send back) or `text` with a `check`: "text" (equal after
trimming) or "json" (equal as JSON).

Problems come from the share that training never sees.  Arithmetic is special: what can only be known by heart (one-digit
sums, differences and products, and exact divisions: a quarter) comes from the trained share, two-digit problems from
the other.
`arithmetic` thinks first; `arithmetic_direct` has little or no thinking.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import generate
import skills_basic as basic
import world as w

COUNT, FIRST = 64, 10_000
HERE = Path(__file__).resolve().parent / "eval"
EFFORTS = {"arithmetic": ("high", "max"), "arithmetic_direct": ("off", "low")}
ORDER = [s for s in generate.WEIGHTS if s != "arithmetic"]


def arithmetic(r: random.Random, efforts) -> generate.Doc:
    want_by_heart = r.random() < 0.25
    while True:
        d = basic.arithmetic(r)
        a, op, b = re.fullmatch(r"arith (\d+)([-+*/])(\d+)", d.key).groups()
        by_heart = op == "/" or max(int(a), int(b)) < 10
        if d.effort in efforts and by_heart == want_by_heart and w.held_out(d.key) != by_heart:
            return d


def request(d) -> dict:
    last = max(i for i, m in enumerate(d.messages) if m["role"] == "user")
    body = {"model": "demo", "messages": d.messages[:last + 1], "temperature": 0, "max_tokens": 600}
    if d.tools:
        body["tools"] = d.tools
    body["chat_template_kwargs"] = {"enable_thinking": False} if d.effort == "off" else {"reasoning_effort": d.effort}
    return body


def turns(d) -> list:
    last = max(i for i, m in enumerate(d.messages) if m["role"] == "user")
    out: list = []
    for m in d.messages[last + 1:]:
        if m["role"] == "tool":
            out[-1]["results"].append(m["content"])
        elif m.get("tool_calls"):
            out.append({"calls": [c["function"] for c in m["tool_calls"]], "results": []})
        else:
            out.append({"text": m["content"], "check": "json" if d.check == "json" else "text"})
    return out


def sets(first: int = FIRST, count: int = COUNT, skills=None) -> dict:
    """{skill: documents}"""
    out = {}
    for name in skills or ["arithmetic", "arithmetic_direct", *ORDER]:
        if name in EFFORTS:
            at = range(first - FIRST, first - FIRST + count)
            out[name] = [arithmetic(random.Random(f"eval/{name}/{i}"), EFFORTS[name]) for i in at]
        else:
            out[name] = [generate.draw_held(name, first + i) for i in range(count)]
    return out


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--first", type=int, default=FIRST)
    ap.add_argument("--count", type=int, default=COUNT)
    ap.add_argument("--skills", type=lambda x: x.split(","))
    ap.add_argument("--out", type=Path, default=HERE)
    a = ap.parse_args()
    a.out.mkdir(exist_ok=True)
    whole = sets(a.first, a.count, a.skills)
    for skill, docs in whole.items():
        lines = [json.dumps({"id": f"{skill}-{i:03d}", "skill": skill, "request": request(d), "turns": turns(d)}, ensure_ascii=False)
                 for i, d in enumerate(docs)]
        (a.out / f"{skill}.jsonl").write_text("\n".join(lines) + "\n")
    print(", ".join(f"{s} {len(d)}" for s, d in whole.items()))


if __name__ == "__main__":
    main()
