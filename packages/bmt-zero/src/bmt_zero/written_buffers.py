"""Buffers that a forward writes to (running averages, counters), for forwards that are recomputed.

Recomputation starts from the values before the forward, and its own writes are dropped. So buffers that forward writes
to are copied before it. The first forward in training, and the first one in evaluation, copies all buffers to learn
which ones it writes to. Small buffers are always copied, because only some forwards may write to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

_SMALL = 1 << 16  # bytes

# Buffers from before a forward, by (index of module, name); None: a buffer was not copied.
Copies = dict[tuple[int, str], Tensor | None]


class WrittenBuffers:
    """The buffers of ``modules`` and all modules in them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [m for module in modules for m in module.modules() if m._buffers]
        self._written: dict[bool, set[tuple[int, str]]] = {}  # (index of module, name), in training and evaluation

    def noting_writes(self, copies: Copies) -> contextlib.AbstractContextManager[None]:
        """Fill ``copies`` for the buffers that the forward within writes to."""
        return self._noting_writes(copies) if self._modules else contextlib.nullcontext()

    def restored(self, copies: Copies) -> contextlib.AbstractContextManager[None]:
        """Within, buffers have the values from before the forward. Afterwards they have their current values again.

        Raises:
            RuntimeError: the forward was the first to write to a large buffer, so there is no copy.
        """
        return self._restored(copies) if self._modules else contextlib.nullcontext()

    @contextlib.contextmanager
    def _noting_writes(self, copies: Copies) -> Iterator[None]:
        training = any(module.training for module in self._modules)
        known = self._written.get(training)
        buffers = {(i, name): b for i, m in enumerate(self._modules) for name, b in m._buffers.items() if b is not None}
        before = {k: b.clone() for k, b in buffers.items() if known is None or k in known or b.nbytes <= _SMALL}
        versions = {key: _version(buffer) for key, buffer in buffers.items()}
        yield
        written = {
            (index, name)
            for (index, name), buffer in buffers.items()
            # The kernel of batch normalisation writes without counting a version.
            if isinstance(self._modules[index], nn.modules.batchnorm._NormBase)
            or self._modules[index]._buffers.get(name) is not buffer
            or _version(buffer) != versions[index, name]
        }
        self._written[training] = written | (known or set())
        # A buffer that was replaced (a cache that grows, for example) still has its values.
        kept = {
            key: buffer
            for key, buffer in buffers.items()
            if _version(buffer) == versions[key]
            and not isinstance(self._modules[key[0]], nn.modules.batchnorm._NormBase)
        }
        copies.update({key: before.get(key, kept.get(key)) for key in written})

    @contextlib.contextmanager
    def _restored(self, copies: Copies) -> Iterator[None]:
        missing = [name for (_, name), value in copies.items() if value is None]
        if missing:
            raise RuntimeError(
                f"a checkpointed forward has written to the buffers {missing} for the first time, which are too large "
                f"to be copied before each forward; it cannot be computed again with their values before; use "
                f"use_checkpoint=False for this module"
            )
        now = [dict(m._buffers) for m in self._modules]
        for (index, name), value in copies.items():
            assert value is not None
            self._modules[index]._buffers[name] = value.clone()
        try:
            yield
        finally:
            for module, buffers in zip(self._modules, now, strict=True):
                module._buffers.update(buffers)


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version
