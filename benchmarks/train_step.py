"""Training steps of one GPT: bmtrain against FSDP2, DDP, DeepSpeed and no communication, over the same transports.

Each candidate runs in fresh processes of its own, and the candidates take turns: what one leaves behind (threads,
memory, caches) meets no other, and what else the machine does meets them all. In a round each starts once, trains a few
steps that do not count, and then some that do; its time in the round is their median. Reported are the median over
rounds, the least and the greatest, and the ratio to a yardstick within a round: its median, least and greatest.

A candidate is named with its transport: "FSDP2 over gloo", "FSDP2 over shared memory" (the backend "bmt"), "bmtrain
ZeRO-3 over gloo". On GPUs all go over NCCL, and none says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from launch import default_ranks, launched, machine, on_ranks
from link import on_hosts
from models import GPT, GPTShape
from torch import Tensor, nn

import bmt_comm
import bmt_zero
from bmt_comm.fixed_order import use_deterministic_kernels
from bmt_optim import AdamOptimizer, OptimManager
from bmt_zero.compression import Kind

Step = Callable[[Tensor, Tensor], None]
_GLOO, _SHARED = "gloo", "shared memory"


def _torch_step(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed_step(model: nn.Module, stage: int, device: torch.device) -> Step:
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,  # for its timers only
        "zero_optimization": {"stage": stage, "overlap_comm": device.type == "cuda"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(tokens: Tensor, targets: Tensor) -> None:
        engine.backward(engine(tokens, targets))
        engine.step()

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
    """One candidate's training step, over the process groups and communicators of ``context``."""
    name = name.partition(" over ")[0]
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
    if name.startswith("DeepSpeed"):
        return _deepspeed_step(model, int(level), context.device)
    compression = order.pop() if order and order[0] in get_args(Kind) else None
    precision = bmt_zero.MixedPrecision(compression=compression)
    model = bmt_zero.BMTrainModelWrapper(model, use_checkpoint=False, zero_level=int(level), precision=precision)
    optimizer = AdamOptimizer(model.parameters(), lr=1e-4)
    if order:
        context = dataclasses.replace(context, deterministic=order == ["deterministic"])
        return _accumulating_step(model, optimizer, context)

    def step(tokens: Tensor, targets: Tensor) -> None:
        (model(tokens, targets) / context.replicas).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def start(name: str) -> bmt_comm.ParallelContext:
    """Join the other ranks. Everything on the CPU goes over the transport of the candidate ``name``, if it has one."""
    name, _, transport = name.partition(" over ")
    if transport == _GLOO:
        bmt_comm.Communicator.share_memory = lambda *_: False  # type: ignore[method-assign]
    by_torch = transport == _SHARED and not name.startswith("bmtrain")
    context = bmt_comm.init_distributed(backend="bmt" if by_torch else None)
    if transport == _SHARED and not context.world.share_memory():
        sys.exit("the ranks cannot share memory: is bmt-kernels installed, with its compiled module?")
    return context


def run_alone(arguments: argparse.Namespace) -> None:
    """Measure one candidate, on the ranks that this process is one of."""
    context = start(arguments.alone)
    shape = shape_of(arguments)
    found: dict[str, list[float]] = {}
    for size in arguments.sizes:
        batch, length = (int(n) for n in size.split("x"))
        generator = torch.Generator().manual_seed(context.rank)
        tokens = torch.randint(shape.vocab, (batch, length + 1), generator=generator).to(context.device)
        step = build(arguments.alone, shape, context)
        times = []
        for number in range(-arguments.warm_up, arguments.steps):
            context.synchronize()
            begun = time.perf_counter()
            step(tokens[:, :-1], tokens[:, 1:])
            context.synchronize()
            if number >= 0:
                times.append(time.perf_counter() - begun)
        found[size] = [statistics.median(times), peak_mib(context.device)]
        del step
    if context.rank == 0:
        Path(arguments.into).write_text(json.dumps(found))
    if dist.is_initialized():
        bmt_comm.shutdown()


def peak_mib(device: torch.device) -> float:
    """Of a rank so far: what it has allocated on a GPU, or all of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(arguments: argparse.Namespace) -> None:
    link = f"; a host each, which sends {arguments.link}/s" if arguments.link else ""
    print(f"{machine()}; {arguments.ranks} ranks{link}; {shape_of(arguments)}; {arguments.rounds} rounds", flush=True)
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in arguments.candidates}
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "found.json")
        for round_ in range(arguments.rounds):
            for name in arguments.candidates:
                if sys.stderr.isatty():
                    print(f"\rround {round_ + 1} of {arguments.rounds}: {name:40s}", end="", file=sys.stderr)
                flags = [*sys.argv[1:], "--alone", name, "--into", str(into)]
                if arguments.link:
                    code = on_hosts(__file__, arguments.ranks, flags, arguments.link)
                else:
                    code = on_ranks(__file__, arguments.ranks, flags)
                if code:
                    sys.exit(f"{name!r} has failed")
                found[name].append(json.loads(into.read_text()))
    for size in arguments.sizes:
        report(size, {name: [each[size] for each in rounds] for name, rounds in found.items()})


def report(size: str, found: dict[str, list[list[float]]]) -> None:
    yardstick = next((name for name in found if name.startswith("FSDP2")), next(iter(found)))
    print(f"\nbatch {size}: seconds per step (least to greatest), speed relative to {yardstick}, peak MiB of a rank")
    for name, rounds in found.items():
        times, peaks = zip(*rounds, strict=True)
        ratios = [theirs / ours for ours, (theirs, _) in zip(times, found[yardstick], strict=True)]
        print(
            f"  {name:34s} {statistics.median(times):8.4f} ({min(times):.4f} to {max(times):.4f})"
            f"   {statistics.median(ratios):5.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
            f"   {statistics.median(peaks):7.0f}",
            flush=True,
        )


def shape_of(arguments: argparse.Namespace) -> GPTShape:
    return GPTShape(arguments.layers, arguments.hidden, arguments.heads, arguments.vocab)


def default_candidates() -> list[str]:
    names = ["DDP", "FSDP2", "bmtrain ZeRO-2", "bmtrain ZeRO-3"]
    if not torch.cuda.is_available():
        names = [f"{name} over {transport}" for name in names for transport in (_GLOO, _SHARED)]
    if find_spec("deepspeed"):
        transport = "" if torch.cuda.is_available() else f" over {_GLOO}"
        names += [f"DeepSpeed ZeRO-{stage}{transport}" for stage in (2, 3)]
    return ["no communication", *names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=default_ranks(), help="processes (default: GPUs, or 2)")
    parser.add_argument("--sizes", nargs="+", default=["1x64", "4x256"], help="batch x tokens (default: 1x64 4x256)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each candidate (default: 5)")
    parser.add_argument("--steps", type=int, default=7, help="timed steps in each start (default: 7)")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps in each start (default: 3)")
    parser.add_argument(
        "--candidates",
        nargs="+",
        default=default_candidates(),
        help="what to compare; also ZeRO-0 and ZeRO-1. 'bmtrain ZeRO-3 accumulating': four micro-batches, a gradient "
        "norm and a step; 'bmtrain ZeRO-3 deterministic': the same with sums in a fixed order; 'bmtrain ZeRO-3 int8' "
        "or float8: compressed communication (default: %(default)s)",
    )
    parser.add_argument(
        "--link", metavar="RATE", help="each rank on a host (a network namespace) that sends so much, such as 1gbit"
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # the candidate that these ranks are
    parser.add_argument("--into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not launched():
        measure(arguments)
        return 0
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    run_alone(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
