#!/usr/bin/env bash
# On a machine with a CUDA or ROCm device and no need of a network: link portattn into the current Python, check it
# on the device, then time it. Usage: scripts/on_gpu.sh [FOLDER FOR RESULTS] [BENCH SETS…]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.bench}
shift || true
sets=("${@:-seed}")
mkdir -p "$out"
python3 -m pip install -q --no-deps --no-build-isolation --no-index -e .
python3 -m portattn.cli doctor
python3 scripts/chip_suite.py --out "$out/tests" --again --all
python3 -m portattn.cli bench $(printf -- '--set %s ' "${sets[@]}") --out "$out"
