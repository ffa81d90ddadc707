#!/usr/bin/env bash
# What wants a GPU: build the kernels for this machine, run all tests and benchmarks.
#
#   benchmarks/on_gpu.sh [-o FOLDER] [PART ...]
#
# FOLDER gets the results (default: runs/gpu). The parts, all of them by default: kernels tests one-gpu memcheck racecheck
# adam adam8bit norms cross-entropy factored optimizers lamb overhead train-step tensor-parallel pipeline.
# Uses the python3 (or $PYTHON) that holds torch and changes nothing in it: the kernels are installed into the
# results folder, the pure packages are imported from where they lie. Needs torch, pytest, hypothesis, numpy,
# scikit-build-core, pybind11, matplotlib, cmake and ninja there, and nvcc on the PATH for the CUDA kernels. With
# pytest-xdist, tests run side by side.
# Works without a GPU, too, and then tests and measures the CPU paths.
set -euo pipefail
out=runs/gpu
case "${1:-}" in
    -h | --help) sed -n '2,12p' "$0" | cut -c3-; exit 0 ;;
    -o) out=${2:?-o needs a folder}; shift 2 ;;
esac
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
known=" kernels tests one-gpu memcheck racecheck adam adam8bit norms cross-entropy factored optimizers lamb overhead \
train-step tensor-parallel pipeline "
for part in "$@"; do
    [[ $known = *" $part "* ]] || { echo "there is no part $part; the parts are$known" >&2; exit 2; }
done
parts=" $* "
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
run() { # run PART COMMAND...: if the part is wanted, keep the output; go on after a failure and say so at the end
    local part=$1
    shift
    [[ $parts = "  " || $parts = *" $part "* ]] || return 0
    echo "=== $part"
    "$@" 2>&1 | tee "$out/$part.txt" || { failed=1; echo "=== $part FAILED"; }
}
run kernels "$python" -m bmt_kernels
test=(env OMP_NUM_THREADS=1 "$python" -m pytest -q -p bmt_comm.testing.plugin)
if "$python" -c "import xdist" 2> /dev/null; then
    test+=(-n "$((($(nproc) + 1) / 2))" --dist worksteal)
fi
run tests "${test[@]}" packages tests
if [ "$("$python" -c "import torch; print(torch.cuda.device_count())")" = 1 ]; then
    # Two ranks over NCCL, which sends through sockets then: slow, and the only GPU is enough.
    zero=packages/bmt-zero/tests tp=packages/bmt-tp/tests optim=packages/bmt-optim/tests
    run one-gpu "${test[@]}" --bmt-share-gpu --bmt-ranks 2 -o bmt_ranks_timeout=180 "$zero/test_block.py" \
        "$zero/test_equivalence.py" "$tp/test_parallel_linear.py" "$optim/test_sharded.py" "$optim/test_lamb.py"
fi
if command -v compute-sanitizer > /dev/null; then
    # Out-of-bounds and misaligned accesses and races of every kernel, on a few cases of each.
    few=(-q -p bmt_comm.testing.plugin packages/bmt-kernels/tests -k "cuda and not hypothesis and not compile")
    run memcheck compute-sanitizer --error-exitcode 1 "$python" -m pytest "${few[@]}"
    run racecheck compute-sanitizer --tool racecheck --error-exitcode 1 "$python" -m pytest "${few[@]}" --maxfail 1
fi
run adam "$python" benchmarks/adam.py --numel 1000000 10000000 100000000
run adam8bit "$python" benchmarks/adam8bit.py --numel 1000000 10000000 100000000
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
