#!/usr/bin/env bash
# Builds the kernels for the GPU of this machine, tests them on it, and times them against their rivals.
#
#   scripts/check_gpu.sh OUTPUT_DIRECTORY [environment|build|test|sanitize|bench|ops|attention|video ...]
#
# Without steps all run; sanitize on NVIDIA cards only. Needs torch with that GPU, CUDA (nvcc) or ROCm (hipcc 6 or
# newer), and `pip install ".[examples,hub,test]"`. PYTHON names the interpreter. Logs, JSON results and the versions
# of everything go to the output directory: please send it if docs/gpus does not know your card.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/check_gpu.sh OUTPUT_DIRECTORY [step ...]}
shift
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0

platform=$("$python" -c 'import torch; print("rocm" if torch.version.hip else "cuda")') || exit 2
[ "$platform" = rocm ] && export HIP_PLATFORM=amd
steps=("$@")
if [ ${#steps[@]} -eq 0 ]; then
  steps=(environment build test sanitize bench ops attention video)
  [ "$platform" = rocm ] && steps=("${steps[@]/sanitize/}")
fi

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

# Self-attention of LTX-Video, Flux and Wan, cross-attention with a mask, and grouped queries of a language model.
shapes=(--shape 2x2688x32x64 --shape 1x4608x24x128 --shape 1x32760x40x128)

for name in "${steps[@]}"; do
  case $name in
    '') ;;
    environment)
      step environment "$python" -c "import json, torch; from diffkern.bench.environment import describe_environment
print(json.dumps(describe_environment(torch.device('cuda', torch.cuda.current_device())), indent=2))"
      cat "$out/environment.log"
      ;;
    build)
      step build "$python" -m diffkern.cli build "--$platform"
      "$python" -m diffkern.cli doctor
      ;;
    test) step test "$python" -m pytest tests -m gpu -q --maxfail=20 -rf ;;
    sanitize)
      if [ "$platform" = rocm ]; then
        echo "== sanitize: compute-sanitizer is for NVIDIA cards" >&2
        exit 2
      fi
      step sanitize compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all \
        "$python" -m pytest tests -m "gpu and sanitize" -q -p no:cacheprovider
      step sanitize_fuzz compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$python" scripts/fuzz_ops.py --device cuda --cases 400 --seconds 1800
      ;;
    bench)
      step bench "$python" examples/ltx_video/benchmark_rmsnorm.py --json "$out/rms_norm.json"
      cat "$out/bench.log"
      ;;
    ops)
      step ops "$python" -m diffkern.cli bench ops --json "$out/ops.json" --plot "$out/ops.png"
      cat "$out/ops.log"
      ;;
    attention)
      step attention "$python" -m diffkern.cli bench attention "${shapes[@]}" --json "$out/attention.json"
      step attention_masked "$python" -m diffkern.cli bench attention --shape 2x2688/128x32x64 --mask additive \
        --json "$out/attention_masked.json"
      step attention_grouped "$python" -m diffkern.cli bench attention --shape 1x4096x32/8x128 --causal --backward \
        --json "$out/attention_grouped.json"
      cat "$out"/attention*.log
      ;;
    video)
      step video "$python" examples/ltx_video/generate_video.py --random-weights full --num-frames 49 --steps 30 \
        --compare --output "$out/ltx_video.mp4" --json "$out/ltx_video.json"
      tail -n 40 "$out/video.log"
      ;;
    *)
      echo "unknown step $name: environment, build, test, sanitize, bench, ops, attention or video" >&2
      exit 2
      ;;
  esac
done
exit $status
