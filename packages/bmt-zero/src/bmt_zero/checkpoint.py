"""One-file checkpoints that hold the plain, unsharded state dict."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import ParallelContext, check_agreement, current_context

from .sharded_parameter import ShardedParameter
from .stage_entry import StageEntry, is_stage_local
from .state import (
    check_entries,
    dtype_of,
    has_own_code,
    is_extra_state,
    load_state_dict,
    local_entries,
    shape_of,
    whole_tensor,
    write_whole,
)

_log = logging.getLogger(__name__)
_writer: ThreadPoolExecutor | None = None


def save(model: nn.Module, file_name: str | os.PathLike[str], non_blocking: bool = False) -> Future[None]:
    """Write the model's plain state dict to one file, which a plain PyTorch model loads.

    All ranks must call it; rank 0 writes. Parameters are gathered one at a time, and rank 0 alone keeps them
    (in host memory); where a module has saving code of its own (hooks, ``_save_to_state_dict``), all of them
    at once, for that code to see. The file appears under its name only when it is complete. A name that ends
    in ``.safetensors`` is written in that format (tensors only; needs the safetensors package), any other as
    by ``torch.save``.

    Args:
        model: any module, sharded or not.
        file_name: the file; its folder must exist.
        non_blocking: return when the values are taken, and write in the background.

    Returns:
        A future that is done when the file is there; it is done on return unless ``non_blocking``, and
        always on ranks other than 0.

    Raises:
        ImportError: the safetensors package is missing (on every rank).
        ValueError: the model has entries that are no tensors, which safetensors cannot hold.
        RuntimeError: ranks have different models; rank 0 cannot write (on every rank; a failure in the
            background is the future's exception, and logged).
    """
    context = current_context()
    path = Path(file_name)
    has_code = _has_own_code(model, context, loading=False)
    check_agreement(context.world, "save", _facts(model, has_code))
    entries = model.state_dict() if has_code else local_entries(model)
    if path.suffix == ".safetensors":
        for name, value in entries.items():
            if shape_of(value) is None:
                raise ValueError(f"{name!r} is no tensor, and safetensors holds tensors only; use .pt")
    _raise_alike(context, _find_obstacle(path) if context.rank == 0 else None)
    taken: dict[int, Any] = {}
    for value in entries.values():
        if id(value) not in taken:
            taken[id(value)] = _take(value, context)
    kept = {name: taken[id(value)] for name, value in entries.items()}
    done: Future[None] = Future()
    done.set_result(None)
    if non_blocking:
        if context.rank != 0:
            return done
        done = _background().submit(_write, kept, path)
        done.add_done_callback(_log_failure)
        return done
    problem: Any = None
    if context.rank == 0:
        # Behind what is being written in the background already, perhaps to the same file.
        problem = _background().submit(_write, kept, path).exception()
    _raise_alike(context, problem and RuntimeError(f"rank 0 could not write {path}: {_one_line(problem)}"), problem)
    return done


def load(model: nn.Module, file_name: str | os.PathLike[str], strict: bool = True) -> None:
    """Fill a model from a file with a plain state dict (:func:`save`, ``torch.save`` or safetensors).

    All ranks must call it; rank 0 reads, one tensor at a time, and the others get theirs from it; where a
    module has loading code of its own (hooks, ``_load_from_state_dict``), all of them at once, for that code
    to see. Nothing in the file is executed (``weights_only``). The file is checked as a whole before anything
    is changed.

    Raises:
        FileNotFoundError: on every rank.
        ImportError: the safetensors package is missing (on every rank).
        ValueError: on every rank: the file is damaged, holds other things than tensors and plain values, or
            has missing or surplus (under ``strict``) or misshapen entries. The model is as it was then.
        RuntimeError: ranks have different models.
    """
    context = current_context()
    path = Path(file_name)
    has_code = _has_own_code(model, context, loading=True) or _has_own_code(model, context, loading=False)
    check_agreement(context.world, "load", _facts(model, has_code))
    state: Mapping[str, Any] = {}
    problem: Exception | None = None
    if context.rank == 0:
        try:
            state = _read(path)
        except (OSError, ValueError, ImportError) as error:
            problem = error
    _raise_alike(context, problem, problem)
    found = context.world.broadcast_object([(k, shape_of(v), dtype_of(v)) for k, v in state.items()])
    if has_code:
        load_state_dict(model, {f[0]: _receive(context, state, *f) for f in found}, strict)
        return
    entries = local_entries(model)
    check_entries(entries, {name: shape for name, shape, _ in found}, strict)
    extra_state: dict[str, Any] = {}
    for name, shape, dtype in found:
        if name not in entries:
            continue
        value = _receive(context, state, name, shape, dtype)
        target = entries[name]
        is_here = not isinstance(target, StageEntry) or target.is_here
        if isinstance(target, StageEntry):
            target = target.value
        if is_extra_state(name):
            extra_state[name] = value
        elif not is_here:
            pass
        elif isinstance(target, ShardedParameter):
            write_whole(target, value)
        else:
            with torch.no_grad():
                target.copy_(value)
        del value  # before there is the next
    if extra_state:
        nn.Module.load_state_dict(model, extra_state, strict=False)


def _take(value: Any, context: ParallelContext) -> Any:
    """A copy of an entry, in host memory, on rank 0; None elsewhere."""
    whole = whole_tensor(value)  # every rank takes part
    if context.rank != 0:
        return None
    if not isinstance(whole, Tensor):
        return copy.deepcopy(whole)
    return torch.empty(whole.shape, dtype=whole.dtype).copy_(whole)


def _receive(
    context: ParallelContext,
    state: Mapping[str, Any],
    name: str,
    shape: tuple[int, ...] | None,
    dtype: torch.dtype | None,
) -> Any:
    """An entry of rank 0's ``state`` on every rank."""
    if shape is None:
        return context.world.broadcast_object(state.get(name))
    if context.rank == 0:
        whole = state[name].detach().to(context.device).contiguous()
    else:
        whole = torch.empty(shape, dtype=dtype, device=context.device)
    context.world.broadcast(whole, 0)
    return whole


def _raise_alike(context: ParallelContext, problem: Exception | None, cause: BaseException | None = None) -> None:
    """Raise rank 0's problem on every rank."""
    report = context.world.broadcast_object(None if problem is None else (type(problem).__name__, str(problem)))
    if report is None:
        return
    kinds = {kind.__name__: kind for kind in (FileNotFoundError, ImportError, ValueError, RuntimeError)}
    name, message = report
    raise kinds.get(name, ValueError)(message) from (None if cause is problem else cause)


def _find_obstacle(path: Path) -> Exception | None:
    """Why a file cannot be written, as far as that can be told before the model is gathered."""
    if path.suffix == ".safetensors":
        try:
            import safetensors.torch  # noqa: F401
        except ImportError:
            return _no_safetensors(path)
    if not path.parent.is_dir():
        return RuntimeError(f"rank 0 could not write {path}: there is no folder {path.parent}")
    if path.is_dir():
        return RuntimeError(f"rank 0 could not write {path}: it is a folder")
    return None


def _no_safetensors(path: Path) -> ImportError:
    return ImportError(f"{path}: the safetensors package is needed for this; pip install 'bmt-zero[safetensors]'")


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint file {path}" + " (it is a folder)" * path.is_dir())
    state: Any
    try:
        if path.suffix == ".safetensors":
            try:
                from safetensors.torch import load_file
            except ImportError as error:
                raise _no_safetensors(path) from error
            state = load_file(path)
        else:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                state = torch.load(path, map_location="cpu", weights_only=True)  # torch's format before 1.6
    except ImportError:
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is damaged, or holds objects whose loading would run code; only tensors and plain values "
            f"are read: {_one_line(error)}"
        ) from error
    except Exception as error:  # a damaged file can fail anywhere in the reader
        raise ValueError(f"{path} cannot be read; it may be truncated or no checkpoint: {_one_line(error)}") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a state dict")
    for name, value in state.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} holds no state dict: {name!r} is not a name")
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_quantized or value.is_meta):
            raise ValueError(
                f"{path} holds no plain tensor under {name!r}, but one of {value.layout} on {value.device}"
            )
    return state


def _write(state: dict[str, Any], path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            distinct: dict[int, str] = {}
            for name, tensor in state.items():  # the format has no two names for one tensor
                if distinct.setdefault(id(tensor), name) != name:
                    state[name] = tensor.clone()
            save_file(state, part, metadata={"format": "pt"})
        else:
            torch.save(state, part)
        with open(part, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _background() -> ThreadPoolExecutor:
    """One thread, so that files are written in the order of the calls; the process waits for it at exit."""
    global _writer
    if _writer is None:
        _writer = ThreadPoolExecutor(1, "bmt-zero-save")
        atexit.register(_writer.shutdown)
    return _writer


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        _log.error("a checkpoint could not be written: %s", _one_line(error))


def _one_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _has_own_code(model: nn.Module, context: ParallelContext, loading: bool) -> bool:
    found = any(has_own_code(module, loading) for module in model.modules())
    if context.pipe_size == 1:
        return found
    flag = torch.tensor(int(found), device=context.device)  # another stage's layers may have some
    context.pipe.all_reduce(flag, "max")
    return bool(flag)


def _facts(model: nn.Module, has_code: bool) -> list[str]:
    """What ranks must agree on."""
    if has_code:  # which stands in the way of asking for the entries as they are
        entries: dict[str, Any] = {
            n: p for n, p in model.named_parameters(remove_duplicate=False) if not is_stage_local(p)
        }
    else:
        entries = local_entries(model)
    return [f"{name}: {shape_of(value)} {dtype_of(value)}" for name, value in entries.items()]
