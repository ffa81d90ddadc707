#!/usr/bin/env bash
# Everything that wants a GPU, in one command: build the kernels for this machine, run all tests and benchmarks.
#
#   benchmarks/on_gpu.sh [folder for the results, by default runs/gpu]
#
# Uses the python3 (or $PYTHON) that holds torch and changes nothing in it: the kernels are installed into the
# results folder, the pure packages are imported from where they lie. Needs torch, pytest, hypothesis, numpy,
# scikit-build-core, pybind11, matplotlib, cmake and ninja there, and nvcc on the PATH for the CUDA kernels.
# Works without a GPU, too, and then tests and measures the CPU paths.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,9p' "$0" | cut -c3-; exit 0 ;; esac
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-runs/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
site=$out/site
"$python" -m pip install --quiet --no-build-isolation --no-deps --upgrade --target "$site" packages/bmt-kernels
for package in packages/*; do
    name=$(basename "$package" | tr - _)
    [ "$name" = bmt_kernels ] || PYTHONPATH=$PWD/$package/src${PYTHONPATH:+:$PYTHONPATH}
done
export PYTHONPATH=$site:$PYTHONPATH PYTHONUNBUFFERED=1
failed=0
run() { # run TITLE COMMAND...: keep the output, go on after a failure and say so at the end
    local title=$1
    shift
    echo "=== $title"
    "$@" 2>&1 | tee "$out/$title.txt" || { failed=1; echo "=== $title FAILED"; }
}
run kernels "$python" -m bmt_kernels
run tests "$python" -m pytest -q -p bmt_comm.testing.plugin packages tests
if command -v compute-sanitizer > /dev/null; then
    # Out-of-bounds and misaligned accesses and races of every kernel, on a few cases of each.
    few=(-q -p bmt_comm.testing.plugin packages/bmt-kernels/tests -k "cuda and not hypothesis and not compile")
    run memcheck compute-sanitizer --error-exitcode 1 "$python" -m pytest "${few[@]}"
    run racecheck compute-sanitizer --tool racecheck --error-exitcode 1 "$python" -m pytest "${few[@]}" --maxfail 1
fi
run adam "$python" benchmarks/adam.py --numel 1000000 10000000 100000000
run adam8bit "$python" benchmarks/adam8bit.py
run norms "$python" benchmarks/norms.py
run cross-entropy "$python" benchmarks/cross_entropy.py --large
run factored "$python" benchmarks/factored.py
run optimizers "$python" benchmarks/optimizers.py --plot "$out/optimizers.png"
run lamb "$python" benchmarks/lamb.py
run overhead "$python" benchmarks/overhead.py
# Writes its tables to docs/benchmarks.md. If it is interrupted, the next run measures what is missing.
run train-step "$python" -W ignore benchmarks/train_step_report.py --results "$out/train-step.json"
run tensor-parallel "$python" benchmarks/tensor_parallel.py
run pipeline "$python" benchmarks/pipeline.py
exit $failed
