"""One-file checkpoints that hold the plain, unsharded state dict."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import (
    ParallelContext,
    check_agreement,
    current_context,
    errors_on_all,
    is_stage_local,
    local_tensor,
    note_place,
    shard_of,
    slice_of,
)
from bmt_comm.durable import obstacle

from .checkpoints.contents import check_dense, check_filled, check_has_values, check_writable
from .checkpoints.headers import NAMES, Entry
from .checkpoints.pretrained import KeyMap, WeightLoader, give_memory
from .checkpoints.rank0_source import Rank0Source
from .checkpoints.regions import flat_bytes
from .checkpoints.weight_files import Placeholder, WeightFile, weight_file, write_weights
from .sharded_parameter import ShardedParameter
from .stage_entry import StageEntry
from .state import (
    check_entries,
    dtype_of,
    dtypes_without_own_code,
    has_own_code,
    is_extra_state,
    load_state_dict,
    local_entries,
    logical_tensor,
    refuse_fsdp1,
    shape_of,
    versions_of,
    with_tp_parameters,
    with_versions,
    without_wrapper,
)

_log = logging.getLogger(__name__)
_writer = ThreadPoolExecutor(1, "bmt-zero-save")  # one thread, so that files are written in the order of the calls


def save(model: nn.Module, file_name: str | os.PathLike[str], non_blocking: bool = False) -> Future[None]:
    """Write the model's plain state dict to one file, which a plain PyTorch model loads.

    All ranks must call it; rank 0 writes. Parameters are unsharded and written one at a time. If a module has its own
    saving code (hooks, ``_save_to_state_dict``), all are unsharded at once. The file appears under its name only when
    it is complete and on the disk. A name that ends in ``.safetensors`` is written in that format (tensors only), any
    other as by ``torch.save``.

    Args:
        model: any module, sharded or not.
        file_name: the file; its folder must exist.
        non_blocking: whether to return when the values are in rank 0's host memory, and write in the background.

    Returns:
        A future that is done when the file is written. It is done on return unless ``non_blocking``, and always on
        ranks other than 0.

    Raises:
        ValueError: on every rank: a tensor is on the meta device or not dense; the model has entries that are not
            tensors, which safetensors cannot hold.
        RuntimeError: ranks have different models; nothing has filled parameters that were built on the meta device;
            rank 0 cannot write (on every rank; a failure in the background is the future's exception, and logged).
    """
    model = without_wrapper(model)
    context = current_context()
    path = target = Path(file_name)
    has_code = _has_own_code(model, context, loading=False)
    note_place("save")
    check_agreement(context.world, "save", _facts(model, has_code))
    entries = with_tp_parameters(model.state_dict(), model) if has_code else local_entries(model)
    _check_values(entries, model, context)
    names: dict[int, list[str]] = {}  # of each value, by its identity
    for name, value in entries.items():
        names.setdefault(id(value), []).append(name)
    others = {name: logical_tensor(value) for name, value in entries.items() if shape_of(value) is None}
    files: list[WeightFile] = []

    def prepare() -> None:
        nonlocal target
        target = Path(os.path.realpath(path))  # a symbolic link stays one, and its name gives the format
        if problem := obstacle(target):
            raise RuntimeError(f"rank 0 could not write {target}: {problem}")
        kinds = {i: Placeholder(n[0], shape_of(entries[n[0]]) or (), dtype_of(entries[n[0]])) for i, n in names.items()}
        state = {n: others[n] if n in others else kinds[id(v)] for n, v in entries.items()}
        files.append(weight_file(path, with_versions(state, versions_of(entries))))

    def write(values: Iterable[tuple[list[str], Tensor]]) -> None:
        write_weights(files[0], target, _by_name(values, path))

    _on_rank0(context, path, prepare)
    tensors = (  # every rank takes part
        (names[id(value)], logical_tensor(value))
        for name, value in entries.items()
        if name == names[id(value)][0] and name not in others
    )
    done: Future[None] = Future()
    if non_blocking:
        kept: list[tuple[list[str], Tensor]] = []
        _on_rank0(context, path, lambda: kept.extend((names, _host_copy(t)) for names, t in tensors), tensors)
        if context.rank == 0:
            done = _writer.submit(write, kept)
            done.add_done_callback(_log_failure)
            return done
    else:
        if context.rank == 0:
            _writer.submit(lambda: None).result()  # files are written in the order of the calls
        _on_rank0(context, path, lambda: write(tensors), tensors)
    done.set_result(None)
    return done


def _check_values(entries: Mapping[str, Any], model: nn.Module, context: ParallelContext) -> None:
    """Raise on every rank if the tensor of an entry cannot be saved."""
    with errors_on_all(context.world):
        check_filled(model)
        for name, entry in entries.items():
            value = entry.value if isinstance(entry, StageEntry) else entry
            if isinstance(value, Tensor):
                check_has_values(name, value)
                check_dense(name, value)


def _on_rank0(context: ParallelContext, path: Path, call: Callable[[], None], tensors: Iterable[Any] = ()) -> None:
    """Call ``call`` on rank 0 while the others take part in unsharding. An error is raised on every rank."""
    with errors_on_all(context.world):
        if context.rank > 0:
            deque(tensors, maxlen=0)
            return
        try:
            call()
        except Exception as error:
            deque(tensors, maxlen=0)  # the rest, which the other ranks unshard
            if isinstance(error, (ValueError, RuntimeError)):
                raise
            raise RuntimeError(f"rank 0 could not write {path}: {_one_line(error)}") from error


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _by_name(tensors: Iterable[tuple[list[str], Tensor]], path: Path) -> Iterator[tuple[str, list[Tensor]]]:
    """The bytes of each tensor: under its first name, and under all of them where the file has no ties."""
    for names, tensor in tensors:
        content = flat_bytes(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        for name in names if path.suffix == ".safetensors" else names[:1]:
            yield name, [content]


def load(model: nn.Module, file_name: str | os.PathLike[str], strict: bool = True, *, key_map: KeyMap = None) -> None:
    """Fill a model from a file with a plain state dict (:func:`save`, ``torch.save`` or safetensors), or a directory.

    All ranks must call it. Rank 0 reads and broadcasts a few MiB at a time, and each rank keeps its rows. If a module
    has its own loading code (hooks, ``_load_from_state_dict``), every rank gets the full state dict at once. Nothing in
    the file is executed. Before anything is changed, these are checked: names, shapes and dtypes; the range of numbers
    that are converted to a narrower dtype (which are read twice for this); the checksums of a file of ``torch.save``.

    From a directory (a checkpoint of a :class:`~bmt_zero.Checkpointer`, or the files that Hugging Face's
    ``save_pretrained`` writes), and with a ``key_map``, each rank reads its own rows; all ranks must see the files. Of
    tied weights, one name is enough then. Experts that the files have one by one (``experts.0.up_proj.weight``) go into
    the packed tensors of a model (``experts.gate_up_proj``), and names that transformers has changed are mapped.

    Parameters and buffers on the meta device get memory, except those that the file does not have.

    Args:
        model: any module, sharded or not.
        file_name: the file or directory.
        strict: whether the names must be those of the model, no more and no fewer.
        key_map: from names in the file to names in the model: a mapping, or a function that may return ``None`` for
            entries that are not read.

    Raises:
        FileNotFoundError: on every rank.
        ValueError: on every rank: the file is damaged, holds other things than tensors and plain values, or
            has missing or surplus (under ``strict``) or misshapen entries; a number is too large for the model's dtype;
            a parameter of FSDP2's is on the meta device. The model is not changed then. Or a file with one checksum per
            piece (a checkpoint of a ``Checkpointer``) is damaged where it is read: the model may be loaded in part.
        OSError: on every rank: the machine cannot read now. The model may be loaded in part.
        RuntimeError: ranks have different models.
        TypeError: a module is FSDP1's.
    """
    model = without_wrapper(model)
    refuse_fsdp1(model)
    context = current_context()
    path = Path(file_name)
    if context.world.broadcast_object(key_map is not None or _is_directory(path)):
        _load_parts(model, path, strict, key_map, context)
        return
    has_code = _has_own_code(model, context, loading=True) or _has_own_code(model, context, loading=False)
    note_place("load")
    check_agreement(context.world, "load", _facts(model, has_code))
    reading = Rank0Source(path, context, at_once=has_code)
    try:
        _fill(model, reading, strict, has_code, context.device)
    finally:
        reading.close()


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # no rank may raise alone; on rank 0, opening the file raises it again, on every rank
        return False


def _fill(model: nn.Module, reading: Rank0Source, strict: bool, has_code: bool, device: torch.device) -> None:
    if has_code:
        theirs = reading.context.world.all_gather_object(dtypes_without_own_code(model))  # stages have different layers
        reading.check_dtypes({name: dtype for each in theirs for name, dtype in each.items()})
        state: dict[str, Any] = {}
        for name, shape, dtype in reading.facts:
            first = reading.tied.get(name, name)
            state[name] = state[first] if first in state else reading.receive(name, shape, dtype)
        reading.check()
        give_memory(model, device)
        load_state_dict(model, with_versions(state, reading.versions), strict)
        return
    entries = local_entries(model)
    check_entries(entries, {name: shape for name, shape, _ in reading.facts}, strict)
    reading.check_dtypes({name: dtype_of(value) for name, value in entries.items() if not is_extra_state(name)})
    wanted = [fact for fact in reading.facts if fact[0] in entries]
    targets = {name: e.value if isinstance(e, StageEntry) else e for name, e in entries.items()}  # None elsewhere
    with errors_on_all(reading.context.world):  # stages have different tensors
        for name, _, _ in wanted:
            if isinstance(target := targets[name], Tensor) and target.layout is torch.strided:
                check_writable(name, local_tensor(target))
    made = give_memory(model, device, [targets[name] for name, _, _ in wanted])
    extra_state: dict[str, Any] = {}
    for name, shape, dtype in wanted:
        target = made.get(id(targets[name]), targets[name])
        if is_extra_state(name):
            extra_state[name] = reading.receive(name, shape, dtype)
        elif dtype in NAMES:
            reading.stream(Entry(name, NAMES[dtype], shape or ()), target)
        else:
            value = reading.receive(name, shape, dtype)
            if target is not None:
                with torch.no_grad():
                    local_tensor(target).copy_(shard_of(value, slice_of(target)))
        if isinstance(target, ShardedParameter):
            target.awaits_values = False
    reading.check()
    if extra_state:
        nn.Module.load_state_dict(model, extra_state, strict=False)


def _load_parts(model: nn.Module, path: Path, strict: bool, key_map: KeyMap, context: ParallelContext) -> None:
    """Load from files that each rank reads: its own rows."""
    with contextlib.ExitStack() as opened:
        with errors_on_all(context.world):
            loader = WeightLoader(model, path, key_map)
            opened.callback(loader.close)
        everyone = context.world.all_gather_object((loader.names(), loader.has_code()))
        elsewhere = {name for names, _ in everyone for name in names}
        by_code = any(has_code for _, has_code in everyone)
        with errors_on_all(context.world):
            loader.check(elsewhere, strict, by_code)
        if not by_code:
            with errors_on_all(context.world):
                loader.read(context.device)
            return
        with errors_on_all(context.world):
            state = loader.read_unsharded(context.device)
        load_state_dict(model, with_versions(state, loader.versions), strict)


def _log_failure(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        _log.error("a checkpoint could not be written: %s", _one_line(error))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _has_own_code(model: nn.Module, context: ParallelContext, loading: bool) -> bool:
    has_code = torch.tensor(any(has_own_code(m, loading) for m in model.modules()), dtype=torch.int64, device="cpu")
    has_code = has_code.to(context.device)
    context.pipe.all_reduce(has_code, "max")  # layers of another stage may have some
    return bool(has_code)


def _facts(model: nn.Module, has_code: bool) -> list[str]:
    """Descriptions of the entries, which must be the same on all ranks."""
    entries = {n: p for n, p in model.named_parameters(remove_duplicate=False) if not is_stage_local(p)}
    if not has_code:  # which local_entries() needs
        entries = local_entries(model)
    return [f"{name}: {shape_of(value)} {dtype_of(value)}" for name, value in entries.items()]
