"""The logical tensors of a model and its optimizers, by name, and this rank's part of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import Slice, StateRecord, local_tensor, slice_of, unsharded_slice
from bmt_zero.sharded_parameter import ShardedParameter
from bmt_zero.state import has_own_code, is_extra_state, stage_entries
from bmt_zero.torch_optimizers import OF_A_PARAMETER

from .headers import DTYPES, Entry, dtype_name


@dataclass(frozen=True, eq=False)
class Content:
    """A logical tensor, and this rank's part of it.

    Attributes:
        entry: its name, dtype and logical shape.
        where: this rank's part.
        tensor: the part, of shape ``where.local_shape``, on any device.
        is_current: whether this rank's values are up to date and may be saved.
        is_single: whether only the lowest rank's values are saved, as for a buffer.
        owner: the parameter or buffer itself.
    """

    entry: Entry
    where: Slice
    tensor: Tensor
    is_current: bool = True
    is_single: bool = False
    owner: Tensor | None = None


def contents_of_model(model: nn.Module, entries: Mapping[str, Any] | None = None) -> list[Content]:
    """The tensors in a model's state dict, of this rank's pipeline stage, without :func:`extra_states`.

    Args:
        model: the model.
        entries: its :func:`~bmt_zero.state.stage_entries`, if the caller has them.

    Raises:
        TypeError: ``model`` is not a module, or its state dict holds something other than tensors.
        ValueError: a tensor has no values, is sparse, or has a dtype or a placement that cannot be saved.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    contents = []
    for name, value in (stage_entries(model) if entries is None else entries).items():
        if is_extra_state(name):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name!r} in the model's state dict is a {type(value).__name__}; a checkpoint holds tensors. Return "
                "other things from get_extra_state, or save them under a keyword of their own"
            )
        contents.append(_content(name, value))
    return contents


def require_memory(contents: Iterable[Content]) -> None:
    """Raise ValueError if a tensor is on the meta device, or cannot be written (see :func:`check_writable`)."""
    for content in contents:
        if content.tensor.is_meta:
            raise without_memory(content.entry.name)
        if content.tensor.numel() and not content.tensor.data_ptr():
            raise ValueError(
                f"{content.entry.name!r} is a {type(content.tensor).__name__} made of other tensors, which cannot be "
                "written into; load before it is converted. Nothing was loaded"
            )
        check_writable(content.entry.name, content.tensor)


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise ValueError if elements of a tensor share memory. Tensors on the meta device are replaced before."""
    if not tensor.is_meta and any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())):
        raise ValueError(
            f"elements of {name!r} share memory, as after expand(), and cannot be written one by one; clone it before "
            "it becomes part of the model. Nothing was loaded"
        )


def without_memory(name: str) -> ValueError:
    """The error for a tensor on the meta device."""
    return ValueError(
        f"{name!r} is on the meta device and has no memory; build the model on a device, or call bmt_zero.load(model, "
        "checkpoint) first, which makes memory (FSDP2's: model.to_empty(device=...)). Nothing was loaded"
    )


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor is dense numbers in memory, as a file holds them."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized or nested" if tensor.layout is torch.strided else str(tensor.layout)
        raise ValueError(f"{name!r} is no dense tensor, but a {kind} one; it cannot be saved")


def check_has_values(name: str, tensor: Tensor) -> None:
    """Raise ValueError if a tensor is on the meta device. :func:`check_filled` is about parameters."""
    if tensor.is_meta:
        raise ValueError(f"{name!r} has no values yet; load or initialise the model before saving it")


def check_filled(model: Any) -> None:
    """Raise RuntimeError if nothing has filled parameters of a model that were built on the meta device.

    A collective of the ranks that share such parameters, unless a forward has seen values in them.
    """
    params = model.parameters() if isinstance(model, nn.Module) else ()
    for group in dict.fromkeys(param.handle.group for param in params if isinstance(param, ShardedParameter)):
        group.check_values()


def mark_loaded(contents: Iterable[Content]) -> None:
    """Note that parameters have received their values."""
    for content in contents:
        if isinstance(content.owner, ShardedParameter):
            content.owner.awaits_values = False


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules of this rank's pipeline stage return from ``get_extra_state``, by the names in the state dict."""
    states = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if getattr(type(module), "get_extra_state", None) is not nn.Module.get_extra_state:
            states[f"{path}._extra_state" if path else "_extra_state"] = module.get_extra_state()
    return states


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give modules what :func:`extra_states` returned."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, state in states.items():
        modules[name.rpartition("_extra_state")[0].rstrip(".")].set_extra_state(state)


def any_own_code(model: nn.Module) -> bool:
    """Whether a module of the model has its own code for saving or loading, which needs unsharded tensors."""
    return any(has_own_code(m, loading) for m in model.modules() for loading in (False, True))


def _content(name: str, value: Tensor) -> Content:
    check_dense(name, value)
    where = slice_of(value)
    is_param = isinstance(value, nn.Parameter) or hasattr(value, "bmt_slice") or hasattr(value, "placements")
    tensor = local_tensor(value).detach() if not isinstance(value, ShardedParameter) else value.to_local()
    entry = Entry(name, dtype_name(tensor.dtype, name), where.shape)
    return Content(entry, where, tensor, is_single=not is_param, owner=value)


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter. A parameter with several names gets the first one."""
    return {param: name for name, param in model.named_parameters()}


def contents_of_optimizer(records: Iterable[StateRecord], names: Mapping[Tensor, str], what: str) -> list[Content]:
    """The state of an optimizer, under ``<parameter>.<state>``.

    Args:
        names: the model's parameters.
        what: names the optimizer in messages.

    Raises:
        ValueError: the optimizer has a parameter that is not in the model.
    """
    contents = []
    for record in records:
        if record.param not in names:
            raise ValueError(
                f"{what} has a parameter of shape {slice_of(record.param).shape} that the model has not; pass the "
                "model that it steps"
            )
        name = f"{names[record.param]}.{record.key}"
        entry = Entry(name, dtype_name(record.tensor.dtype, name), record.where.shape)
        contents.append(Content(entry, record.where, record.tensor, record.is_current))
    return contents


State = dict[Tensor, dict[str, Any]]
"""The state of one of torch's optimizers, by parameter."""


def records_of(optimizer: Any, made: State | None = None, also: Sequence[Tensor] = ()) -> list[StateRecord]:
    """The state of an optimizer.

    It has ``state_records()``, as this project's optimizers do, or each of its states is a number or has the shape of
    its parameter.

    Args:
        made: the result of :func:`make_state` for the optimizer.
        also: frozen parameters whose states are to be loaded.

    Raises:
        TypeError: a state is something else.
    """
    if hasattr(optimizer, "state_records"):
        records: list[StateRecord] = optimizer.state_records(also=also) if also else optimizer.state_records()
        return records
    return [
        _record(optimizer, param, key, value)
        for group in optimizer.param_groups
        for param in group["params"]
        for key, value in (optimizer.state.get(param) or (made or {}).get(param, {})).items()
        if value is not None
    ]


@torch.inference_mode(False)
@torch.no_grad()
def adopt_records(optimizer: Any, records: Iterable[StateRecord], made: State) -> None:
    """Let an optimizer use the values that were written into its records and into the state that was made for it.

    Its options must be the loaded ones: torch's fused and capturable optimizers read the steps on the device.
    """
    for param, state in made.items():
        optimizer.state[param].update(state)
    if hasattr(optimizer, "adopt_state_records"):
        optimizer.adopt_state_records(records)
        return
    for record in records:
        value = optimizer.state[record.param][record.key]
        if not isinstance(value, Tensor):
            optimizer.state[record.param][record.key] = type(value)(record.tensor.item())
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("fused") or group.get("capturable") else ():
            step = optimizer.state.get(param, {}).get("step")
            if isinstance(step, Tensor):
                optimizer.state[param]["step"] = step.to(param.device, torch.float32)


@torch.inference_mode(False)
@torch.no_grad()
def make_state(optimizer: Any, names: Mapping[Tensor, str], saved: Mapping[str, Entry]) -> State:
    """Allocate the saved state for one of torch's optimizers, which would allocate it in its first step.

    The optimizer is not changed. :func:`adopt_records` gives it the state after the values were read.

    Raises:
        ValueError: a saved state is neither a number nor like its parameter.
    """
    by_param: dict[str, list[tuple[str, Entry]]] = {}
    for name, entry in saved.items():
        param_name, _, key = name.rpartition(".")
        by_param.setdefault(param_name, []).append((key, entry))
    made: State = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state: dict[str, Any] = {}
            for key, entry in by_param.get(names.get(param, ""), []) if not optimizer.state.get(param) else []:
                dtype, shape = DTYPES[entry.dtype], slice_of(param).shape
                if dtype.is_complex and not param.is_complex():
                    raise ValueError(f"{entry} is of complex numbers, and its parameter is not")
                if entry.shape == shape and (shape or key not in OF_A_PARAMETER):
                    like = local_tensor(param)
                    if dtype.is_floating_point and param.is_floating_point():
                        dtype = param.dtype  # as torch's optimizers do; check_fit reports another one in the file
                    state[key] = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
                elif not entry.shape:  # where torch's load_state_dict has it, which adopt_records does for steps
                    state[key] = torch.zeros((), dtype=dtype, device="cpu" if key == "step" else param.device)
                else:
                    raise ValueError(
                        f"{entry} is neither a number nor like the parameter of shape {shape}; it was saved by another "
                        f"optimizer than {type(optimizer).__name__}"
                    )
            if state:
                made[param] = state
    return made


def _record(optimizer: Any, param: Tensor, key: str, value: Any) -> StateRecord:
    where = slice_of(param)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64, device="cpu")
    if isinstance(value, Tensor):
        local = local_tensor(value).detach()
        if tuple(local.shape) == where.local_shape:
            return StateRecord(param, key, where, local)
        if not value.dim():
            return StateRecord(
                param, key, unsharded_slice(local), local, bool(where.numel or not math.prod(where.shape))
            )
    raise TypeError(
        f"{type(optimizer).__name__} has a state {key!r} ({_described(value)}) of a parameter of shape {where.shape}, "
        "which is neither a number nor like the parameter, so it has no place in a checkpoint of every layout"
    )


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def distinct_tensors(contents: Iterable[Content]) -> tuple[list[Tensor], list[int]]:
    """The tensors without repetitions (tied weights are one tensor), and the index of each content's tensor in them."""
    tensors: list[Tensor] = []
    indices: list[int] = []
    known: dict[tuple[Any, ...], int] = {}
    for content in contents:
        tensor = content.tensor
        key: tuple[Any, ...] = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        key = (*key, tensor.is_conj(), tensor.is_neg())
        if tensor.is_meta or not tensor.numel() or not tensor.data_ptr():
            key = (id(tensor if content.owner is None else content.owner),)
        if key not in known:
            known[key] = len(tensors)
            tensors.append(tensor)
        indices.append(known[key])
    return tensors, indices
