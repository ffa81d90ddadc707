"""State dicts with plain names and whole tensors, in and out of sharded modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .parameter import DistributedParameter, cut_piece

if TYPE_CHECKING:
    from .unit import Unit

# Whether state_dict() of sharded modules gathers. Off while this module asks for the parameters themselves.
_gathers: ContextVar[bool] = ContextVar("bmt_zero_state_dict_gathers", default=True)


@contextmanager
def _ungathered() -> Iterator[None]:
    token = _gathers.set(False)
    try:
        yield
    finally:
        _gathers.reset(token)


def local_entries(model: nn.Module) -> dict[str, Any]:
    """The entries of ``model.state_dict()`` with the model's own (sharded) parameters in place of whole tensors."""
    with _ungathered():
        return dict(model.state_dict(keep_vars=True))


def whole_tensor(value: Any) -> Any:
    """The whole tensor of a parameter; anything else as it is. Every rank must take part."""
    if isinstance(value, DistributedParameter):
        return value.gather_all()
    return value.detach() if isinstance(value, Tensor) else value


def write_whole(param: DistributedParameter, whole: Tensor) -> None:
    """Set a parameter, of which this rank has some rows, from its whole tensor."""
    found = param.bmt_slice
    with torch.no_grad():
        piece = cut_piece(whole, found)
        rows = piece.reshape(1) if not found.shape else piece
        param.copy_(rows[found.row_start : found.row_stop].reshape(param.shape))
    param.awaits_values = False


class BlockState:
    """State dict of a Block: of all parameters in it, those of its children included."""

    unit: Unit

    def register_state_hooks(self) -> None:
        """Gather after saving, cut before loading; the module's own hooks come first."""
        assert isinstance(self, nn.Module)
        inner: Any = self.inner_module
        self.__dict__["_state_dict_hooks"] = OrderedDict(inner._state_dict_hooks)
        self.__dict__["_load_state_dict_pre_hooks"] = OrderedDict(inner._load_state_dict_pre_hooks)
        self._register_state_dict_hook(_gather_entries)
        self.register_load_state_dict_pre_hook(_cut_entries)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.inner_module._save_to_state_dict(*args, **kwargs)  # type: ignore[attr-defined]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.inner_module._load_from_state_dict(*args, **kwargs)  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors under plain names; see :func:`load_state_dict`."""
        return load_state_dict(self, state_dict, strict, assign)  # type: ignore[arg-type]


def _gather_entries(block: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    if not _gathers.get():
        return
    whole: dict[int, Tensor] = {}
    for slot in block.unit.slots:
        param = slot.module._parameters[slot.name]
        if prefix + slot.path in state_dict:
            if id(param) not in whole:
                whole[id(param)] = _owned(whole_tensor(param))
            state_dict[prefix + slot.path] = whole[id(param)]


def _cut_entries(
    block: Any,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    _missing: list[str],
    _unexpected: list[str],
    errors: list[str],
) -> None:
    for slot in block.unit.slots:
        param = slot.module._parameters[slot.name]
        cut_entry(param, state_dict, prefix + slot.path, errors)


def cut_entry(param: DistributedParameter, state_dict: dict[str, Any], name: str, errors: list[str]) -> None:
    """Replace a whole tensor by this rank's rows of it, so that the module's own loading finds what fits."""
    whole = state_dict.get(name)
    if not isinstance(whole, Tensor):
        return
    found = param.bmt_slice
    if tuple(whole.shape) != found.shape:
        errors.append(f"size mismatch for {name}: the entry has shape {tuple(whole.shape)}, the model {found.shape}")
        del state_dict[name]
        return
    piece = cut_piece(whole, found)
    rows = piece if found.shape else piece.reshape(1)
    state_dict[name] = rows[found.row_start : found.row_stop].reshape(param.shape)
    param.awaits_values = False


def _owned(tensor: Tensor) -> Tensor:
    """``tensor`` in contiguous storage of its own size: a gathered one may lie in a padded buffer, or be the shard."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class Problems(ValueError):
    """Entries of a state dict do not fit a model."""


def check_entries(expected: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None], strict: bool) -> None:
    """Raise :class:`Problems` unless the entries (name to shape, None for what is no tensor) fit the model's."""
    problems = []
    missing = [name for name in expected if name not in shapes]
    surplus = [name for name in shapes if name not in expected]
    if strict and missing:
        problems.append(f"missing entries: {_some(missing)}")
    if strict and surplus:
        problems.append(f"entries the model does not have: {_some(surplus)}")
    for name, shape in shapes.items():
        value = expected.get(name)
        if isinstance(value, Tensor):
            wanted = value.bmt_slice.shape if isinstance(value, DistributedParameter) else tuple(value.shape)
            if shape != wanted:
                what = "no tensor" if shape is None else f"shape {tuple(shape)}"
                problems.append(f"{name!r} has {what}, the model's has shape {wanted}")
    if problems:
        raise Problems("the state dict does not fit the model; nothing was loaded: " + "; ".join(problems))


def load_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Load a plain state dict (whole tensors) into a model with sharded parameters.

    Raises:
        ValueError: entries are missing or surplus (under ``strict``) or of another shape, or ``assign`` is set.
            The model is as it was then.
    """
    if assign:
        raise ValueError("assign=True would replace sharded parameters; load with assign=False")
    shapes = {k: tuple(v.shape) if isinstance(v, Tensor) else None for k, v in state_dict.items()}
    check_entries(local_entries(model), shapes, strict)
    return nn.Module.load_state_dict(model, state_dict, strict)


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def gathers_state() -> bool:
    """Whether ``state_dict()`` is to gather."""
    return _gathers.get()
