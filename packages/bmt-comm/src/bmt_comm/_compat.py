"""The differences between torch versions in what this package calls."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch
import torch._C._dynamo.eval_frame as _eval_frame
import torch.distributed as dist
from torch.utils import checkpoint

eval_frame: Any = _eval_frame
_F = TypeVar("_F", bound=Callable[..., Any])

_version: Any = torch.__version__  # a TorchVersion


def _compiler() -> Any:
    return sys.modules.get("torch._dynamo.eval_frame")


# Returns something if the compiler may look at frames. torch 2.6 and 2.7 have the function, but it returns a borrowed
# reference as a new one, and the process crashes later.
_callback: Any = eval_frame.get_eval_frame_callback if _version >= (2, 8) else _compiler


def not_compiled(function: _F) -> _F:
    """Exclude a function, and all that it calls, from the graphs of ``torch.compile``.

    As ``torch.compiler.disable``, but while nothing is being compiled a call costs 0.1 us instead of several, and the
    compiler, whose import takes a second, is not imported.
    """
    disabled: Any = torch._disable_dynamo(function)

    def eager(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _callback() is None else disabled(*args, **kwargs)

    _skip(eager.__code__)  # where its frame runs while the compiler watches
    wrapped: Any = functools.update_wrapper(eager, function)
    wrapped._torchdynamo_disable = True  # where a graph comes to a call
    return wrapped


_has_compiled = False


def uses_compiler() -> bool:
    """Whether something was compiled by ``torch.compile`` in this process, as this function has seen it.

    Whether a module will run compiled is not known in advance, because it may call any function. So this is a property
    of the process. Once true, it stays true: ``torch._dynamo.reset()`` empties the table, but functions that were
    compiled are compiled again.
    """
    global _has_compiled
    if not _has_compiled:
        module = sys.modules.get("torch._dynamo.eval_frame")
        backends = {} if module is None else getattr(module, "cached_backends", None)
        # Functions that are excluded from compilation have None.
        _has_compiled = backends is None or any(backend is not None for backend in backends.values())
    return _has_compiled


def runs_compiled_autograd() -> bool:
    """Whether the backward pass that is running was captured to be compiled."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    names = "in_compiled_autograd_region", "compiled_autograd_enabled"
    return module is not None and any(getattr(module, name, False) for name in names)


def _skip(code: CodeType) -> None:
    """Let the compiler skip frames of a code object, but not what they call. torch 2.7 renamed the functions."""
    if hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    else:
        eval_frame.skip_code(code)


# torch 2.13 renamed the single-tensor collectives and deprecates the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """End the operations of process groups with an error; does nothing if torch cannot.

    NCCL's communicators are aborted together, the latest first: one that is aborted by itself may wait for another.
    """
    backends = [backend for group in groups if (backend := _nccl_backend(group)) is not None]
    if backends:
        backends[0]._group_start()
    try:
        for group in reversed(groups):
            if hasattr(group, "abort"):
                group.abort()
    finally:
        if backends:
            backends[0]._group_end()


def constant_when_compiled(function: _F) -> _F:
    """Let torch.compile call a function of constants while it traces, instead of tracing the function."""
    # As torch.compiler.assume_constant_result, which imports the compiler; that takes seconds.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The backend of a process group for each type of device. The group's own name may be "undefined"."""
    return dict(each.split(":") for each in str(dist.get_backend_config(group)).split(","))


def uses_nccl(group: dist.ProcessGroup) -> bool:
    return backends(group).get("cuda") == "nccl"


def _nccl_backend(group: dist.ProcessGroup) -> Any:
    """The NCCL backend of a process group, if it can abort together with others; else None."""
    if not uses_nccl(group):
        return None
    backend = group._get_backend(torch.device("cuda"))
    return backend if hasattr(backend, "_group_start") else None


def inside_checkpoint() -> bool:
    """Whether a non-reentrant ``torch.utils.checkpoint`` is active."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if ask is not None:
        hooks = ask(False)
        return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__
    # torch 2.6 does not expose the hooks. The innermost running function of torch.utils.checkpoint tells.
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != checkpoint.__name__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("checkpoint", "recompute_fn")
