"""State dicts with plain names and whole tensors, in and out of sharded modules.

[Note: stand-ins]
    A module's own code for saving and loading (hooks, ``_save_to_state_dict``, ``_load_from_state_dict``) was
    written for whole parameters. So while it runs, whole tensors stand in the places of the sharded ones:

    saving   gathered tensors.
    loading  tensors without storage. torch's ``assign=True`` replaces them by the entries of the state dict,
             without a copy; when all has gone well, the model's own tensors take their rows from those. So a
             state dict that does not fit changes nothing. Modules with loading code of their own, which may
             write in place, get gathered tensors.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from bmt_comm import Communicator, cut_piece, select_rows

from .parameter_group import Slot, refresh_flat_weights
from .sharded_parameter import ShardedParameter
from .stage_entry import StageEntry

F = TypeVar("F", bound=Callable[..., Any])

HANDLES_SHARDS = "handles_shards"  # set on classes and hooks whose loading and saving serve sharded parameters
EXTRA_STATE = "_extra_state"  # what torch calls the entry of get_extra_state()

# Whether state_dict() of sharded modules gathers. Off while this module asks for the parameters themselves.
_gathers: ContextVar[bool] = ContextVar("bmt_zero_state_dict_gathers", default=True)


def local_entries(model: nn.Module) -> dict[str, Any]:
    """The entries of ``model.state_dict()`` with the model's own (sharded) parameters in place of whole tensors."""
    token = _gathers.set(False)
    try:
        return dict(model.state_dict(keep_vars=True))
    finally:
        _gathers.reset(token)


def whole_tensor(value: Any) -> Any:
    """The whole tensor of a parameter; anything else as it is. Every rank must take part."""
    if isinstance(value, StageEntry):
        return value.spread(whole_tensor(value.value) if value.is_here else None)
    if isinstance(value, ShardedParameter):
        return value.gather_all()
    return value.detach() if isinstance(value, Tensor) else value


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of the whole tensor of an entry; None for what is no tensor."""
    if isinstance(value, StageEntry):
        return value.shape
    if isinstance(value, ShardedParameter):
        return value.bmt_slice.shape
    return tuple(value.shape) if isinstance(value, Tensor) else None


def dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, (Tensor, StageEntry)) else None


def entries_of_stages(own: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """The entries of every stage, one stage after the other, where ``own`` are those of this rank's.

    Whole tensors, or, while :func:`local_entries` asks for entries, :class:`StageEntry`s. Names of one value on its
    stage are names of one value here. Every rank of ``comm``, which goes over the stages, must call it.
    """
    numbers: dict[Any, int] = {}
    facts = [(n, shape_of(v), dtype_of(v), numbers.setdefault(_identity(v), len(numbers))) for n, v in own.items()]
    found: dict[str, Any] = {}
    for owner, theirs in enumerate(comm.all_gather_object(facts)):
        values: dict[int, Any] = {}
        for name, shape, dtype, number in theirs:
            if number not in values:
                mine = own[name] if owner == comm.rank else None
                entry = StageEntry(mine, shape, dtype, comm, owner)
                values[number] = whole_tensor(entry) if _gathers.get() else entry
            found[name] = values[number]
    return found


def _identity(value: Any) -> Any:
    """The same for what is one value under several names: tensors are detached, each by itself."""
    if isinstance(value, ShardedParameter) or not isinstance(value, Tensor) or not value.numel():
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def write_whole(param: ShardedParameter, whole: Tensor) -> None:
    """Set a parameter, of which this rank has some rows, from its whole tensor."""
    with torch.no_grad():
        param.copy_(_rows(param, whole))
    param.awaits_values = False
    param.handle.original = None  # type: ignore[attr-defined]


def _rows(param: ShardedParameter, whole: Tensor) -> Tensor:
    """This rank's rows of a parameter's whole tensor."""
    return select_rows(cut_piece(whole, param.bmt_slice), param.bmt_slice)


@contextmanager
def unsharded_parameters(places: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
    """Within, modules have copies of their whole parameters; see [Note: stand-ins]. Tied ones stay tied.

    Args:
        places: (module, name) of sharded parameters.
    """
    if not _gathers.get():
        yield
        return
    places = list(places)
    own = [module._parameters[name] for module, name in places]
    copies: dict[int, nn.Parameter] = {}
    try:
        for (module, name), param in zip(places, own, strict=True):
            if id(param) not in copies:
                copies[id(param)] = nn.Parameter(_unsharded_copy(param), requires_grad=False)
            module._parameters[name] = copies[id(param)]
        yield
    finally:
        for (module, name), param in zip(places, own, strict=True):
            module._parameters[name] = param


def _unsharded_copy(param: Any) -> Tensor:
    """Contiguous, in storage of its own size: a gathered tensor may lie in a padded buffer, or be the shard."""
    return whole_tensor(param).clone(memory_format=torch.contiguous_format)


def serves_shards(hook: F) -> F:
    """Mark a hook for loading that serves sharded parameters, unlike those that were written for whole ones."""
    setattr(hook, HANDLES_SHARDS, True)
    return hook


def add_state_hooks(slots: Iterable[Slot]) -> None:
    """Let the modules that have sharded parameters save whole tensors, and load their rows of them."""
    names: dict[nn.Module, list[str]] = {}
    for slot in slots:
        names.setdefault(slot.module, [])
        if slot.name not in names[slot.module]:
            names[slot.module].append(slot.name)
    for module, own in names.items():
        for kind in (module._state_dict_pre_hooks, module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key in [key for key, hook in kind.items() if isinstance(getattr(hook, "hook", hook), _StateHook)]:
                del kind[key]  # of a sharding before
        saving = _Saving(module, own, has_own_code(module, loading=False))
        if saving.stands_in:
            module.register_state_dict_pre_hook(_Begin(saving))
        module._register_state_dict_hook(_End(saving))
        module.register_load_state_dict_pre_hook(_Loading(own))


class _StateHook:
    """A hook of ours, which serves sharded parameters."""

    handles_shards = True


class _Saving:
    """How a module saves; see [Note: stand-ins]. Where it has no code of its own, its entries are replaced after."""

    def __init__(self, module: nn.Module, names: list[str], stands_in: bool) -> None:
        self.module = module
        self.names = names
        self.stands_in = stands_in
        self.sharded: dict[str, Any] = {}


class _Begin(_StateHook):
    def __init__(self, saving: _Saving) -> None:
        self.saving = saving

    def __call__(self, module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        if not _gathers.get():
            return
        own, params = self.saving, module._parameters
        own.sharded = own.sharded or {name: params[name] for name in own.names}
        copies = {id(p): nn.Parameter(_unsharded_copy(p), requires_grad=False) for p in own.sharded.values()}
        params.update({name: copies[id(p)] for name, p in own.sharded.items()})


class _End(_StateHook):
    def __init__(self, saving: _Saving) -> None:
        self.saving = saving

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        own = self.saving
        if own.stands_in:
            module._parameters.update(own.sharded)
            own.sharded = {}
        elif _gathers.get():
            # Tied parameters are one tensor in the state dict, too.
            done = _copies_in(state_dict)
            for name in own.names:
                param = module._parameters.get(name)
                if prefix + name in state_dict and isinstance(param, ShardedParameter):
                    found = done[id(param)]() if id(param) in done else None
                    if found is None:
                        found = _unsharded_copy(param)
                        done[id(param)] = TensorWeakRef(found)
                    state_dict[prefix + name] = found


_copies: dict[int, dict[int, TensorWeakRef]] = {}  # by state dict: unsharded copies by parameter


def _copies_in(state_dict: dict[str, Any]) -> dict[int, TensorWeakRef]:
    """The unsharded copies of parameters that a state dict has, for as long as it lives."""
    found = _copies.get(id(state_dict))
    if found is None:
        try:
            weakref.finalize(state_dict, _copies.pop, id(state_dict), None).atexit = False
        except TypeError:  # a plain dict, given as the destination
            return {}
        found = _copies[id(state_dict)] = {}
    return found


class _Loading(_StateHook):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        _strict: bool,
        _missing: list[str],
        _unexpected: list[str],
        errors: list[str],
    ) -> None:
        own = [module._parameters.get(name) for name in self.names]
        if metadata.get("assign_to_params_buffers", False) and any(isinstance(p, ShardedParameter) for p in own):
            raise ValueError("assign=True would replace sharded parameters; load with assign=False")
        for name, param in zip(self.names, own, strict=True):
            cut_entry(param, state_dict, prefix + name, errors)


def cut_entry(param: nn.Parameter | None, state_dict: dict[str, Any], name: str, errors: list[str]) -> None:
    """Replace a whole tensor by this rank's rows of it, so that torch's own loading finds what fits.

    This serves ``load_state_dict`` of a plain module with sharded ones in it.
    """
    whole = state_dict.get(name)
    if not isinstance(param, ShardedParameter) or not isinstance(whole, Tensor):
        return
    wanted = param.bmt_slice.shape
    if tuple(whole.shape) != wanted:
        errors.append(f"size mismatch for {name}: the entry has shape {tuple(whole.shape)}, the model {wanted}")
        state_dict[name] = param.detach()  # what it holds already
        return
    state_dict[name] = _rows(param, whole.detach())
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
        return not all(getattr(getattr(hook, "hook", hook), HANDLES_SHARDS, False) for hook in hooks)
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return not all(isinstance(getattr(hook, "hook", hook), _StateHook) for hook in hooks)


class StateDictError(ValueError):
    """Entries of a state dict do not fit a model."""


def check_entries(expected: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None], strict: bool) -> None:
    """Raise unless the entries (name to shape, None for what is no tensor) fit the model's."""
    problems = []
    missing = [name for name in expected if name not in shapes]
    surplus = [name for name in shapes if name not in expected]
    if strict and missing:
        problems.append(f"missing entries: {_some(missing)}")
    if strict and surplus:
        problems.append(f"entries the model does not have: {_some(surplus)}")
    for name, shape in shapes.items():
        wanted = shape_of(expected.get(name))
        if wanted is not None and not is_extra_state(name) and shape != wanted:
            what = "no tensor" if shape is None else f"shape {tuple(shape)}"
            problems.append(f"{name!r} has {what}, the model's has shape {wanted}")
    if problems:
        raise StateDictError("the state dict does not fit the model; nothing was loaded: " + "; ".join(problems))


def is_extra_state(name: str) -> bool:
    """Whether an entry is what a module's ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == EXTRA_STATE


def load_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Load a plain state dict (whole tensors) into a model with sharded parameters. Every rank must call it.

    Returns:
        what ``torch.nn.Module.load_state_dict`` does: the missing and the surplus names.

    Raises:
        TypeError: ``state_dict`` is no mapping.
        ValueError: entries are missing or surplus (under ``strict``) or of another shape, or ``assign`` is set.
            The model is as it was then.
    """
    if assign:
        raise ValueError("assign=True would replace sharded parameters; load with assign=False")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to tensors, not {type(state_dict).__name__}")
    # Not the caller's parameters: assigning changes their requires_grad.
    entries = OrderedDict((k, v.detach() if isinstance(v, Tensor) else v) for k, v in state_dict.items())
    if hasattr(state_dict, "_metadata"):
        entries._metadata = state_dict._metadata  # type: ignore[attr-defined]
    places = _stand_in(model)
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


def _stand_in(model: nn.Module) -> list[_Place]:
    """Put stand-ins, where whatever the state dict brings is caught before it reaches the model."""
    places: dict[nn.Module, _Place] = {}

    def visit(module: nn.Module, has_code: bool) -> None:
        if module not in places:
            has_code = has_code or has_own_code(module, loading=True)
            places[module] = _Place(module, has_code)
            for child in module._modules.values():
                if child is not None:
                    visit(child, has_code)

    wholes: dict[int, Tensor] = {}
    visit(model, False)
    for place in places.values():  # gathers: in one order on every rank, and before anything is replaced
        place.gather(wholes)
    for place in places.values():
        place.open()
    return list(places.values())


class _Place:
    """A module while it is being loaded; see [Note: stand-ins]."""

    def __init__(self, module: nn.Module, has_code: bool) -> None:
        self.module = module
        self.has_code = has_code
        self.params = dict(module._parameters)
        self.buffers = dict(module._buffers)
        self.stand_ins: dict[str, nn.Parameter | None] = {}
        self.loaded: list[tuple[Tensor, Tensor]] = []
        self.extra_state: list[Any] = []

    def gather(self, wholes: dict[int, Tensor]) -> None:
        for name, param in self.params.items():
            stand_in = param
            if isinstance(param, ShardedParameter) and self.has_code:
                if id(param) not in wholes:
                    wholes[id(param)] = _unsharded_copy(param)
                stand_in = nn.Parameter(wholes[id(param)], requires_grad=False)
            elif param is not None and not self.has_code:
                shape = param.bmt_slice.shape if isinstance(param, ShardedParameter) else param.shape
                stand_in = nn.Parameter(torch.empty(shape, dtype=param.dtype, device="meta"), requires_grad=False)
            self.stand_ins[name] = stand_in

    def open(self) -> None:
        self.module._parameters.update(self.stand_ins)
        self.module.__dict__["set_extra_state"] = self.extra_state.append

    def close(self) -> None:
        """Put the module's own tensors back."""
        module = self.module
        del module.__dict__["set_extra_state"]
        kinds: list[Any] = [
            (self.params, self.stand_ins, module._parameters),
            (self.buffers, self.buffers, module._buffers),
        ]
        for own, stand_ins, now in kinds:
            for name, tensor in own.items():
                found = now.get(name)
                gathered = self.has_code and isinstance(tensor, ShardedParameter)
                if tensor is not None and found is not None and (found is not stand_ins[name] or gathered):
                    self.loaded.append((tensor, found))
                now[name] = tensor
        if isinstance(module, nn.RNNBase):
            refresh_flat_weights(module)

    def commit(self) -> None:
        """Take over what has been loaded."""
        for own, found in self.loaded:
            if isinstance(own, ShardedParameter):
                if not (own.awaits_values and self.has_code and not found.any()):  # was not touched: still zeros
                    write_whole(own, found)
            else:
                with torch.no_grad():
                    own.copy_(found)
        for state in self.extra_state:
            self.module.set_extra_state(state)


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
