#!/usr/bin/env python3
"""Speed, memory and starts of the formats of weights: what `measure.sh` runs after the build.

Settings are measured in turns, so that all meet the same machine; medians count. Numbers go to measured.json, tables into
README.md between its marks.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = ROOT / "results/weights"
DEMO = ROOT / "host/assets/demo-model"
WIDE = ROOT / "core/engine/src/config/testdata/published.json"
Q8 = ["--plugin", "0001", "--plugin", "0140", "--plugin", "0470", "--set", "0001.nonexpert=q8"]
SETTINGS = {
    "bf16, no plugin": [],
    "0001 bf16": ["--plugin", "0001", "--set", "0001.nonexpert=bf16"],
    "0001 q4": ["--plugin", "0001", "--set", "0001.nonexpert=q4"],
    "0001 q4mse": ["--plugin", "0001", "--set", "0001.nonexpert=q4mse"],
    "0470 q8": Q8,
}
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def median(values):
    return statistics.median(values)


class Lab:
    def __init__(self, program: pathlib.Path, work: pathlib.Path):
        self.program, self.work = program, work
        self.environment = {**os.environ, "PLUGFOLD_CACHE_DIR": str(work / "cache")}
        work.mkdir(parents=True, exist_ok=True)

    def run(self, *line) -> tuple[str, float, int]:
        """What a command printed, its seconds, and the most memory it held in bytes."""
        begun = time.perf_counter()
        child = subprocess.Popen([self.program, *map(str, line)], env=self.environment, cwd=ROOT, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begun
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            sys.exit(f"plugfold {' '.join(map(str, line))} ended with {child.returncode}:\n{text}")
        return text, seconds, usage.ru_maxrss * 1024

    def model(self, name: str, *line) -> pathlib.Path:
        out = self.work / name
        if not (out / "model.safetensors.index.json").exists():
            self.run(*line, "--out", out)
        return out

    def bench(self, kind: str, model: pathlib.Path, more: list[str]) -> float:
        file = self.work / "bench.json"
        self.run("bench", kind, "--profile", "minimal", "--model", model, "--runs", 1, "--json", file, *more)
        return json.loads(file.read_text())["median_tokens_per_s"]

    def memory(self, model: pathlib.Path, more: list[str]) -> dict:
        """Bytes of weights as the start tells them, and the most memory of the process."""
        boot = [] if "0140" in more else ["--plugin", "0140"]
        line = ["--profile", "minimal", "--model", model, "--ids", "1,2,3", "--max-tokens", 8, "--log", "info"]
        text, _, peak = self.run("generate", *line, *more, *boot)
        number, unit = re.search(r"weights, built took [0-9.]+ s, ([0-9.]+) ([MG])B", text).groups()
        return {"weights": float(number) * (1e6 if unit == "M" else 1e9), "peak": peak}

    def serve(self, more: list[str]) -> float:
        """Seconds until /health says that the server is ready."""
        begun = time.perf_counter()
        line = ["serve", "--profile", "minimal", "--model", DEMO, "--port", "18719", *more]
        child = subprocess.Popen([self.program, *map(str, line)], env=self.environment, cwd=ROOT,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while child.poll() is None:
                try:
                    with urllib.request.urlopen("http://127.0.0.1:18719/health", timeout=1) as answer:
                        if answer.status == 200:
                            return time.perf_counter() - begun
                except OSError:
                    time.sleep(0.002)
            sys.exit("the server ended before it was ready")
        finally:
            child.terminate()
            child.wait()


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speeds(lab: Lab, models: dict, turns: int) -> tuple[dict, str]:
    found = {m: {s: {"decode": [], "prefill": []} for s in SETTINGS} for m in models}
    for _ in range(turns):
        for name, model in models.items():
            for setting, more in SETTINGS.items():
                for kind in ("decode", "prefill"):
                    found[name][setting][kind].append(lab.bench(kind, model, more))
    rows = []
    for name, model in models.items():
        base = found[name]["bf16, no plugin"]
        for setting, more in SETTINGS.items():
            memory = found[name][setting]["memory"] = lab.memory(model, more)
            cells = [f"{name}; {setting}"]
            for kind in ("decode", "prefill"):
                # Of each turn the ratio, so that what slows the machine down slows down both.
                ratio = median([a / b for a, b in zip(found[name][setting][kind], base[kind])])
                cells.append(f"{median(found[name][setting][kind]):.0f} (x{ratio:.2f})")
            cells += [f"{memory['weights'] / 1e6:.1f}", f"{memory['peak'] / 1e6:.0f}"]
            rows.append(cells)
    head = ["weights", "decode, tokens/s", "prefill, tokens/s", "weights, MB", "peak of the process, MB"]
    return found, table(head, rows)


def starts(lab: Lab, turns: int) -> tuple[dict, str]:
    prepared = ["--plugin", "0140", "--set", f"0140.dir={lab.work / 'prepared'}"]
    lab.run("prepare", "--profile", "minimal", "--model", DEMO, *prepared)
    generate = ["generate", "--profile", "minimal", "--model", DEMO, "--ids", "1,2,3", "--max-tokens", 1]
    text, _, _ = lab.run(*generate, "--log", "info", *prepared)
    if "weights, prepared" not in text:
        sys.exit(f"the prepared folder was not used:\n{text}")
    kinds = {"weights built": [], "weights prepared": prepared}
    found = {kind: {"generate": [], "serve": []} for kind in kinds}
    for _ in range(turns):
        for kind, more in kinds.items():
            found[kind]["generate"].append(lab.run(*generate, *more)[1])
            found[kind]["serve"].append(lab.serve(more))
    rows = [[kind, f"{median(f['generate']):.3f}", f"{median(f['serve']):.3f}"] for kind, f in found.items()]
    return found, table(["start of the demo model", "one token and the end, s", "until /health is ready, s"], rows)


def disk(lab: Lab) -> tuple[str, str]:
    wide = lab.model("wide", "make-synthetic", "--like", WIDE, "--layers", 4, "--no-draft-head", "--bits", 4)
    line = ["--profile", lab.work / "wide.toml", "--model", wide, "--plugin", "0140",
            "--set", f"0140.dir={lab.work / 'wide-prepared'}"]
    (lab.work / "wide.toml").write_text("slots = 1\ncontext = 64\nprefill_rows = 16\nplugins = []\n")
    lab.run("prepare", *line)
    text = lab.run("prepared", "rate", *line)[0].strip()
    said = re.sub(r"^.*?rank0: ", "", text, flags=re.S)
    return said, f"Reads of a prepared folder (`plugfold prepared rate`, the page cache is not used): {said}"


def kernels(lab: Lab) -> tuple[dict, str]:
    file = lab.work / "exl3.json"
    lab.run("bench", "exl3", "--k", 2048, "--n", 4096, "--threads", 1, "--rows", "1,8", "--repetitions", 25,
            "--encode", 1, "--json", file)
    found = json.loads(file.read_text())
    encoded = {(e["codebook"], e["bits"]): e for e in found["encodings"]}
    rows = []
    one = [p for p in found["products"] if p["rows"] == 1]
    for p, many in zip(one, [p for p in found["products"] if p["rows"] == 8]):
        e = encoded[p["codebook"], p["bits"]]
        rows.append([f"{p['codebook']} {p['bits']:g}", f"{1e3 * p['seconds']:.2f}", f"{1e3 * p['memory_seconds']:.2f}",
                     f"{1e3 * p['operation_seconds']:.2f}", f"{100 * p['fraction']:.0f}%", f"{1e3 * many['seconds']:.2f}",
                     f"{100 * many['fraction']:.0f}%", f"{e['weights_per_second_and_thread']:,.0f}"])
    head = ["codebook, bits", "1 row, ms", "memory, ms", "operations, ms", "reached of the slower", "8 rows, ms",
            "reached", "encoder, weights/s and core"]
    return found, table(head, rows)


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--program", type=pathlib.Path, default=ROOT / "target/release/plugfold")
    parse.add_argument("--work", type=pathlib.Path, required=True)
    parse.add_argument("--turns", type=int, default=7)
    parse.add_argument("--no-disk", action="store_true")
    asked = parse.parse_args()
    lab = Lab(asked.program.resolve(), asked.work.resolve())
    if not asked.no_disk and shutil.disk_usage(lab.work).free < 25e9:
        sys.exit(f"{lab.work}: less than 25 GB are free; free some, or give --no-disk")
    models = {
        "as trained": DEMO,
        "experts in 4 bits": lab.model("experts-4", "quantize", "--model", DEMO, "--bits", 16, "--expert-bits", 4,
                                       "--head-bits", 16),
    }
    load = os.getloadavg()[0]
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    about = (f"{cpu.group(1) if cpu else 'unknown processor'}, {os.cpu_count()} processors, load {load:.1f} at the start, "
             f"{time.strftime('%Y-%m-%d')}, {asked.turns} turns.")
    report, parts = {"about": about}, [about]
    for name, measure in [("speeds", lambda: speeds(lab, models, asked.turns)), ("starts", lambda: starts(lab, asked.turns)),
                          ("kernels", lambda: kernels(lab))] + ([] if asked.no_disk else [("disk", lambda: disk(lab))]):
        begun = time.perf_counter()
        report[name], text = measure()
        parts.append(text)
        print(f"{text}\n({name}: {time.perf_counter() - begun:.0f} s)\n", flush=True)
    (HERE / "measured.json").write_text(json.dumps(report, indent=1) + "\n")
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
