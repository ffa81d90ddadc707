"""Filling parameters with initial values that do not depend on the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bmt_comm import check_agreement, current_context

from .block import Block
from .parameter import DistributedParameter
from .state import write_whole


def init_parameters(model: nn.Module) -> None:
    """Run the initialiser of every sharded parameter of ``model``.

    Parameters with an ``init_method`` are filled by it. Parameters that were built on the meta device are
    filled by their module's ``reset_parameters``. All others are left alone, and so are Blocks that were built
    with ``initialized=True``.

    Each parameter has a random stream of its own, seeded by the context's seed and the parameter's name, and
    is filled as a whole, of which a rank keeps its rows: every element is the same for every number of
    ranks, ZeRO level and tensor-parallel size. One parameter at a time is whole.

    Raises:
        RuntimeError: ranks have different models.
        ValueError: a parameter on the meta device whose module has no ``reset_parameters``.
    """
    context = current_context()
    settled = {id(p) for m in model.modules() if isinstance(m, Block) and m.initialized for p in m.unit.params}
    named = {n: p for n, p in model.named_parameters() if isinstance(p, DistributedParameter)}
    facts = [f"{name}: {p.bmt_slice.shape} {p.dtype}" for name, p in named.items()]
    check_agreement(context.world, "init_parameters", facts)
    waiting: dict[nn.Module, list[tuple[str, str, DistributedParameter]]] = {}
    for module_name, module in _every_module(model):
        for name, param in module._parameters.items():
            if isinstance(param, DistributedParameter) and param.awaits_values and param.init_method is None:
                if not hasattr(module, "reset_parameters"):
                    raise ValueError(
                        f"parameter {f'{module_name}.{name}'!r} was built on the meta device, and its module "
                        f"{type(module).__name__} has no reset_parameters; load a state dict instead"
                    )
                waiting.setdefault(module, []).append((f"{module_name}.{name}", name, param))
    for name, param in named.items():
        if param.init_method is None or id(param) in settled:
            continue
        whole = torch.empty(param.bmt_slice.shape, dtype=param.dtype, device=context.device)
        with torch.no_grad(), _seeded(context.seed, name, context.device):
            param.init_method(whole)
        write_whole(param, whole)
    for module, members in waiting.items():
        _reset(module, members, context.seed, context.device)


def _reset(
    module: nn.Module, members: list[tuple[str, str, DistributedParameter]], seed: int, device: torch.device
) -> None:
    """Let ``reset_parameters`` fill whole tensors in the place of the module's own parameters."""
    own = dict(module._parameters)
    whole: dict[str, Tensor] = {}
    try:
        for _, name, param in members:
            whole[name] = torch.empty(param.bmt_slice.shape, dtype=param.dtype, device=device)
            module._parameters[name] = nn.Parameter(whole[name], requires_grad=False)
        with torch.no_grad(), _seeded(seed, members[0][0], device):
            module.reset_parameters()  # type: ignore[operator]
            whole = {name: module._parameters[name].data for name in whole}  # type: ignore[union-attr]
    finally:
        module._parameters.update(own)
    for _, name, param in members:
        write_whole(param, whole[name])


def _every_module(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name, the inner module of a Block in its place."""
    for name, module in model.named_modules():
        yield name, module.inner_module if isinstance(module, Block) else module


@contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed torch's generators for one parameter, and put them back after."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
