"""One-file checkpoints that hold the plain, unsharded state dict."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import ParallelContext, check_agreement, current_context

from .checkpoints.directory import sync_directory
from .checkpoints.pretrained import KeyMap, WeightLoader
from .checkpoints.pt_files import read_state_dict
from .sharded_parameter import ShardedParameter
from .stage_entry import StageEntry, is_stage_local
from .state import (
    check_entries,
    dtype_of,
    has_own_code,
    is_extra_state,
    load_state_dict,
    local_entries,
    logical_tensor,
    raise_on_all,
    shape_of,
    write_logical,
)

_log = logging.getLogger(__name__)
_writer = ThreadPoolExecutor(1, "bmt-zero-save")  # one thread, so that files are written in the order of the calls


def save(model: nn.Module, file_name: str | os.PathLike[str], non_blocking: bool = False) -> Future[None]:
    """Write the model's plain state dict to one file, which a plain PyTorch model loads.

    All ranks must call it; rank 0 writes. Parameters are gathered one at a time, and only rank 0 keeps them, in host
    memory. If a module has its own saving code (hooks, ``_save_to_state_dict``), all are gathered at once. The file
    appears under its name only when it is complete. A name that ends in ``.safetensors`` is written in that format
    (tensors only; needs the safetensors package), any other as by ``torch.save``.

    Args:
        model: any module, sharded or not.
        file_name: the file; its folder must exist.
        non_blocking: return when the values are copied, and write in the background.

    Returns:
        A future that is done when the file is written. It is done on return unless ``non_blocking``, and always on
        ranks other than 0.

    Raises:
        ImportError: the safetensors package is missing (on every rank).
        ValueError: the model has entries that are not tensors, which safetensors cannot hold.
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
    obstacle: Exception | None = None
    if context.rank == 0:
        try:
            path = Path(os.path.realpath(path))  # a symbolic link stays one
            obstacle = _find_obstacle(path)
        except OSError as error:
            obstacle = RuntimeError(f"rank 0 could not write {path}: {_one_line(error)}")
    raise_on_all(context.world, obstacle)
    kept = take_to_rank0(entries, context)
    done: Future[None] = Future()
    if context.rank == 0:
        done = _writer.submit(_write, kept, path)
    else:
        done.set_result(None)
    if non_blocking:
        done.add_done_callback(_log_failure)
        return done
    failure, problem = done.exception(), None
    if failure is not None:
        problem = RuntimeError(f"rank 0 could not write {path}: {_one_line(failure)}")
        problem.__cause__ = failure
    raise_on_all(context.world, problem)
    return done


def load(model: nn.Module, file_name: str | os.PathLike[str], strict: bool = True, *, key_map: KeyMap = None) -> None:
    """Fill a model from a file with a plain state dict (:func:`save`, ``torch.save`` or safetensors), or a directory.

    All ranks must call it; rank 0 reads and broadcasts one tensor at a time, or all at once if a module has its own
    loading code (hooks, ``_load_from_state_dict``). Nothing in the file is executed (``weights_only``). The file is
    checked as a whole before anything is changed.

    From a directory (a checkpoint of a :class:`~bmt_zero.Checkpointer`, or what Hugging Face's ``save_pretrained``
    writes), and with a ``key_map``, each rank reads what it holds; all ranks must see the files. Parameters and buffers
    of plain modules may then be on the meta device, and names of tied weights may be missing but for one.

    Args:
        model: any module, sharded or not.
        file_name: the file or directory.
        strict: whether the names must be those of the model, no more and no fewer.
        key_map: from names in the file to names in the model: a mapping, or a function that may return ``None`` for
            what is not to be read.

    Raises:
        FileNotFoundError: on every rank.
        ImportError: the safetensors package is missing (on every rank).
        ValueError: on every rank: the file is damaged, holds other things than tensors and plain values, or
            has missing or surplus (under ``strict``) or misshapen entries. The model is then unchanged.
        RuntimeError: ranks have different models.
    """
    context = current_context()
    path = Path(file_name)
    if context.world.broadcast_object(path.is_dir() or key_map is not None):
        _load_parts(model, path, strict, key_map, context)
        return
    has_code = _has_own_code(model, context, loading=True) or _has_own_code(model, context, loading=False)
    check_agreement(context.world, "load", _facts(model, has_code))
    state: Mapping[str, Any] = {}
    problem: Exception | None = None
    if context.rank == 0:
        try:
            state = _read(path)
        except Exception as error:  # the others wait to hear of it
            problem = error
    raise_on_all(context.world, problem)
    facts = context.world.broadcast_object([(k, shape_of(v), dtype_of(v)) for k, v in state.items()])

    def receive(name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Any:
        value = state.get(name)
        return StageEntry(value, shape, dtype, context.world, owner=0).spread(value)

    if has_code:
        load_state_dict(model, {fact[0]: receive(*fact) for fact in facts}, strict)
        return
    entries = local_entries(model)
    check_entries(entries, {name: shape for name, shape, _ in facts}, strict)
    for name, _, dtype in facts:
        mine = dtype_of(entries.get(name))
        if mine is not None and not _converts(dtype, mine) and not is_extra_state(name):
            raise ValueError(f"{path}: {name!r} has dtype {dtype}, the model's has {mine}; nothing was loaded")
    extra_state: dict[str, Any] = {}
    for name, shape, dtype in facts:
        if name not in entries:
            continue
        value = receive(name, shape, dtype)
        target = entries[name]
        if dtype is not None and _becomes_infinite(value, dtype_of(target)):
            raise ValueError(f"{path}: {name!r} has numbers of {dtype} that are infinite in {dtype_of(target)}")
        if isinstance(target, StageEntry):
            target = target.value  # None on other stages
        if is_extra_state(name):
            extra_state[name] = value
        elif isinstance(target, ShardedParameter):
            write_logical(target, value)
        elif target is not None:
            with torch.no_grad():
                target.copy_(value)
        del value  # before the next one is received
    if extra_state:
        nn.Module.load_state_dict(model, extra_state, strict=False)


def _load_parts(model: nn.Module, path: Path, strict: bool, key_map: KeyMap, context: ParallelContext) -> None:
    """Each rank reads what it holds."""
    loaders: list[WeightLoader] = []

    def together(call: Callable[[], object]) -> None:
        problem: Exception | None = None
        try:
            call()
        except (OSError, ValueError, TypeError) as error:
            problem = error
        raise_on_all(context.world, problem)

    try:
        together(lambda: loaders.append(WeightLoader(model, path, key_map)))
        everyone = context.world.all_gather_object((loaders[0].names(), loaders[0].has_code()))
        elsewhere = {name for names, _ in everyone for name in names}
        together(lambda: loaders[0].check(elsewhere, strict))
        if any(has_code for _, has_code in everyone):
            state: dict[str, Tensor] = {}
            together(lambda: state.update(loaders[0].read_whole()))
            load_state_dict(model, state, strict)
        else:
            together(lambda: loaders[0].read(context.device))
    finally:
        for loader in loaders:
            loader.close()


def take_to_rank0(entries: Mapping[str, Any], context: ParallelContext) -> dict[str, Any]:
    """Copies of entries in host memory on rank 0, one for all names of a value; None elsewhere. All ranks take part."""
    taken: dict[int, Any] = {}
    for value in entries.values():
        if id(value) not in taken:
            taken[id(value)] = _take(value, context)
    return {name: taken[id(value)] for name, value in entries.items()}


def _take(value: Any, context: ParallelContext) -> Any:
    """A copy of an entry in host memory on rank 0; None elsewhere."""
    value = logical_tensor(value)  # every rank takes part
    if context.rank != 0:
        return None
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def _find_obstacle(path: Path) -> Exception | None:
    """Why a file cannot be written, if that is known before the model is gathered."""
    if path.suffix == ".safetensors":
        try:
            import safetensors.torch  # noqa: F401
        except ImportError:
            return _no_safetensors(path)
    if not path.parent.is_dir():
        return RuntimeError(f"rank 0 could not write {path}: there is no folder {path.parent}")
    if path.is_dir():
        return RuntimeError(f"rank 0 could not write {path}: it is a folder")
    if path.exists() and not path.is_file():
        return RuntimeError(f"rank 0 could not write {path}: it is no regular file")
    return None


def _converts(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Whether numbers of one dtype may be loaded as another."""
    return source == target or (source is not None and source.is_floating_point and target.is_floating_point)


def _becomes_infinite(value: Any, dtype: torch.dtype | None) -> bool:
    if not isinstance(value, Tensor) or dtype is None or not (value.is_floating_point() and dtype.is_floating_point):
        return False
    narrows = torch.finfo(dtype).max < torch.finfo(value.dtype).max
    return narrows and bool((value.to(dtype).isinf() & ~value.isinf()).any())


def _no_safetensors(path: Path) -> ImportError:
    return ImportError(f"{path}: the safetensors package is needed for this; pip install 'bmt-zero[safetensors]'")


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint file {path}" + " (it is a folder)" * path.is_dir())
    if path.suffix != ".safetensors":
        return read_state_dict(path)
    try:
        from safetensors.torch import load_file

        return load_file(path)
    except ImportError as error:
        raise _no_safetensors(path) from error
    except Exception as error:  # a damaged file can fail anywhere in the reader
        raise ValueError(f"{path} cannot be read; it may be truncated or no checkpoint: {_one_line(error)}") from error


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
        sync_directory(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _log_failure(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        _log.error("a checkpoint could not be written: %s", _one_line(error))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _has_own_code(model: nn.Module, context: ParallelContext, loading: bool) -> bool:
    has_code = torch.tensor(any(has_own_code(m, loading) for m in model.modules()), dtype=torch.int64)
    has_code = has_code.to(context.device)
    context.pipe.all_reduce(has_code, "max")  # layers of another stage may have some
    return bool(has_code)


def _facts(model: nn.Module, has_code: bool) -> list[str]:
    """What ranks must agree on."""
    entries = {n: p for n, p in model.named_parameters(remove_duplicate=False) if not is_stage_local(p)}
    if not has_code:  # which local_entries() needs
        entries = local_entries(model)
    return [f"{name}: {shape_of(value)} {dtype_of(value)}" for name, value in entries.items()]
