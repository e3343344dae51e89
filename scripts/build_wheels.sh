#!/usr/bin/env bash
# Builds the wheels into a folder, and checks them: one of pure Python, for any machine, and one with compiled kernels.
#
#     scripts/build_wheels.sh dist          # pure, and with CPU kernels
#     scripts/build_wheels.sh dist cuda     # pure, and with CUDA kernels; nvcc needed, no GPU
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:?the folder to write to}
kernels=${2:-cpu}
python=${PYTHON:-python3}

"$python" -m pip install --quiet build twine 'setuptools>=77' wheel ninja
# The pure wheel is built in isolation, where there is no torch, and asks for no kernels.
DIFFKERN_BUILD=0 "$python" -m build --wheel --outdir "$output"
"$python" -c 'import torch' 2>/dev/null || "$python" -m pip install --quiet 'torch>=2.11'
DIFFKERN_BUILD="$kernels,require" "$python" -m build --wheel --no-isolation --outdir "$output"
"$python" -m twine check --strict "$output"/*.whl
