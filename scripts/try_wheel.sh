#!/usr/bin/env bash
# Installs each wheel into a new environment, with the versions that are named, and tries it there: what doctor says, and
# the example of the README.
#
#     scripts/try_wheel.sh dist/*.whl 'torch==2.11.0' 'diffusers==0.36.0'
#     PYTHON=python3.13 scripts/try_wheel.sh dist/diffkern-*_x86_64.whl
set -euo pipefail
readme=$(realpath "$(dirname "$0")/../README.md")
wheels=() versions=()
for argument in "$@"; do
    if [[ $argument == *.whl ]]; then wheels+=("$(realpath -e "$argument")"); else versions+=("$argument"); fi
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" # not where the sources are
for wheel in "${wheels[@]:?name a wheel}"; do
    echo "== $(basename "$wheel")"
    "${PYTHON:-python3}" -m venv --clear venv
    venv/bin/python -m pip install --quiet "$wheel[diffusers]" ${versions[@]+"${versions[@]}"}
    venv/bin/python -m pip list 2>/dev/null | grep -iE '^(diffkern|torch|diffusers|transformers|triton) '
    # No kernels that were built into the user's cache serve, and no times that are kept there count.
    XDG_CACHE_HOME="$folder/venv/cache" venv/bin/diffkern doctor
    XDG_CACHE_HOME="$folder/venv/cache" venv/bin/python - "$readme" <<'PYTHON'
import pathlib
import re
import sys

import diffkern

assert "site-packages" in diffkern.__file__, diffkern.__file__
example = pathlib.Path(sys.argv[1]).read_text().split("<!-- example: begin")[1]
exec(re.search(r"```python\n(.*?)```", example, re.DOTALL)[1])
print("diffkern", diffkern.__version__, "of", pathlib.Path(diffkern.__file__).parent)
PYTHON
done
