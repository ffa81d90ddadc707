"""One Adam step with 8-bit moments against fp32 moments: time, and bytes of state per parameter.

Candidates alternate within a round, and ratios are taken within a round, since memory bandwidth comes and goes on a
shared machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from launch import machine
from timing import median_ratio, take_turns, thread_counts
from torch import Tensor

from bmt_kernels import adam8bit_step, adam_step


def _bytes_per_element(states: list[list[Tensor]]) -> float:
    tensors = [tensor for state in states for tensor in state]
    return sum(t.numel() * t.element_size() for t in tensors) / states[0][0].numel() / len(states[0])


def candidates(count: int, numel: int, device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """Steps over ``count`` tensors of ``numel`` elements each, and the bytes of their moments per element."""

    def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.rand(numel, device=device).to(dtype) for _ in range(count)]

    def filled(value: float, size: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.full((size,), value, dtype=dtype, device=device) for _ in range(count)]

    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 10}
    p, half_p, g, half_g = tensors(), tensors(torch.bfloat16), tensors(), tensors(torch.bfloat16)
    moments = [tensors(), tensors()]
    blocks = -(-numel // 256)
    small = [filled(127, numel, torch.uint8), filled(0, numel, torch.uint8)]
    small += [filled(0.0, blocks, torch.float32), filled(0.0, blocks, torch.float32)]
    steps = [torch.tensor(10.0, device=device) for _ in range(count)]

    def torch_fused() -> None:
        torch._fused_adamw_(
            p, g, *moments, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip

    large_size, small_size = _bytes_per_element(moments), _bytes_per_element(small)
    floors = {}
    for name, size in (("fp32", large_size), ("8-bit", small_size)):  # an element is read and written: 8 bytes
        moved = torch.rand(int(count * numel * (12 + 2 * size) / 8), device=device)
        floors[f"floor: the bytes of a step, {name}"] = (lambda moved=moved: moved.mul_(1.0), size)
    return floors | {
        "fp32 moments": (lambda: adam_step(p, g, *moments, **options), large_size),
        "torch fused, fp32 moments": (torch_fused, large_size),
        "8-bit moments": (lambda: adam8bit_step(p, g, *small, **options), small_size),
        "fp32 moments, bf16 in and out": (
            lambda: adam_step(half_p, half_g, *moments, masters=p, **options),
            large_size,
        ),
        "8-bit moments, bf16 in and out": (
            lambda: adam8bit_step(half_p, half_g, *small, masters=p, **options),
            small_size,
        ),
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
    for threads in thread_counts(arguments.threads, device):
        torch.set_num_threads(threads)
        for count, numel in [(1, n) for n in arguments.numel] + [(arguments.small, 1000)]:
            functions = candidates(count, numel, device)
            steps = {name: step for name, (step, _) in functions.items()}
            times = take_turns(steps, device, arguments.rounds, repeat=max(1, 1_000_000 // (count * numel)))
            print(f"\n{count} x {numel:,} elements, {threads} threads")
            head = f"{'median µs':>12s} {'to fp32':>8s} {'to its floor':>13s} {'moments, bytes per element':>27s}"
            print(f"  {'':34s} {head}")
            floors = {functions[name][1]: measured for name, measured in times.items() if name.startswith("floor")}
            for name, measured in times.items():
                size = functions[name][1]
                ratio, to_floor = (median_ratio(measured, base) for base in (times["fp32 moments"], floors[size]))
                row = f"{statistics.median(measured) * 1e6:12.1f} {ratio:8.2f} {to_floor:13.2f} {size:27.3f}"
                print(f"  {name:34s} {row}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
