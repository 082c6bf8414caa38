#!/usr/bin/env bash
# How many answers of the demo model stay right at fewer bits: quantizes it, serves each, runs the held-out set, prints a table.
#
#   results/quantize/quality.sh [--limit ITEMS-A-SKILL] [--device cuda] [--jobs N]   (default: all 64 items of each of 13 skills)
#
# N models are tried beside one another (default: 1); the device writes them, the CPU serves them.
#
# Models go to WORK (default: target/quality) and are used again; program: PLUGFOLD (default: target/release/plugfold).
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${WORK:-target/quality} program=${PLUGFOLD:-target/release/plugfold} limit=() device=() jobs=1
while [ $# -gt 0 ]; do
  case $1 in
    --limit) limit=(--limit "$2") ;;
    --device) device=(--device "$2") ;;
    --jobs) jobs=$2 ;;
    *) echo "unknown: $1; give --limit N, --device cuda or --jobs N" >&2; exit 2 ;;
  esac
  shift 2
done
mkdir -p "$work"

# The calibration text: items 33 to 36 of each skill. With --limit 32 or less, nothing that is asked is in it.
for file in tests/demo-model/eval/*.jsonl; do sed -n 33,36p "$file" | cut -c1-700; done >"$work/text.txt"

# evaluate PORT NAME MODEL: a line of the table.
evaluate() {
  local port=$1 server
  shift
  "$program" serve --profile minimal --model "$2" --slots 8 --port $port >"$work/$1.log" 2>&1 &
  server=$!
  until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do kill -0 $server; sleep 0.2; done
  # It ends with 1 where a skill is under its bar, which at few bits is what is to be seen.
  python3 tests/demo-model/eval/run.py --base-url "http://127.0.0.1:$port/v1" "${limit[@]}" --out "$work/eval-$1" >"$work/eval-$1.txt" 2>&1 || true
  kill $server
  wait $server || true
  python3 - "$1" "$work/eval-$1/results.json" <<'PY'
import json, sys
rows = json.load(open(sys.argv[2]))["rows"]
items, right = (sum(row[key] for row in rows) for key in ("items", "right"))
worst = sorted((row for row in rows if row["right"] < row["items"]), key=lambda row: row["right"] / row["items"])[:3]
told = ", ".join(f"{row['skill']} {row['right']}/{row['items']}" for row in worst)
print(f"| {sys.argv[1]} | {right} / {items} = {100 * right / items:.1f}% | {told} |", flush=True)
PY
}

# model NAME OPTIONS...: quantizes unless it is there, and evaluates, when fewer than JOBS are at it.
port=18721
model() {
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  port=$((port + 1))
  if [ "$1" = bf16 ]; then
    evaluate $port bf16 host/assets/demo-model &
    return
  fi
  (
    name=$1
    shift
    [ -e "$work/$name/model.safetensors.index.json" ] ||
      "$program" quantize --model host/assets/demo-model --out "$work/$name" "${device[@]}" "$@" >"$work/$name.txt"
    evaluate $port "$name" "$work/$name"
  ) &
}

echo "| model | right | what it gets wrong most |"
echo "| --- | ---: | --- |"
model bf16
for bits in 2 3 4; do
  model "experts-$bits" --bits 16 --expert-bits $bits --head-bits 16
  model "all-$bits" --bits $bits
done
model experts-2-calibrated --bits 16 --expert-bits 2 --head-bits 16 --calibration "$work/text.txt"
wait
