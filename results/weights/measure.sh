#!/usr/bin/env bash
# Makes the tables of README.md beside it, in one go, on a quiet machine: under six minutes on two cores once the release
# build is there. Models and prepared folders go to WORK (default: target/weights), 20 GB with the wide model; what is there
# already is used again.
#
#   results/weights/measure.sh [--no-disk]     --no-disk leaves out the wide model and the rate of reads
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release --locked -p plugfold -p plugfold-0001-exl3-nonexpert-q4 -p plugfold-0140-fast-boot -p plugfold-0470-nonexpert-q8
exec python3 results/weights/measure.py --work "${WORK:-target/weights}" "$@"
