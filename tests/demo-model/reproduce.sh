#!/usr/bin/env bash
# Makes the demo model again from nothing: tokenizer, shape, both phases of training, evaluation set, goldens,
# measurements.
# Needs one GPU and about 40 minutes: pip install torch transformers==5.17.0 tokenizers safetensors numpy jinja2
#                                                 matplotlib einops flash-linear-attention
set -euo pipefail
cd "$(dirname "$0")"
assets=../../host/assets/demo-model
out=${1:-/tmp/demo-model-run}

python train_tokenizer.py 12000
python shape.py
python render.py
python check.py
python train.py --out "$out" --minutes 16.6 --seed 1
python train.py --second --init "$out" --out "$out" --minutes 6.6 --eval-every 1.3 --seed 2
cp "$out"/model* "$assets"/
cp "$out"/log.jsonl .
python curve.py
python make_eval.py
python render.py goldens
python goldens.py
python measure_eval.py ../../results/demo-model/teacher_forced.json
