"""The training steps that the benchmarks compare: bmtrain, FSDP2, DDP, DeepSpeed and no communication.

A candidate has a name: "no communication", "DDP", "FSDP2", "DeepSpeed ZeRO-3" or "bmtrain ZeRO-3", each at any level
of ZeRO. bmtrain's may end with a variant: "int8" or "float8" (compressed communication), "accumulating" (four
micro-batches, a gradient norm and a step), "deterministic" (the same with sums in a fixed order).

On the CPU the name has the transport, too: "FSDP2 over gloo", "FSDP2 over shared memory" (the backend "bmt").
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import cast, get_args

import torch
from models import GPT, GPTShape
from torch import Tensor, nn

import bmt_comm
import bmt_zero
from bmt_comm.fixed_order import use_deterministic_kernels
from bmt_optim import AdamOptimizer, OptimManager
from bmt_zero.compression import Kind

Step = Callable[[Tensor, Tensor], None]
GLOO, SHARED = "gloo", "shared memory"
PLAIN = "no communication"


@dataclasses.dataclass(frozen=True)
class Options:
    """How all candidates compute.

    Attributes:
        bf16: layers compute in bf16. Parameters and optimizer states are fp32, and gradients are summed in fp32.
        checkpointing: each layer keeps its inputs only, and computes again in backward.
        compiled: each layer is compiled by itself.
        fused_loss: the loss is ``bmt_kernels.linear_cross_entropy``, which holds no logits.
    """

    bf16: bool = False
    checkpointing: bool = False
    compiled: bool = False
    fused_loss: bool = False


def candidates(systems: Sequence[str], transports: Sequence[str] = (GLOO, SHARED)) -> list[str]:
    """Names of candidates: the systems over each transport. DeepSpeed has gloo only, and takes part if installed."""
    systems = [name for name in systems if find_spec("deepspeed") or not name.startswith("DeepSpeed")]
    if torch.cuda.is_available():
        return systems
    names = [name for name in systems if name == PLAIN]
    for transport in transports:
        names += [
            f"{name} over {transport}"
            for name in systems
            if name != PLAIN and (transport == GLOO or not name.startswith("DeepSpeed"))
        ]
    return names


def candidate(name: str) -> str:
    """A name, from the command line."""
    variants = "|".join([*get_args(Kind), "accumulating", "deterministic"])
    ours = f"bmtrain ZeRO-[0-3]( ({variants}))?"
    if not re.fullmatch(
        f"{PLAIN}|DeepSpeed ZeRO-[0-3]( over {GLOO})?|(DDP|FSDP2|{ours})( over ({GLOO}|{SHARED}))?", name
    ):
        raise argparse.ArgumentTypeError(f"{name!r} is none: see the beginning of benchmarks/candidates.py")
    return name


def split(name: str) -> tuple[str, str]:
    """A candidate's system and its transport ("" if the name has none)."""
    system, _, transport = name.partition(" over ")
    return system, transport


def start(name: str) -> bmt_comm.ParallelContext:
    """Join the other ranks. Everything on the CPU goes over the transport of the candidate ``name``, if it has one."""
    system, transport = split(name)
    if transport == GLOO:
        bmt_comm.Communicator.share_memory = lambda *_: False  # type: ignore[method-assign]
    by_torch = transport == SHARED and not system.startswith("bmtrain")
    context = bmt_comm.init_distributed(backend="bmt" if by_torch else None)
    if not system.startswith("bmtrain"):
        torch.autograd.set_multithreading_enabled(True)  # torch's default, which init_distributed changes on CUDA
    if system == "FSDP2":  # here, so that code does not count as memory of a model
        from torch.distributed import fsdp  # noqa: F401
    elif system.startswith("DeepSpeed"):
        os.environ["DS_ACCELERATOR"] = context.device.type
        import deepspeed  # noqa: F401
    if transport == SHARED and context.world.size > 1 and not context.world.share_memory():
        sys.exit("the ranks cannot share memory: is bmt-kernels installed, with its compiled module?")
    return context


def build(name: str, shape: GPTShape, context: bmt_comm.ParallelContext, options: Options = Options()) -> Step:
    """One candidate's training step, over the process groups and communicators of ``context``."""
    system, _ = split(name)
    torch.manual_seed(0)
    if system.startswith("bmtrain"):
        return _bmtrain_step(system, shape, context, options)
    # FSDP2's documentation shards models on the meta device, and fills them afterwards.
    with torch.device("meta" if system == "FSDP2" else context.device):
        model = GPT(shape, options.fused_loss)
    for number, layer in enumerate(model.layers):
        if options.checkpointing:
            layer = _checkpointed(layer)
            model.layers[number] = layer
        if options.compiled:
            layer.compile()
    if system == PLAIN:
        return _torch_step(model, context, autocast=options.bf16)
    if system == "DDP":
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        return _torch_step(ddp, context, autocast=options.bf16)
    if system == "FSDP2":
        _fully_shard(model, context, options)
        return _torch_step(model, context, autocast=False)
    return _deepspeed_step(model, int(system.rpartition("-")[2]), context, options)


def _checkpointed(layer: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    return checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def _torch_step(model: nn.Module, context: bmt_comm.ParallelContext, autocast: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        with torch.autocast(context.device.type, torch.bfloat16, enabled=autocast):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fully_shard(model: GPT, context: bmt_comm.ParallelContext, options: Options) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = bf16 if options.bf16 else MixedPrecisionPolicy()
    for module in [*model.layers, model]:
        fully_shard(module, mesh=context.mesh["data"], mp_policy=policy)
    model.to_empty(device=context.device)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.reset_parameters()


def _deepspeed_step(model: nn.Module, stage: int, context: bmt_comm.ParallelContext, options: Options) -> Step:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,  # for its timers only
        "zero_optimization": {"stage": stage, "overlap_comm": context.device.type == "cuda"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.bf16},
        "communication_data_type": "fp32",
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(tokens: Tensor, targets: Tensor) -> None:
        engine.backward(engine(tokens, targets))
        engine.step()

    return step


def _bmtrain_step(system: str, shape: GPTShape, context: bmt_comm.ParallelContext, options: Options) -> Step:
    level, *variant = system.rpartition("-")[2].split()
    compression = cast(Kind, variant.pop()) if variant and variant[0] in get_args(Kind) else None
    precision = bmt_zero.MixedPrecision(compression=compression)
    if options.bf16:
        precision = dataclasses.replace(precision, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = GPT(shape, options.fused_loss)
    bmt_zero.BMTrainModelWrapper(
        model, use_checkpoint=options.checkpointing, zero_level=int(level), precision=precision
    )
    bmt_zero.init_parameters(model)
    if options.compiled:
        for layer in model.layers:
            layer.compile()
    optimizer = AdamOptimizer(model.parameters(), lr=1e-4)
    if variant:
        context = dataclasses.replace(context, deterministic=variant == ["deterministic"])
        return _accumulating_step(model, optimizer, context)

    def step(tokens: Tensor, targets: Tensor) -> None:
        (model(tokens, targets) / context.replicas).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

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
