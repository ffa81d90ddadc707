"""A LAMB step from bmt_kernels' two passes against its fused Adam step, over the tensors of a GPT.

Kernels: the same tensors, with fp32 weights, and with bf16 weights and gradients beside fp32 masters. Adam moves 28
bytes per element. LAMB cannot but move 40: the weights and moments are read a second time once the norms are known.
Optimizers: whole steps of DistributedLamb and AdamOptimizer over ZeRO shards on --ranks processes, with the
all-reduce of the norms. Ratios are taken within a round, since memory bandwidth comes and goes on a shared machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from launch import default_ranks, launched, machine, on_ranks
from timing import median_ratio, take_turns, thread_counts
from torch import Tensor

import bmt_comm
from bmt_comm import Slice
from bmt_kernels import adam_step, lamb_moments, lamb_update
from bmt_optim import AdamOptimizer, DistributedLamb

BETAS, EPS, DECAY, LR = (0.9, 0.999), 1e-6, 0.01, 1e-3


def gpt_shapes(layers: int, hidden: int, vocab: int) -> list[tuple[int, ...]]:
    """Of the parameters of a GPT, with biases."""
    square, wide, tall = (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)
    norms, fused = [(hidden,)] * 4, (3 * hidden, hidden)
    block = [*norms, fused, (3 * hidden,), square, (hidden,), wide, (4 * hidden,), tall, (hidden,)]
    return [(vocab, hidden), (1024, hidden), *block * layers, (hidden,), (hidden,)]


def kernels(shapes: Sequence[tuple[int, ...]], device: torch.device) -> dict[str, Callable[[], object]]:
    def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.rand(shape, device=device).to(dtype) for shape in shapes]

    p, g, m, v = tensors(), tensors(), tensors(), tensors()
    half_p, half_g = tensors(torch.bfloat16), tensors(torch.bfloat16)
    common = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY, "step": 10}

    def lamb(grads: list[Tensor], params: list[Tensor], masters: list[Tensor | None] | None) -> None:
        squares = lamb_moments(p, grads, m, v, **common)
        norms = squares.float().sqrt()
        rates = LR * torch.where((norms > 0).all(dim=1), norms[:, 0] / norms[:, 1], 1)
        lamb_update(params, m, v, rates, masters=masters, **common)

    rates = torch.full((len(shapes),), LR, device=device)
    return {
        "Adam, fp32": lambda: adam_step(p, g, m, v, lr=LR, **common),
        "LAMB, fp32": lambda: lamb(g, p, None),
        "  its first pass": lambda: lamb_moments(p, g, m, v, **common),
        "  its second pass": lambda: lamb_update(p, m, v, rates, **common),
        "Adam, bf16 in and out": lambda: adam_step(half_p, half_g, m, v, masters=p, lr=LR, **common),
        "LAMB, bf16 in and out": lambda: lamb(half_g, half_p, list(p)),
    }


def optimizers(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, context: bmt_comm.ParallelContext
) -> dict[str, Callable[[], object]]:
    """Steps over this rank's rows of every parameter, which lie end to end as bmt-zero lays them."""
    zero = context.zero

    def shards() -> list[torch.nn.Parameter]:
        cuts = []
        for shape in shapes:
            start, stop = (shape[0] * rank // zero.size for rank in (zero.rank, zero.rank + 1))
            cuts.append(Slice(shape, start, stop, zero))
        flat = torch.rand(sum(cut.numel for cut in cuts), device=context.device).to(dtype)
        gradient = torch.rand_like(flat)
        params, at = [], 0
        for cut in cuts:
            local = cut.local_shape
            param = torch.nn.Parameter(flat[at : at + cut.numel].view(local))
            param.bmt_slice = cut  # type: ignore[attr-defined]
            param.grad = gradient[at : at + cut.numel].view(local)
            params.append(param)
            at += cut.numel
        return params

    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    adam, lamb = AdamOptimizer(shards(), **options), DistributedLamb(shards(), **options)
    return {"AdamOptimizer": adam.step, "DistributedLamb": lamb.step}


def report(times: Mapping[str, Sequence[float]]) -> None:
    """Each candidate's time, and its ratio to the last Adam before it."""
    base = ""
    for name, measured in times.items():
        base = name if name.startswith("Adam") else base
        ratio = median_ratio(measured, times[base])
        print(f"  {name:26s} {statistics.median(measured) * 1e3:10.2f} ms  {ratio:6.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=24000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="of the kernels")
    parser.add_argument("--ranks", type=int, default=default_ranks(), help="of the optimizers; 0: leave these out")
    arguments = parser.parse_args()
    shapes = gpt_shapes(arguments.layers, arguments.hidden, arguments.vocab)
    if launched():
        context = bmt_comm.init_distributed()
        for dtype in (torch.float32, torch.bfloat16):
            times = take_turns(optimizers(shapes, dtype, context), context.device, arguments.rounds)
            if context.rank == 0:
                print(f"\nwhole steps, {dtype} parameters, {context.world_size} ranks: median; relative to Adam")
                report(times)
        bmt_comm.shutdown()
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(machine())
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"{numel / 1e6:.1f}M parameters in {len(shapes)} tensors")
    for threads in thread_counts(arguments.threads, device):
        torch.set_num_threads(threads)
        times = take_turns(kernels(shapes, device), device, arguments.rounds)
        print(f"\nkernels, {threads} threads: median; relative to the Adam step above")
        report(times)
    return on_ranks(__file__, arguments.ranks, sys.argv[1:]) if arguments.ranks else 0


if __name__ == "__main__":
    sys.exit(main())
