"""Activation checkpointing of a sharded module: keep its inputs, and compute the rest again in backward.

[Note: buffers]
    A forward may write to buffers (running averages, counters). The computation in backward starts from the values
    that they had before, and what it writes is dropped. So the values of buffers that forward writes to are copied
    before it; which ones these are is learned from the first forward, which copies all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .backward_context import current_backward
from .parameter_group import ParameterGroup


class CheckpointedForward:
    """Stands in the place of a module's ``forward``, which it calls twice: in forward, and in backward.

    Attributes:
        enabled: whether it does; otherwise activations are kept.
    """

    def __init__(self, module: nn.Module, group: ParameterGroup) -> None:
        self.module = module
        self.group = group
        self.enabled = True
        self._buffers: _Buffers | None = None  # made at the first call: the module may be a copy that is not filled yet
        functools.update_wrapper(self, type(module).forward.__get__(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward.__get__(self.module)
        calls = self.group.step.calls
        call = next((c for c in reversed(calls) if c.hooks.module is self.module), None)
        if not self.enabled or call is None or call.call is None:
            return forward(*args, **kwargs)
        if self._buffers is None:
            self._buffers = _Buffers(self.module)
        run = functools.partial(self._run, forward, call.views, _Snapshot(self._buffers), kwargs)
        return checkpoint(run, *args, use_reentrant=False)

    def _run(
        self, forward: Any, views: list[Tensor], snapshot: _Snapshot, kwargs: dict[str, Any], /, *args: Any
    ) -> Any:
        if not snapshot.done:
            with snapshot.first_time():
                return forward(*args, **kwargs)
        group = self.group
        if current_backward() is not None:
            group.needed_again()
        first = group.install(views)
        try:
            with snapshot.again():
                return forward(*args, **kwargs)
        finally:
            if first:
                group.uninstall()

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointedForward:
        twin = CheckpointedForward(copy.deepcopy(self.module, memo), copy.deepcopy(self.group, memo))
        twin.enabled = self.enabled
        return twin


class _Buffers:
    """The buffers of a module and those in it, and what is known of who writes to them."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [m for m in module.modules() if m._buffers]
        self.written: set[tuple[int, str]] | None = None  # (index of module, name); None: not known yet


class _Snapshot:
    """The buffers before a forward."""

    def __init__(self, buffers: _Buffers) -> None:
        self.buffers = buffers
        self.done = False
        self._before: dict[tuple[int, str], Tensor] = {}
        self._surprises: list[str] = []

    @contextlib.contextmanager
    def first_time(self) -> Iterator[None]:
        self.done = True
        known = self.buffers
        if not known.modules:
            yield
            return
        places = [((i, n), b) for i, m in enumerate(known.modules) for n, b in m._buffers.items() if b is not None]
        self._before = {key: b.clone() for key, b in places if known.written is None or key in known.written}
        versions = [_version(buffer) for _, buffer in places]
        yield
        written = {
            key
            for (key, buffer), version in zip(places, versions, strict=True)
            # The kernel of batch normalisation writes without counting a version.
            if isinstance(known.modules[key[0]], nn.modules.batchnorm._NormBase)
            or known.modules[key[0]]._buffers.get(key[1]) is not buffer
            or _version(buffer) != version
        }
        known.written = written if known.written is None else known.written | written
        self._surprises = [name for i, name in written if (i, name) not in self._before]
        self._before = {key: value for key, value in self._before.items() if key in written}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within, buffers are as they were before; after it, as now.

        Raises:
            RuntimeError: forward has written to a buffer that no forward before has, so that there is no copy.
        """
        if self._surprises:
            raise RuntimeError(
                f"a checkpointed forward has written to the buffers {self._surprises} for the first time; it cannot be "
                f"computed again with their values before; use use_checkpoint=False for this module"
            )
        modules = self.buffers.modules
        now = [dict(m._buffers) for m in modules]
        for (index, name), value in self._before.items():
            modules[index]._buffers[name] = value.clone()
        try:
            yield
        finally:
            for module, buffers in zip(modules, now, strict=True):
                module._buffers.update(buffers)


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version
