"""Running a chunk of layers on one stage, and recomputing it exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmt_zero.activation_checkpoint import CheckpointedForward
from bmt_zero.block_list import copy_containers
from bmt_zero.parameter_group import ParameterGroup
from bmt_zero.shard import groups_of, sharding_of


def blocks_in(layer: nn.Module) -> list[nn.Module]:
    """The layer if it is sharded; otherwise (a module has taken its place) the outermost sharded modules in it."""
    if sharding_of(layer) is not None and groups_of(layer)[0].params:
        return [layer]
    return [block for child in layer.children() for block in blocks_in(child)]


def groups_in(layers: Sequence[nn.Module]) -> list[ParameterGroup]:
    """The parameter groups of layers."""
    return list(dict.fromkeys(group for layer in layers for block in blocks_in(layer) for group in groups_of(block)))


def run_layers(
    blocks: Sequence[nn.Module], hidden: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Run layers one after another on ``hidden``.

    Returns the last layer's hidden states, and the intermediate hidden states: the input of each layer.

    Raises:
        ValueError: a layer returns fewer hidden states than it takes.
    """
    count = len(hidden)
    intermediates = []
    for block in blocks:
        intermediates.append(copy_containers(hidden))
        output = block(*hidden, *args, **kwargs)
        hidden = tuple(output[:count]) if isinstance(output, (tuple, list)) else (output,)
        if len(hidden) < count:
            raise ValueError(f"a Block returned {len(hidden)} hidden states, and num_hidden={count}")
    return hidden, intermediates


def autocast_state(device: torch.device) -> list[tuple[Any, ...]]:
    """The arguments of ``torch.autocast`` that restore its present state, for ``device`` and for the host."""
    return [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
        for kind in dict.fromkeys((device.type, "cpu"))
    ]


class AmbientState:
    """The state of random number generators and of autocast, as it is when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = [device] if device.type == "cuda" else []
        self._autocast = autocast_state(device)
        self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(cuda) for cuda in self._cuda]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, this state is restored. Afterwards, the state of before is."""
        with torch.random.fork_rng(self._cuda), contextlib.ExitStack() as stack:
            torch.set_rng_state(self._random[0])
            for cuda, state in zip(self._cuda, self._random[1]):
                torch.cuda.set_rng_state(state, cuda)
            for options in self._autocast:
                stack.enter_context(torch.autocast(*options))
            yield


class Settings:
    """``training`` of modules and ``requires_grad`` of parameters, as they are when this is made."""

    def __init__(self, chunks: Sequence[Sequence[nn.Module]], groups: Sequence[ParameterGroup]) -> None:
        modules = dict.fromkeys(m for chunk in chunks for block in chunk for m in block.modules())
        self._training = {module: module.training for module in modules}
        self._requires_grad = [(param, param.requires_grad) for group in groups for param in group.params]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, ``training`` of the modules is restored. Afterwards, it is as before.

        Raises:
            RuntimeError: ``requires_grad`` of a parameter has changed since.
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


def checkpoints(layers: Sequence[nn.Module]) -> list[CheckpointedForward]:
    """The enabled activation checkpoints of layers."""
    blocks = [block for layer in layers for block in blocks_in(layer)]
    shardings = [sharding for sharding in map(sharding_of, blocks) if sharding is not None]
    return [each.checkpoint for each in shardings if each.checkpoint is not None and each.checkpoint.enabled]


def kept_tensors(layers: Sequence[nn.Module], first: int) -> Iterator[tuple[int, str, Tensor]]:
    """The tensors with gradients that layers keep in attributes: (index of the layer, name, tensor).

    Args:
        first: the number of the first autograd node that counts; see :func:`next_node`.
    """
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            for name, value in (*vars(module).items(), *module._buffers.items()):
                if name in ("_parameters", "_buffers") or any(p.startswith(f"{name}_") for p in module._parameters):
                    continue  # a weight that a hook (weight_norm) has computed of weight_g and weight_v, for example
                for each in value.values() if isinstance(value, dict) else value if type(value) in _LISTS else (value,):
                    node = each.grad_fn if isinstance(each, Tensor) else None
                    if node is not None and node._sequence_nr() >= first:
                        yield index, f"{path}.{name}".lstrip("."), each


_LISTS = (list, tuple)


def next_node() -> int:
    """The number of this thread's next autograd node."""
    with torch.enable_grad():
        return 1 + int(torch.zeros((), requires_grad=True, device="cpu").view(()).grad_fn._sequence_nr())  # type: ignore[union-attr]


@contextlib.contextmanager
def not_checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within, layers keep their activations."""
    disabled = checkpoints(blocks)
    for checkpoint in disabled:
        checkpoint.enabled = False
    try:
        yield
    finally:
        for checkpoint in disabled:
            checkpoint.enabled = True
