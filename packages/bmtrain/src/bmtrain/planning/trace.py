"""One training step on meta tensors: what a rank of a large job would hold, compute and send.

The step runs the code of ``bmt_zero`` and ``bmt_tp`` with communicators that send nothing. A model of many equal layers
is traced twice, with a few layers and with one more, and extrapolated: each further layer adds the same.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from bmt_comm import ParallelContext, planned_context, sharded_gradient
from bmt_tp import parallelize
from bmt_zero import Block, BMTrainModelWrapper, no_sync
from bmt_zero.block_list import link_blocks
from bmt_zero.repeated_layers import find_layers
from bmt_zero.shard import sharding_of
from bmt_zero.sharded_parameter import ShardedParameter

from .live_memory import LiveMemory, Memory, Phase, flash_attention
from .models import PlannedModel, loss_of
from .settings import Job, Settings

PHASES = ("embedding", "layers forward", "head", "layers backward", "embedding backward")
_DEPTH = 3
"""Layers of the shorter trace: with prefetching, two of them are unsharded at a time."""


@dataclass
class Trace:
    """A training step of one rank.

    Attributes:
        peaks, ends: of the phases of the step: the most memory, and the memory when they end.
        seconds: of computation of one micro-batch, in all phases.
        traffic: bytes that the rank sends in a step, by the communicator: "tensor"; "stage", for the layers of a
            pipeline; or "data", for all other parameters.
        shards: elements of trained parameters that this rank holds.
    """

    peaks: dict[str, Memory] = field(default_factory=dict)
    ends: dict[str, Memory] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)
    shards: float = 0

    def deeper(self, shorter: Trace, layers: float) -> Trace:
        """The step of a model with ``layers`` more layers. ``shorter`` is the step with one layer less."""

        def memory(of: str) -> dict[str, Memory]:
            mine, theirs = getattr(self, of), getattr(shorter, of)
            return {name: value.plus(value.plus(theirs[name], -1), layers) for name, value in mine.items()}

        def numbers(of: str) -> dict[str, float]:
            mine, theirs = getattr(self, of), getattr(shorter, of)
            return {name: value + layers * (value - theirs.get(name, 0)) for name, value in mine.items()}

        return Trace(
            memory("peaks"),
            memory("ends"),
            numbers("seconds"),
            numbers("traffic"),
            self.shards + layers * (self.shards - shorter.shards),
        )


def trace_step(model: PlannedModel, job: Job, settings: Settings, batch: int, layers: int | None = None) -> Trace:
    """Trace a step of one rank with micro-batches of ``batch`` sequences.

    Args:
        layers: the number of the model's layers that the rank has; None: all.
    """
    wanted = model.depth if layers is None else layers
    if not model.uniform or wanted <= _DEPTH:
        return _traced(model, job, settings, batch, wanted)
    short, long = (_traced(model, job, settings, batch, depth) for depth in (_DEPTH, _DEPTH + 1))
    return long.deeper(short, wanted - _DEPTH - 1)


def _traced(model: PlannedModel, job: Job, settings: Settings, batch: int, depth: int) -> Trace:
    import torch._dynamo  # torch's checkpoints import it in the first forward, and its import computes

    arguments = job.world_size, settings.tp, settings.pipe, settings.zero
    module = model.at_depth(depth).to(job.dtype)
    with planned_context(*arguments) as context, LiveMemory() as memory, flash_attention():
        layers = list(find_layers(module))
        if settings.tp > 1:
            parallelize(module, model.tp_plan)
        _shard(module, layers, settings)
        params = [p for p in module.parameters() if isinstance(p, ShardedParameter)]
        flats = list(dict.fromkeys(param.handle.flat for param in params))
        memory.watch(flats)
        for flat in flats:
            for param, zeros in zip(flat.params, flat.local_views(torch.zeros_like(flat.shard)), strict=True):
                param.awaits_values = False
                if param.requires_grad:  # as after a step, which keeps gradients and zeroes them
                    param.grad = sharded_gradient(zeros, param)
        _mark_phases(layers, memory)
        try:
            args, kwargs = model.batch(batch, job.sequence)
        except Exception as error:
            raise ValueError(
                f"the batch of {model.name} must be (args, kwargs) of the module: {type(error).__name__}: {error}"
            ) from error

        def run() -> None:
            memory.enter(PHASES[0])
            for phase in memory.phases.values():
                phase.operations.clear()
            try:
                loss_of(module(*args, **kwargs)).backward()
            except Exception as error:
                raise ValueError(f"a step of {model.name} fails: {type(error).__name__}: {error}") from error
            memory.enter("")

        traffic = _run_step(run, module, settings, context)
        trained = sum(flat.shard.numel() for flat in flats if any(p.requires_grad for p in flat.params))
        # Phases are missing if layers get no gradients.
        phases = {name: memory.phases.get(name, Phase()) for name in PHASES}
        seconds = {
            name: sum(job.operation_seconds(flops, moved) for flops, moved in phase.operations)
            for name, phase in phases.items()
        }
        return Trace(
            {name: phase.peak for name, phase in phases.items()},
            {name: phase.end for name, phase in phases.items()},
            seconds,
            traffic,
            trained,
        )


def _shard(module: nn.Module, layers: list[nn.Module], settings: Settings) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # the wrapper prints the Blocks there
        if settings.pipe > 1:
            for layer in layers:
                Block(layer, settings.checkpoint, settings.zero, stage_local=True)
            link_blocks(layers)
        BMTrainModelWrapper(module, use_checkpoint=settings.checkpoint, zero_level=settings.zero)
    assert all(sharding_of(layer) is not None for layer in layers)


def _mark_phases(layers: list[nn.Module], memory: LiveMemory) -> None:
    """Begin phases where the first and the last layer begin and end."""
    if not layers:
        return

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        memory.enter(PHASES[1])
        _on_gradient([*args, *kwargs.values()], lambda: memory.enter(PHASES[4]))

    def after(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        memory.enter(PHASES[2])
        outputs = output if isinstance(output, (tuple, list)) else [output]
        _on_gradient(list(outputs), lambda: memory.enter(PHASES[3]))

    layers[0].register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    layers[-1].register_forward_hook(after)


def _on_gradient(values: list[object], call: Callable[[], None]) -> None:
    """Run ``call`` when the gradient of the first tensor that gets one arrives."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(lambda _: call())
            return


def _run_step(
    run: Callable[[], None], module: nn.Module, settings: Settings, context: ParallelContext
) -> dict[str, float]:
    """Run the micro-batches of a step that differ from each other. Returns the bytes that the rank sends in a step."""
    communicators = {
        "stage": (context.zero, context.tp_zero),
        "data": (context.outer_zero, context.outer_tp_zero),
        "tensor": (context.tp,),
    }

    def sent() -> dict[str, float]:
        return {
            name: sum(traffic.bytes for comm in set(group) for traffic in comm.traffic.values())
            for name, group in communicators.items()
        }

    total = dict.fromkeys(communicators, 0.0)
    count = settings.accumulation
    # From level 2 on, all micro-batches are equal. Below, the first one unshards, and the last one reduces.
    differing = {1: [(False, 1)], 2: [(True, 1), (False, 1)]}.get(count, [(True, 1), (True, count - 2), (False, 1)])
    for accumulates, times in differing if settings.zero <= 1 else [(False, count)]:
        before = sent()
        with no_sync(module) if accumulates else contextlib.nullcontext():
            run()
        total = {name: value + times * (sent()[name] - before[name]) for name, value in total.items()}
    return total
