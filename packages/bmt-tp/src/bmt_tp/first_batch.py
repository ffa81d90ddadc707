"""Checks in the first forward of a model that parallelize has sharded: its batch, and the shards of its parameters."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import Communicator

from .batch import check_same_batch, have_equal_values
from .parameters import ShardModule, TensorParallelParameter
from .random import default_generator

_log = logging.getLogger(__name__)


class FirstBatchCheck:
    """Compares the first batch, and the shards, over the tensor-parallel ranks."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.comm = comm
        self.done = False
        self.were_equal = have_equal_values(self._shards(model), comm)  # such as experts that begin as copies of one

    @staticmethod
    def _shards(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if isinstance(p, TensorParallelParameter) and p.tp_mode]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.done and not torch.compiler.is_compiling():
            # Tensors in other containers are not compared: caches have the heads of this rank.
            inputs = [*args, *kwargs.values()]
            inputs += [x for value in inputs if type(value) is dict for x in value.values()]
            check_same_batch(*(x for x in inputs if isinstance(x, Tensor)), comm=self.comm)
            _check_not_fully_sharded(module)
            _warn_of_random_states(module, self.comm)
            if not self.were_equal and have_equal_values(self._shards(module), self.comm):
                raise RuntimeError(
                    "the tensor-parallel ranks have the same values in different shards, which were overwritten: give "
                    "DistributedDataParallel the data-parallel ranks (process_group=), and initialise a model before "
                    "parallelize shards it"
                )
            self.done = True


def _warn_of_random_states(model: nn.Module, comm: Communicator) -> None:
    """Warn if the tensor-parallel ranks draw different numbers, and dropout applies to what they have in common."""
    are_equal = have_equal_values([default_generator(comm.device).get_state()], comm)
    drops = model.training and any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
    if not are_equal and drops and comm.rank == 0 and comm.size > 1 and not comm.is_planned:
        _log.warning(
            "the random generators of the tensor-parallel ranks differ, so dropout gives these ranks different "
            "activations, and their replicas of parameters drift apart: seed the ranks of a tensor-parallel group alike"
        )


def _check_not_fully_sharded(model: nn.Module) -> None:
    """Raise if torch's ``fully_shard`` has replaced shards by DTensors, which do not keep a shard's slice."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, module in model.named_modules():
        if isinstance(module, sharded) and any(isinstance(part, ShardModule) for part in module.modules()):
            raise RuntimeError(
                f"torch's fully_shard has sharded {name or type(module).__name__!r}, which parallelize has already "
                f"sharded: clipping and state dicts would take shards for logical parameters; use bmt_zero "
                f"(fully_shard, BMTrainModelWrapper) or DistributedDataParallel over the data-parallel ranks"
            )


def check_router_logits(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a Hugging Face model would compute its router loss from this rank's part of the tokens."""
    config = getattr(module, "config", None)
    configs = [config, getattr(config, "text_config", None)]
    option = kwargs.get("output_router_logits")
    if option or (option is None and any(getattr(c, "output_router_logits", False) for c in configs)):
        raise ValueError(
            "output_router_logits=True: routers see this rank's part of the sequence, and the auxiliary loss is of all "
            "tokens; use a plan without 'expert_parallel+sequence', or output_router_logits=False"
        )
