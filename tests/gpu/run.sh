#!/usr/bin/env bash
# Checks and times the kernels on a GPU with what `tests/gpu/prepare.sh` made: no compiler and no network are needed.
#
#   tests/gpu/run.sh FOLDER [OUT] [SECONDS]
#
# FOLDER holds the program `gpu` and the cache of compiled kernels `cubins`. Every check runs in a process of its own with a
# time limit, and the rest goes on after one that fails; what has not begun after SECONDS (190 unless given) is left out and
# said so. Results go to OUT (default: $OUT, or ./gpu-results): facts.json, cases.jsonl, times.jsonl, sanitizer.txt, and
# summary.txt.
set -uo pipefail

folder=$(cd "$1" && pwd)
out=${2:-${OUT:-gpu-results}}
limit=${3:-190}
mkdir -p "$out"
export PLUGFOLD_CUDA_CACHE="$folder/cubins"
gpu="$folder/gpu"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf '%s\n' "$*" | tee -a "$out/summary.txt"; }

# check NAME SECONDS FILE COMMAND...: what the command prints goes to FILE.
check() {
  local name=$1 seconds=$2 file=$3 id
  shift 3
  if [ "$SECONDS" -ge "$limit" ]; then
    say "left out $name"
    return
  fi
  id=$(mktemp -p "$work")
  local start=$SECONDS
  if timeout -k 5 "$seconds" "$@" >"$id.out" 2>"$id.err"; then
    say "ok       $name ($((SECONDS - start)) s)"
  else
    say "FAILED   $name (exit $?, $((SECONDS - start)) s): $(head -c 600 "$id.err" | tr '\n' ' ')"
  fi
  cat "$id.out" >>"$out/$file"
}

# together COUNT: waits until fewer than COUNT checks are running.
together() {
  while [ "$(jobs -rp | wc -l)" -ge "$1" ]; do wait -n; done
}

: >"$out/summary.txt"
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader >"$out/nvidia-smi.txt" 2>&1
check facts 60 facts.json "$gpu" facts
mapfile -t names < <("$gpu" list)
for name in "${names[@]}"; do
  together 6
  check "$name" 60 cases.jsonl "$gpu" case "$name" &
done
wait
# Nothing beside it: it is timed.
check times 110 times.jsonl "$gpu" time
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    for name in "norm" "dense, few rows" "experts" "dense in segments" "kda.mix" "mla.dense" "idx.select" "moe.group" "sample.candidates"; do
      together 6
      check "$tool: $name" 60 sanitizer.txt compute-sanitizer --tool "$tool" --error-exitcode 9 "$gpu" case "$name" &
    done
  done
  wait
fi
failures=$(grep -c '^FAILED' "$out/summary.txt")
say "$failures failed, $(grep -c '^ok' "$out/summary.txt") passed, $(grep -c '^left out' "$out/summary.txt") left out, $SECONDS s"
[ "$failures" -eq 0 ]
