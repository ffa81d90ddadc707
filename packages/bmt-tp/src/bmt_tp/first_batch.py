"""What is checked when a model that was cut is called for the first time: batches, and the pieces of its parameters."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import Communicator

from .batch import check_same_batch, have_equal_values
from .parameters import PieceModule, TensorParallelParameter


class FirstBatchCheck:
    """Compares the first batch over the tensor-parallel ranks, and the pieces that they have."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.comm = comm
        self.done = False
        self.were_equal = have_equal_values(self._pieces(model), comm)  # experts that begin as copies of one, say

    @staticmethod
    def _pieces(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if isinstance(p, TensorParallelParameter) and p.tp_mode]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.done and not torch.compiler.is_compiling():
            # Caches, which lie deeper, have the heads of this rank.
            given = [*args, *kwargs.values()]
            given += [x for value in given if type(value) is dict for x in value.values()]
            check_same_batch(*(x for x in given if isinstance(x, Tensor)), comm=self.comm)
            _check_not_fully_sharded(module)
            if not self.were_equal and have_equal_values(self._pieces(module), self.comm):
                raise RuntimeError(
                    "the tensor-parallel ranks have the same values in different pieces, which were overwritten: give "
                    "DistributedDataParallel the data-parallel ranks (process_group=), and initialise a model before "
                    "it is cut"
                )
            self.done = True


def _check_not_fully_sharded(model: nn.Module) -> None:
    """Raise if torch's ``fully_shard`` has replaced pieces by DTensors, which do not say what they are pieces of."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, module in model.named_modules():
        if isinstance(module, sharded) and any(isinstance(part, PieceModule) for part in module.modules()):
            raise RuntimeError(
                f"torch's fully_shard has sharded {name or type(module).__name__!r}, which parallelize has cut: "
                f"clipping and state dicts would take pieces for whole parameters; use bmt_zero (fully_shard, "
                f"BMTrainModelWrapper) or DistributedDataParallel over the data-parallel ranks"
            )


def check_router_logits(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a Hugging Face model would compute a loss of its routers from this rank's part of the tokens."""
    config = getattr(module, "config", None)
    parts = [config, getattr(config, "text_config", None)]
    asked = kwargs.get("output_router_logits")
    if asked or (asked is None and any(getattr(part, "output_router_logits", False) for part in parts)):
        raise ValueError(
            "output_router_logits=True: routers see this rank's part of the sequence, and the auxiliary loss is of all "
            "tokens; use a plan without 'expert_parallel+sequence', or output_router_logits=False"
        )
