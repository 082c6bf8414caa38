#!/usr/bin/env bash
# Makes what `tests/gpu/run.sh` needs, on a machine without a GPU: the programs, models and the compiled kernels.
#
#   tests/gpu/prepare.sh FOLDER [ARCHITECTURE]
#
# ARCHITECTURE is sm_90a (H100, H200) unless given. NVRTC is found as docs/GPU.md says (PLUGFOLD_NVRTC).
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$1
mkdir -p "$folder/cubins" "$folder/plugins" "$folder/models"
cargo build --locked -p plugfold-cuda --example gpu
plugins=(base_graph base_nccl base_shm base_tcp)
cargo build --locked --release -p plugfold $(printf -- '-p plugfold-%s ' "${plugins[@]//_/-}")
cp target/debug/examples/gpu "$folder/gpu"
cp target/release/plugfold "$folder/plugfold"
strip "$folder/gpu" "$folder/plugfold"
for plugin in "${plugins[@]}"; do
  cp "target/release/libplugfold_$plugin.so" "$folder/plugins/"
  # A library's note has to stay.
  strip --strip-debug "$folder/plugins/libplugfold_$plugin.so"
done
cp tests/gpu/run.sh tests/gpu/peers.py "$folder/"
cp -r tests/fixtures/tiny host/assets/demo-model "$folder/models/"
rm -f "$folder/models/tiny/goldens.safetensors"
cp core/engine/src/config/testdata/published.json "$folder/models/"
# flash-linear-attention's operations, for tests/gpu/peers.py: the core package alone, whose import asks for torch, triton and einops.
# The outer package adds layers and models, which import transformers: they are not needed.
if python3 -m pip download --quiet --no-deps --dest "$folder/wheels" fla-core==0.6.0; then
  python3 -m zipfile -e "$folder"/wheels/fla_core-*.whl "$folder/peers"
fi
rm -rf "$folder/wheels"
"$folder/gpu" compile "${2:-sm_90a}" "$folder/cubins"
