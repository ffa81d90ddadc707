"""Which functions of modules fill the tensors of a model that were built on the meta device."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .kept_results import written_tensors
from .sharded_parameter import ShardedParameter

Place: TypeAlias = tuple[dict[str, Any], str]
"""A module's dictionary of parameters or buffers, and a name in it."""
_ALL_WRITES = 1 << 30  # more than a function writes to a tensor


class Reset(NamedTuple):
    """A function that fills parameters and buffers of a module or its submodules."""

    path: str  # of the module
    name: str  # of the first tensor that it fills
    function: Callable[[], Any]
    places: list[Place]  # the tensors that it writes to, and the parameters of the module itself
    fills: set[int]  # identities of the tensors that it is called for; the others keep their values


def find_resets(model: nn.Module, waiting: dict[int, str]) -> list[Reset]:
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
    search = _Search(model, waiting)
    resets = [reset for path, module in inner_first(model) if (reset := search.reset_of(path, module)) is not None]
    search.check()
    search.warn()
    return resets


def inner_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
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


class _Search:
    """The search for functions that fill tensors.

    Args:
        model: the module.
        waiting: as for :func:`find_resets`.
    """

    def __init__(self, model: nn.Module, waiting: dict[int, str]) -> None:
        self._model, self._waiting = model, waiting
        self._owners: dict[int, tuple[nn.Module, str]] = {}  # a tied parameter belongs to the first module that has it
        self._family: dict[nn.Module, nn.Module | None] = {}  # the innermost module with _init_weights around each
        for module in model.modules():
            if hasattr(module, "_init_weights"):
                self._family[module] = module
            for child in module.children():
                self._family.setdefault(child, self._family.get(module))
            for name, param in module._parameters.items():
                if id(param) in waiting:
                    self._owners.setdefault(id(param), (module, name))
        self._unfilled = {**waiting, **{id(b): name for name, b in model.named_buffers() if b.is_meta}}
        self._others = {
            id(p): name
            for name, p in model.named_parameters()
            if id(p) not in waiting
            and not (isinstance(p, ShardedParameter) and p.init_method is not None)
            and not getattr(p, "_is_hf_initialized", False)
        }
        self._left: dict[int, str] = {}  # parameters with values that an _init_weights would fill
        self._writes: dict[int, int] = {}  # how often functions write to each tensor

    def reset_of(self, path: str, module: nn.Module) -> Reset | None:
        """The function that fills tensors of a module, if it has one. Modules come in the order of construction."""
        family = self._family.get(module)
        function: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if family is not None:
            function = functools.partial(cast(Any, family)._init_weights, module)
        if function is None:
            return None
        inside = set(module.modules())
        places = [
            (tensors, name)
            for part in module.modules()
            for tensors in (part._parameters, part._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        mine = {i for t, n in places if (i := id(t[n])) in self._unfilled or self._owner(i) in inside}
        if not mine:
            return None
        written, counts = _written_by(function, places)
        for i, count in counts.items():
            self._writes[i] = self._writes.get(i, 0) + (count if _resets_first(family) else _ALL_WRITES)
        if family is not None and not getattr(module, "_is_hf_initialized", False):
            self._left.update((i, self._others[i]) for t, n in written if (i := id(t[n])) in self._others)
        fills = [(t, n) for t, n in written if id(t[n]) in mine and self._is_filled_here(t, n)]
        if not fills:
            return None
        identities = [id(tensors[name]) for tensors, name in fills]
        of_parameters = [(tensors, name) for tensors, name in places if tensors is module._parameters]
        needed = {(id(tensors), name): (tensors, name) for tensors, name in of_parameters + written}
        first = self._waiting.get(identities[0]) or self._unfilled.get(identities[0]) or fills[0][1]
        self._unfilled = {i: name for i, name in self._unfilled.items() if i not in identities}
        return Reset(path, first, function, [*needed.values()], set(identities))

    def check(self) -> None:
        """Raise ValueError if no function fills some of the tensors."""
        if not self._unfilled:
            return
        kinds = {n: type(self._model.get_submodule(n.rpartition(".")[0])).__name__ for n in self._unfilled.values()}
        some = ", ".join(f"{name!r} of a {kind}" for name, kind in [*kinds.items()][:5])
        raise ValueError(
            f"{len(self._unfilled)} tensors were built on the meta device, and no module has a reset_parameters (or "
            f"_init_weights) that fills them: {some}; give the modules one, or load a state dict instead"
        )

    def warn(self) -> None:
        """Warn of values that functions do not give, and of parameters that nothing may have filled."""
        lost = [
            name
            for name, p in self._model.named_parameters()
            if id(p) in self._waiting and isinstance(p, ShardedParameter) and p.writes_on_meta > self._writes[id(p)]
        ]
        if lost:
            warnings.warn(
                f"init_parameters gives {len(lost)} parameters the values of reset_parameters, and not those that "
                f"their model's constructor gives them, which the meta device does not keep: {', '.join(lost[:5])}; "
                "write them after init_parameters, or build the model on a real device",
                stacklevel=4,
            )
        if self._left:
            warnings.warn(
                f"init_parameters leaves {len(self._left)} parameters as they are, which were not built on the meta "
                f"device as others were: {', '.join([*self._left.values()][:5])}; if nothing has given them values, "
                "build the model on a real device",
                stacklevel=4,
            )

    def _owner(self, identity: int) -> nn.Module | None:
        return self._owners[identity][0] if identity in self._owners else None

    def _is_filled_here(self, tensors: dict[str, Any], name: str) -> bool:
        """Whether a tensor has no values yet, or this is its first place: construction ties modules last."""
        identity = id(tensors[name])
        if identity in self._unfilled:
            return True
        module, first_name = self._owners[identity]
        return module._parameters is tensors and first_name == name


def _resets_first(family: nn.Module | None) -> bool:
    """Whether modules are filled by ``reset_parameters`` first, as in their construction.

    This is so without ``_init_weights`` and with timm's. transformers' ``_init_weights`` runs after construction.
    """
    return family is None or "needs_reset" in inspect.signature(cast(Any, family)._init_weights).parameters


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


def _written_by(function: Callable[[], Any], places: list[Place]) -> tuple[list[Place], dict[int, int]]:
    """The places that ``function`` writes to or replaces, and how often it writes to each tensor."""
    before = [(t, n, t[n], like(t[n], torch.device("meta"))) for t, n in places]
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


def like(tensor: Tensor, device: torch.device) -> Tensor:
    """An unsharded tensor of the same kind, with no values."""
    shape = tensor.bmt_slice.shape if isinstance(tensor, ShardedParameter) else tensor.shape
    values = torch.empty(shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
