"""A whole step of Adafactor and of CAME from bmt_kernels' factored passes, against transformers' Adafactor, the same
steps in plain PyTorch, and torch's fused AdamW, which keeps two full moments.

Each round also times an in-place pass that moves as many bytes as Adafactor must (20 per element: the gradient read
three times, the parameter read and written); ratios are taken within a round, since memory bandwidth comes and goes
on a shared machine.
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

import bmt_kernels as bk

LR, DECAY, BETA1, BETA2, BETA3, EPS, EPS2 = 1e-3, 0.1, 0.9, 0.999, 0.9999, 1e-30, 1e-16


class Averages:
    """Row and column averages of equal matrices, with views for what the kernels write and read."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self.size = size
        self.sums, self.averages = (
            torch.zeros(2, count, size, device=device),
            torch.zeros(2, count, size, device=device),
        )
        self.row_sums, self.col_sums = list(self.sums[0]), list(self.sums[1])

    def factors(self, beta: float) -> tuple[list[Tensor], list[Tensor]]:
        self.averages.lerp_(self.sums / self.size, 1 - beta)
        row, col = self.averages
        return list((row / row.mean(-1, keepdim=True)).rsqrt()), list(col.rsqrt())


def _approximate(averages: tuple[Tensor, Tensor], square: Tensor, beta: float) -> Tensor:
    row, col = averages
    row.lerp_(square.mean(-1), 1 - beta)
    col.lerp_(square.mean(-2), 1 - beta)
    return (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * col.rsqrt().unsqueeze(-2)


def candidates(count: int, size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Steps over ``count`` matrices of ``size`` by ``size`` elements."""

    def tensors() -> list[Tensor]:
        return [torch.randn(size, size, device=device) for _ in range(count)]

    p, g, m, v = tensors(), tensors(), [torch.zeros_like(t) for t in tensors()], tensors()
    torch._foreach_abs_(v)
    steps = [torch.tensor(10.0, device=device) for _ in range(count)]
    moved = torch.rand(count * size * size * 5 // 2, device=device)
    squares, residuals = Averages(count, size, device), Averages(count, size, device)
    out, rates = torch.zeros(count, device=device), torch.full((count,), LR, device=device)
    decays = torch.full((count,), 1 - LR * DECAY, device=device)
    plain = [[torch.ones(2, size, device=device).unbind() for _ in range(count)] for _ in range(2)]

    def factors_and_clips() -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
        bk.factored_square_sums(g, squares.row_sums, squares.col_sums, eps=EPS)
        factors = squares.factors(BETA2)
        bk.factored_update_square_sum(g, *factors, out)
        return factors, (out / size**2).sqrt().clamp(min=1.0)

    def adafactor() -> None:
        factors, clips = factors_and_clips()
        bk.factored_update(p, g, *factors, LR / clips, decay_factors=decays)

    def came() -> None:
        factors, clips = factors_and_clips()
        sums = (residuals.row_sums, residuals.col_sums)
        bk.factored_residual_square_sums(g, *factors, 1 / clips, m, *sums, beta1=BETA1, eps=EPS2)
        bk.factored_update(p, m, *residuals.factors(BETA3), rates, decay_factors=decays)

    def plain_update(i: int) -> Tensor:
        u = _approximate(plain[0][i], g[i] ** 2 + EPS, BETA2).mul_(g[i])
        return u.div_((u.norm(2) / size).clamp_(min=1.0))

    def plain_adafactor() -> None:
        for i in range(count):
            p[i].mul_(1 - LR * DECAY).sub_(plain_update(i), alpha=LR)

    def plain_came() -> None:
        for i in range(count):
            u = plain_update(i)
            m[i].lerp_(u, 1 - BETA1)
            approximate = _approximate(plain[1][i], (u - m[i]) ** 2 + EPS2, BETA3)
            p[i].mul_(1 - LR * DECAY).sub_(approximate.mul_(m[i]), alpha=LR)

    def torch_fused() -> None:
        torch._fused_adamw_(
            p, g, m, v, [], steps, lr=LR, beta1=BETA1, beta2=BETA2, weight_decay=DECAY, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip

    functions: dict[str, Callable[[], object]] = {
        "pass over the same bytes": lambda: moved.mul_(1.0),
        "bmt_kernels, Adafactor": adafactor,
        "plain torch, Adafactor": plain_adafactor,
        "bmt_kernels, CAME": came,
        "plain torch, CAME": plain_came,
        "torch fused AdamW": torch_fused,
    }
    try:
        from transformers.optimization import Adafactor
    except ImportError:
        return functions
    leaves = [torch.nn.Parameter(t) for t in p]
    for leaf, grad in zip(leaves, g, strict=True):
        leaf.grad = grad
    theirs = Adafactor(leaves, lr=LR, weight_decay=DECAY, relative_step=False, scale_parameter=False)
    return {**functions, "transformers Adafactor": theirs.step}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", nargs="+", default=["1x4096", "30x512"], help="count x size of square matrices")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(machine())
    for threads in thread_counts(arguments.threads, device):
        torch.set_num_threads(threads)
        for matrices in arguments.matrices:
            count, size = (int(number) for number in matrices.split("x"))
            functions = candidates(count, size, device)
            times = take_turns(functions, device, arguments.rounds, warm_up=1)
            print(f"\n{count} x {size} x {size}, {threads} threads: median ms; time relative to the pass")
            floor = times["pass over the same bytes"]
            for name, measured in times.items():
                ratio = median_ratio(measured, floor)
                print(f"  {name:30s} {statistics.median(measured) * 1e3:10.2f}  {ratio:6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
