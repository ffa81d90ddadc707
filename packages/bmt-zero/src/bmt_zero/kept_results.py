"""Keep results of operations in a forward, and return them in its recomputation.

[Note: kept results]
    The first forward runs in a dispatch mode that keeps results. The recomputation runs in a mode that returns them
    instead of running the operations. A result is identified by its operator and the number of earlier calls of that
    operator. This is what ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` does, with these changes:

    - Operations in hooks of sharded modules (unsharding an inner module) are not counted, because they may differ in
      the recomputation.
    - A result that was written to later (by an in-place activation, or an all-reduce) is recomputed.
    - Results of random operations may be kept. The generator then gets the state that it had after the operation.
    - A second backward (``retain_graph=True``) recomputes the results that the first one has used.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

F = TypeVar("F", bound=Callable[..., Any])

Operation = tuple[OpOverload, int]
"""An operator, and the number of the call in a forward."""


# --- what is not counted --------------------------------------------------------------------------


class _Uncounted(threading.local):
    depth = 0


_uncounted = _Uncounted()


def uncounted(function: F) -> F:
    """Do not count the operations in a function; see [Note: kept results]."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _uncounted.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _uncounted.depth -= 1

    return wrapped  # type: ignore[return-value]


# --- forward and recomputation --------------------------------------------------------------------


class Result:
    """The result of an operation.

    Attributes:
        output: the output with detached tensors: otherwise the graph would keep itself alive through them.
        versions: of these tensors when they were kept, to notice writes.
        arguments: shapes and dtypes of the input tensors, to recognise the operation.
        random: the state of the generator after a random operation.
    """

    def __init__(self, func: OpOverload, args: Any, kwargs: Any, output: Any) -> None:
        self.arguments = _describe(args, kwargs)
        # With the key, an alias shares its version counter with the tensor that autograd gives to the caller.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.output = tree_map_only(Tensor, lambda x: x.detach(), output)
        self._tensors = [x for x in tree_leaves(self.output) if isinstance(x, Tensor)]
        self.versions = [x._version for x in self._tensors]
        self.random: Tensor | None = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = _random(self._tensors[0].device).get_rng_state()

    def is_current(self) -> bool:
        return self.versions == [x._version for x in self._tensors]

    def lies_in(self, storages: set[int]) -> bool:
        return any(x.untyped_storage()._cdata in storages for x in dense_tensors(self._tensors))

    def take(self) -> Any:
        """The output. The generator gets its state after the operation."""
        if self.random is not None:
            _random(self._tensors[0].device).set_rng_state(self.random)
        return self.output


def _random(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _describe(args: Any, kwargs: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape, x.dtype) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def written_tensors(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to: all those of a collective, whose schema does not say."""
    values: Any = (args, kwargs)
    if func.namespace != "c10d":
        if not func._schema.is_mutable:
            return []
        values = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    return dense_tensors(values)


def dense_tensors(values: Any) -> list[Tensor]:
    """The tensors in nested containers that have a storage: not those of a sparse layout."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.layout is torch.strided]


class CountingMode(TorchDispatchMode):
    """Counts the calls of operators.

    Higher-order operators (``flex_attention``) run and are not counted. Compiled functions inside run compiled.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[OpOverload] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _uncounted.depth or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        self._calls[func] += 1
        return self.run((func, self._calls[func] - 1), args, kwargs)

    def run(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class Forward(CountingMode):
    """The mode of a forward: keeps results.

    Args:
        wanted: the calls of operators to keep; None: all calls.
        results: gets the results.
    """

    def __init__(self, wanted: Mapping[OpOverload, frozenset[int] | None], results: dict[Operation, Result]) -> None:
        super().__init__()
        self.wanted = wanted
        self.results = results

    def run(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        func, index = operation
        output = func(*args, **kwargs)
        # ``x.data`` and the results of ``unsafe_chunk`` (in a GRU) have version counters of their own.
        if written := {x.untyped_storage()._cdata for x in written_tensors(func, args, kwargs)}:
            for other in [each for each, result in self.results.items() if result.lies_in(written)]:
                del self.results[other]
        if func in self.wanted:
            calls = self.wanted[func]
            if (calls is None or index in calls) and kwargs.get("generator") is None:
                self.results[operation] = Result(func, args, kwargs, output)
        return output

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for operation in [operation for operation, result in self.results.items() if not result.is_current()]:
            del self.results[operation]


class Recomputation(CountingMode):
    """The mode of a recomputation: returns the results that the forward has kept, each once."""

    def __init__(self, results: dict[Operation, Result]) -> None:
        super().__init__()
        self.results = results

    def run(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        func, index = operation
        result = self.results.pop(operation, None)
        if result is None or not result.is_current():
            return func(*args, **kwargs)
        if result.arguments != _describe(args, kwargs):
            raise RuntimeError(
                f"call {index} of {func} has other shapes or dtypes in the recomputation of a checkpointed forward "
                f"than it had before: the forward must compute the same each time; or use use_checkpoint=True"
            )
        return result.take()
