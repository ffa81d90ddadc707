"""A chunk of layers on one stage: run, and run again exactly as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from bmt_zero.activation_checkpoint import CheckpointedForward
from bmt_zero.parameter_group import ParameterGroup
from bmt_zero.shard import sharding_of


def run_layers(
    blocks: Sequence[nn.Module], hidden: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Hand ``hidden`` from layer to layer.

    Returns the last layer's hidden states, and what went into each layer.

    Raises:
        ValueError: a layer returns fewer hidden states than it takes.
    """
    count = len(hidden)
    inputs = []
    for block in blocks:
        inputs.append(hidden)
        output = block(*hidden, *args, **kwargs)
        hidden = tuple(output[:count]) if isinstance(output, (tuple, list)) else (output,)
        if len(hidden) < count:
            raise ValueError(f"a Block returned {len(hidden)} hidden states, and num_hidden={count}")
    return hidden, inputs


def autocast_state(device: torch.device) -> list[tuple[Any, ...]]:
    """The arguments of ``torch.autocast`` by which computations on ``device`` and the host are as now."""
    return [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
        for kind in dict.fromkeys((device.type, "cpu"))
    ]


class AmbientState:
    """What a computation depends on beside its arguments: random generators and autocast, as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = [device] if device.type == "cuda" else []
        self._autocast = autocast_state(device)
        self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(cuda) for cuda in self._cuda]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, all is as it was; after it, as it was before."""
        with torch.random.fork_rng(self._cuda), contextlib.ExitStack() as stack:
            torch.set_rng_state(self._random[0])
            for cuda, state in zip(self._cuda, self._random[1]):
                torch.cuda.set_rng_state(state, cuda)
            for options in self._autocast:
                stack.enter_context(torch.autocast(*options))
            yield


class Settings:
    """What modules and parameters are told to do, as a call has found it."""

    def __init__(self, chunks: Sequence[Sequence[nn.Module]], groups: Sequence[ParameterGroup]) -> None:
        modules = dict.fromkeys(m for chunk in chunks for block in chunk for m in block.modules())
        self._training = {module: module.training for module in modules}
        self._requires_grad = [(param, param.requires_grad) for group in groups for param in group.params]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, modules are in training or not as they were; after it, as they are now.

        Raises:
            RuntimeError: a parameter was frozen or unfrozen since.
        """
        changed = next((param for param, before in self._requires_grad if param.requires_grad != before), None)
        if changed is not None:
            raise RuntimeError(
                f"requires_grad of a parameter of shape {tuple(changed.bmt_slice.shape)} was set to "
                f"{changed.requires_grad} between the call of a pipeline and its backward, which computes the layers "
                f"again; set it before the call"
            )
        now = [(module, module.training) for module, before in self._training.items() if module.training != before]
        for module, flag in now:
            module.training = not flag
        try:
            yield
        finally:
            for module, flag in now:
                module.training = flag


def checkpoints(blocks: Sequence[nn.Module]) -> list[CheckpointedForward]:
    """Those of the layers that are checkpointed."""
    found = [sharding.checkpoint for sharding in map(sharding_of, blocks) if sharding is not None]
    return [checkpoint for checkpoint in found if checkpoint is not None and checkpoint.enabled]


@contextlib.contextmanager
def not_checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within, layers keep their activations."""
    found = checkpoints(blocks)
    for checkpoint in found:
        checkpoint.enabled = False
    try:
        yield
    finally:
        for checkpoint in found:
            checkpoint.enabled = True
