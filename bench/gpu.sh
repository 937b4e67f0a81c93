#!/usr/bin/env bash
# Everything that needs a GPU, in one go: tests, kernel benchmarks, the table that chooses providers, and the scripts
# with a GPU part. Results are written to bench/results/, to be committed. About 15 minutes on one GPU.
#   bench/gpu.sh [python]     default: .venv/bin/python, or python3 where there is none
set -u
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
export PYTHONPATH=.
unset TRITON_INTERPRET

gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "_"))') \
    || { echo "no CUDA device"; exit 1; }
results=bench/results
mkdir -p "$results"
failed=0

step() {
    echo "== $*"
    "$@" || { echo "FAILED: $*"; failed=1; }
}

# the last line that a script prints with --json is one object
json() {
    local name=$1
    shift
    echo "== bench/$name.py $*"
    "$python" "bench/$name.py" "$@" --json > "$results/$name.log" || { echo "FAILED: bench/$name.py"; failed=1; }
    tail -n 1 "$results/$name.log" > "$results/${name}_$gpu.json"
    sed '$d' "$results/$name.log"
    rm "$results/$name.log"
}

step "$python" -m pytest tests/gpu tests/kernels -m "not slow" -q
step "$python" -m pytest bench/kernels --gpu -q --benchmark-json="$results/kernels_$gpu.json"
json providers
json coordination
json generate_vs_transformers
json selective_batching
exit $failed
