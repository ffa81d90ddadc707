"""Training steps of one GPT: bmtrain against FSDP2, DDP and no communication at all, in one run.

The candidates live in the same processes and take turns, so that what else the machine does meets them all.
Reported are medians over rounds, and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from launch import default_ranks, launched, machine, on_ranks
from models import GPT, GPTShape
from torch import Tensor, nn

import bmt_comm
import bmt_zero
from bmt_comm.fixed_order import use_deterministic_kernels
from bmt_optim import AdamOptimizer, OptimManager

Step = Callable[[Tensor, Tensor], None]


def _torch_step(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _accumulating_step(model: nn.Module, optimizer: AdamOptimizer, context: bmt_comm.ParallelContext) -> Step:
    """Four micro-batches, a gradient norm and an optimizer step; sums in a fixed order if ``context`` has one."""
    for param in model.parameters():
        param.handle.reducer.has_fixed_order = context.deterministic
    manager = OptimManager(skip_non_finite=True, context=context)
    manager.add_optimizer(optimizer)

    def step(tokens: Tensor, targets: Tensor) -> None:
        restore = use_deterministic_kernels(context.device.type == "cuda") if context.deterministic else None
        manager.zero_grad()
        for micro_batch in range(4):
            with contextlib.nullcontext() if micro_batch == 3 else bmt_zero.no_sync(model):
                manager.backward(model(tokens, targets) / 4)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
        if restore is not None:
            restore()

    return step


def build(name: str, shape: GPTShape, context: bmt_comm.ParallelContext) -> Step:
    """One candidate's training step."""
    torch.manual_seed(0)
    model = GPT(shape).to(context.device)
    if name == "no communication":
        return _torch_step(model)
    if name == "DDP":
        return _torch_step(nn.parallel.DistributedDataParallel(model))
    if name == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        mesh = context.mesh["data"]
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return _torch_step(model)
    level, *order = name.rsplit("-", 1)[1].split()
    model = bmt_zero.BMTrainModelWrapper(model, use_checkpoint=False, zero_level=int(level))
    optimizer = AdamOptimizer(model.parameters(), lr=1e-4)
    if order:
        context = dataclasses.replace(context, deterministic=order == ["deterministic"])
        return _accumulating_step(model, optimizer, context)

    def step(tokens: Tensor, targets: Tensor) -> None:
        (model(tokens, targets) / context.replicas).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(arguments: argparse.Namespace) -> None:
    context = bmt_comm.init_distributed()
    shape = GPTShape(arguments.layers, arguments.hidden, arguments.heads, arguments.vocab)
    names = arguments.candidates
    steps = {name: build(name, shape, context) for name in names}
    if context.rank == 0:
        print(f"{machine()}; {context.world_size} ranks; {shape}", flush=True)
    for size in arguments.sizes:
        batch, length = (int(n) for n in size.split("x"))
        generator = torch.Generator().manual_seed(context.rank)
        tokens = torch.randint(shape.vocab, (batch, length + 1), generator=generator).to(context.device)
        times: dict[str, list[float]] = {name: [] for name in names}
        for round_ in range(-arguments.warm_up, arguments.rounds):
            for name in names:
                context.synchronize()
                start = time.perf_counter()
                for _ in range(arguments.steps):
                    steps[name](tokens[:, :-1], tokens[:, 1:])
                context.synchronize()
                if round_ >= 0:
                    times[name].append((time.perf_counter() - start) / arguments.steps)
            if context.rank == 0 and sys.stderr.isatty():
                print(f"\r{size}: round {round_ + 1} of {arguments.rounds}", end="", file=sys.stderr)
        if context.rank == 0:
            report(size, times, names)
    if dist.is_initialized():
        bmt_comm.shutdown()


def report(size: str, times: dict[str, list[float]], names: list[str]) -> None:
    yardstick = "FSDP2" if "FSDP2" in names else names[0]
    print(f"\nbatch {size}: median seconds per step; speed relative to {yardstick} (median of ratios)")
    for name in names:
        ratio = statistics.median(y / t for t, y in zip(times[name], times[yardstick], strict=True))
        print(f"  {name:28s} {statistics.median(times[name]):8.4f}   {ratio:5.2f}x", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=default_ranks(), help="processes (default: GPUs, or 2)")
    parser.add_argument("--sizes", nargs="+", default=["1x64", "4x256"], help="batch x tokens (default: 1x64 4x256)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument("--steps", type=int, default=1, help="steps per round and candidate (default: 1)")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed rounds (default: 2)")
    parser.add_argument(
        "--candidates",
        nargs="+",
        default=["no communication", "DDP", "FSDP2", "bmtrain ZeRO-2", "bmtrain ZeRO-3"],
        help="what to compare; also ZeRO-0 and ZeRO-1. 'bmtrain ZeRO-3 accumulating': four micro-batches, a gradient "
        "norm and a step; 'bmtrain ZeRO-3 deterministic': the same with sums in a fixed order",
    )
    arguments = parser.parse_args()
    if not launched():
        return on_ranks(__file__, arguments.ranks, sys.argv[1:])
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
