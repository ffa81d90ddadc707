"""Cross entropy, forward and backward: bmt_kernels against torch, with the memory that each takes.

The first table is of logits that are there already; the second adds the linear layer that makes them. Ratios are of
torch's time, within a round. The memory is the most that was allocated beyond what was there before, counted by
PyTorch's profiler on CPU and by its caching allocator on CUDA.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from launch import machine
from timing import median_ratio, take_turns, thread_counts
from torch import Tensor

from bmt_kernels import cross_entropy, linear_cross_entropy

Pass = Callable[[], object]


def _peak(function: Pass, device: torch.device) -> int:
    """The most bytes allocated at a time beyond those before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def of_logits(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> dict[str, Pass]:
    leaf = torch.randn(rows, vocab, device=device).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, (rows,), device=device)

    def both(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Pass:
        # The gradient is dropped: what it takes is part of the peak, but not of what the next pass finds.
        return lambda: torch.autograd.grad(loss_of(leaf, target), leaf)

    return {"torch": both(F.cross_entropy), "bmt_kernels": both(cross_entropy)}


def of_a_layer(rows: int, width: int, vocab: int, dtype: torch.dtype, device: torch.device) -> dict[str, Pass]:
    hidden = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=device) * width**-0.5).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, (rows,), device=device)

    def both(loss_of: Callable[[], Tensor]) -> Pass:
        return lambda: torch.autograd.grad(loss_of(), [hidden, weight])

    return {
        "torch": both(lambda: F.cross_entropy(F.linear(hidden, weight), target)),
        "linear + cross_entropy": both(lambda: cross_entropy(F.linear(hidden, weight), target, inplace_backward=True)),
        "linear_cross_entropy": both(lambda: linear_cross_entropy(hidden, weight, target)),
    }


def report(title: str, functions: dict[str, Pass], device: torch.device, rounds: int) -> None:
    times = take_turns(functions, device, rounds, warm_up=1)
    print(f"\n{title}: median ms; torch's time over it; extra memory in MiB")
    for name, measured in times.items():
        ratio = median_ratio(times["torch"], measured)
        memory = _peak(functions[name], device) / 2**20
        print(f"  {name:26s} {statistics.median(measured) * 1e3:10.1f}  {ratio:6.2f}  {memory:10.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--width", type=int, default=512, help="of the linear layer's input")
    parser.add_argument("--large", action="store_true", help="8192 rows")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    rows = 8192 if arguments.large else arguments.rows
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(machine())
    for threads in thread_counts(arguments.threads, device):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            where = f"{rows} x {arguments.vocab}, {dtype}, {threads} threads"
            report(f"logits {where}", of_logits(rows, arguments.vocab, dtype, device), device, arguments.rounds)
            layer = of_a_layer(rows, arguments.width, arguments.vocab, dtype, device)
            report(f"layer of width {arguments.width}, {where}", layer, device, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
