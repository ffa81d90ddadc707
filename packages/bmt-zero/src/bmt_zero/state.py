"""Saving and loading sharded modules by state dicts with plain names and unsharded tensors.

[Note: placeholders]
    A module's code for saving and loading (hooks, ``_save_to_state_dict``, ``_load_from_state_dict``) is written for
    unsharded parameters. So while it runs, modules have placeholders instead of the sharded parameters:

    saving   unsharded copies.
    loading  tensors without storage. torch's ``assign=True`` replaces them by the entries of the state dict, without a
             copy. If no error is raised, the model's tensors then take their rows from the entries. So a state dict
             that does not fit changes nothing. Modules with loading code of their own, which may write in place, get
             unsharded copies.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from bmt_comm import Communicator, ShardedRows, is_tp_shard, shard_of, slice_of, tp_shard_of, unshard_tp

from .backward_context import abandon_dead_calls
from .parameter_group import GroupHandle, Slot, refresh_flat_weights
from .sharded_parameter import ShardedParameter
from .stage_entry import StageEntry

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

HANDLES_SHARDS = "handles_shards"  # set on classes and hooks whose loading and saving support sharded parameters

# Whether state_dict() of sharded modules makes unsharded copies. Off inside sharded_entries().
_unshards: ContextVar[bool] = ContextVar("bmt_zero_state_dict_unshards", default=True)

# Whether state_dict() has the entries of this rank's pipeline stage only. Set by stage_entries().
_own_stage: ContextVar[bool] = ContextVar("bmt_zero_state_dict_own_stage", default=False)


def without_wrapper(model: Any) -> Any:
    """The module that ``torch.compile(module)`` has wrapped, which has the plain names; other models unchanged."""
    while isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        model = model._modules["_orig_mod"]
    return model


@contextmanager
def sharded_entries() -> Iterator[None]:
    """Within, the entries of ``state_dict(keep_vars=True)`` are sharded parameters instead of unsharded copies."""
    token = _unshards.set(False)
    try:
        yield
    finally:
        _unshards.reset(token)


def unshards_state() -> bool:
    """Whether ``state_dict()`` makes unsharded copies; see :func:`sharded_entries`."""
    return _unshards.get()


def local_entries(model: nn.Module) -> dict[str, Any]:
    """The entries of ``model.state_dict()``, with the sharded parameters instead of unsharded copies."""
    with sharded_entries():
        entries: dict[str, Any] = model.state_dict(keep_vars=True)
        return entries


def with_versions(entries: Mapping[str, Any], versions: Any) -> OrderedDict[str, Any]:
    """A state dict with the versions that modules have given their entries, as :func:`versions_of` returns them.

    Modules read them when they load the entries, and convert older entries.
    """
    state = OrderedDict(entries)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return state


def valid_versions(versions: Any) -> dict[str, Any] | None:
    """The valid ones of the versions in a file; None: the file has none."""
    if not isinstance(versions, dict):
        return None
    return {
        name: {"version": of_module["version"]}
        for name, of_module in versions.items()
        if isinstance(name, str) and isinstance(of_module, dict) and type(of_module.get("version")) is int
    }


def versions_of(entries: Mapping[str, Any]) -> Any:
    """The versions in a state dict; None: it has none."""
    return getattr(entries, "_metadata", None)


def stage_entries(model: nn.Module) -> dict[str, Any]:
    """As :func:`local_entries`, of this rank's pipeline stage only. Ranks of different stages do not communicate.

    A module with its own saving code saves unsharded copies of its sharded parameters; all ranks of the stage must then
    call this.
    """
    token = _own_stage.set(True)
    try:
        return local_entries(model)
    finally:
        _own_stage.reset(token)


def has_own_stage_only() -> bool:
    """Whether ``state_dict`` is asked for the entries of this rank's pipeline stage only."""
    return _own_stage.get()


def with_tp_parameters(entries: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict with the parameters instead of the tensor-parallel shards that saving code has put into it."""
    for name, param in model.named_parameters(remove_duplicate=False):
        value = entries.get(name)
        if is_tp_shard(param) and isinstance(value, Tensor) and value.data_ptr() == param.data_ptr():
            entries[name] = param
    return entries


def logical_tensor(value: Any) -> Any:
    """The logical tensor of an entry; an entry that is no tensor, unchanged. Every rank must call it."""
    if isinstance(value, StageEntry):
        return value.spread(logical_tensor(value.value) if value.is_here else None)
    if isinstance(value, ShardedParameter):
        return value.gather_all()
    if isinstance(value, ShardedRows):
        return value.full_tensor()
    if is_tp_shard(value):
        return unshard_tp(value.detach(), slice_of(value))
    if hasattr(value, "placements"):  # a DTensor, FSDP2's for example
        return value.detach().to(value.device_mesh.device_type).full_tensor()
    return value.detach() if isinstance(value, Tensor) else value


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of the logical tensor of an entry; None if it is no tensor."""
    if isinstance(value, StageEntry):
        return value.shape
    if isinstance(value, ShardedParameter) or is_tp_shard(value):
        return slice_of(value).shape
    return tuple(value.shape) if isinstance(value, Tensor) else None


def dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, (Tensor, StageEntry)) else None


def entries_of_stages(own: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """The entries of all stages, one stage after the other. ``own`` are the entries of this rank's stage.

    The values are logical tensors, or :class:`StageEntry` objects inside :func:`local_entries`. Several names of one
    value stay names of one value. Every rank of ``comm``, which connects the stages, must call it.
    """
    numbers: dict[Any, int] = {}
    facts = [(n, shape_of(v), dtype_of(v), numbers.setdefault(_identity(v), len(numbers))) for n, v in own.items()]
    entries: dict[str, Any] = {}
    for owner, theirs in enumerate(comm.all_gather_object(facts)):
        values: dict[int, Any] = {}
        for name, shape, dtype, number in theirs:
            if number not in values:
                entry = StageEntry(own[name] if owner == comm.rank else None, shape, dtype, comm, owner)
                values[number] = logical_tensor(entry) if _unshards.get() else entry
            entries[name] = values[number]
    return entries


def _identity(value: Any) -> Any:
    """A key that is equal for all names of one value: a state dict has another detached tensor for each name."""
    if isinstance(value, ShardedParameter) or not isinstance(value, Tensor) or not value.numel():
        return id(value)
    if hasattr(value, "placements") or not value.data_ptr():  # its memory is in other tensors
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def write_logical(param: ShardedParameter, values: Tensor) -> None:
    """Set this rank's rows of a parameter from its logical tensor."""
    with torch.no_grad():
        param.to_local().copy_(shard_of(values, param.bmt_slice))
    param.awaits_values = False


@contextmanager
def unsharded_parameters(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Within, a module has unsharded copies of its parameters ``names``; see [Note: placeholders]."""
    if not _unshards.get():
        yield
        return
    params = {name: module._parameters.get(name) for name in names}
    module._parameters.update(_placeholders(params))
    try:
        yield
    finally:
        module._parameters.update(params)


def _placeholders(params: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Unsharded copies; tied parameters stay tied."""
    copies = {id(p): nn.Parameter(_unsharded_copy(p), requires_grad=False) for p in params.values()}
    return {name: copies[id(p)] for name, p in params.items()}


def _unsharded_copy(param: Any) -> Tensor:
    """A contiguous copy in separate storage: the logical tensor may be a view of a padded buffer, or the shard."""
    return logical_tensor(param).clone(memory_format=torch.contiguous_format)


def serves_shards(hook: F) -> F:
    """Mark a hook for saving or loading that supports sharded parameters."""
    setattr(hook, HANDLES_SHARDS, True)
    return hook


def add_state_hooks(slots: Iterable[Slot]) -> None:
    """Let the modules that have sharded parameters save unsharded tensors, and load their rows of these."""
    names_of: dict[nn.Module, dict[str, None]] = {}
    for slot in slots:
        names_of.setdefault(slot.module, {})[slot.name] = None
    for module, names in names_of.items():
        for kind in (module._state_dict_pre_hooks, module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key, hook in list(kind.items()):
                before = getattr(getattr(hook, "hook", hook), "__self__", None)
                if isinstance(before, _StateHooks):  # the module was sharded before, or has parameters of two groups
                    names.update(dict.fromkeys(name for name in before.names if name in module._parameters))
                    del kind[key]
        hooks = _StateHooks(list(names), has_own_code(module, loading=False))
        module.register_state_dict_pre_hook(hooks.before_saving)
        module._register_state_dict_hook(hooks.after_saving)
        module.register_load_state_dict_pre_hook(hooks.before_loading)


class _StateHooks:
    """The hooks for saving and loading of a module; see [Note: placeholders].

    ``replaces_before``: whether the module has saving code of its own, which sees unsharded copies; otherwise the
    entries are replaced after saving.
    """

    def __init__(self, names: list[str], replaces_before: bool) -> None:
        self.names = names
        self.replaces_before = replaces_before
        self.sharded: dict[str, Any] = {}

    @serves_shards
    def before_saving(self, module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        abandon_dead_calls()
        if self.replaces_before and (_unshards.get() or _own_stage.get()):
            self.sharded = self.sharded or {name: module._parameters.get(name) for name in self.names}
            module._parameters.update(_placeholders(self.sharded))

    @serves_shards
    def after_saving(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if self.replaces_before:
            module._parameters.update(self.sharded)
            self.sharded = {}
        elif _unshards.get():
            for name in self.names:
                param = module._parameters.get(name)
                if prefix + name in state_dict and isinstance(param, ShardedParameter):
                    state_dict[prefix + name] = _copy_in(state_dict, param)

    @serves_shards
    def before_loading(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *problems: Any
    ) -> None:
        abandon_dead_calls()
        params = {name: module._parameters.get(name) for name in self.names}
        if metadata.get("assign_to_params_buffers", False) and any(
            isinstance(p, ShardedParameter) for p in params.values()
        ):
            copy_instead(module, state_dict, prefix, metadata)
        for name, param in params.items():
            shard_entry(param, state_dict, prefix + name, problems[-1])


def copy_instead(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Any) -> None:
    """Let ``load_state_dict(assign=True)`` copy the entries of a module: sharded parameters keep their identity."""
    metadata["assign_to_params_buffers"] = False
    for name, buffer in module._buffers.items():
        value = state_dict.get(prefix + name)
        if buffer is not None and buffer.is_meta and isinstance(value, Tensor):
            module._buffers[name] = torch.empty_like(buffer, device=value.device)


def _copy_in(state_dict: dict[str, Any], param: ShardedParameter) -> Tensor:
    """An unsharded copy of a parameter; tied parameters are one tensor in the state dict."""
    handle: GroupHandle = param.handle
    saved = None if handle.saved is None else handle.saved()
    if saved is None or not any(value is saved for value in state_dict.values()):
        saved = _unsharded_copy(param)
        handle.saved = TensorWeakRef(saved)
    return saved


def shard_entry(param: nn.Parameter | None, state_dict: dict[str, Any], name: str, errors: list[str]) -> None:
    """Replace an entry by this rank's rows of it, for ``load_state_dict`` of a plain module with sharded ones in it."""
    value = state_dict.get(name)
    if not isinstance(param, ShardedParameter) or not isinstance(value, Tensor):
        return
    shape = param.bmt_slice.shape
    if isinstance(value, ShardedRows):
        value = value.full_tensor()
    if tuple(value.shape) != shape:
        errors.append(f"size mismatch for {name}: the entry has shape {tuple(value.shape)}, the model {shape}")
        state_dict[name] = param.to_local()  # its current values
        return
    state_dict[name] = shard_of(value.detach(), param.bmt_slice)
    param.awaits_values = False


def has_own_code(module: nn.Module, loading: bool) -> bool:
    """Whether a module has code of its own for saving, or for loading, its entries."""
    methods = ("_load_from_state_dict", "load_state_dict") if loading else ("_save_to_state_dict", "state_dict")
    for cls in type(module).__mro__:
        if cls is nn.Module or HANDLES_SHARDS in vars(cls):
            continue
        if any(name in vars(cls) for name in methods):
            return True
    if loading:
        hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    else:
        hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return not all(_serves_shards(getattr(hook, "hook", hook)) for hook in hooks)


def dtypes_without_own_code(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of parameters and buffers that torch loads: neither their module nor an outer one has loading code."""
    dtypes: dict[str, torch.dtype] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        if not has_own_code(module, loading=True):
            tensors = {**module._parameters, **module._buffers}
            dtypes.update({prefix + name: tensor.dtype for name, tensor in tensors.items() if tensor is not None})
            for name, child in module._modules.items():
                if child is not None:
                    visit(child, f"{prefix}{name}.")

    visit(model, "")
    return dtypes


def _serves_shards(hook: Any) -> bool:
    """Whether a hook supports sharded parameters: this package's, and FSDP2's (not FSDP1's) for DTensors."""
    module = getattr(hook, "__module__", None) or ""
    return getattr(hook, HANDLES_SHARDS, False) or module.startswith("torch.distributed.fsdp._fully_shard.")


class StateDictError(ValueError):
    """Entries of a state dict do not fit a model."""


def check_entries(expected: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None], strict: bool) -> None:
    """Raise unless the entries of a state dict fit a model.

    Args:
        expected: the model's entries.
        shapes: of the state dict's entries, by name; None: no tensor.
        strict: whether the names must be the same.

    Raises:
        StateDictError: they do not fit.
    """
    problems = []
    missing = [name for name in expected if name not in shapes]
    surplus = [name for name in shapes if name not in expected]
    if strict and missing:
        problems.append(f"missing entries: {some_names(missing)}")
    if strict and surplus:
        problems.append(f"entries the model does not have: {some_names(surplus)}")
    if shapes and not strict and len(surplus) == len(shapes):
        _log.warning(
            "nothing is loaded: of the entries, %s, the model has none; it has %s",
            some_names(surplus),
            some_names([*expected]),
        )
    for name, shape in shapes.items():
        expected_shape = shape_of(expected.get(name))
        if expected_shape is not None and not is_extra_state(name) and shape != expected_shape:
            what = "no tensor" if shape is None else f"shape {tuple(shape)}"
            problems.append(f"{name!r} has {what}, the model's has shape {expected_shape}")
    if problems:
        raise StateDictError("the state dict does not fit the model; nothing was loaded: " + "; ".join(problems))


def is_extra_state(name: str) -> bool:
    """Whether an entry is what a module's ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == "_extra_state"


def load_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Load a plain state dict (unsharded tensors) into a model with sharded parameters. Every rank must call it.

    Returns:
        The missing and the surplus names, as ``torch.nn.Module.load_state_dict`` does.

    Raises:
        TypeError: ``state_dict`` is not a mapping.
        ValueError: entries are missing or surplus (under ``strict``) or have another shape, or ``assign`` is set.
            The model is not changed then.
    """
    if assign:
        raise ValueError("assign=True would replace sharded parameters; load with assign=False")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to tensors, not {type(state_dict).__name__}")
    # Not the caller's parameters: assigning changes their requires_grad.
    detached = {k: v.detach() if isinstance(v, Tensor) else v for k, v in state_dict.items()}
    detached = {k: v.full_tensor() if isinstance(v, ShardedRows) else v for k, v in detached.items()}
    entries = with_versions(detached, versions_of(state_dict))
    refuse_fsdp1(model)
    abandon_dead_calls()
    params = dict(model.named_parameters(remove_duplicate=False))
    if any(hasattr(param, "placements") for param in params.values()):  # FSDP2's hooks do not support placeholders
        check_entries(local_entries(model), {name: shape_of(value) for name, value in entries.items()}, strict)
        with torch.no_grad():
            for name, value in detached.items():
                entries[name] = _distributed(value, params.get(name))
        return nn.Module.load_state_dict(model, entries, strict)
    places = _places(model)
    for place in places:
        place.open()
    try:
        result = nn.Module.load_state_dict(model, entries, strict, assign=True)
    except RuntimeError as error:
        raise StateDictError(f"the state dict does not fit the model; nothing was loaded: {error}") from error
    finally:
        for place in places:
            place.close()
    for place in places:
        place.commit()
    return result


def _distributed(value: Any, param: Any) -> Any:
    """A logical tensor as a DTensor like ``param``, if that is one."""
    if not isinstance(value, Tensor) or not hasattr(param, "placements") or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(param.device), param.device_mesh, param.placements)


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise if a module is FSDP1's. Its entries are copies, so writes to them would be lost."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            "a FullyShardedDataParallel cannot be loaded: shard with torch's fully_shard or bmt_zero, or load before"
        )


def _places(model: nn.Module) -> list[_Place]:
    """The modules of a model with placeholders for loading. Every rank unshards copies for them in the same order."""
    places: dict[nn.Module, _Place] = {}
    copies: dict[int, Tensor] = {}

    def visit(module: nn.Module, has_code: bool) -> None:
        if module not in places:
            has_code = has_code or has_own_code(module, loading=True)
            places[module] = _Place(module, has_code, copies)
            for child in module._modules.values():
                if child is not None:
                    visit(child, has_code)

    visit(model, False)
    return list(places.values())


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Place:
    """A module while it is being loaded; see [Note: placeholders].

    Args:
        module: the module.
        has_code: whether its own code, or that of an outer module, loads it.
        copies: unsharded copies that were made already, by identity of the parameter.
    """

    def __init__(self, module: nn.Module, has_code: bool, copies: dict[int, Tensor]) -> None:
        self.module = module
        self.has_code = has_code
        self.params = dict(module._parameters)
        self.buffers = dict(module._buffers)
        self.loaded: list[tuple[Tensor, Tensor]] = []  # each of the module's tensors, and its loaded values
        self.unwritten: dict[Tensor, int] = {}  # copies that have no values yet, and their versions
        self.extra_state: list[Any] = []
        self.placeholders: dict[str, nn.Parameter | None] = dict(self.params)
        for name, param in self.params.items():
            if isinstance(param, ShardedParameter) and has_code:
                if id(param) not in copies:
                    copies[id(param)] = _unsharded_copy(param)
                placeholder = self.placeholders[name] = nn.Parameter(copies[id(param)], requires_grad=False)
                if param.awaits_values:
                    self.unwritten[placeholder] = _version_of(placeholder)
            elif param is not None and not has_code:
                empty = torch.empty(shape_of(param) or (), dtype=param.dtype, device="meta")
                self.placeholders[name] = nn.Parameter(empty, requires_grad=False)

    def open(self) -> None:
        self.module._parameters.update(self.placeholders)
        self.module.__dict__["set_extra_state"] = self.extra_state.append

    def close(self) -> None:
        """Restore the module's tensors."""
        module = self.module
        del module.__dict__["set_extra_state"]
        kinds: list[Any] = [
            (self.params, self.placeholders, module._parameters),
            (self.buffers, self.buffers, module._buffers),
        ]
        for originals, placeholders, now in kinds:
            for name, tensor in originals.items():
                loaded = now.get(name)
                in_place = self.has_code and isinstance(tensor, ShardedParameter)
                if tensor is not None and loaded is not None and (loaded is not placeholders[name] or in_place):
                    self.loaded.append((tensor, loaded))
                now[name] = tensor
        if isinstance(module, nn.RNNBase):
            refresh_flat_weights(module)

    def commit(self) -> None:
        """Copy the loaded values into the module's tensors."""
        for tensor, loaded in self.loaded:
            if isinstance(tensor, ShardedParameter):
                if self.unwritten.get(loaded) != _version_of(loaded) or loaded.any():
                    write_logical(tensor, loaded)
            else:
                is_shard = is_tp_shard(tensor) and not self.has_code
                with torch.no_grad():
                    tensor.copy_(tp_shard_of(loaded, slice_of(tensor)) if is_shard else loaded)
        for state in self.extra_state:
            self.module.set_extra_state(state)


def some_names(names: list[str]) -> str:
    """The first five, for a message."""
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
