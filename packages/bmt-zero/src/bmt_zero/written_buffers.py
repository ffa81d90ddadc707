"""Buffers that a forward reads or writes to (running averages, counters), for forwards that are recomputed.

Recomputation starts from the values before the forward, and its own writes are dropped. So buffers that forward writes
to are copied before it. The first forward in training, and the first one in evaluation, copies all buffers to learn
which ones it writes to. Small buffers are always copied, because only some forwards may write to them, also between a
forward and its recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

_SMALL = 1 << 16  # bytes


class _Before(NamedTuple):
    """A buffer before a forward. ``copy`` is None if it was not copied."""

    buffer: Tensor
    version: int
    copy: Tensor | None


# Buffers from before a forward, by (index of module, name).
Copies = dict[tuple[int, str], _Before]


class WrittenBuffers:
    """The buffers of ``modules`` and all modules in them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [m for module in modules for m in module.modules() if m._buffers]
        self._written: dict[bool, set[tuple[int, str]]] = {}  # (index of module, name), in training and evaluation

    def noting_writes(self, copies: Copies) -> contextlib.AbstractContextManager[None]:
        """Fill ``copies`` for the forward within."""
        return self._noting_writes(copies) if self._modules else contextlib.nullcontext()

    def restored(self, copies: Copies) -> contextlib.AbstractContextManager[None]:
        """Within, buffers have the values from before the forward. Afterwards they have their current values again.

        Raises:
            RuntimeError: a large buffer has changed, and there is no copy: no forward had written to it before.
        """
        return self._restored(copies) if self._modules else contextlib.nullcontext()

    @contextlib.contextmanager
    def _noting_writes(self, copies: Copies) -> Iterator[None]:
        training = any(module.training for module in self._modules)
        known = self._written.get(training)
        buffers = {(i, name): b for i, m in enumerate(self._modules) for name, b in m._buffers.items() if b is not None}
        small = {key for key, b in buffers.items() if b.numel() * b.element_size() <= _SMALL}  # also sparse ones
        before = {
            key: _Before(b, _version(b), b.clone() if known is None or key in known or key in small else None)
            for key, b in buffers.items()
        }
        yield
        written = {key for key, each in before.items() if self._has_changed(key, each)}
        self._written[training] = written | (known or set())
        needed = small | self._written[training]
        for key, each in before.items():
            # A buffer that was replaced (a cache that grows, for example) still has its values.
            has_values = key not in needed or (key in written and not self._was_written(key, each))
            copies[key] = each._replace(copy=None) if has_values else each

    @contextlib.contextmanager
    def _restored(self, copies: Copies) -> Iterator[None]:
        by_forwards = set().union(*self._written.values())
        values: dict[tuple[int, str], Tensor] = {}
        missing = []
        for key, each in copies.items():
            if self._has_changed(key, each):
                if each.copy is not None:
                    values[key] = each.copy
                elif not self._was_written(key, each):
                    values[key] = each.buffer
                elif key in by_forwards:  # else a script or a hook has written to it
                    missing.append(key[1])
        if missing:
            raise RuntimeError(
                f"a checkpointed forward has written to the buffers {missing} for the first time, which are too large "
                f"to be copied before each forward; forwards before cannot be computed again with their values then; "
                f"use use_checkpoint=False for this module"
            )
        now = [dict(m._buffers) for m in self._modules]
        for (index, name), value in values.items():
            self._modules[index]._buffers[name] = value.clone()
        try:
            yield
        finally:
            for module, buffers in zip(self._modules, now, strict=True):
                module._buffers.update(buffers)

    def _has_changed(self, key: tuple[int, str], before: _Before) -> bool:
        return self._modules[key[0]]._buffers.get(key[1]) is not before.buffer or self._was_written(key, before)

    def _was_written(self, key: tuple[int, str], before: _Before) -> bool:
        # The kernel of batch normalisation writes without counting a version.
        is_norm = isinstance(self._modules[key[0]], nn.modules.batchnorm._NormBase)
        return is_norm or _version(before.buffer) != before.version


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version
