"""Choose the results of operations to keep, for modules that may keep a share of their activation memory.

[Note: a share of memory]
    The first forward of a module keeps nothing. It records the cost and the output bytes of each operation, and which
    tensors autograd saves. The budget is the bytes of the saved tensors times the share. Results with the highest cost
    per byte are chosen first, as long as they fit the budget. The cost is an estimate from shapes. Ranks do not
    communicate: they choose the same results if their batches have the same shapes. Otherwise each rank's choice is
    valid by itself.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.weak import WeakIdKeyDictionary

from .kept_operations import MATMULS, why_not_kept
from .kept_results import CountingMode, Operation, dense_tensors, written_tensors

FLOPS_PER_BYTE = 100
"""How many floating-point operations take as long as moving one byte: 20 to 300 on current CPUs and GPUs. Any value in
this range separates matrix products from all other operations."""


class _Made:
    """A storage that an operation has made.

    Attributes:
        nbytes: its size.
        version: of the tensor that the operation returned.
        written: whether a later operation has written to it.
        saved: whether autograd has saved it for backward.
    """

    def __init__(self, nbytes: int, version: int) -> None:
        self.nbytes = nbytes
        self.version = version
        self.written = False
        self.saved = False


class Recording(CountingMode):
    """The mode of the first forward of a module that keeps a share; see [Note: a share of memory]."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: dict[Operation, tuple[float, list[_Made]]] = {}  # the cost, and the storages it has made
        self._storages = WeakIdKeyDictionary()  # the _Made of each storage that is alive
        self._all: list[_Made] = []

    def run(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        func = operation[0]
        output = func(*args, **kwargs)
        inputs, outputs = dense_tensors((args, kwargs)), dense_tensors(output)
        self._note_writes(func, args, kwargs, inputs)
        made = []
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage not in self._storages and all(x.untyped_storage() is not storage for x in inputs):
                self._storages[storage] = _Made(storage.nbytes(), tensor._version)
                made.append(self._storages[storage])
        self._all += made
        # The result of an operation like empty_like is filled later, perhaps by a kernel that writes to a pointer.
        is_filled = bool(inputs) and "empty" not in func._schema.name
        if is_filled and made and why_not_kept(func) is None and kwargs.get("generator") is None:
            self._operations[operation] = _cost(func, args, kwargs, output, inputs, outputs), made
        return output

    def _note_writes(self, func: OpOverload, args: Any, kwargs: Any, inputs: list[Tensor]) -> None:
        written = written_tensors(func, args, kwargs)
        for tensor in inputs:
            made = self._storages.get(tensor.untyped_storage())
            if made is not None and (tensor._version != made.version or any(tensor is each for each in written)):
                made.written = True

    def note_saved(self, tensor: Tensor) -> None:
        """Note that autograd saves a tensor for backward."""
        if tensor.layout is torch.strided and (made := self._storages.get(tensor.untyped_storage())) is not None:
            made.saved = True

    def choose(self, share: float) -> dict[OpOverload, frozenset[int]]:
        """The operations to keep. Their results take at most ``share`` of the memory that autograd would keep."""
        left = share * sum(made.nbytes for made in self._all if made.saved)
        sizes = {operation: sum(m.nbytes for m in made) for operation, (_, made) in self._operations.items()}
        able = [
            operation
            for operation, (_, made) in self._operations.items()
            if sizes[operation] and not any(m.written for m in made)
        ]
        chosen: dict[OpOverload, set[int]] = {}
        for operation in sorted(able, key=lambda each: self._operations[each][0] / sizes[each], reverse=True):
            if sizes[operation] <= left:
                left -= sizes[operation]
                chosen.setdefault(operation[0], set()).add(operation[1])
        return {func: frozenset(calls) for func, calls in chosen.items()}


def _cost(func: OpOverload, args: Any, kwargs: Any, output: Any, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """The time of an operation, as the number of bytes that could be moved meanwhile."""
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    moved = sum(x.nbytes for x in (*inputs, *outputs))
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return moved + formula(*args, **kwargs, out_val=output) / FLOPS_PER_BYTE
    name = func._overloadpacket.__name__
    if name.startswith("_scaled_dot_product_"):  # operators without a formula in torch
        return moved + sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape) / FLOPS_PER_BYTE
    if name in MATMULS:
        # (m, k) times (k, n) is m n products of length k, where k² = (m k) (k n) / (m n).
        first, second, result = inputs[0].numel(), inputs[1].numel(), max(outputs[0].numel(), 1)
        return moved + 2 * math.sqrt(first * second * result) / FLOPS_PER_BYTE
    return float(moved)


class _Recordings(threading.local):
    innermost: Recording | None = None


_recordings = _Recordings()


@contextlib.contextmanager
def recording(mode: Recording) -> Iterator[None]:
    """Within, ``mode`` records operations, and the tensors that a checkpoint with :func:`noting_saves` saves."""
    before, _recordings.innermost = _recordings.innermost, mode
    try:
        with mode:
            yield
    finally:
        _recordings.innermost = before


def noting_saves() -> str:
    """A ``determinism_check`` for ``torch.utils.checkpoint.checkpoint`` that passes saved tensors to the recording.

    It compares the same facts as torch's default.
    """
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    default = checks["default"]

    def note(tensor: Tensor) -> Any:
        if _recordings.innermost is not None:
            _recordings.innermost.note_saved(tensor)
        return default(tensor)

    checks.setdefault("bmt_zero", note)
    return "bmt_zero"
