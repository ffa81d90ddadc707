"""The frameworks that shard the models of the conformance kit: an adapter each."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bmt_comm import ParallelContext, Slice, init_distributed, shard_of, slice_of

from .cases import Bags


class Framework:
    """Shards a model. Subclasses are adapters; see those below.

    Attributes:
        ranks: the number of ranks it runs on.
        divide: the divisor of a rank's loss, so that gradients are means over ranks.
        least: the least number of parameters of a model.
        lacks: cases that it does not have.
    """

    ranks = 2
    least = 1
    divide = 1
    lacks: frozenset[str] = frozenset()

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether parameters may have this shape."""
        return True

    def start(self) -> ParallelContext:
        """Initialize a rank."""
        return init_distributed()

    def shard(self, model: Bags, other: bool) -> nn.Module:
        """Shard ``model``; at another layout if ``other`` and there is one."""
        raise NotImplementedError

    def train(self, model: nn.Module, passes: Sequence[Mapping[str, Tensor]], means: Mapping[int, Tensor]) -> None:
        """Run backward passes with this rank's coefficients. ``means`` are the resulting gradients."""
        for coefficients in passes:
            (model(coefficients) / self.divide).backward()


class OneProcess(Framework):
    ranks = 1

    def shard(self, model: Bags, other: bool) -> nn.Module:
        return model.to_empty(device="cpu") if next(model.parameters()).is_meta else model


class DDP(Framework):
    lacks = frozenset({"from meta"})

    def shard(self, model: Bags, other: bool) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


class FSDP2(Framework):
    lacks = frozenset({"missing on a rank"})  # its ranks then reduce gradients of different sizes
    ranks, replicas = 2, 1

    def takes(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) > 0 and len(shape) > 0

    def shard(self, model: Bags, other: bool) -> nn.Module:
        mesh = None
        if self.replicas > 1:
            mesh = init_device_mesh(
                "cpu", (self.replicas, self.ranks // self.replicas), mesh_dim_names=("replicate", "shard")
            )
        for module in (*([] if other else model.layers), model):
            fully_shard(module, mesh=mesh)
        return model.to_empty(device="cpu") if next(model.parameters()).is_meta else model


class HSDP(FSDP2):
    ranks, replicas = 4, 2


class Zero(Framework):
    """bmt-zero at a level; other layouts are other levels."""

    divide = 2

    def __init__(self, level: int) -> None:
        self.level = level

    def shard(self, model: Bags, other: bool) -> nn.Module:
        bmt_zero = importlib.import_module("bmt_zero")
        for module in (*model.layers, model):
            bmt_zero.shard(module, zero_level=(self.level + 2) % 4 if other else self.level)
        return model


class Slices(Framework):
    """Parameters that are sharded by hand: by rows, and over tensor-parallel ranks, or stages of a pipeline.

    They carry a ``bmt_slice``, and get their gradients without a backward pass.
    """

    ranks = 4
    lacks = frozenset({"from meta", "missing on a rank"})

    def __init__(self, tp_size: int = 1, pipe_size: int = 1) -> None:
        self.tp_size, self.pipe_size = tp_size, pipe_size
        self.least = pipe_size  # every stage needs one: torch's optimizers take no empty list

    def start(self) -> ParallelContext:
        self.context = init_distributed(tp_size=self.tp_size, pipe_size=self.pipe_size)
        return self.context

    def shard(self, model: Bags, other: bool) -> nn.Module:
        for layer in model.layers:
            for name, param in list(layer.named_parameters(remove_duplicate=False)):
                if name.endswith("_again"):
                    delattr(layer, name)
                    continue
                where = self._slice(int(name[1:]), tuple(param.shape), other)
                if where is None:
                    delattr(layer, name)
                    continue
                mine = nn.Parameter(shard_of(param.detach(), where).clone(), requires_grad=param.requires_grad)
                mine.bmt_slice = where  # type: ignore[attr-defined]
                layer.register_parameter(name, mine)
        return model

    def _slice(self, n: int, shape: tuple[int, ...], other: bool) -> Slice | None:
        context = self.context
        if n % (context.pipe_size + 1) not in (context.pipe_size, context.pipe_rank):
            return None
        outer = context.pipe_size > 1 and n % (context.pipe_size + 1) == context.pipe_size  # every stage has it
        tp: dict[str, Any] = {}
        rows, dim = context.outer_zero if outer else context.zero, n % 3
        tp_shard_shape, row_dims = list(shape), 2 if len(shape) == 3 else 1
        if context.tp_size > 1 and dim < len(shape):
            length, size, rank = shape[dim], context.tp_size, context.tp_rank
            first, last = length * rank // size, length * (rank + 1) // size
            tp = {"tp_dim": dim, "tp_offset": first, "tp_extent": last - first, "tp_comm": context.tp}
            rows, tp_shard_shape[dim] = context.tp_zero, last - first
        count = math.prod(tp_shard_shape[:row_dims])
        start, stop = count * rows.rank // rows.size, count * (rows.rank + 1) // rows.size
        if other:  # one rank has all
            start, stop = (0, count) if rows.rank == n % rows.size else (0, 0)
        return Slice(shape, start, stop, rows, **tp, row_dims=row_dims)

    def train(self, model: nn.Module, passes: Sequence[Mapping[str, Tensor]], means: Mapping[int, Tensor]) -> None:
        for name, param in model.named_parameters():
            i = int(name.rsplit("p", 1)[1])
            if i in means and param.requires_grad:
                param.grad = shard_of(means[i], slice_of(param)).to(param.dtype).clone()


FRAMEWORKS: dict[str, Framework] = {
    "one process": OneProcess(),
    "DDP": DDP(),
    "FSDP2": FSDP2(),
    "HSDP": HSDP(),
    **{f"ZeRO-{level}": Zero(level) for level in range(4) if importlib.util.find_spec("bmt_zero")},
    "rows x tp": Slices(tp_size=2),
    "rows x pipe": Slices(pipe_size=2),
}
