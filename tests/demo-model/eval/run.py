"""Runs the held-out set against an OpenAI-compatible server that serves the demo model.

    python run.py --base-url http://127.0.0.1:8000/v1 [--skills edit,tool] [--limit 20] [--out FOLDER] [--items FOLDER]

Prints a table per skill, writes it as table.md and results.json into --out, and exits with 1 when a skill is under
its bar.  Only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
BARS = {"arithmetic": 0.95, "copy": 0.95, "edit": 0.95, "json": 0.95, "tool": 0.95, "chain": 0.95}
DRAFT_BARS = {"edit": 0.8}
DRAFT_BAR = 0.6


def post(base: str, body: dict, timeout: float) -> dict:
    data = json.dumps(body).encode()
    req = urllib.request.Request(base.rstrip("/") + "/chat/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(req, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        raise RuntimeError(f"HTTP {e.code}: {e.read().decode(errors='replace')[:300]}") from None


def model_name(base: str, timeout: float) -> str:
    with urllib.request.urlopen(base.rstrip("/") + "/models", timeout=timeout) as answer:
        return json.load(answer)["data"][0]["id"]


def canonical(calls) -> list:
    return sorted(json.dumps([c["name"], c["arguments"]], sort_keys=True) for c in calls)


def problem_of(turn: dict, message: dict) -> str | None:
    """None when the reply is as expected."""
    got = [c["function"] for c in message.get("tool_calls") or []]
    if "calls" in turn:
        try:
            got = [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in got]
        except ValueError:
            return f"arguments are not JSON: {got}"
        if canonical(got) != canonical(turn["calls"]):
            return f"calls {got}, content {message.get('content')!r}"
        return None
    text = (message.get("content") or "").strip()
    if got:
        return f"unexpected calls {got}"
    if turn["check"] == "json":
        try:
            same = json.loads(text) == json.loads(turn["text"])
        except ValueError:
            same = False
    else:
        same = text == turn["text"].strip()
    return None if same else f"text {text!r}, expected {turn['text']!r}"


def add_drafts(sums: dict, reply: dict) -> None:
    stats = reply.get("tensorfold") or {}
    for key in ("rounds", "drafted", "accepted"):
        sums[key] = sums.get(key, 0) + (stats.get(key) or 0)
    keeps, depths = stats.get("keeps"), stats.get("depths")
    if isinstance(keeps, list) and isinstance(depths, list) and len(keeps) == len(depths):
        for kept, depth in zip(keeps, depths):
            if depth >= 1:
                sums["first_tried"] = sums.get("first_tried", 0) + 1
                sums["first_kept"] = sums.get("first_kept", 0) + (kept >= 2)


def run_item(item: dict, base: str, name: str, timeout: float) -> dict:
    body = dict(item["request"], model=name)
    messages, sums = list(body["messages"]), {}
    for number, turn in enumerate(item["turns"]):
        try:
            reply = post(base, dict(body, messages=messages), timeout)
        except (RuntimeError, OSError) as e:
            return {"id": item["id"], "ok": False, "turn": number, "problem": str(e), "drafts": sums}
        add_drafts(sums, reply)
        message = reply["choices"][0]["message"]
        problem = problem_of(turn, message)
        if problem:
            return {"id": item["id"], "ok": False, "turn": number, "problem": problem, "drafts": sums}
        if "calls" in turn:
            kept = {"role": "assistant", "content": message.get("content") or "", "tool_calls": message["tool_calls"]}
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            if reasoning:
                kept["reasoning_content"] = reasoning
            messages.append(kept)
            messages += results_of(turn, message["tool_calls"])
    return {"id": item["id"], "ok": True, "drafts": sums}


def results_of(turn: dict, calls: list) -> list:
    """The tool messages, each with the ID of the call that it answers."""
    open_calls, out = list(calls), []
    for expected, text in zip(turn["calls"], turn["results"]):
        mine = next(c for c in open_calls if c["function"]["name"] == expected["name"]
                    and json.loads(c["function"]["arguments"]) == expected["arguments"])
        open_calls.remove(mine)
        out.append({"role": "tool", "tool_call_id": mine["id"], "content": text})
    return out


def row_of(skill: str, results: list) -> dict:
    sums: dict = {}
    for r in results:
        for key, x in r["drafts"].items():
            sums[key] = sums.get(key, 0) + x
    right = sum(r["ok"] for r in results)
    first = sums["first_kept"] / sums["first_tried"] if sums.get("first_tried") else None
    bar, draft_bar = BARS.get(skill), DRAFT_BARS.get(skill, DRAFT_BAR)
    return {"skill": skill, "items": len(results), "right": right, "share": right / len(results), "bar": bar,
            "first_draft": first, "first_draft_bar": draft_bar, "drafted": sums.get("drafted", 0), "accepted": sums.get("accepted", 0),
            "ok": (bar is None or right / len(results) >= bar) and (first is None or first >= draft_bar)}


def table_of(rows: list) -> str:
    lines = ["| skill | items | right | share | bar | first draft | accepted / drafted |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for r in rows:
        first = "–" if r["first_draft"] is None else f"{r['first_draft']:.3f}"
        bar = "–" if r["bar"] is None else f"{r['bar']:.2f}"
        lines.append(f"| {r['skill']} | {r['items']} | {r['right']} | {r['share']:.3f} | {bar} | {first} | {r['accepted']} / {r['drafted']} |")
    return "\n".join(lines)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--base-url", required=True)
    ap.add_argument("--skills", help="comma list; all by default")
    ap.add_argument("--items", type=Path, default=HERE, help="folder of the requests, as make_eval.py --out writes it")
    ap.add_argument("--limit", type=int, default=10**9, help="items per skill")
    ap.add_argument("--jobs", type=int, default=4, help="requests at a time")
    ap.add_argument("--timeout", type=float, default=600)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--minimum", type=float, help="one bar for every skill instead of the targets (to notice a loss)")
    ap.add_argument("--show", type=int, default=3, help="failures to print per skill")
    a = ap.parse_args()
    if a.minimum is not None:
        BARS.update({f.stem: a.minimum for f in a.items.glob("*.jsonl")})
    files = sorted(a.items.glob("*.jsonl"))
    wanted = a.skills.split(",") if a.skills else [f.stem for f in files]
    unknown = set(wanted) - {f.stem for f in files}
    if unknown:
        print(f"no such skill: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    try:
        name = model_name(a.base_url, a.timeout)
    except (OSError, KeyError, IndexError, ValueError) as e:
        print(f"no model list at {a.base_url}: {e}", file=sys.stderr)
        return 2
    rows, details, began = [], [], time.time()
    with ThreadPoolExecutor(a.jobs) as pool:
        for skill in wanted:
            items = [json.loads(x) for x in (a.items / f"{skill}.jsonl").read_text().splitlines()][:a.limit]
            results = list(pool.map(lambda x: run_item(x, a.base_url, name, a.timeout), items))
            rows.append(row_of(skill, results))
            details += results
            print(table_of(rows[-1:]).splitlines()[-1], flush=True)
            for r in [r for r in results if not r["ok"]][:a.show]:
                print(f"    {r['id']} turn {r['turn']}: {r['problem'][:300]}", flush=True)
    print(table_of(rows))
    if a.out:
        a.out.mkdir(parents=True, exist_ok=True)
        (a.out / "table.md").write_text(table_of(rows) + "\n")
        whole = {"seconds": round(time.time() - began, 1), "rows": rows, "items": details}
        (a.out / "results.json").write_text(json.dumps(whole, indent=1) + "\n")
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
