"""Activation checkpointing of a sharded module: keep its inputs and recompute the rest in backward.

[Note: buffers]
    A forward may write to buffers (running averages, counters). Recomputation starts from the values that they had
    before, and its own writes are dropped. So buffers that forward writes to are copied before it. The first forward
    copies all buffers to learn which ones these are.

[Note: scripted functions]
    TorchScript's profiling executor replaces a scripted function by an optimized one after some calls. The two save
    different tensors for backward, so a recomputation between them would not find the tensors of the first forward.
    A call of the same function outside of the module replaces it, too. So the executor makes no optimized functions any
    more in a process that has a checkpointed module: scripted functions run as they were written.

    Recomputation stops at the last tensor that backward needs, by an exception without a message. If a scripted
    function has saved that tensor, TorchScript makes a RuntimeError of it. Torch compares the numbers of tensors after
    each recomputation, so one that was cut short for another reason is noticed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_comm import not_compiled

from .backward_context import current_backward
from .caches import with_copied_caches
from .kept_operations import KeptOperations, KeptShare
from .kept_results import Forward, Operation, Recomputation, Result
from .memory_share import Recording, noting_saves, recording
from .parameter_group import ParameterGroup

# Buffers from before a forward, by (index of module, name); None: a buffer was not copied.
_Copies = dict[tuple[int, str], Tensor | None]


class CheckpointedForward:
    """Takes the place of a module's ``forward``, which it calls twice: in forward and in backward.

    Args:
        module: the module.
        group: its parameters.
        kept: the results of operations that are kept beside its inputs.

    Attributes:
        enabled: whether it does; otherwise activations are kept.
        replaced: the forward that was set on the instance before; it is called instead of the class's.
    """

    def __init__(self, module: nn.Module, group: ParameterGroup, kept: KeptOperations | KeptShare) -> None:
        self.module = module
        self.group = group
        self.kept = kept
        self.enabled = True
        # Modules with buffers, found at the first call: the module may be a copy that is not filled yet.
        self._modules: list[nn.Module] | None = None
        self._written: set[tuple[int, str]] | None = None  # (index of module, name) of written buffers; None: unknown
        self._compiled: Callable[..., Any] | None = None
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        functools.update_wrapper(self, self._forward)
        torch._C._jit_set_profiling_mode(False)  # see [Note: scripted functions]

    @property
    def _forward(self) -> Callable[..., Any]:
        if self.replaced is not None:
            return self.replaced
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward; takes the place of its ``compile``. The arguments are ``torch.compile``'s.

        What a compiled forward keeps of a share is torch's choice (``activation_memory_budget``).

        Raises:
            ValueError: results of some operators are to be kept: the operators of a compiled forward are others.
        """
        if isinstance(self.kept, KeptOperations) and self.kept.wanted:
            raise ValueError(
                "use_checkpoint names operators to keep results of, and a compiled forward has operators of its own; "
                "shard the module with use_checkpoint=True, False or a share from 0.0 to 1.0 to compile it"
            )
        self._compiled = torch.compile(self._forward, *args, **kwargs)

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._compiled or self._forward
        # One call for each group of the module; the innermost ones, if the module calls itself.
        calls = {c.hooks.group: c for c in self.group.step.calls if c.hooks.module is self.module}
        if not self.enabled or not calls or any(c.call is None for c in calls.values()):
            return forward(*args, **kwargs)
        if self._compiled is not None and isinstance(self.kept, KeptShare):
            from torch._functorch import config

            with config.patch(activation_memory_budget=self.kept.share):  # read when it compiles
                return forward(*args, **kwargs)
        if self._modules is None:
            self._modules = [m for m in self.module.modules() if m._buffers]
        views, copies = {group: c.views for group, c in calls.items()}, _Copies()
        before = with_copied_caches((args, kwargs))
        keeping = _Keeping(self.kept)
        first = True
        failed: list[BaseException] = []

        def run(*args: Any) -> Any:
            nonlocal first
            if not first:
                given, named = with_copied_caches(before)
                try:
                    return self._recompute(views, copies, keeping, functools.partial(forward, *given, **named))
                except RuntimeError as error:
                    if "TorchScript" in str(error) and str(error).rstrip().endswith("RuntimeError:"):
                        return None  # it has stopped; see [Note: scripted functions]
                    raise
            first = False
            notes = self._noting_writes(copies) if self._modules else contextlib.nullcontext()
            try:
                with notes, keeping.forward():
                    return forward(*args, **kwargs)
            except BaseException as error:
                failed.append(error)  # to be raised outside: torch 2.8 would leave the checkpoint's hooks in place
                return None

        result = checkpoint(run, *args, use_reentrant=False, determinism_check=keeping.determinism_check)
        if failed:
            raise failed.pop()
        return result

    def _recompute(
        self,
        views: Mapping[ParameterGroup, list[Tensor]],
        copies: _Copies,
        keeping: _Keeping,
        forward: Callable[[], Any],
    ) -> Any:
        if current_backward() is not None:
            for group in views:
                group.unshard_in_backward()
        installed = [group for group, tensors in views.items() if group.install(tensors)]
        try:
            with self._restored(copies) if self._modules else contextlib.nullcontext(), keeping.recomputation():
                return forward()
        finally:
            for group in installed:
                group.uninstall()

    @contextlib.contextmanager
    def _noting_writes(self, copies: _Copies) -> Iterator[None]:
        """Fill ``copies`` for the buffers that the forward within writes to."""
        modules = self._modules or []
        buffers = {(i, name): b for i, m in enumerate(modules) for name, b in m._buffers.items() if b is not None}
        before = {key: b.clone() for key, b in buffers.items() if self._written is None or key in self._written}
        versions = {key: _version(buffer) for key, buffer in buffers.items()}
        yield
        written = {
            (index, name)
            for (index, name), buffer in buffers.items()
            # The kernel of batch normalisation writes without counting a version.
            if isinstance(modules[index], nn.modules.batchnorm._NormBase)
            or modules[index]._buffers.get(name) is not buffer
            or _version(buffer) != versions[index, name]
        }
        self._written = written | (self._written or set())
        copies.update({key: before.get(key) for key in written})

    @contextlib.contextmanager
    def _restored(self, copies: _Copies) -> Iterator[None]:
        """Within, buffers have the values from before the first forward; after it, those of now.

        Raises:
            RuntimeError: the forward was the first to write to a buffer, so that there is no copy.
        """
        modules = self._modules or []
        missing = [name for (_, name), value in copies.items() if value is None]
        if missing:
            raise RuntimeError(
                f"a checkpointed forward has written to the buffers {missing} for the first time; it cannot be "
                f"computed again with their values before; use use_checkpoint=False for this module"
            )
        now = [dict(m._buffers) for m in modules]
        for (index, name), value in copies.items():
            assert value is not None
            modules[index]._buffers[name] = value.clone()
        try:
            yield
        finally:
            for module, buffers in zip(modules, now, strict=True):
                module._buffers.update(buffers)

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointedForward:
        twin = CheckpointedForward(
            copy.deepcopy(self.module, memo), copy.deepcopy(self.group, memo), copy.copy(self.kept)
        )
        twin.enabled = self.enabled
        twin.replaced = copy.deepcopy(self.replaced, memo)
        return twin


class _Keeping:
    """What one forward of a checkpointed module keeps."""

    def __init__(self, kept: KeptOperations | KeptShare) -> None:
        self.kept = kept
        self._results: dict[Operation, Result] = {}
        self.determinism_check = "default" if kept.wanted is not None else noting_saves()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The first forward runs within."""
        if self.kept.wanted is not None:
            with Forward(self.kept.wanted, self._results) if self.kept.wanted else contextlib.nullcontext():
                yield
            return
        assert isinstance(self.kept, KeptShare)
        recorded = Recording()
        with recording(recorded):
            yield
        self.kept.wanted = recorded.choose(self.kept.share)

    def recomputation(self) -> contextlib.AbstractContextManager[object]:
        """A recomputation runs within."""
        return Recomputation(self._results) if self._results else contextlib.nullcontext()


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version
