"""Fill parameters with initial values that do not depend on the layout."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_comm import ParallelContext, check_agreement, current_context

from .fill_order import Fill, generators_of_rank_0, run_in_order, without_drawing
from .kept_results import written_tensors
from .shard import sharding_of
from .sharded_parameter import ShardedParameter
from .state import raise_on_all, write_logical

_Place: TypeAlias = tuple[dict[str, Any], str]
"""A module's dictionary of parameters or buffers, and a name in it."""


def init_parameters(model: nn.Module, *, seed: int | None = None) -> None:
    """Run the initialiser of every sharded parameter of ``model``.

    Parameters with an ``init_method`` are filled by it. Parameters and buffers that were built on the meta device are
    filled by the ``reset_parameters`` (or ``_reset_parameters``; in a Hugging Face model by the model's
    ``_init_weights``) of their module or of an outer module. All others are not changed, nor are Blocks that were
    built with ``initialized=True``.

    Values are drawn from torch's generators: first parameter by parameter in the order of ``model.parameters()``, then
    module by module, inner modules first. So a model has the values that one process would draw for it from the same
    seed, for every number of ranks, ZeRO level, tensor-parallel size and pipeline. Modules that are initialised one by
    one have different values. The logical parameter is filled, and each rank keeps its rows. One parameter at a time is
    unsharded; for ``reset_parameters``, the parameters that one module fills. Pipeline stages fill their layers one
    after the other.

    The states of rank 0's generators are used. If the generators of a rank had the same states before, they continue
    after the drawn values, as in one process. Otherwise they keep their states.

    Args:
        model: the module.
        seed: seed the generators with it, and restore them afterwards.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: ranks have different models.
        ValueError: none of these fills a tensor that was built on the meta device (the model is not changed then), or
            one of them fills a tensor only in part.
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
    local = {path for path, sharding in shardings.items() if sharding.group.options.stage_local}
    with generators_of_rank_0(context, seed):
        problem, resets = None, []
        try:
            with without_drawing(context):
                resets = _find_resets(model, waiting)
        except ValueError as error:
            problem = error
        raise_on_all(context.pipe, problem)  # stages have different layers
        fills = [
            Fill(name.rpartition(".")[0], functools.partial(_fill, param, context))
            for name, param in named.items()
            if param.init_method is not None
        ]
        run_in_order(fills, list(model.named_modules()), local, context)
        fills = [Fill(reset.path, functools.partial(_run_reset, reset, context)) for reset in resets]
        run_in_order(fills, _inner_first(model), local, context)


def _fill(param: ShardedParameter, context: ParallelContext) -> None:
    """Fill the logical parameter by its ``init_method``."""
    assert param.init_method is not None
    values = torch.empty(param.bmt_slice.shape, dtype=param.dtype, device=context.device)
    with torch.no_grad():
        param.init_method(values)
    write_logical(param, values)


def _inner_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The paths and modules, in the order in which they are constructed."""
    paths = {module: path for path, module in model.named_modules()}
    ordered: dict[nn.Module, str] = {}

    def add(module: nn.Module) -> None:
        for child in module.children():
            if child not in ordered:
                add(child)
        ordered[module] = paths[module]

    add(model)
    return [(path, module) for module, path in ordered.items()]


class _Reset(NamedTuple):
    """A function that fills parameters and buffers of a module or its submodules."""

    path: str  # of the module
    name: str  # of the first tensor that it fills
    function: Callable[[], Any]
    places: list[_Place]  # the tensors that it writes to, and the parameters of the module itself
    fills: set[int]  # identities of the tensors that it is called for; the others keep their values


def _find_resets(model: nn.Module, waiting: dict[int, str]) -> list[_Reset]:
    """The functions to call for the parameters in ``waiting`` (identity to name) and for buffers on the meta device.

    Inner modules come before outer ones, as in construction, because a module may overwrite values of its submodules. A
    trial on the meta device, which needs no memory, shows which tensors a function fills.

    Warns if a module with waiting parameters also has parameters with values, which its ``_init_weights`` would fill.
    Some classes build them in ways that ignore the meta device (``torch.FloatTensor(2, 3)``), and then their values are
    arbitrary. Also warns if a constructor has written values into parameters that no ``reset_parameters`` writes: the
    meta device does not keep them.

    Raises:
        ValueError: some of the tensors are filled by no function.
    """
    modules = list(model.modules())
    owners: dict[int, tuple[nn.Module, str]] = {}  # a tied parameter belongs to the first module that has it
    family: dict[nn.Module, nn.Module | None] = {}  # the innermost module with _init_weights around each
    for module in modules:
        if hasattr(module, "_init_weights"):
            family[module] = module
        for child in module.children():
            family.setdefault(child, family.get(module))
        for name, param in module._parameters.items():
            if id(param) in waiting:
                owners.setdefault(id(param), (module, name))
    first = {i: (id(module._parameters), name) for i, (module, name) in owners.items()}
    unfilled = {**waiting, **{id(b): name for name, b in model.named_buffers() if b.is_meta}}
    others = {
        id(p): name
        for name, p in model.named_parameters()
        if id(p) not in waiting
        and not (isinstance(p, ShardedParameter) and p.init_method is not None)
        and not getattr(p, "_is_hf_initialized", False)
    }
    left: dict[int, str] = {}
    writes: dict[int, int] = {}  # how often functions write to each tensor
    resets = []
    for path, module in _inner_first(model):
        function: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if family.get(module) is not None:
            function = functools.partial(cast(Any, family[module])._init_weights, module)
        if function is None:
            continue
        inside = set(module.modules())
        places = [
            (tensors, name)
            for part in module.modules()
            for tensors in (part._parameters, part._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        mine = {i for t, n in places if (i := id(t[n])) in unfilled or (i in owners and owners[i][0] in inside)}
        if not mine:
            continue
        written, counts = _written_by(function, places)
        for i, count in counts.items():
            writes[i] = writes.get(i, 0) + (count if _resets_first(family.get(module)) else 1 << 30)
        if family.get(module) is not None and not getattr(module, "_is_hf_initialized", False):
            left.update((i, others[i]) for tensors, name in written if (i := id(tensors[name])) in others)
        # A tied tensor is filled by its first module only: construction ties modules last.
        fills = [
            (tensors, name)
            for tensors, name in written
            if (i := id(tensors[name])) in mine and (i in unfilled or first[i] == (id(tensors), name))
        ]
        if fills:
            identities = [id(tensors[name]) for tensors, name in fills]
            names = [waiting.get(i) or unfilled.get(i) or name for i, (_, name) in zip(identities, fills, strict=True)]
            params = [(tensors, name) for tensors, name in places if tensors is module._parameters]
            needed = {(id(tensors), name): (tensors, name) for tensors, name in params + written}
            resets.append(_Reset(path, names[0], function, [*needed.values()], set(identities)))
            unfilled = {i: name for i, name in unfilled.items() if i not in identities}
    if unfilled:
        some = ", ".join(f"{name!r} of a {type(_module_of(model, name)).__name__}" for name in [*unfilled.values()][:5])
        raise ValueError(
            f"{len(unfilled)} tensors were built on the meta device, and no module has a reset_parameters (or "
            f"_init_weights) that fills them: {some}; give the modules one, or load a state dict instead"
        )
    lost = [
        name
        for name, param in model.named_parameters()
        if id(param) in waiting and isinstance(param, ShardedParameter) and param.writes_on_meta > writes[id(param)]
    ]
    if lost:
        warnings.warn(
            f"init_parameters gives {len(lost)} parameters the values of reset_parameters, and not those that their "
            f"model's constructor gives them, which the meta device does not keep: {', '.join(lost[:5])}; write them "
            "after init_parameters, or build the model on a real device",
            stacklevel=3,
        )
    if left:
        warnings.warn(
            f"init_parameters leaves {len(left)} parameters as they are, which were not built on the meta device as "
            f"others were: {', '.join([*left.values()][:5])}; if nothing has given them values, build the model on a "
            "real device",
            stacklevel=3,
        )
    return resets


def _resets_first(family: nn.Module | None) -> bool:
    """Whether modules are filled by ``reset_parameters`` first, as in their construction.

    This is so without ``_init_weights`` and with timm's. transformers' ``_init_weights`` runs after construction.
    """
    return family is None or "needs_reset" in inspect.signature(cast(Any, family)._init_weights).parameters


def _module_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


class _Questions(TorchFunctionMode):
    """Notes the storages of tensors whose ``is_meta`` is read.

    Some functions of torch.nn.init do not write to tensors on the meta device. Only this read shows that they would.
    """

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            self.storages.add(args[0].untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


class _Writes(TorchDispatchMode):
    """Notes the storages that operations write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.storages.update(x.untyped_storage()._cdata for x in written_tensors(func, args, kwargs))
        return func(*args, **kwargs)


def _written_by(function: Callable[[], Any], places: list[_Place]) -> tuple[list[_Place], dict[int, int]]:
    """The places that ``function`` writes to or replaces, and how often it writes to each tensor."""
    before = [(t, n, t[n], _like(t[n], torch.device("meta"))) for t, n in places]
    try:
        for tensors, name, _, trial in before:
            tensors[name] = trial
        with warnings.catch_warnings(), torch.no_grad(), _Writes() as writes, _Questions(writes.storages):
            warnings.simplefilter("ignore")  # they are repeated when values are filled
            function()
        written = [
            (tensors, name)
            for tensors, name, _, trial in before
            if tensors[name] is not trial or trial.untyped_storage()._cdata in writes.storages
        ]
        return written, {id(tensor): trial._version for _, _, tensor, trial in before}
    finally:
        for tensors, name, tensor, _ in before:
            tensors[name] = tensor


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """An unsharded tensor of the same kind, with no values."""
    shape = tensor.bmt_slice.shape if isinstance(tensor, ShardedParameter) else tensor.shape
    values = torch.empty(shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def _marker_of(dtype: torch.dtype) -> float | None:
    """A value that no function fills a tensor with; None: there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return torch.iinfo(dtype).min if dtype in (torch.int16, torch.int32, torch.int64) else None


def _run_reset(reset: _Reset, context: ParallelContext) -> None:
    """Call it with unsharded tensors in place of the parameters and buffers, and keep this rank's rows.

    Raises:
        ValueError: it fills only a part of a tensor.
    """
    before = [(tensors, name, tensors[name]) for tensors, name in reset.places]
    unsharded: dict[int, Tensor] = {}
    for tensor in {id(t): t for _, _, t in before}.values():
        values = unsharded[id(tensor)] = _like(tensor, context.device)
        if tensor.is_meta or (isinstance(tensor, ShardedParameter) and tensor.awaits_values):
            if (marker := _marker_of(values.dtype)) is not None:
                values.fill_(marker)
        else:
            values.copy_(tensor.gather_all() if isinstance(tensor, ShardedParameter) else tensor)
    results: list[Any] = []
    try:
        for tensors, name, tensor in before:
            tensors[name] = unsharded[id(tensor)]
        with torch.no_grad():
            reset.function()
        results = [tensors[name] for tensors, name, _ in before]  # it may replace tensors
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor
    for (tensors, name, tensor), result in zip(before, results, strict=True):
        if id(tensor) not in reset.fills:
            continue
        marker = _marker_of(result.dtype)
        if marker is not None and bool((result.isnan() if math.isnan(marker) else result == marker).any()):
            raise ValueError(f"{name!r} (near {reset.name!r}) was built on the meta device and is filled only in part")
        if isinstance(tensor, ShardedParameter):
            write_logical(tensor, result.detach())
        elif tensor.is_meta:
            tensors[name] = result.detach().to(context.device)
