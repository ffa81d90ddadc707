"""One-file checkpoints that hold the plain, unsharded state dict."""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import check_agreement, current_context

from .parameter import DistributedParameter
from .state import check_entries, local_entries, whole_tensor, write_whole

_writer: ThreadPoolExecutor | None = None


def save(model: nn.Module, file_name: str | os.PathLike[str], non_blocking: bool = False) -> Future[None]:
    """Write the model's plain state dict to one file, which a plain PyTorch model loads.

    All ranks must call it; rank 0 writes. Parameters are gathered one at a time, and rank 0 alone keeps them
    (in host memory). The file appears under its name only when it is complete. A name that ends in
    ``.safetensors`` is written in that format (tensors only; needs the safetensors package), any other as by
    ``torch.save``.

    Args:
        model: any module, sharded or not.
        file_name: the file; its folder must exist.
        non_blocking: return when the values are taken, and write in the background.

    Returns:
        A future that is done when the file is there; it is done on return unless ``non_blocking``, and
        always on ranks other than 0.

    Raises:
        RuntimeError: ranks have different models; rank 0 cannot write (on every rank).
    """
    context = current_context()
    path = Path(file_name)
    entries = local_entries(model)
    check_agreement(context.world, "save", _facts(entries))
    kept: dict[str, Any] = {}
    copies: dict[int, Any] = {}
    for name, value in entries.items():
        if id(value) not in copies:
            whole = whole_tensor(value)
            if isinstance(whole, Tensor):
                whole = whole.detach().to("cpu", copy=True).contiguous() if context.rank == 0 else None
            copies[id(value)] = whole
        kept[name] = copies[id(value)]
    done: Future[None] = Future()
    if non_blocking:
        if context.rank == 0:
            return _background().submit(_write, kept, path)
        done.set_result(None)
        return done
    problem = None
    if context.rank == 0:
        try:
            _write(kept, path)
        except Exception as error:  # told to the other ranks, which would wait for ever otherwise
            problem = error
    message = context.world.broadcast_object(None if problem is None else f"{type(problem).__name__}: {problem}")
    if message is not None:
        raise RuntimeError(f"rank 0 could not write {path}: {message}") from problem
    done.set_result(None)
    return done


def load(model: nn.Module, file_name: str | os.PathLike[str], strict: bool = True) -> None:
    """Fill a model from a file with a plain state dict (:func:`save`, ``torch.save`` or safetensors).

    All ranks must call it; rank 0 reads, one tensor at a time, and the others get theirs from it. Nothing in
    the file is executed (``weights_only``). The file is checked as a whole before anything is changed.

    Raises:
        FileNotFoundError: on every rank.
        ValueError: on every rank: the file is damaged, holds other things than tensors and plain values, or
            has missing or surplus (under ``strict``) or misshapen entries. The model is as it was then.
        RuntimeError: ranks have different models.
    """
    context = current_context()
    path = Path(file_name)
    entries = local_entries(model)
    check_agreement(context.world, "load", _facts(entries))
    state: Mapping[str, Any] = {}
    problem: BaseException | None = None
    if context.rank == 0:
        try:
            state = _read(path)
        except (OSError, ValueError) as error:
            problem = error
    header = None if problem else [(k, _shape(v), _dtype(v)) for k, v in state.items()]
    found, report = context.world.broadcast_object((header, _describe(problem)))
    if report is not None:
        kind, message = report
        raise (FileNotFoundError if kind == "FileNotFoundError" else ValueError)(message) from problem
    check_entries(entries, {name: shape for name, shape, _ in found}, strict)
    others: dict[str, Any] = {}
    for name, shape, dtype in found:
        if name not in entries:
            continue
        if shape is None:
            others[name] = context.world.broadcast_object(state.get(name))
            continue
        if context.rank == 0:
            whole = state[name].to(context.device).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype, device=context.device)
        context.world.broadcast(whole, 0)
        target = entries[name]
        if isinstance(target, DistributedParameter):
            write_whole(target, whole)
        else:
            with torch.no_grad():
                target.copy_(whole)
    if others:  # what modules keep by get_extra_state
        nn.Module.load_state_dict(model, others, strict=False)


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint file {path}")
    state: Any
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                state = torch.load(path, map_location="cpu", weights_only=True)  # torch's format before 1.6
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is damaged, or holds objects whose loading would run code; only tensors and plain values "
            f"are read: {str(error).splitlines()[0]}"
        ) from error
    except Exception as error:  # a damaged file can fail anywhere in the reader
        raise ValueError(f"{path} cannot be read; it may be truncated or no checkpoint: {error}") from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a state dict")
    return state


def _write(state: dict[str, Any], path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            # The format has no two names for one tensor.
            save_file({k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}, part)
        else:
            torch.save(state, part)
        with open(part, "rb") as written:
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


def _facts(entries: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {_shape(value)}" for name, value in entries.items()]


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, DistributedParameter):
        return value.bmt_slice.shape
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, Tensor) else None


def _describe(problem: BaseException | None) -> tuple[str, str] | None:
    return None if problem is None else (type(problem).__name__, str(problem))
