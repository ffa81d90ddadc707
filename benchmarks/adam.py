"""One Adam step over a large tensor and over many small ones: bmt_kernels against torch's fused AdamW.

Each round also times an in-place pass that moves as many bytes as an fp32 step must (28 per element: four values
read, three written); ratios are taken within a round, since memory bandwidth comes and goes on a shared machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from launch import machine
from torch import Tensor

from bmt_kernels import adam_step


def _timed(function: Callable[[], object], device: torch.device, repeat: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeat):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeat


def candidates(count: int, numel: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Steps over ``count`` tensors of ``numel`` elements each."""

    def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.rand(numel, device=device).to(dtype) for _ in range(count)]

    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 10}
    p, g, m, v = tensors(), tensors(), tensors(), tensors()
    half_p, half_g = tensors(torch.bfloat16), tensors(torch.bfloat16)
    steps = [torch.tensor(10.0, device=device) for _ in range(count)]
    # 28 bytes per element of a step: 14 read and 14 written, in place as the step does.
    moved = torch.rand(count * numel * 7 // 2, device=device)

    def torch_fused() -> None:
        torch._fused_adamw_(
            p, g, m, v, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip

    def torch_fused_and_copy() -> None:
        torch._foreach_copy_(g, half_g)
        torch_fused()
        torch._foreach_copy_(half_p, p)

    return {
        "pass over the same bytes": lambda: moved.mul_(1.0),
        "torch fused, fp32": torch_fused,
        "bmt_kernels, fp32": lambda: adam_step(p, g, m, v, **options),
        "torch fused + bf16 copies": torch_fused_and_copy,
        "bmt_kernels, bf16 in and out": lambda: adam_step(half_p, half_g, m, v, masters=p, **options),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--small", type=int, default=200, help="number of small tensors of 1000 elements")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(machine())
    for threads in arguments.threads if device.type == "cpu" else [1]:
        torch.set_num_threads(threads)
        for count, numel in [(1, n) for n in arguments.numel] + [(arguments.small, 1000)]:
            functions = candidates(count, numel, device)
            times: dict[str, list[float]] = {name: [] for name in functions}
            repeat = max(1, 1_000_000 // (count * numel))
            for round_ in range(-2, arguments.rounds):
                for name, function in functions.items():
                    seconds = _timed(function, device, repeat)
                    if round_ >= 0:
                        times[name].append(seconds)
            print(f"\n{count} x {numel:,} elements, {threads} threads: median µs; time relative to the pass")
            floor = times["pass over the same bytes"]
            for name, measured in times.items():
                ratio = statistics.median(t / f for t, f in zip(measured, floor, strict=True))
                print(f"  {name:30s} {statistics.median(measured) * 1e6:12.1f}  {ratio:6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
