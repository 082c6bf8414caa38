#!/usr/bin/env python3
"""Turns times of `tests/gpu/run.sh` into the table of results/h200/README.md.

    tests/gpu/table.py times.jsonl [earlier.jsonl]

With a second file, a column says what each operation took there.
"""

import json
import sys


def times(path):
    lines = [json.loads(line) for line in open(path)]
    return {line["operation"]: line for line in lines if "operation" in line}


def main():
    now = times(sys.argv[1])
    earlier = times(sys.argv[2]) if len(sys.argv) > 2 else {}
    head = ["operation", "us", "bound", "us of the bound", "reached", "eager, us", "host, us"]
    if earlier:
        head += ["earlier, us", "reached then"]
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join(["---"] * len(head)) + " |")
    for name, t in now.items():
        row = [name, f"{t['microseconds']:.1f}", t["bound"], f"{t['bound_microseconds']:.2f}", f"{t['fraction'] * 100:.0f} %"]
        row += [f"{t['eager']:.1f}", f"{t['host']:.1f}"]
        if earlier:
            before = earlier.get(name)
            row += [f"{before['microseconds']:.1f}", f"{before['fraction'] * 100:.0f} %"] if before else ["", ""]
        print("| " + " | ".join(row) + " |")


main()
