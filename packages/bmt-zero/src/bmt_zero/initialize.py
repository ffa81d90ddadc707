"""Filling parameters with initial values that do not depend on the layout."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from bmt_comm import ParallelContext, check_agreement, current_context

from .shard import sharding_of
from .sharded_parameter import ShardedParameter
from .state import write_whole


def init_parameters(model: nn.Module) -> None:
    """Run the initialiser of every sharded parameter of ``model``.

    Parameters with an ``init_method`` are filled by it. Parameters that were built on the meta device are
    filled by their module's ``reset_parameters`` (or ``_reset_parameters``; in a Hugging Face model by the
    model's ``_init_weights``). All others are left alone, and so are Blocks that were built with
    ``initialized=True``.

    Each parameter has a random stream of its own, seeded by the context's seed and the parameter's name, and
    is filled as a whole, of which a rank keeps its rows: every element is the same for every number of
    ranks, ZeRO level and tensor-parallel size. One parameter at a time is whole; for ``reset_parameters``,
    those of one module and the modules in it. The global generators are left as they were.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: ranks have different models.
        ValueError: a parameter on the meta device whose module has none of these. The model is as it was then.
    """
    context = current_context()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    shardings = {path: sharding for path, m in model.named_modules() if (sharding := sharding_of(m)) is not None}
    for path, sharding in shardings.items():
        if path:
            sharding.group.name = f"{path} (a {type(sharding.hooks.module).__name__})"
    settled = {id(p) for sharding in shardings.values() if sharding.initialized for p in sharding.group.params}
    named = {
        name: param
        for name, param in model.named_parameters()
        if isinstance(param, ShardedParameter) and id(param) not in settled
    }
    check_agreement(context.zero, "init_parameters", [f"{n}: {p.bmt_slice.shape} {p.dtype}" for n, p in named.items()])
    waiting = {id(p): n for n, p in named.items() if p.awaits_values and p.init_method is None}
    problem, resets = None, []
    try:
        resets = _find_resets(model, waiting)
    except ValueError as error:
        problem = str(error)
    _raise_alike(context, problem)
    for name, param in named.items():
        if param.init_method is None:
            continue
        whole = torch.empty(param.bmt_slice.shape, dtype=param.dtype, device=context.device)
        with torch.no_grad(), _seeded(context, name):
            param.init_method(whole)
        write_whole(param, whole)
    for reset in resets:
        _run_reset(reset, context)


def _raise_alike(context: ParallelContext, problem: str | None) -> None:
    """Raise the problem of any stage on all of them, which have different layers."""
    problems = [problem] if context.pipe_size == 1 else context.pipe.all_gather_object(problem)
    for found in problems:
        if found is not None:
            raise ValueError(found)


class _Reset(NamedTuple):
    """What fills the parameters of a module."""

    module: nn.Module
    name: str  # of the first of them
    function: Callable[[], Any]
    may_write: set[int]  # the identities of those it fills, and those that were filled for modules inside


def _find_resets(model: nn.Module, waiting: dict[int, str]) -> list[_Reset]:
    """What to call for the parameters in ``waiting`` (identity to name), inner modules before outer ones: as
    in construction, where a module may overwrite what its parts have set."""
    found: list[_Reset] = []
    claimed: dict[int, nn.Module] = {}  # a tied parameter belongs to the first module that has it
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, family: nn.Module | None) -> None:
        if module in seen:
            return
        seen.add(module)
        if hasattr(module, "_init_weights"):
            family = module
        for child in module._modules.values():
            if child is not None:
                visit(child, family)
        own = [id(p) for p in module._parameters.values() if id(p) in waiting and id(p) not in claimed]
        if not own:
            return
        claimed.update(dict.fromkeys(own, module))
        names = [waiting[i] for i in own]
        inside = set(module.modules())
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if family is not None:
            reset = functools.partial(cast(Any, family)._init_weights, module)
        if reset is None:
            raise ValueError(
                f"parameter {names[0]!r} was built on the meta device, and its module {type(module).__name__} has "
                f"no reset_parameters; give it one, or load a state dict instead"
            )
        found.append(_Reset(module, names[0], reset, {i for i, owner in claimed.items() if owner in inside}))

    visit(model, None)
    return found


def _run_reset(reset: _Reset, context: ParallelContext) -> None:
    """Let it fill whole tensors in the places of the parameters of its module and the modules inside."""
    places = [(m, n, p) for m in reset.module.modules() for n, p in m._parameters.items() if p is not None]
    wholes: dict[int, nn.Parameter] = {}
    for _, _, param in places:
        if id(param) in wholes:
            continue
        if not isinstance(param, ShardedParameter):
            whole = param.detach().clone()
        elif param.awaits_values:
            whole = torch.empty(param.bmt_slice.shape, dtype=param.dtype, device=context.device)
        else:
            whole = param.gather_all().clone()
        wholes[id(param)] = nn.Parameter(whole, requires_grad=False)
    try:
        for m, n, param in places:
            m._parameters[n] = wholes[id(param)]
        with torch.no_grad(), _seeded(context, reset.name):
            reset.function()
        # A reset may also put new parameters in place of the old ones.
        filled = [(param, m._parameters[n]) for m, n, param in places]
    finally:
        for m, n, param in places:
            m._parameters[n] = param
    for param, result in filled:
        if id(param) in reset.may_write and isinstance(param, ShardedParameter) and result is not None:
            write_whole(param, result.detach())


@contextmanager
def _seeded(context: ParallelContext, name: str) -> Iterator[None]:
    """Seed torch's generators for one parameter, and put them back after."""
    digest = hashlib.sha256(f"{context.seed}:{name}".encode()).digest()
    generators = [torch.default_generator]
    if context.device.type == "cuda":
        index = torch.cuda.current_device() if context.device.index is None else context.device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
