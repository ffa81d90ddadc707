"""A tensor of this rank's rows of a logical tensor. Operations on it mean the logical tensor.

[Note: operations on sharded rows]
    The storage, ``shape``, ``numel()`` and ``len`` are those of this rank's rows, as a kernel needs them, and ``data``
    is these rows as a plain tensor. Reading metadata and printing never communicate. Operations are of five kinds:

    - Operations on each element or each row (arithmetic, comparisons, copies, ``flatten``, a mean along the last
      dimension) return the same rows of the result. The other operand is rows, too, or a logical tensor, or a number.
    - Norms, ``sum``, ``mean``, ``any``, ``all``, ``count_nonzero`` and extremes of all elements exchange one number.
    - Element-wise in-place operations act on the rows. An index in an assignment refers to the logical tensor.
    - Views of some elements (``rows[0]``, ``t()``) and other in-place operations raise, because a write would have to
      change rows of other ranks.
    - Everything else gathers the logical tensor and computes with it.

    In the second and the last kind all ranks that have a part of the tensor must take part. So the kind depends only on
    what all ranks know: the operation, its numbers, and logical shapes. It does not depend on the number of local rows.

    The optimizers of ``torch.optim`` that are not refused are element-wise, so the functions that they call act on the
    rows and return plain tensors. So do operators of ``torch.ops``, which are kernels.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .context import is_deterministic
from .operation_kinds import (
    ALONG_ROWS,
    INITIALIZERS_OF_MATRICES,
    KERNELS,
    NORMS,
    OF_ALL,
    RANDOM,
    TRANSPOSED,
    Kind,
    kind_of,
)
from .row_reductions import norms, of_all, over_ranks, reduce_over, spreading_communicators
from .slice import STAGE_LOCAL_ATTRIBUTE, Slice, is_stage_local, select_rows, shard_of, unshard_tp


class ShardedRows(Tensor):
    """This rank's rows of a logical tensor; see [Note: operations on sharded rows].

    Attributes:
        bmt_slice: which rows (:class:`bmt_comm.Slice`).
    """

    bmt_slice: Slice
    _is_gradient = False

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape of the logical tensor, over all ranks."""
        return self.bmt_slice.shape

    def to_local(self) -> Tensor:
        """This rank's rows, as a plain tensor on the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def full_tensor(self) -> Tensor:
        """The logical tensor, a copy; not differentiable. Every rank that has a part of it must call this."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return _gathered(self.detach(), self.bmt_slice)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = clone = self._with_rows(self.to_local().clone())
            clone.grad = copy.deepcopy(self.grad, memo)
        result: Tensor = memo[id(self)]
        return result

    def __copy__(self) -> Tensor:
        return self._with_rows(self.to_local())

    def _with_rows(self, rows: Tensor) -> Any:
        """A tensor like this one, with other memory."""
        result = make_rows(type(self), rows, self.bmt_slice, is_stage_local(self)).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):  # of nn.Parameter(self)
            result._is_param = True
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"one rank's rows of a tensor of shape {self.bmt_slice.shape} cannot be pickled: save full_tensor(), which "
            f"all ranks must call, or to_local() on each rank"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = self.bmt_slice
        return (
            f"{type(self).__name__}(shape={where.shape}, rows=[{where.row_start}, {where.row_stop}), "
            f"{self.to_local()!r})"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls._operate(func, args, kwargs or {}, is_called_by_optimizer())

    @classmethod
    def _operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_optimizer: bool) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            operation = None if by_optimizer else _operation(func, getattr(func, "__name__", ""))
            if operation is None:
                return func(*args, **kwargs)
            if not args:
                args, kwargs = positional(kwargs)
            parts = [part for part in _parts((args, kwargs)) if part.bmt_slice.communicators or is_stage_local(part)]
            if not parts and operation is not _unscale:
                return func(*args, **kwargs)
            if operation not in (_copy, _in_place, _in_place_of_lists) and torch.is_grad_enabled():
                for part in parts:
                    if part.requires_grad:
                        raise RuntimeError(
                            f"{func.__name__}: rows of a tensor of shape {part.bmt_slice.shape} have no gradients; "
                            f"compute with full_tensor().requires_grad_() instead"
                        )
            result = operation(func, args, kwargs)
            if result is not _GATHER:
                return result
            if isinstance(kwargs.get("out"), ShardedRows) or kwargs.get("inplace"):
                return _refused(func, args, kwargs)
            args, kwargs = logical_operands((args, kwargs))
        return func(*args, **kwargs)


def is_called_by_optimizer() -> bool:
    """Whether ``torch.optim`` has called the function that the calling ``__torch_function__`` handles."""
    if torch.compiler.is_compiling():  # the compiler cannot trace frames
        return False
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torch.optim")


def positional(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments, with the first one as a positional argument; it was given by keyword."""
    first = next((name for name in ("input", "self", "tensor") if name in kwargs), None)
    if first is None or "condition" in kwargs:  # the first argument of torch.where
        return (), kwargs
    return (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}


def logical_operands(values: Any) -> Any:
    """Nested arguments, with logical tensors in place of sharded ones. Every rank must call this."""
    with torch.no_grad():
        return tree_map_only(ShardedRows, lambda part: _gathered(part.detach(), part.bmt_slice), values)


def sharded_rows(rows: Tensor, like: Any) -> Tensor:
    """This rank's rows, on the same memory, of a tensor that is spread over ranks as ``like``; plain if it is not."""
    where, stage_local = like.bmt_slice, is_stage_local(like)
    return make_rows(ShardedRows, rows, where, stage_local) if where.communicators or stage_local else rows


def make_rows(cls: type[Any], rows: Tensor, where: Slice, stage_local: bool) -> Any:
    part = Tensor._make_subclass(cls, rows, rows.requires_grad)
    part.bmt_slice = where
    setattr(part, STAGE_LOCAL_ATTRIBUTE, stage_local)
    return part


def _gathered(rows: Tensor, where: Slice) -> Tensor:
    """The logical tensor of which this rank has ``rows``."""
    comm = where.row_comm
    if comm is None or comm.size == 1:
        shard = rows.reshape(where.tp_shard_shape)
    else:
        # A sum with zeros: a slice does not say how many rows each of the others has.
        there = torch.zeros(where.tp_shard_shape, dtype=rows.dtype, device=comm.device)
        select_rows(there, where).copy_(rows)
        comm.all_reduce(there.view(torch.uint8) if rows.dtype == torch.bool else there, label=f"of {where.shape}")
        shard = there.to(rows.device)
    return unshard_tp(shard, where)


# --- kinds of operations ------------------------------------------------------------------------------------------

_GATHER = object()
_Operation = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _operation(func: Any, name: str) -> _Operation | None:
    """The operation for a function; ``None``: the function acts on this rank's rows."""
    if isinstance(func, KERNELS):
        return None
    if name == "__get__":
        return _attribute if getattr(func.__self__, "__name__", "") in TRANSPOSED else None
    return _OPERATIONS[kind_of(name)]


def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _GATHER


def _parts(values: Any) -> list[ShardedRows]:
    """The sharded tensors among arguments, in their order."""
    return [leaf for leaf in _leaves(values) if isinstance(leaf, ShardedRows)]


def _leaves(values: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts; torch's pytree does the same, slower."""
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        yield values
        return
    for value in values:
        yield from _leaves(value)


def _wrapped(result: Any, like: ShardedRows, where: Slice) -> Any:
    """The tensors of a result as rows of logical ones, with the slice ``where`` or other dimensions behind the rows."""

    def wrap(rows: Tensor) -> Tensor:
        if isinstance(rows, ShardedRows):
            return rows
        same = rows.shape == where.local_shape
        part = where if same else dataclasses.replace(where, shape=(where.shape[0], *rows.shape[1:]))
        return make_rows(ShardedRows, rows, part, is_stage_local(like))

    return wrap(result) if isinstance(result, Tensor) else tree_map_only(Tensor, wrap, result)


def _has_plain_rows(where: Slice) -> bool:
    """Whether rows are not sharded, and run along the first dimension."""
    return where.row_dims == 1 and where.tp_dim is None and bool(where.shape)


def _rows_like(other: Tensor, where: Slice) -> Any:
    """The part of another operand for this rank's rows; ``_GATHER``: the result has more elements than the tensor.

    Raises:
        ValueError: it is neither logical nor rows.
    """
    local, shape = where.local_shape, tuple(other.shape)
    if not shape:
        return other
    try:
        together = torch.broadcast_shapes(shape, where.shape)
    except RuntimeError as error:
        if shape == local:
            return other
        raise ValueError(
            f"an operand of shape {shape} is neither logical, of shape {where.shape}, nor of this rank's rows, of "
            f"shape {local}"
        ) from error
    if together != where.shape:
        return other if shape == local else _GATHER
    if where.row_dims > 1 and len(shape) == len(local):  # rows: a matrix for all experts may have the same shape
        if shape == local:
            return other
        raise ValueError(f"an operand of shape {shape} is not this rank's rows, of shape {local}: expand it first")
    if _has_plain_rows(where) and (len(shape) < len(where.shape) or shape[0] == 1):
        return other
    return shard_of(other.expand(where.shape), where)


def _check_same_rows(slices: Sequence[Slice]) -> None:
    """Raise unless this rank has the same rows of all tensors."""
    first = slices[0]
    for other in slices[1:]:
        if other.row_shard != first.row_shard:
            raise ValueError(
                f"this rank has rows [{other.row_start}, {other.row_stop}) of a tensor of shape {other.shape} and rows "
                f"[{first.row_start}, {first.row_stop}) of one of shape {first.shape}: combine full_tensor() of both"
            )


def _operands(args: Any, kwargs: Any) -> tuple[Any, Any, Slice | None]:
    """Arguments as corresponding rows, and the slice of the result; None: they must be gathered."""
    tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    slices = [tensor.bmt_slice for tensor in tensors if hasattr(tensor, "bmt_slice")]
    where = slices[0]
    if any(each.shape != where.shape for each in slices):
        try:
            shape = torch.broadcast_shapes(*(each.shape for each in slices))
        except RuntimeError:
            return args, kwargs, None  # torch says what does not fit
        if any(
            not _has_plain_rows(each) or len(each.shape) != len(shape) or each.shape[0] != shape[0] for each in slices
        ):
            return args, kwargs, None
        where = dataclasses.replace(where, shape=tuple(shape))
    if len(tensors) > len(slices) and any(t.dim() for t in tensors if not hasattr(t, "bmt_slice")):
        met = {id(t): t if hasattr(t, "bmt_slice") else _rows_like(t, where) for t in tensors}
        if any(each is _GATHER for each in met.values()):
            return args, kwargs, None
        args, kwargs = tree_map_only(Tensor, lambda t: met[id(t)], (args, kwargs))
    _check_same_rows(slices)
    return args, kwargs, where


def _rowwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = _parts((args, kwargs))
    if kwargs.get("out") is not None:
        return _refused(func, args, kwargs)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in _leaves((args, kwargs))):
        return _GATHER  # autograd would see only this rank's part
    args, kwargs, where = _operands(args, kwargs)
    return _GATHER if where is None else _wrapped(func(*args, **kwargs), parts[0], where)


def _of_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.__name__ == "_foreach_max":
        return [_reduction(torch.max, (part,), {}) if isinstance(part, ShardedRows) else part.max() for part in args[0]]
    parts = next(each for each in args if isinstance(each, (list, tuple)) and _parts(each))
    results = func(*args, **kwargs)
    return [
        make_rows(ShardedRows, rows, like.bmt_slice, is_stage_local(like))
        if isinstance(like, ShardedRows) and rows.shape == like.bmt_slice.local_shape
        else rows
        for rows, like in zip(results, parts, strict=True)
    ]


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    return _wrapped(result, args[0], args[0].bmt_slice) if isinstance(args[0], ShardedRows) else result


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill the logical tensor, with the same values on all ranks."""
    part = args[0]
    if not isinstance(part, ShardedRows):
        return func(*args, **kwargs)
    where, in_place = part.bmt_slice, func.__name__ in RANDOM
    if in_place:
        check_initializer(where)
    values = func(torch.empty(where.shape, dtype=part.dtype, device=part.device), *args[1:], **kwargs)
    rows = shard_of(values, where)
    if in_place:
        with torch.no_grad():
            return part.copy_(rows)
    return make_rows(ShardedRows, rows.clone(), where, is_stage_local(part))


def check_initializer(where: Slice) -> None:
    """Raise if called from a function of ``torch.nn.init`` that computes with the number of rows.

    Raises:
        RuntimeError: such a function is among the callers.
    """
    frame: Any = sys._getframe(1)
    inner_modules = ("sharded_rows", "sharded_gradient", "sharded_parameter")
    while frame is not None and frame.f_globals.get("__name__", "").rpartition(".")[2] in inner_modules:
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") == torch.nn.init.__name__:
        name = frame.f_code.co_name
        if name in INITIALIZERS_OF_MATRICES or frame.f_locals.get("mode") == "fan_out":
            raise RuntimeError(
                f"torch.nn.init.{name} would compute with this rank's rows of a parameter of shape {where.shape}; call "
                f"bmt_zero.init_parameters(model), which runs reset_parameters of its modules, or fill the parameters "
                f"before the module is sharded"
            )
        frame = frame.f_back


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An in-place operation of a sharded parameter, or with one.

    Raises:
        RuntimeError: it is not element-wise.
        ValueError: an operand has another shape, or this rank has other rows of it.
    """
    if not any(leaf.bmt_slice.communicators for leaf in _leaves((args, kwargs)) if hasattr(leaf, "bmt_slice")):
        return func(*args, **kwargs)
    operation = _OPERATIONS[kind_of(func.__name__)]
    assert operation is not None
    return operation(func, args, kwargs)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _operands_in_place(func.__name__, args, kwargs)
    return func(*args, **kwargs)


def _in_place_of_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Combine the tensors of the lists at each index."""
    is_list = [isinstance(each, (list, tuple)) for each in args]
    lists = [each for each, several in zip(args, is_list, strict=True) if several]
    met = [_operands_in_place(func.__name__, together, {})[0] for together in zip(*lists, strict=True)]
    columns = iter(zip(*met, strict=True))
    return func(*(list(next(columns)) if several and met else each for each, several in zip(args, is_list)), **kwargs)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grads, found_inf = args[:2]
    if torch.cuda.is_initialized() and not grads[0].is_cuda:
        torch.cuda.current_stream().synchronize()  # GradScaler copies the scale to the host without waiting
    result = func(*args, **kwargs)
    reduce_over(found_inf, spreading_communicators(grads), "max")
    return result


def _operands_in_place(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an in-place operation, with the operands' rows that correspond to those of the target."""
    target, others = args[0], [leaf for leaf in _leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
    if not hasattr(target, "bmt_slice"):
        for part in others:
            where = getattr(part, "bmt_slice", None)
            if where is not None and where.communicators and (part.shape != target.shape or not where.shape):
                raise RuntimeError(
                    f"{name} would combine a tensor of shape {tuple(target.shape)} with this rank's rows "
                    f"{tuple(part.shape)} of one of shape {where.shape}: combine full_tensor()"
                )
    elif any(other.dim() or hasattr(other, "bmt_slice") for other in others):
        args, kwargs, where = _operands(args, kwargs)
        if where is None or where.shape != target.bmt_slice.shape:
            raise ValueError(
                f"{name} of a tensor of shape {target.bmt_slice.shape} with one that it cannot be combined "
                f"with in place: combine with full_tensor() of it"
            )
    return args, kwargs


# --- views --------------------------------------------------------------------------------------------------------


def _refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    where = next(leaf.bmt_slice for leaf in _leaves((args, kwargs)) if hasattr(leaf, "bmt_slice"))
    raise RuntimeError(
        f"{func.__name__} of this rank's rows [{where.row_start}, {where.row_stop}) of a tensor of shape "
        f"{where.shape}: use full_tensor(), which all ranks must call, to read the logical tensor, and to_local() to "
        f"write to the rows"
    )


def _attribute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    where, name = args[0].bmt_slice, func.__self__.__name__
    raise AttributeError(f"{name} of this rank's rows of a tensor of shape {where.shape}: use that of full_tensor()")


def _reshaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part, name = args[0], func.__name__
    if not isinstance(part, ShardedRows):
        return func(*args, **kwargs)  # view_as and reshape_as of this rank's shape
    where, given = part.bmt_slice, [*args[1:], *kwargs.values()]
    check_initializer(where)
    if name in ("view_as", "reshape_as"):
        given = list(getattr(given[0], "bmt_slice", given[0]).shape)
    sizes = list(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    numel, dims = math.prod(where.shape), len(where.shape)
    if name in ("view", "reshape", "view_as", "reshape_as") and sizes == list(where.shape):
        return part
    is_flat = (
        sizes in ([-1], [numel])
        if name in ("view", "reshape", "view_as", "reshape_as")
        else (name == "ravel" or (name == "flatten" and (not given or given in ([0], [0, -1]))))
    )
    if is_flat and where.tp_dim is None:  # this rank's elements are a range of the flat tensor
        rows, size = part.detach().reshape(-1), where.row_numel
        flat = Slice((numel,), where.row_start * size, where.row_stop * size, where.row_comm)
        return make_rows(ShardedRows, rows, flat, is_stage_local(part))
    if name in ("flatten", "squeeze", "unsqueeze") and _has_plain_rows(where) and given:
        every = [dim for each in given for dim in (each if isinstance(each, (tuple, list)) else [each])]
        added = 1 if name == "unsqueeze" else 0
        if all(isinstance(dim, int) and dim % (dims + added) for dim in every):  # not the first
            return _wrapped(func(*args, **kwargs), part, where)
    return _refused(func, args, kwargs)


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, index = args[:2]
    if not isinstance(target, ShardedRows):
        if _parts(index):  # of a plain tensor
            return _GATHER if func.__name__ == "__getitem__" else _refused(func, args, kwargs)
        if func.__name__ == "__setitem__":
            _operands_in_place("an assignment", (target[index], args[2]), {})
        return func(*args, **kwargs)
    where = target.bmt_slice
    check_initializer(where)
    every = (list(index) or [Ellipsis]) if isinstance(index, tuple) else [index]
    is_basic = all(each is None or each is Ellipsis or isinstance(each, (int, slice)) for each in every)
    is_all = every[0] is Ellipsis or (isinstance(every[0], slice) and every[0] == slice(None))
    is_rowwise = is_basic and is_all and (len(every) == 1 or (every[0] is not Ellipsis and _has_plain_rows(where)))
    if func.__name__ == "__setitem__":
        value, is_mask = args[2], isinstance(index, ShardedRows) and index.bmt_slice == where
        is_local = isinstance(value, ShardedRows) or not isinstance(value, Tensor) or not value.dim()
        return func(*args) if (is_rowwise or is_mask) and is_local else _set_items(target, index, value)
    if is_rowwise:
        return _wrapped(func(*args), target, where)
    if is_basic or not all(isinstance(each, (Tensor, list, int, slice)) for each in every):
        return _refused(func, args, kwargs)
    return _GATHER  # a copy in any case


def _set_items(target: ShardedRows, index: Any, value: Any) -> None:
    """Write this rank's part of an assignment to an index of the logical tensor."""
    where = target.bmt_slice
    index, value = logical_operands((index, value))
    chosen = torch.zeros(where.shape, dtype=torch.bool, device=target.device)
    chosen[index] = True
    values = torch.zeros(where.shape, dtype=target.dtype, device=target.device)
    values[index] = value
    mine, values = (shard_of(each, where) for each in (chosen, values))
    target.copy_(torch.where(mine, values, target.detach()))


# --- reductions ---------------------------------------------------------------------------------------------------


def _dims(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dimensions of a reduction, from its arguments; ``None``: all."""
    given = kwargs.get("dim", kwargs.get("axis"))
    place = 2 if name in NORMS else 1
    if given is None and len(args) > place and not isinstance(args[place], (bool, torch.dtype)):
        given = args[place]
    return None if given in ((), []) else given


def _reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    part = args[0]
    if not isinstance(part, ShardedRows) or kwargs.get("out") is not None:
        return _GATHER  # of another argument, an index for example
    where = part.bmt_slice
    if (
        name in ("max", "min")
        and len(args) + len(kwargs) == 2
        and isinstance(other := args[1] if len(args) > 1 else kwargs.get("other"), Tensor)
    ):
        return _rowwise(torch.maximum if name == "max" else torch.minimum, (part, other), {})
    dims = _dims(name, args, kwargs)
    if dims is not None:
        given = [dims] if isinstance(dims, int) else dims
        if where.row_dims > 1 and any(isinstance(dim, int) and dim >= 0 for dim in given):
            raise ValueError(
                f"{name}: dim={dims} of rows of shape {tuple(part.shape)}, of a tensor of shape {where.shape}: count "
                f"dimensions from the end, or take full_tensor()"
            )
        if name not in ALONG_ROWS or not _has_plain_rows(where):
            return _GATHER
        if not all(isinstance(dim, int) for dim in given) or any(dim % len(where.shape) == 0 for dim in given):
            return _GATHER
        if not part.numel():  # no rows: torch's function warns of them, or raises
            result: Tensor = func(part.new_zeros(1, *where.row_shape), *args[1:], **kwargs)[:0]
        else:
            result = func(*args, **kwargs)
        return _wrapped(result, part, where)
    if (
        name not in OF_ALL
        or kwargs.get("keepdim")
        or (name == "mean" and not part.is_floating_point())
        or (part.is_floating_point() and is_deterministic() and name in ("mean", "nansum", "sum"))
    ):
        return _GATHER
    with torch.no_grad():
        return of_all(name, part, kwargs.get("dtype"))


def _comparison(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part = _parts((args, kwargs))[0]
    compare = torch.eq if func.__name__ == "equal" else torch.isclose
    same: Any = _rowwise(compare, args, kwargs)
    return same if same is _GATHER else bool(over_ranks(same.detach().all(), part, torch.all))


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _dims(func.__name__, args, kwargs) is not None:
        return _reduction(func, args, kwargs)
    if kwargs.get("out") is not None or any(args[3:4]):  # keepdim
        return _GATHER
    given = [*args[1:2], *(kwargs[key] for key in ("ord", "p") if key in kwargs)]
    is_of_matrix = func.__name__ == "linalg_norm" and args and len(args[0].bmt_slice.shape) > 1
    if "nuc" in given or kwargs.get("keepdim") or (is_of_matrix and not set(given) <= {None, "fro"}):
        return _GATHER
    with torch.no_grad():
        return norms(func.__name__, *args, **kwargs)


_OPERATIONS: dict[Kind, _Operation | None] = {
    Kind.LOCAL: None,
    Kind.ELEMENTWISE: _rowwise,
    Kind.LISTS: _of_lists,
    Kind.LISTS_IN_PLACE: _in_place_of_lists,
    Kind.UNSCALE: _unscale,
    Kind.COPY: _copy,
    Kind.RANDOM: _random,
    Kind.IN_PLACE: _in_place,
    Kind.NORM: _norms,
    Kind.REDUCTION: _reduction,
    Kind.COMPARISON: _comparison,
    Kind.INDEX: _index,
    Kind.RESHAPED: _reshaped,
    Kind.REFUSED: _refused,
    Kind.GATHERED: _gather,
}
