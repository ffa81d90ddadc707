"""One Adam step over a large tensor and over many small ones: bmt_kernels against torch's fused AdamW.

Each round also times two floors, passes that move as many bytes as an fp32 step must (28 per element): an in-place
multiplication of one array by torch, and, where there is a C compiler, a loop that reads four arrays and writes three
side by side, as a step does. Ratios are taken within a round, since memory bandwidth comes and goes on a shared
machine. A step with half-precision gradients and copies of fp32 masters moves the same 28 bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from launch import machine
from timing import median_ratio, take_turns, thread_counts
from torch import Tensor

from bmt_kernels import adam_step

FOUR_READS_THREE_WRITES = """
void pass(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, long n) {
  for (long i = 0; i < n; ++i) { m[i] += g[i]; v[i] += g[i]; p[i] += g[i]; }
}
"""


def compiled_pass() -> Callable[..., None] | None:
    """The loop over four arrays as a C function; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "pass.c"), Path(folder, "pass.so")
        source.write_text(FOUR_READS_THREE_WRITES)
        subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
        function = ctypes.CDLL(str(library))["pass"]
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long]
    return function


def deepspeed_adam() -> object | str:
    """DeepSpeed's CPU optimizer class, or why it takes no part."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return "not installed"
    return DeepSpeedCPUAdam


def candidates(
    count: int, numel: int, device: torch.device, pool: ThreadPoolExecutor
) -> dict[str, Callable[[], object]]:
    """Steps over ``count`` tensors of ``numel`` elements each."""

    def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.rand(numel, device=device).to(dtype) for _ in range(count)]

    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 10}
    p, g, m, v = tensors(), tensors(), tensors(), tensors()
    bf16_p, bf16_g = tensors(torch.bfloat16), tensors(torch.bfloat16)
    fp16_p, fp16_g = tensors(torch.float16), tensors(torch.float16)
    steps = [torch.tensor(10.0, device=device) for _ in range(count)]
    moved = torch.rand(count * numel * 7 // 2, device=device)  # each element is read and written
    functions: dict[str, Callable[[], object]] = {"floor: one array": lambda: moved.mul_(1.0)}

    c_pass = compiled_pass() if device.type == "cpu" else None
    if c_pass is not None:
        threads = torch.get_num_threads() if count == 1 else 1
        cuts = [numel * i // threads for i in range(threads + 1)]
        quads = [
            [t[begin:end].data_ptr() for t in quad] + [end - begin]
            for quad in zip(p, g, m, v, strict=True)
            for begin, end in pairwise(cuts)
        ]

        def side_by_side() -> None:
            if threads == 1:
                for quad in quads:
                    c_pass(*quad)
            else:
                list(pool.map(lambda quad: c_pass(*quad), quads))

        functions["floor: 4 reads, 3 writes"] = side_by_side

    def torch_fused() -> None:
        torch._fused_adamw_(
            p, g, m, v, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip

    def torch_fused_and_copy() -> None:
        torch._foreach_copy_(g, bf16_g)
        torch_fused()
        torch._foreach_copy_(bf16_p, p)

    functions["torch fused, fp32"] = torch_fused
    functions["bmt_kernels, fp32"] = lambda: adam_step(p, g, m, v, **options)
    stats = torch.zeros(2, dtype=torch.float64, device=device)
    functions["bmt_kernels, fp32 with statistics"] = lambda: adam_step(p, g, m, v, delta_stats=stats, **options)
    functions["torch fused + bf16 copies"] = torch_fused_and_copy
    functions["bmt_kernels, bf16 in and out"] = lambda: adam_step(bf16_p, bf16_g, m, v, masters=p, **options)
    functions["bmt_kernels, fp16 in and out"] = lambda: adam_step(fp16_p, fp16_g, m, v, masters=p, **options)
    deepspeed = deepspeed_adam()
    if not isinstance(deepspeed, str) and device.type == "cpu":
        params = [torch.nn.Parameter(t) for t in p]
        for param, grad in zip(params, g, strict=True):
            param.grad = grad
        functions["DeepSpeed CPU Adam, fp32"] = deepspeed(params, lr=1e-3, weight_decay=0.1).step  # type: ignore[operator]
    return functions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--small", type=int, default=200, help="number of small tensors of 1000 elements")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(machine())
    installed = deepspeed_adam()
    print(f"DeepSpeed: {installed if isinstance(installed, str) else 'installed'}")
    for threads in thread_counts(arguments.threads, device):
        torch.set_num_threads(threads)
        for count, numel in [(1, n) for n in arguments.numel] + [(arguments.small, 1000)]:
            with ThreadPoolExecutor(threads) as pool:
                functions = candidates(count, numel, device, pool)
                times = take_turns(functions, device, arguments.rounds, repeat=max(1, 1_000_000 // (count * numel)))
            floors = [measured for name, measured in times.items() if name.startswith("floor")]
            print(f"\n{count} x {numel:,} elements, {threads} threads: median µs; time relative to each floor")
            for name, measured in times.items():
                ratios = [median_ratio(measured, floor) for floor in floors]
                text = "  ".join(f"{ratio:6.2f}" for ratio in ratios)
                print(f"  {name:34s} {statistics.median(measured) * 1e6:12.1f}  {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
