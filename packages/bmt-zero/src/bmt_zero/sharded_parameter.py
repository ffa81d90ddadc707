"""The tensor that an optimizer holds: this rank's rows of a logical parameter.

[Note: operations on a sharded parameter]
    The storage of a sharded parameter has this rank's rows. In-place operations (an optimizer's step) and operations
    that return metadata or new tensors (``shape``, ``detach``, ``zeros_like``) act on these rows. ``detach`` and
    ``zeros_like`` return a ``bmt_comm.ShardedRows``, on which operations act as on the logical tensor. Operations that
    compute with the values (``torch.nn.functional``, powers, products, norms, indexing) act on the logical parameter.
    The modules of an unsharded group see unsharded tensors. Everywhere else such an operation unshards the parameter
    first, differentiably, and all ranks must take part. ``numel()`` and ``dim()`` are those of the logical parameter,
    too: scripts count parameters with the one, and form parameter groups by the other. A parameter without dimensions
    has the shape (0,) on the ranks that do not hold it.

    Without gradients, arithmetic with tensors of the shape of this rank's rows acts on rows, because optimizers combine
    parameters with gradients and states. Copies (``clone``, ``float``) act on rows, too. The results are
    ``ShardedRows``, except in ``torch.optim``. Operations that autograd records always act on the logical parameter: a
    penalty on weights in the loss has the value and the gradient that it has for the plain model.

    If one rank holds all rows of a parameter (as of most biases), a tensor of that shape is ambiguous on that rank, and
    not on the others. Outside of optimizers' steps such arithmetic without gradients raises an error on all ranks.

    Products (``linear``, ``matmul``) with a tensor-parallel parameter act on this rank's shard, as tensor-parallel
    layers do. All other operations act on the logical parameter.

    What a module has checkpointed inside of its forward is recomputed in backward, where modules see sharded parameters
    again. Shapes and values are those of the forward then: of the unsharded parameter, or of this tensor-parallel
    rank's shard.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from bmt_comm import (
    ShardedGradient,
    ShardedRows,
    Slice,
    check_initializer,
    gradient_of,
    in_place,
    inside_checkpoint,
    is_called_by_optimizer,
    is_called_from,
    logical_operands,
    shard_of,
    sharded_rows,
    tp_shard_of,
    unshard_tp,
)
from bmt_comm.operation_kinds import KERNELS, RANDOM, TRANSPOSED, Kind, is_in_place, kind_of
from bmt_comm.sharded_rows import positional


class ShardedParameter(nn.Parameter):
    """A parameter whose rows are spread over ranks; a tensor of this rank's rows, shape (rows, \\*rest).

    The object never changes shape or identity, so optimizers may keep it. A rank may hold no rows at all. See
    [Note: operations on a sharded parameter]. Hooks of ``register_hook`` are called with each reduced gradient of this
    rank's rows, before it is added to ``.grad``; those of ``register_post_accumulate_grad_hook`` after that.

    Attributes:
        bmt_slice: the rows of the logical parameter that this rank holds (:class:`bmt_comm.Slice`).
        group: a name by which ``grouped_parameters`` collects parameters.
        init_method: fills the logical parameter when ``init_parameters`` runs.
        tp_mode: whether tensor-parallel ranks hold different shards of it.
        sequence_parallel: whether a tensor-parallel rank's gradient covers only its part of the sequence.
        awaits_values: whether it was built on the meta device and not filled since.
        writes_on_meta: how often its model has written to it there.
        handle: connects it to its group and storage (a ``parameter_group.GroupHandle``, whose module imports this one).
    """

    bmt_slice: Slice
    group: str | None = None
    init_method: Callable[[Tensor], Any] | None = None
    tp_mode: bool = False
    sequence_parallel: bool = False
    awaits_values: bool = False
    writes_on_meta: int = 0
    handle: Any

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape of the logical parameter, over all ranks."""
        return self.bmt_slice.shape

    @property
    def ds_shape(self) -> tuple[int, ...]:
        """DeepSpeed's name of :attr:`logical_shape`. peft reads it."""
        return self.logical_shape

    @property
    def bmt_averages_gradients(self) -> bool:
        """Whether gradients are divided by the number of ranks, as under :func:`fully_shard`; otherwise summed."""
        return any(reducer.settings.divisor != 1 for reducer in self.handle.group.reducers)

    @property
    def device_mesh(self) -> Any:
        """The ranks that share the parameter (a ``DeviceMesh``): those of :func:`fully_shard`, or the context's."""
        return self.handle.group.mesh

    @property
    def block_parameters(self) -> list[nn.Parameter]:
        """The parameters of the sharded module that has this one, in order; empty if it was sharded alone."""
        return list({id(slot.param): slot.param for slot in self.handle.group.slots}.values())

    @property
    def is_unfilled(self) -> bool:
        """Whether it was built on the meta device and nothing was written into it since."""
        return self.awaits_values and self._version == 0

    def to_local(self) -> Tensor:
        """This rank's rows, as a plain tensor on the same memory; not differentiable."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._alias(self.detach())

    def full_tensor(self) -> Tensor:
        """The logical parameter, in the dtype that it is stored in; differentiable.

        Every rank that holds a part of it must call this.
        """
        return _unshard_tp(self.handle.unshard(stored=True), self.bmt_slice)

    def gather(self) -> Tensor:  # type: ignore[override]
        """The unsharded parameter (under ``tp_mode`` this tensor-parallel rank's shard of it), differentiably.

        Every rank that shares it must call this. Backward sums the gradient over the ranks into ``.grad``.
        """
        unsharded: Tensor = self.handle.unshard()
        return unsharded

    def gather_all(self) -> Tensor:
        """The logical parameter in the dtype that it is stored in; not differentiable."""
        with torch.no_grad():
            return unshard_tp(self.handle.unshard_stored(), self.bmt_slice)

    def tp_gather(self) -> Tensor:
        """This rank's rows with the tensor-parallel dimension unsharded; not differentiable."""
        return unshard_tp(self.to_local(), self.bmt_slice)

    def _alias(self, rows: Tensor) -> Tensor:
        """Note that a script has ``rows``, a tensor on this parameter's memory."""
        _aliases[rows] = None
        known = self.__dict__.setdefault("_aliases", [])
        if len(known) >= 8:
            known[:] = [ref for ref in known if ref() is not None]
        known.append(TensorWeakRef(rows))
        return rows

    def _leave_memory(self) -> None:
        """Move the tensors that scripts have on this parameter's memory, because ``p.data = other`` will overwrite it.

        So ``kept = p.data; p.data = other; p.data = kept`` restores the values, as for a plain parameter.
        """
        for ref in self.__dict__.pop("_aliases", ()):
            rows = ref()
            if rows is not None and rows.data_ptr() == self.data_ptr():
                rows.data = rows.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if id(self) not in memo:
            copy.deepcopy(self.handle.group, memo)  # copies all parameters of the group
        twin: ShardedParameter = memo[id(self)]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a sharded parameter cannot be pickled: it is one rank's part of a parameter, bound to the process "
            "groups of this run; save state_dict(), or the model with bmt_zero.save"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            where = self.bmt_slice
            return (
                f"ShardedParameter(shape={where.shape}, rows=[{where.row_start}, {where.row_stop}), "
                f"dtype={self.dtype}, device={self.device}, requires_grad={self.requires_grad})"
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            by_optimizer = is_called_by_optimizer()
            if not torch.compiler.is_compiling():  # the compiler cannot trace frames
                _refuse_tool(sys._getframe(1), args)
            result, args, kwargs = _result_or_operands(func, name, types, args, kwargs, by_optimizer)
        return func(*args, **kwargs) if result is _NO_RESULT else result


_NO_RESULT = object()


def _refuse_tool(caller: FrameType, args: tuple[Any, ...]) -> None:
    """Raise TypeError if ``caller`` is a tool of torch that would take this rank's rows for the parameter."""
    tools = _TOOLS.get(caller.f_code.co_name, ())
    param = args[0] if tools and args else None
    if not isinstance(param, ShardedParameter):
        return
    for tool in tools:
        if tool.code is caller.f_code and tool.refuses(param, caller):
            raise TypeError(
                f"{tool.what} of a sharded parameter of shape {param.bmt_slice.shape} would {tool.result}: {tool.cure}"
            )


class _Tool(NamedTuple):
    """A function of torch that would give a wrong result."""

    code: CodeType  # of the function that reads the parameter first
    refuses: Callable[[ShardedParameter, FrameType], bool]  # whether the result would be wrong, in this frame of it
    what: str
    cure: str
    result: str = "take this rank's rows for the parameter"


def _is_shard(param: ShardedParameter, _frame: object = None) -> bool:
    return bool(param.bmt_slice.communicators)


def _is_shared(param: ShardedParameter, _frame: object) -> bool:
    return _is_shard(param) or bool(param.handle.group.communicators)


def _called_by(code: CodeType, frame: FrameType) -> bool:
    return frame.f_back is not None and frame.f_back.f_code is code


_PRUNE = inspect.unwrap(prune.BasePruningMethod.apply).__code__
_MULTI_GRAD_HOOK = torch.autograd.graph.register_multi_grad_hook.__code__
_BEFORE = "apply it to a layer of torch.nn, and shard the model then"
_BEFORE_OR_GATHERED = (
    "prune the model before it is sharded or, if the layer is not tensor-parallel, in gathered_parameters()"
)
_ALL_TOOLS = [
    _Tool(
        nn.Parameter.__new__.__code__,
        lambda _param, _frame: True,
        "a torch.nn.Parameter (weight_norm makes one, too)",
        f"give it full_tensor(); {_BEFORE}",
    ),
    _Tool(inspect.unwrap(WeightNorm.apply).__code__, _is_shared, "weight_norm", _BEFORE),
    _Tool(_PRUNE, _is_shard, "pruning", _BEFORE_OR_GATHERED),  # with scores that are given
    _Tool(  # without; before the module is changed
        nn.Module.register_parameter.__code__,
        lambda param, frame: _called_by(_PRUNE, frame) and _is_shard(param),
        "pruning",
        _BEFORE_OR_GATHERED,
    ),
    _Tool(
        ParametrizationList.__init__.__code__,
        lambda param, frame: _is_shard(param) and not frame.f_locals["unsafe"],
        "a parametrization",
        f"{_BEFORE}, or pass unsafe=True",
    ),
    _Tool(
        torch.autograd.graph._get_grad_fn_or_grad_acc.__code__,
        lambda _param, frame: _called_by(_MULTI_GRAD_HOOK, frame),
        "register_multi_grad_hook",
        "register a hook of each parameter, by register_hook or register_post_accumulate_grad_hook",
        "wait for autograd, which does not reach the parameter",
    ),
]
_TOOLS: dict[str, list[_Tool]] = {}
"""By name, because each operation on a parameter looks here, and code objects take long to hash."""
for _tool in _ALL_TOOLS:
    _TOOLS.setdefault(_tool.code.co_name, []).append(_tool)


def _result_or_operands(
    func: Any, name: str, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_optimizer: bool
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The result of a function, or ``_NO_RESULT`` and the unsharded operands to call it with.

    It is not inlined in ``__torch_function__``, because torch.compile cannot trace a long block in a context manager.
    """
    if torch._C._current_graph_task_id() != -1 and _recomputes(args, kwargs):
        if _asks_for_sizes(func, name):
            sizes = torch.empty(args[0].bmt_slice.tp_shard_shape, device="meta")
            return func(sizes, *args[1:], **kwargs), args, kwargs
        if _reads_values(func, name, args):
            args, kwargs = tree_map_only(ShardedParameter, ShardedParameter.gather, (args, kwargs))
            return _NO_RESULT, args, kwargs
    if name in ("numel", "nelement"):
        return math.prod(args[0].bmt_slice.shape), args, kwargs
    if name in ("dim", "ndimension") or (name == "__get__" and func.__self__ is Tensor.ndim):
        return len(args[0].bmt_slice.shape), args, kwargs
    result = _special(func, name, args, kwargs)
    if result is not _NO_RESULT:
        return result, args, kwargs
    if by_optimizer:  # element-wise, or refused
        return func(*args, **kwargs), args, kwargs
    kind = Kind.ELEMENTWISE if isinstance(func, KERNELS) else kind_of(name)
    if kind is Kind.LOCAL:
        return func(*args, **kwargs), args, kwargs
    if not args:  # torch.nn.init.constant_ calls by keyword
        args, kwargs = positional(kwargs)
    if name in _LIKE or (kind is Kind.LISTS and not _is_recorded((args, kwargs))):
        args, kwargs = tree_map_only(ShardedParameter, lambda p: sharded_rows(p.detach(), p), (args, kwargs))
        return ShardedRows.__torch_function__(func, types, args, kwargs), args, kwargs
    if name == "__get__":
        if not _is_readable_transposed(getattr(func.__self__, "__name__", ""), args[0]):
            return func(*args, **kwargs), args, kwargs
    elif kind is Kind.RANDOM:  # in place; :func:`_special` has handled parameters that other ranks hold a part of
        return func(*args, **kwargs), args, kwargs
    elif is_in_place(name) and args:
        return in_place(func, args, kwargs), args, kwargs
    elif any(isinstance(leaf, ShardedRows) for leaf in tree_leaves((args, kwargs))):
        if not torch.is_grad_enabled():
            return ShardedRows.__torch_function__(func, types, args, kwargs), args, kwargs
        args, kwargs = logical_operands((args, kwargs))
    elif not _means_logical(name, kind, args):
        result = func(*args, **kwargs)
        is_rows = kind in (Kind.COPY, Kind.ELEMENTWISE) and isinstance(result, Tensor)
        return (_as_rows(result, args) if is_rows else result), args, kwargs
    if isinstance(kwargs.get("out"), ShardedParameter) or kwargs.get("inplace"):
        raise RuntimeError(f"{name} would write to a gathered copy: write to the parameter's to_local()")
    logical = _shard_or_logical if name in _PRODUCTS else _logical
    args, kwargs = tree_map_only(ShardedParameter, logical, (args, kwargs))
    return _NO_RESULT, args, kwargs


def _recomputes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a checkpoint recomputes, in backward, a part of the forward of the module that has the parameters."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not inside_checkpoint():
        return False
    params = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedParameter))
    return any(param.handle is not None and param.handle.group.in_backward for param in params)


def _asks_for_sizes(func: Any, name: str) -> bool:
    if name == "__get__":
        return func.__self__ is Tensor.shape or func.__self__ is Tensor.ndim
    return name in ("numel", "nelement", "dim", "ndimension", "size", "__len__")


def _reads_values(func: Any, name: str, args: tuple[Any, ...]) -> bool:
    if name == "__get__":
        return func.__self__ is Tensor.data or getattr(func.__self__, "__name__", "") in TRANSPOSED
    if is_in_place(name) or name in ("__set__", "__setitem__"):
        return not (args and isinstance(args[0], ShardedParameter))
    return func is not torch.autograd.grad and kind_of(name) is not Kind.LOCAL


def _special(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of random functions, ``view_as``, ``detach``, ``data``, ``grad`` and writes to an index.

    Raises:
        RuntimeError: ``torch.autograd.grad`` is asked for gradients of parameters.
    """
    if func is torch.autograd.grad:
        raise RuntimeError(
            "torch.autograd.grad gives no gradients of sharded parameters, which are reduced over ranks into p.grad: "
            "call backward(), and torch.autograd.grad for inputs and activations only"
        )
    if name in RANDOM:
        target = args[0] if args else kwargs.get("tensor")
        if isinstance(target, ShardedParameter) and (
            target.handle.group.communicators or target.bmt_slice.communicators
        ):
            return _filled(target, func, args, kwargs)
    elif name == "view_as":
        if isinstance(args[1], ShardedParameter) and args[1].bmt_slice.communicators:
            return _rows_of_vector(*args)
        if isinstance(args[0], ShardedParameter) and is_row_sharded(args[0]):
            check_initializer(args[0].bmt_slice)
    if name == "detach":
        return args[0]._alias(sharded_rows(func(*args, **kwargs), args[0]))
    if name == "__get__" and func.__self__ is Tensor.data:
        return args[0]._alias(func(*args, **kwargs))
    if name == "__setitem__" and isinstance(args[0], ShardedParameter):
        if torch.is_grad_enabled() and args[0].requires_grad:
            raise RuntimeError("an index of a parameter that requires gradients is written under no_grad()")
        rows = sharded_rows(args[0].detach(), args[0])
        with torch._C._EnableTorchFunction():
            rows[args[1]] = args[2]
        torch.autograd.graph.increment_version(args[0])  # also on ranks that have none of these rows
        return None
    if name == "__set__" and func.__self__ is Tensor.grad and args[1] is not None:
        param, value = args
        is_of_param = isinstance(value, ShardedGradient) and value.bmt_slice is param.bmt_slice
        return func(param, value if is_of_param else gradient_of(value, param))
    if name == "__set__" and func.__self__ is Tensor.data:
        param, value = args
        if _is_same_memory(param, value):  # a move that changes nothing, for example
            return func(*args)
        param._leave_memory()
        is_alias = isinstance(value, ShardedParameter) or value in _aliases
        return func(param, value.detach().clone() if is_alias else value)
    return _NO_RESULT


class _UnshardTP(torch.autograd.Function):
    """This tensor-parallel rank's shard → the logical tensor. All ranks must compute the same with it."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, where: Slice) -> Tensor:
        ctx.where = where
        return unshard_tp(shard, where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return tp_shard_of(grad, ctx.where), None


def _unshard_tp(shard: Tensor, where: Slice) -> Tensor:
    """The logical tensor of this tensor-parallel rank's shard, differentiably."""
    if where.tp_comm is None or where.tp_comm.size == 1:
        return shard
    logical: Tensor = _UnshardTP.apply(shard, where)
    return logical


def _filled(param: ShardedParameter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedParameter:
    """Fill the logical parameter by a random function."""
    where = param.bmt_slice
    if where.communicators:
        check_initializer(where)
    values = torch.empty(where.shape, dtype=param.dtype, device=param.device)
    with torch.no_grad():
        if args:
            func(values, *args[1:], **kwargs)
        else:
            func(**{**kwargs, "tensor": values})
        param.handle.fill(tp_shard_of(values, where).contiguous())
    return param


def _rows_of_vector(values: Tensor, param: ShardedParameter) -> Tensor:
    """This rank's rows of the logical parameter ``values``, for ``torch.nn.utils.vector_to_parameters``."""
    where = param.bmt_slice
    if values.numel() == math.prod(param.shape):
        return values.view(param.shape)
    if values.numel() != math.prod(where.shape):
        raise RuntimeError(
            f"view_as of {values.numel()} values and a sharded parameter of shape {where.shape}: this rank holds other "
            f"values than other ranks; set the parameters of a model with load_state_dict"
        )
    return shard_of(values.view(where.shape), where).clone()


def _as_rows(result: Tensor, args: tuple[Any, ...]) -> Tensor:
    """The result of an operation on a parameter's rows, as ``ShardedRows`` if it is new and of the same shape."""
    param = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, ShardedParameter)), None)
    is_new = param is not None and result is not param and result.shape == param.shape
    return sharded_rows(result, param) if is_new else result


def is_row_sharded(param: ShardedParameter) -> bool:
    """Whether other ranks hold other rows of the parameter."""
    return param.bmt_slice.row_comm is not None


def _shard_or_logical(param: ShardedParameter) -> Tensor:
    """The logical parameter, or this tensor-parallel rank's shard of it."""
    # A rank with all rows still needs the parameter group, because the gradient is reduced over the replicas.
    if is_row_sharded(param) or (torch.is_grad_enabled() and param.requires_grad):
        return param.gather()
    values = param.detach()
    return values.to(param.handle.flat.dtype) if param.handle.is_computed_with else values


def _logical(param: ShardedParameter) -> Tensor:
    return _unshard_tp(_shard_or_logical(param), param.bmt_slice)


def _is_readable_transposed(name: str, param: ShardedParameter) -> bool:
    """Whether attribute ``name`` is a transpose and means the logical parameter, instead of this rank's rows.

    Raises:
        AttributeError: it would mean the logical parameter outside of a forward. Reading must not communicate there.
    """
    if name not in TRANSPOSED or (not is_row_sharded(param) and not (torch.is_grad_enabled() and param.requires_grad)):
        return False
    if not param.handle.group.step.calls:
        raise AttributeError(
            f"{name} of a sharded parameter of shape {param.bmt_slice.shape} outside of a module's forward: use t() or "
            f"transpose(), in which all ranks must take part, or that of full_tensor()"
        )
    return True


_aliases = WeakTensorKeyDictionary()  # tensors that scripts have on the memory of sharded parameters


def _is_same_memory(param: Tensor, value: Tensor) -> bool:
    facts = [(each.data_ptr(), each.shape, each.stride(), each.dtype, each.device) for each in (param, value)]
    return facts[0] == facts[1]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# New tensors of a parameter's shape.
_LIKE = _names("empty_like full_like ones_like rand_like randint_like randn_like zeros_like")

# Operations that tensor-parallel layers do with this rank's shard.
_PRODUCTS = _names(
    """
    __get__ __matmul__ __rmatmul__ addbmm addmm addmv baddbmm bilinear bmm conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d einsum embedding embedding_bag linear matmul mm mv t tensordot transpose
    """
)

# Autograd does not record these. With tensors of the shape of this rank's rows they compare rows.
_COMPARISONS = _names("allclose eq equal ge gt isclose le lt ne __eq__ __ge__ __gt__ __le__ __lt__ __ne__")

# Views, through which the parameter could be written to. A view of an unsharded copy would lose the writes.
_VIEWS = _names("view reshape flatten ravel view_as reshape_as")

# Operations that act on the logical parameter also without gradients.
_OF_ALL_ELEMENTS = (Kind.GATHERED, Kind.INDEX, Kind.NORM, Kind.REDUCTION, Kind.REFUSED)


def _may_mean_either(param: ShardedParameter, other: Tensor) -> bool:
    """Whether ``other`` may be logical or this rank's rows: its shape does not tell which on every rank."""
    if isinstance(other, ShardedRows) or not is_row_sharded(param):
        return False
    return other.shape in (param.shape, param.bmt_slice.tp_shard_shape) and param.handle.is_on_one_rank


def _is_recorded(values: Any) -> bool:
    """Whether autograd records operations with the parameters in nested arguments."""
    params = [leaf for leaf in tree_leaves(values) if isinstance(leaf, ShardedParameter)]
    return torch.is_grad_enabled() and any(param.requires_grad for param in params)


def _means_logical(name: str, kind: Kind, args: tuple[Any, ...]) -> bool:
    """Whether an operation acts on the logical parameter, where the name alone does not say that it acts on rows."""
    if kind in _OF_ALL_ELEMENTS:
        return True
    recorded = _is_recorded(args)
    if kind is Kind.COPY:
        return recorded
    leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    params = [x for x in leaves if isinstance(x, ShardedParameter)]
    # An optimizer combines tensors of the shape of this rank's rows; a module computes with other shapes.
    others = [x for x in leaves if x.dim() and not isinstance(x, ShardedParameter)]
    shapes = {p.shape for p in params}
    for param in params:
        if any(_may_mean_either(param, x) for x in others):
            if recorded and name not in _COMPARISONS:
                return True
            if not is_called_from("torch.optim.optimizer"):  # in a step
                raise RuntimeError(
                    f"{name} of a sharded parameter of shape {param.bmt_slice.shape}, which one rank holds, with a "
                    f"tensor that may be logical or one rank's rows: say full_tensor() or to_local()"
                )
    if not all(x.shape in shapes for x in others):
        return True
    if others or len(params) > 1:
        sharded = next((p for p in params if is_row_sharded(p)), None)
        if others and name in _COMPARISONS:
            return False
        if recorded and others and sharded is not None:
            raise RuntimeError(
                f"{name} would combine this rank's rows of a parameter of shape {sharded.bmt_slice.shape} with a "
                f"tensor of the same rows, and autograd would see this rank's part only: combine full_tensor() with "
                f"the logical tensor, or compute under torch.no_grad()"
            )
        return torch.is_grad_enabled() and (recorded or not others)
    if name in _VIEWS and not recorded and params and is_row_sharded(params[0]):
        raise RuntimeError(
            f"{name} of a sharded parameter of shape {params[0].bmt_slice.shape} without gradients: use full_tensor() "
            f"to read the logical parameter, or to_local() for this rank's rows"
        )
    return True
