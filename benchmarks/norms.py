"""Overflow check and norm: bmt_kernels.power_sum in one pass against torch's two.

Torch's part is ``isfinite().all()`` and ``linalg.vector_norm`` (for lists: ``torch._foreach_norm``). Ratios are taken
within a round, since memory bandwidth comes and goes on a shared machine. The floor reads the same bytes once: torch's
sum of them as integers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable

import torch
from launch import machine
from timing import median_ratio, take_turns, thread_counts
from torch import Tensor

from bmt_kernels import has_inf_or_nan, power_sum


def candidates(tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
    def torch_pair() -> None:
        for tensor in tensors:
            tensor.isfinite().all()
        if len(tensors) == 1:
            torch.linalg.vector_norm(tensors[0])
        else:
            torch._foreach_norm(tensors)

    integers = [tensor.view(torch.int32) for tensor in tensors]
    return {
        "floor: torch sum of int32": lambda: [each.sum() for each in integers],
        "torch isfinite and norm": torch_pair,
        "has_inf_or_nan": lambda: has_inf_or_nan(tensors),
        "power_sum, p = 2": lambda: power_sum(tensors),
        "power_sum, p = 1": lambda: power_sum(tensors, 1),
        "power_sum, p = inf": lambda: power_sum(tensors, math.inf),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--small", type=int, default=200, help="number of small tensors of 1000 elements")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(machine())
    for threads in thread_counts(arguments.threads, device):
        torch.set_num_threads(threads)
        for count, numel in [(1, n) for n in arguments.numel] + [(arguments.small, 1000)]:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                tensors = [torch.randn(numel, device=device).to(dtype) for _ in range(count)]
                functions = candidates(tensors)
                times = take_turns(functions, device, arguments.rounds, repeat=max(1, 1_000_000 // (count * numel)))
                print(f"\n{count} x {numel:,} {dtype}, {threads} threads: median µs; torch's time relative to it")
                pair = times["torch isfinite and norm"]
                for name, measured in times.items():
                    ratio = median_ratio(pair, measured)
                    print(f"  {name:28s} {statistics.median(measured) * 1e6:12.1f}  {ratio:6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
