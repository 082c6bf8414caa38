#!/usr/bin/env python3
"""Turns times of `plugfold bench roofline --device cuda --json` into the table of results/h200/README.md.

    tests/gpu/table.py times.json [earlier.json]

With a second file, a column says what each operation took there; it may be one of the lines of JSON that earlier versions wrote.
"""

import json
import sys


def times(path):
    text = open(path).read()
    try:
        return {t["name"]: t for t in json.loads(text)["operations"]}
    except json.JSONDecodeError:
        lines = [json.loads(line) for line in text.splitlines()]
        names = {t["operation"].replace(" 1 rows", " 1 row"): t for t in lines if "operation" in t}
        return {name.replace("dense bf16 [154880", "head bf16 [154880"): t for name, t in names.items()}


def main():
    now = times(sys.argv[1])
    earlier = times(sys.argv[2]) if len(sys.argv) > 2 else {}
    head = ["operation", "us", "recorded, us", "host, us", "bound", "us of the bound", "reached", "recorded", "of memory"]
    if earlier:
        head += ["earlier, us"]
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join(["---"] + ["---:"] * (len(head) - 1)) + " |")
    for name, t in now.items():
        percent = [f"{t[key] * 100:.0f} %" for key in ("fraction", "recorded_fraction", "memory_fraction")]
        row = [name, f"{t['microseconds']:.1f}", f"{t['recorded_microseconds']:.1f}", f"{t['host_microseconds']:.1f}"]
        row += [t["bound"], f"{t['bound_microseconds']:.2f}", *percent]
        if earlier:
            before = earlier.get(name)
            row += [f"{before['microseconds']:.1f}" if before else ""]
        print("| " + " | ".join(row) + " |")


main()
