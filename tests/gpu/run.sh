#!/usr/bin/env bash
# Checks and times kernels and models on a GPU with what `tests/gpu/prepare.sh` made: no compiler and no network are needed.
#
#   tests/gpu/run.sh FOLDER [OUT] [SECONDS] [PARTS]
#
# PARTS are any of kernels, model, full, ranks, peers, sanitizer; all without it. `ranks` needs NCCL (PLUGFOLD_NCCL, or a Python that
# has it) and does what the number of GPUs allows. FOLDER holds the programs and the cache of compiled kernels. Every check runs in a process of its own with a
# time limit, and the rest goes on after one that fails; what has not begun after SECONDS (190 unless given) is left out and
# said so. Results go to OUT (default: $OUT, or ./gpu-results): facts.json, cases.jsonl, encoder.jsonl, times.json with times.txt, model.txt,
# full.txt with full-*.json, ranks.txt with exchange-*.json and ranks-*.json, peers.json, sanitizer.txt, and summary.txt.
set -uo pipefail

folder=$(cd "$1" && pwd)
out=${2:-${OUT:-gpu-results}}
limit=${3:-190}
parts=${4:-kernels model full ranks peers sanitizer}
mkdir -p "$out"
export PLUGFOLD_CUDA_CACHE="$folder/cubins"
gpu="$folder/gpu"
plugfold="$folder/plugfold"
tiny="$folder/models/tiny"
demo="$folder/models/demo-model"
graph=(--plugin-path "$folder/plugins" --plugin base-graph --set executor=graph)
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

has() { [[ " $parts " == *" $1 "* ]]; }

# Logits on the GPU against those of the CPU: every bit.
same_logits() {
  local ids
  ids=$(seq -s, 1 90)
  for device in cpu cuda; do
    "$plugfold" debug logits --model "$1" --device "$device" --ids "$ids" --out "$work/$2-$device.safetensors" || return
  done
  cmp "$work/$2-cpu.safetensors" "$work/$2-cuda.safetensors" && echo "$2: logits on the GPU are those of the CPU"
}

if has kernels; then
  mapfile -t names < <("$gpu" list)
  for name in "${names[@]}"; do
    together 6
    check "$name" 60 cases.jsonl "$gpu" case "$name" &
  done
  wait
  # Nothing beside them: they are timed.
  check encoder 60 encoder.jsonl "$gpu" encode
  check times 110 times.txt "$plugfold" bench roofline --device cuda --json "$out/times.json"
fi
if has model; then
  export -f same_logits
  export plugfold work
  check "quantize tiny" 60 model.txt "$plugfold" quantize --model "$tiny" --out "$work/tiny4" --bits 4 --expert-bits 3 --head-bits 6
  for model in "$tiny" "$work/tiny4" "$demo"; do
    name=$(basename "$model")
    check "logits of $name" 60 model.txt bash -c "same_logits '$model' '$name'"
    check "exact $name" 90 model.txt "$plugfold" exact --model "$model" --device cuda
    check "exact $name, recorded" 90 model.txt "$plugfold" exact --model "$model" --device cuda "${graph[@]}"
  done
  check "exact tiny, 2 ranks" 90 model.txt "$plugfold" exact --model "$tiny" --device cuda --ranks 2 "${graph[@]}"
  for _ in 1 2 3; do
    check "decode" 30 model.txt "$plugfold" bench decode --model "$demo" --device cuda
    check "decode, recorded" 30 model.txt "$plugfold" bench decode --model "$demo" --device cuda "${graph[@]}"
  done
fi
if has full; then
  like=(--like "$folder/models/published.json" --model "$demo" --layers 22 --no-draft-head --bits 4 --device cuda)
  check "22 layers" 200 full.txt "$plugfold" bench synthetic "${like[@]}" --at 1024 --windows 1,8 --prompts 2048 \
    --prefill-rows 2048 --json "$out/full-eager.json"
  check "22 layers, recorded" 250 full.txt "$plugfold" bench synthetic "${like[@]}" --prefill-rows 2048 --seconds 20 \
    --json "$out/full-graph.json" "${graph[@]}"
fi
# refused WORDS COMMAND...: the command fails and says so.
refused() {
  local words=$1 said
  shift
  if said=$("$@" 2>&1); then
    echo "was not refused: $*" >&2
    return 1
  fi
  grep -F -- "$words" <<<"$said" || { printf 'no word of "%s" in: %s\n' "$words" "$said" >&2; return 1; }
}

# ends SIGNAL COMMAND...: rank 1 gets a signal in the middle of exchanges, and rank 0 ends within 6 s (5 s and what a process takes
# to end), with its name.
ends() {
  local signal=$1 said lead rank since took
  shift
  said=$(mktemp -p "$work")
  "$@" >/dev/null 2>"$said" &
  lead=$!
  for _ in $(seq 900); do
    grep -q 'exchanges begin' "$said" && break
    kill -0 "$lead" 2>/dev/null || break
    sleep 0.1
  done
  sleep 1
  rank=$( (cat "/proc/$lead/task/$lead/children" || pgrep -P "$lead") 2>/dev/null | head -n 1 | cut -d ' ' -f 1)
  if [ -z "$rank" ]; then
    echo "the ranks did not start: $(cat "$said")" >&2
    kill -9 "$lead" 2>/dev/null
    return 1
  fi
  since=$(date +%s%N)
  kill "-$signal" "$rank"
  for _ in $(seq 200); do
    kill -0 "$lead" 2>/dev/null || break
    sleep 0.05
  done
  took=$((($(date +%s%N) - since) / 1000000))
  if kill -0 "$lead" 2>/dev/null; then
    echo "rank 0 still runs $took ms after $signal" >&2
    kill -9 "$lead" "$rank" 2>/dev/null
    return 1
  fi
  kill -9 "$rank" 2>/dev/null
  echo "$signal: rank 0 ended after $took ms: $(tail -n 1 "$said")"
  [ "$took" -le 6000 ] && grep -q 'rank 1 of 2' "$said" || { cat "$said" >&2; return 1; }
}

if has ranks; then
  found=${PLUGFOLD_NCCL:-$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null)}
  [ -z "$found" ] || export PLUGFOLD_NCCL=$found
  # Rented machines may show NVLink multicast that cannot be used.
  export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  say "ranks: $gpus GPUs, NCCL in ${PLUGFOLD_NCCL:-the path of the loader}"
  nccl=(--plugin-path "$folder/plugins" --plugin base-nccl --set transport=nccl --device cuda)
  exchange=("$plugfold" bench exchange)
  export -f refused ends
  export work
  check "1 rank over NCCL" 120 ranks.txt "${exchange[@]}" "${nccl[@]}" --json "$out/exchange-nccl-1.json"
  check "two ranks on one GPU are refused" 120 ranks.txt env CUDA_VISIBLE_DEVICES=0 bash -c 'refused "$@"' refused \
    "are on one GPU" "${exchange[@]}" "${nccl[@]}" --ranks 2
  check "a missing NCCL is refused" 60 ranks.txt env PLUGFOLD_NCCL=/nowhere bash -c 'refused "$@"' refused \
    "pip install nvidia-nccl-cu13" "${exchange[@]}" "${nccl[@]}"
  if [ "$gpus" -ge 2 ]; then
    for transport in tcp shm nccl; do
      other=(--plugin-path "$folder/plugins" --plugin "base-$transport" --set "transport=$transport" --device cuda)
      check "exchange of 2 ranks over $transport" 120 ranks.txt "${exchange[@]}" "${other[@]}" --ranks 2 \
        --json "$out/exchange-$transport-2.json"
    done
    for signal in KILL STOP; do
      check "rank 1 gets $signal" 150 ranks.txt bash -c 'ends "$@"' ends "$signal" "${exchange[@]}" "${nccl[@]}" --ranks 2 \
        --turns 100000000
    done
    for model in "$tiny" "$demo"; do
      name=$(basename "$model")
      check "exact $name, 2 ranks over NCCL" 150 ranks.txt "$plugfold" exact --model "$model" --ranks 2 "${nccl[@]}"
      check "exact $name, 2 ranks over NCCL, recorded" 150 ranks.txt "$plugfold" exact --model "$model" --ranks 2 "${nccl[@]}" \
        "${graph[@]}"
    done
    for way in tcp nccl; do
      other=(--plugin-path "$folder/plugins" --plugin "base-$way" --set "transport=$way")
      check "decode on 2 ranks over $way, recorded" 60 ranks.txt "$plugfold" bench decode --model "$demo" --device cuda --ranks 2 \
        "${other[@]}" "${graph[@]}"
      check "45 layers on 2 ranks over $way, recorded" 400 ranks.txt "$plugfold" bench synthetic --ranks 2 \
        --like "$folder/models/published.json" --model "$demo" --layers 45 --no-draft-head --bits 4 --device cuda \
        --prefill-rows 2048 --at 1024 --windows 1,8 --prompts 2048 "${other[@]}" "${graph[@]}" --json "$out/ranks-$way.json"
    done
  fi
fi
if has peers && python3 -c 'import torch' 2>/dev/null; then
  check "peers: torch" 90 peers.json python3 "$folder/peers.py" products
  check "peers: layers of transformers" 120 peers.json python3 "$folder/peers.py" layers
  check "peers: flash-linear-attention" 150 peers.json python3 "$folder/peers.py" linear-64
  check "peers: the same of 32 heads" 150 peers.json python3 "$folder/peers.py" linear-32
fi
if has sanitizer && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    for name in "norm" "dense, few rows" "experts" "dense in segments" "dense in exl3, many rows" "experts in exl3" "hc.dots" "mla.write" "kda.mix" "kda.commit" "mla.dense" "idx.select" "moe.group" "sample.candidates" "vision.rotate" "vision.attend"; do
      together 6
      check "$tool: $name" 60 sanitizer.txt compute-sanitizer --tool "$tool" --error-exitcode 9 "$gpu" case "$name" &
    done
    together 6
    # A prompt past the dense limit, and then windows.
    check "$tool: the tiny model" 150 sanitizer.txt compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$plugfold" generate --model "$tiny" --device cuda --ids "$(seq -s, 1 60)" --max-tokens 4 &
  done
  wait
fi
failures=$(grep -c '^FAILED' "$out/summary.txt")
say "$failures failed, $(grep -c '^ok' "$out/summary.txt") passed, $(grep -c '^left out' "$out/summary.txt") left out, $SECONDS s"
[ "$failures" -eq 0 ]
