#!/usr/bin/env bash
# Builds the kernels for the GPU of this machine, tests them on it, and times them against their rivals.
#
#   scripts/check_gpu.sh OUTPUT_DIRECTORY [build|test|sanitize|bench|video ...]
#
# Without steps all run. Needs a CUDA (nvcc) or ROCm (hipcc) toolchain, torch with that GPU, pytest,
# hypothesis, and for the later steps diffusers. Logs and JSON results go to the output directory.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/check_gpu.sh OUTPUT_DIRECTORY [step ...]}
shift
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build test sanitize bench video)
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0

step() { # name, command ...
  local name=$1 started=$SECONDS
  shift
  echo "== $name"
  if "$@" >"$out/$name.log" 2>&1; then
    echo "   ok, $((SECONDS - started)) s"
  else
    echo "   FAILED ($?), $((SECONDS - started)) s; the end of $out/$name.log:"
    tail -n 25 "$out/$name.log"
    status=1
  fi
}

for name in "${steps[@]}"; do
  case $name in
    build)
      backend=$("$python" -c 'import torch; print("--rocm" if torch.version.hip else "--cuda")')
      step build "$python" -m diffkern.cli build "$backend"
      "$python" -m diffkern.cli doctor
      ;;
    test) step test "$python" -m pytest tests -m gpu -q -x --maxfail=20 ;;
    sanitize)
      step sanitize compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all \
        "$python" -m pytest tests -m "gpu and sanitize" -q -p no:cacheprovider
      ;;
    bench)
      step bench "$python" examples/ltx_video/benchmark_rmsnorm.py --json "$out/rms_norm.json"
      cat "$out/bench.log"
      ;;
    video)
      step video "$python" examples/ltx_video/generate_video.py --random-weights full --num-frames 49 --steps 30 \
        --compare --output "$out/ltx_video.mp4" --json "$out/ltx_video.json"
      tail -n 40 "$out/video.log"
      ;;
    *) echo "unknown step $name: build, test, sanitize, bench or video" >&2; exit 2 ;;
  esac
done
exit $status
