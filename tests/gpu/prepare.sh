#!/usr/bin/env bash
# Makes what `tests/gpu/run.sh` needs, on a machine without a GPU: the program and the compiled kernels.
#
#   tests/gpu/prepare.sh FOLDER [ARCHITECTURE]
#
# ARCHITECTURE is sm_90a (H100, H200) unless given. NVRTC is found as docs/GPU.md says (PLUGFOLD_NVRTC).
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$1
mkdir -p "$folder/cubins"
cargo build --locked -p plugfold-cuda --example gpu
cp target/debug/examples/gpu "$folder/gpu"
strip "$folder/gpu"
cp tests/gpu/run.sh "$folder/run.sh"
"$folder/gpu" compile "${2:-sm_90a}" "$folder/cubins"
