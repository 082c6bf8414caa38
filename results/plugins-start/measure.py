#!/usr/bin/env python3
"""What listed plugins add to a start: `generate` of one token with 80 plugins and with none, in interleaved pairs.

Usage, from the repository's root, after `cargo build --release --workspace`:

    python3 results/plugins-start/measure.py --out results/plugins-start/measured.json

The 80 libraries are copies of the test plugin `9900-hostile`, which does nothing unless told to, under 80 numbers.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def copies(library: bytes, folder: pathlib.Path, count: int) -> list[str]:
    """Writes the library under `count` numbers and gives their names."""
    names = []
    for number in range(count):
        plugin, word = f"{9000 + number}", f"host{number:03d}"
        copy = library.replace(b'id = "9900"', f'id = "{plugin}"'.encode())
        copy = copy.replace(b'name = "hostile"', f'name = "{word}"'.encode())
        copy = copy.replace(b"hostile_mood", f"hostile_{plugin}".encode())
        (folder / f"libplugfold_{plugin}_{word}.so").write_bytes(copy)
        names.append(f"{plugin}-{word}")
    return names


def start(program: pathlib.Path, profile: pathlib.Path, cache: pathlib.Path) -> float:
    """Seconds of one start, one token and the end."""
    command = [program, "generate", "--profile", profile, "--ids", "1,2,3,4", "--max-tokens", "1", "--ignore-eos"]
    environment = {**os.environ, "PLUGFOLD_CACHE_DIR": str(cache)}
    begun = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return time.perf_counter() - begun


def main() -> None:
    """Measures and writes the figures."""
    options = argparse.ArgumentParser()
    options.add_argument("--bin", type=pathlib.Path, default=ROOT / "target/release")
    options.add_argument("--plugins", type=int, default=80)
    options.add_argument("--pairs", type=int, default=15)
    options.add_argument("--out", type=pathlib.Path, required=True)
    options = options.parse_args()
    library = (options.bin / "libplugfold_9900_hostile.so").read_bytes()
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        folder = place / "plugins"
        folder.mkdir()
        names = copies(library, folder, options.plugins)
        profiles = []
        for label, listed in (("none", []), ("all", names)):
            profile = place / f"{label}.toml"
            profile.write_text(
                f'model = "{ROOT}/tests/fixtures/tiny"\ncontext = 512\nplugin_path = ["{folder}"]\n'
                f"plugins = {json.dumps(listed)}\n"
            )
            profiles.append(profile)
        program = options.bin / "plugfold"
        first = start(program, profiles[1], place / "cache")
        pairs = []
        for number in range(options.pairs):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            pair = [0.0, 0.0]
            for side in order:
                pair[side] = start(program, profiles[side], place / "cache")
            pairs.append(pair)
    added = [with_all - bare for bare, with_all in pairs]
    quarters = statistics.quantiles(added, n=4)
    report = {
        "plugins": options.plugins,
        "bytes_each": len(library),
        "load_average": os.getloadavg()[0],
        "first_sight_s": first,
        "pairs_s": pairs,
        "bare_s": statistics.median(bare for bare, _ in pairs),
        "all_s": statistics.median(with_all for _, with_all in pairs),
        "added_s": statistics.median(added),
        "added_quarters_s": [quarters[0], quarters[2]],
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "pairs_s"}, indent=2))


if __name__ == "__main__":
    main()
