"""The memory that a computation on meta tensors would hold, operation by operation.

[Note: what is counted]
    A storage that an operation returns counts until its last tensor is dropped, as in the caching allocator of a
    device. The flat parameters of ``bmt_zero`` release their storage and fill it again, so their size is read after
    each operation. Temporary memory inside an operation (the workspace of a matrix product) does not count.

    A model that reads values (whether a mask is all true, for example) gets true and 1.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from bmt_zero.flat_parameter import FlatParameter

_ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they hold.

    Attributes:
        parameters: the shards.
        gradients: ``.grad``, and what waits to be reduced at levels 0 and 1.
        state: the optimizer's state.
        gathered: unsharded parameters.
        activations: everything else: tensors saved for backward, and temporary tensors.
    """

    parameters: float = 0
    gradients: float = 0
    state: float = 0
    gathered: float = 0
    activations: float = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))

    def plus(self, other: Memory, times: float = 1) -> Memory:
        """This and ``times`` the other."""
        names = [each.name for each in fields(self)]
        return Memory(**{name: getattr(self, name) + times * getattr(other, name) for name in names})


@dataclass
class Phase:
    """Measurements of one phase of a step.

    Attributes:
        peak: the memory at the peak of the phase.
        end: the memory at the end of the phase.
        operations: floating-point operations, and bytes read and written, of each operation that computes.
    """

    peak: Memory = field(default_factory=Memory)
    end: Memory = field(default_factory=Memory)
    operations: list[tuple[float, float]] = field(default_factory=list)


class LiveMemory(TorchDispatchMode):
    """Within, count the storages of tensors that operations return; see [Note: what is counted].

    Attributes:
        phases: the phases, by the names given to :meth:`enter`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Phase] = {}
        self._phase = Phase()
        self._peak_bytes = -1.0
        self._bytes = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._shards: dict[int, Any] = {}
        self._unsharded: dict[int, Any] = {}
        self._params: list[Tensor] = []

    def watch(self, flats: Iterable[FlatParameter]) -> None:
        """Count the storages of these flat parameters separately, and forget all other storages: building the model may
        have left some for Python's garbage collector."""
        self._alive.clear()
        self._bytes = 0
        for flat in flats:
            shard = flat.shard.untyped_storage()
            self._shards[shard._cdata] = shard
            unsharded = flat.unsharded.untyped_storage()
            if unsharded._cdata not in self._shards:
                self._unsharded[unsharded._cdata] = unsharded
            self._params += flat.params

    def enter(self, name: str) -> None:
        """End the current phase, and begin one with this name."""
        self._phase.end = self.now()
        self._phase = self.phases.setdefault(name, Phase())
        self._peak_bytes = self._phase.peak.total

    def now(self) -> Memory:
        """The memory at this moment."""
        parameters, unsharded = self._sizes()
        with torch._C.DisableTorchFunctionSubclass():  # __torch_function__ of sharded parameters is slow
            storages = [param.grad.untyped_storage() for param in self._params if param.grad is not None]
        gradients = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        return Memory(parameters, gradients, 0, unsharded, self._bytes - gradients)

    def _sizes(self) -> tuple[int, int]:
        return (
            sum([storage.nbytes() for storage in self._shards.values()]),
            sum([storage.nbytes() for storage in self._unsharded.values()]),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype is torch.bool or (1.0 if args[0].is_floating_point() else 1)
        key = (func, _described(args), _described(tuple(kwargs.items())))
        known = _results.get(key)
        if known is not None:
            make, cost = known
            out = make()
            self._track(out)
        else:
            out = func(*args, **kwargs)
            is_new, cost = self._track(out), None
            if is_new or func._schema.is_mutable:
                cost = _cost(func, args, kwargs, out)
            if is_new and _makes_all(func, out):
                _results[key] = _maker(out), cost
        total = self._bytes + sum(self._sizes())
        if total > self._peak_bytes:
            self._peak_bytes, self._phase.peak = total, self.now()
        if cost is not None:
            self._phase.operations.append(cost)
        return out

    def _track(self, out: Any) -> bool:
        """Count new storages. Returns whether there are any."""
        is_new = False
        for tensor in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._alive or key in self._shards or key in self._unsharded:
                continue
            is_new = True
            self._alive[key] = weakref.ref(storage, functools.partial(self._drop, key)), storage.nbytes()
            self._bytes += storage.nbytes()
        return is_new

    def _drop(self, key: int, _reference: object) -> None:
        self._bytes -= self._alive.pop(key, (None, 0))[1]


# By operation and arguments: a function that makes the results on the meta device, and the cost. torch computes the
# results in Python, which is slow, and layers repeat each other.
_results: dict[Any, tuple[Callable[[], Any], tuple[float, float] | None]] = {}


def _described(value: Any) -> Any:
    """The properties of an argument that the result of an operation depends on. They are hashable."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, (tuple, list)):
        return tuple([_described(each) for each in value])
    return type(value), value


def _makes_all(func: Any, out: Any) -> bool:
    """Whether an operation always returns new tensors only."""
    if func._schema.is_mutable or any(each.alias_info is not None for each in func._schema.returns):
        return False
    outputs = out if isinstance(out, (tuple, list)) else (out,)
    tensors = [x for x in outputs if isinstance(x, Tensor)]
    storages = {x.untyped_storage()._cdata for x in tensors}
    return len(storages) == len(outputs) and all(
        x.is_meta and x.untyped_storage().nbytes() == x.nbytes and x.storage_offset() == 0 for x in tensors
    )


def _maker(out: Any) -> Callable[[], Any]:
    """A function that makes tensors like these."""
    if isinstance(out, Tensor):
        shape, stride, dtype = out.shape, out.stride(), out.dtype
        return lambda: torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    makers = [_maker(x) for x in out]
    return lambda: tuple([make() for make in makers])


def _cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    """Floating-point operations, and bytes read and written."""
    moved = sum(x.nbytes for x in tree_iter((args, kwargs, out)) if isinstance(x, Tensor))
    count: Any = flop_registry.get(func._overloadpacket) or _FLOPS.get(func._overloadpacket)
    return float(count(*args, **kwargs, out_val=out) if count is not None else 0), float(moved)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Without padding, the groups' rows, columns or summands are those of the matrix together."""
    groups = len(a) if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


_FLOPS = {
    getattr(_ATEN, "_grouped_mm", None): _grouped_flops,  # before torch 2.8 there is none
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Within, scaled dot-product attention is flash attention, as on GPUs. On meta tensors, torch's keeps the scores.

    The function is replaced in ``torch.nn.functional``, because function modes are off while backward recomputes.
    """
    before = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *others: Any, **options: Any
    ) -> Tensor:
        learned = attn_mask is not None and attn_mask.requires_grad  # flash attention does not support such a bias
        function = before if learned else _flash
        return function(query, key, value, attn_mask, *others, **options)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if value.shape[-1] != query.shape[-1]:  # flash attention has one size of heads
        efficient = _ATEN._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, True, 0.0, is_causal, scale=scale)[0]
    flash = _ATEN._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
