"""Writing the gathered state of optimizers to a file, in the background."""

from __future__ import annotations

import copy
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmt_comm import is_dtensor
from bmt_comm.durable import complete_file, obstacle

from .manager import OptimManager, gathers
from .state_dict import keeps_gathered_state

_log = logging.getLogger(__name__)
_writer = ThreadPoolExecutor(1, "bmt-optim-save")  # one thread, so that files are written in the order of the calls


def save_optimizer(
    optimizer: torch.optim.Optimizer | OptimManager, file_name: str | os.PathLike[str], non_blocking: bool = False
) -> Future[None]:
    """Write the gathered state of an optimizer, or of a manager with all it steps, to one file.

    All ranks must call it. The state is gathered, one parameter at a time, into the host memory of the rank that
    writes: rank 0, or the first rank of each pipeline stage. Each stage then needs a file name of its own. The gathered
    state is a copy, so training may go on while it is written. ``torch.load(file_name, weights_only=True)`` gives what
    ``load_state_dict`` takes, at any layout with the same pipeline stages. The file appears under its name only when it
    is complete.

    Args:
        optimizer: one whose ``state_dict`` takes ``gather`` (ours), or an :class:`OptimManager`.
        file_name: the file; its folder must exist.
        non_blocking: return when the state is gathered, and write in the background. The process does not
            end before it is written.

    Returns:
        A future that is done when the file is there; it is done on return unless ``non_blocking``, and
        always on ranks that do not write.

    Raises:
        TypeError: ``optimizer`` cannot gather its state.
        ValueError: two pipeline stages are to write the same file (on every rank).
        RuntimeError: a rank cannot write its file (on every rank; a failure in the background is the
            future's exception, and logged).
    """
    path = Path(os.path.realpath(file_name))  # a symbolic link stays one
    for each in optimizer.optimizers if isinstance(optimizer, OptimManager) else [optimizer]:
        # A manager may have optimizers whose state needs no gathering.
        has_parts = any(is_dtensor(param) for group in each.param_groups for param in group["params"])
        if (each is optimizer or has_parts) and not gathers(each):
            raise TypeError(
                f"{type(each).__name__} cannot gather its state; save what its state_dict() returns, or the run with "
                f"bmt_zero.Checkpointer"
            )
    writes = keeps_gathered_state()
    problem = _obstacle(path) if writes else None
    reports = _from_all_ranks((str(path) if writes else None, problem and f"cannot write {path}: {problem}"))
    _raise_first(path, [problem for _, problem in reports])
    targets = [target for target, _ in reports if target is not None]
    for target in targets:
        if targets.count(target) > 1:
            raise ValueError(f"{targets.count(target)} pipeline stages are to write {target}; give each its own file")
    if isinstance(optimizer, OptimManager):
        state = optimizer.state_dict(gather_opt=True)
    else:
        state = optimizer.state_dict(gather=True)  # type: ignore[call-arg]
    done: Future[None] = Future()
    if not writes:
        done.set_result(None)
    else:
        try:
            done = _writer.submit(_write, _detached(optimizer, state), path)
        except Exception as failure:  # reported to the other ranks below
            done.set_exception(failure)
    if non_blocking:
        done.add_done_callback(_log_failure)
        return done
    error = done.exception()
    _raise_first(path, _from_all_ranks(error and f"{type(error).__name__}: {error}"))
    return done


def _detached(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The gathered state. It shares no memory with the training."""
    if not isinstance(optimizer, OptimManager):
        return _detached_state(optimizer, state)
    pairs = zip(optimizer.optimizers, state["optimizers"])
    return {
        **{key: _copied(value) for key, value in state.items() if key != "optimizers"},
        "optimizers": [_detached_state(each, saved) for each, saved in pairs],
    }


def _detached_state(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)  # which may have added tensors
    is_detached = gathers(optimizer) and not hooks
    return {key: value if key == "state" and is_detached else _copied(value) for key, value in state.items()}


def _copied(value: Any) -> Any:
    """A copy whose tensors are in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(entry) for entry in value)
    return copy.deepcopy(value)


def _obstacle(path: Path) -> str | None:
    """Why the file cannot be written, as far as it can be known before the state is gathered."""
    try:
        return obstacle(path)
    except OSError as error:  # such as a folder without read permission
        return str(error)


def _from_all_ranks(mine: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _raise_first(path: Path, problems: list[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise RuntimeError(f"rank {rank} cannot write {path}: {problem}")


def _write(state: dict[str, Any], path: Path) -> None:
    with complete_file(path) as part:
        torch.save(state, part)


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        _log.error("an optimizer's state could not be written: %s: %s", type(error).__name__, error)
