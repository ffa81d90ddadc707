"""Activation checkpointing of a sharded module: keep its inputs and recompute everything else in backward.

[Note: scripted functions]
    TorchScript's profiling executor replaces a scripted function by an optimized one after some calls. The two save
    different tensors for backward, so the recomputation would save other tensors than the forward if the function is
    replaced between them. A call of the same function outside of the module can also replace it. So the executor
    makes no optimized functions in a process that has a checkpointed module: scripted functions run as written.

    Recomputation stops at the last tensor that backward needs, by an exception without a message. If a scripted
    function has saved that tensor, TorchScript turns the exception into a RuntimeError. Torch compares the number of
    tensors after each recomputation, so it notices a recomputation that has stopped for another reason.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_comm import not_compiled

from .backward_context import current_backward
from .caches import copied_arguments
from .kept_operations import KeptOperations, KeptShare
from .kept_results import Forward, Operation, Recomputation, Result
from .memory_share import Recording, noting_saves, recording
from .parameter_group import ParameterGroup
from .written_buffers import Copies, WrittenBuffers


class CheckpointedForward:
    """Replaces a module's ``forward``, which it calls twice: in forward and in backward.

    Args:
        module: the module.
        group: its parameters.
        kept: the results of operations that are kept in addition to its inputs.

    Attributes:
        enabled: whether to recompute; otherwise activations are kept.
        replaced: the forward that was set on the instance before; it is called instead of the class's.
    """

    def __init__(self, module: nn.Module, group: ParameterGroup, kept: KeptOperations | KeptShare) -> None:
        self.module = module
        self.group = group
        self.kept = kept
        self.enabled = True
        self._buffers: WrittenBuffers | None = None  # made in the first call: the module may be an unfinished copy
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
        """Compile the module's forward. Replaces its ``compile``; the arguments are those of ``torch.compile``.

        For a share, torch chooses what a compiled forward keeps (``activation_memory_budget``).

        Raises:
            ValueError: results of some operators are kept: a compiled forward has other operators.
        """
        if isinstance(self.kept, KeptOperations) and self.kept.wanted:
            raise ValueError(
                "use_checkpoint names operators to keep results of, and a compiled forward has operators of its own; "
                "shard the module with use_checkpoint=True, False or a share from 0.0 to 1.0 to compile it"
            )
        self._compiled = torch.compile(self._forward, *args, **kwargs)

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # One call for each group of the module; the innermost ones, if the module calls itself.
        calls = {c.hooks.group: c for c in self.group.step.calls if c.hooks.module is self.module}
        # ``module.forward(x)``: hooks have not run, and parameters are sharded; torch does not compile such a call.
        forward = self._forward if not calls else self._compiled or self._forward
        if not self.enabled or not calls or any(c.call is None for c in calls.values()):
            return forward(*args, **kwargs)
        if self._compiled is not None and isinstance(self.kept, KeptShare):
            return self._compiled_with_share(self._compiled, self.kept.share, args, kwargs)
        if self._buffers is None:
            self._buffers = WrittenBuffers([self.module])
        buffers, views, copies = self._buffers, {group: c.views for group, c in calls.items()}, Copies()
        before = copied_arguments((args, kwargs))
        versions = _versions(before)
        keeping = _Keeping(self.kept)
        first = True
        failed: list[BaseException] = []

        def run(*_: Any) -> Any:
            nonlocal first
            if not first:
                if versions != _versions(before):
                    raise RuntimeError(
                        f"an argument of a checkpointed {type(self.module).__name__}, which is computed again in "
                        f"backward, was changed in place in its forward or since; change a copy, or shard the module "
                        f"with use_checkpoint=False"
                    )
                given, named = copied_arguments(before)
                try:
                    with buffers.restored(copies):
                        return self._recompute(views, keeping, functools.partial(forward, *given, **named))
                except RuntimeError as error:
                    if "TorchScript" in str(error) and str(error).rstrip().endswith("RuntimeError:"):
                        return None  # it has stopped; see [Note: scripted functions]
                    raise
            first = False
            try:
                with buffers.noting_writes(copies), keeping.forward():
                    return forward(*args, **kwargs)
            except BaseException as error:
                failed.append(error)  # raised outside: otherwise torch 2.8 would not remove the checkpoint's hooks
                return None

        # torch keeps the random states of the devices of positional tensor arguments only.
        place = torch.empty(0, device=self.group.context.device)
        result = checkpoint(run, place, use_reentrant=False, determinism_check=keeping.determinism_check)
        if failed:
            raise failed.pop()
        return result

    def _compiled_with_share(
        self, forward: Callable[..., Any], share: float, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        from torch._functorch import config

        checks = torch.is_grad_enabled() and share < 1.0
        generators = _random_states() if checks else []
        with config.patch(activation_memory_budget=share):  # read when it compiles
            result = forward(*args, **kwargs)
        if checks and not all(map(torch.equal, generators, _random_states())):
            raise RuntimeError(
                f"a compiled {type(self.module).__name__} with use_checkpoint={share:g} draws random numbers "
                f"(dropout): what torch recomputes of it in backward would draw other ones; shard it with "
                f"use_checkpoint=True or False to compile it"
            )
        return result

    def _recompute(
        self,
        views: Mapping[ParameterGroup, list[Tensor]],
        keeping: _Keeping,
        forward: Callable[[], Any],
    ) -> Any:
        if current_backward() is not None:
            for group in views:
                # Ranks compare the order in which they unshard, and one that saves no tensors recomputes nothing.
                if not (group.in_backward and group.is_unsharded):
                    group.unshard_in_backward()
        installed = [group for group, tensors in views.items() if group.install(tensors)]
        try:
            with keeping.recomputation():
                return forward()
        finally:
            for group in installed:
                group.uninstall()

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointedForward:
        twin = CheckpointedForward(
            copy.deepcopy(self.module, memo), copy.deepcopy(self.group, memo), copy.copy(self.kept)
        )
        twin.enabled = self.enabled
        twin.replaced = copy.deepcopy(self.replaced, memo)
        return twin


class _Keeping:
    """The results that one forward of a checkpointed module keeps."""

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


def _random_states() -> list[Tensor]:
    """The states of the generators that operations draw from."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _versions(value: Any) -> list[int]:
    """The versions of the tensors in nested arguments."""
    if isinstance(value, Tensor):
        return [] if value.is_inference() else [value._version]
    if isinstance(value, (list, tuple)):
        return [version for item in value for version in _versions(item)]
    if isinstance(value, dict):
        return [version for item in value.values() for version in _versions(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return [version for name in fields for version in _versions(getattr(value, name, None))]
    return []
