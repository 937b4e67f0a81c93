#!/usr/bin/env bash
# Everything that needs a GPU, in one go: tests, kernel benchmarks, the table that chooses providers, and the
# coordination of branches. Results are written to bench/results/, to be committed. About 15 minutes on one GPU.
#   bench/gpu.sh [python]     default: .venv/bin/python, or python3 where there is none
# RESULTS=<folder> writes them elsewhere; WORKERS=<n> tests at once, 8 by default.
set -u
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v "${1:-python3}")
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET

gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "_"))' 2> /dev/null) \
    || { echo "no CUDA device"; exit 1; }
results=${RESULTS:-bench/results}
mkdir -p "$results"
failed=0

has() {
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"
}

step() {
    echo "== $*"
    "$@" || { echo "FAILED: $*"; failed=1; }
}

# the last line that a script prints with --json is one object; nothing is kept of a script that did not get there
json() {
    local name=$1 log
    shift
    log=$(mktemp)
    echo "== bench/$name.py $*"
    "$python" "bench/$name.py" "$@" --json > "$log" || { echo "FAILED: bench/$name.py"; failed=1; }
    if tail -n 1 "$log" | "$python" -m json.tool > /dev/null 2>&1; then
        tail -n 1 "$log" > "$results/gpu_${name}_$gpu.json"
        sed '$d' "$log"
    else
        cat "$log"
    fi
    rm "$log"
}

# most of the tests' time is compiling, on the CPU
parallel=()
if has xdist; then parallel=(-n "${WORKERS:-8}" --dist worksteal); fi
step "$python" -m pytest tests/gpu tests/kernels -m "not slow" -q "${parallel[@]}"
if has pytest_benchmark; then
    step "$python" -m pytest bench/kernels --gpu -q --benchmark-json="$results/gpu_kernels_$gpu.json"
else
    echo "FAILED: bench/kernels needs pytest-benchmark"
    failed=1
fi
json providers --out "$results/providers_$gpu.json"
json coordination
exit $failed
