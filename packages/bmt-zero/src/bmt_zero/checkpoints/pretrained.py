"""Loading weights from a checkpoint, a Hugging Face directory, a safetensors file or a ``torch.save`` file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import local_tensor
from bmt_zero.sharded_parameter import ShardedParameter
from bmt_zero.state import dtypes_without_own_code, is_extra_state, valid_versions

from . import trainer_state
from .contents import (
    Content,
    any_own_code,
    check_writable,
    contents_of_model,
    distinct_tensors,
    extra_states,
    mark_loaded,
    set_extra_states,
    without_memory,
)
from .headers import DamagedError, Entry, parse_json
from .job import EXTRA_STATE
from .loading import read_extra_states
from .manifest import NAME, FileRecord, read_manifest, read_small_file
from .packed_experts import PackedExperts, names_in_model
from .pt_files import PtSource
from .reader import check_fit, check_range, fill, read_tensor, read_unsharded
from .sources import SafetensorsSource, Source, checkpoint_source, hugging_face_files
from .trees import decode

_log = logging.getLogger("bmt_zero.checkpoints")

KeyMap = Mapping[str, str] | Callable[[str], "str | None"] | None
"""A map from names in the files to names in the model. Names that it lacks or maps to ``None`` are not read."""


def open_source(path: Path) -> Any:
    """Open the tensors at a path: a :class:`Source` with a method ``close``.

    A directory is a checkpoint of a :class:`Checkpointer`, or contains what Hugging Face's ``save_pretrained`` writes.

    Raises:
        FileNotFoundError: the path does not exist.
        DamagedError: the file or directory is damaged, or has an unknown format.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint file or directory {path}")
    if path.is_dir():
        return _open_directory(path)
    return SafetensorsSource([path]) if path.suffix == ".safetensors" else PtSource(path)


def _open_directory(path: Path) -> Any:
    files: Mapping[str, FileRecord | None] = {}
    if (path / NAME).exists():
        manifest = read_manifest(path)
        source, files = checkpoint_source(path, manifest, "model"), manifest.files
    else:
        names = hugging_face_files(path)
        if names[0].suffix == ".bin":
            return PtSource(names[0]) if len(names) == 1 else JoinedSource(names)
        source = SafetensorsSource(names)
        if (path / EXTRA_STATE).is_file():  # a checkpoint that was converted
            files = {EXTRA_STATE: None}
    try:
        if trainer_state.FILE in files:
            trainer = parse_json(path, read_small_file(path / trainer_state.FILE, files[trainer_state.FILE]))
            source.versions = valid_versions(trainer.get("module_versions") if isinstance(trainer, dict) else None)
        if EXTRA_STATE in files:
            source.others = _extra_states(path / EXTRA_STATE, files[EXTRA_STATE])
    except BaseException:
        source.close()
        raise
    return source


def _extra_states(path: Path, record: FileRecord | None) -> dict[str, Any]:
    """What modules returned from ``get_extra_state``, by the names in the state dict."""
    return {name: decode(state, f"{path}: {name!r}") for name, state in read_extra_states(path, record).items()}


def _mapped(name: str, key_map: KeyMap) -> str | None:
    if key_map is None:
        return name
    return key_map(name) if callable(key_map) else key_map.get(name)


class JoinedSource:
    """Several ``torch.save`` files, each with some entries of one state dict.

    Raises:
        DamagedError: a file is damaged, or two files have an entry of the same name.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._sources: list[PtSource] = []
        self._places: dict[str, PtSource] = {}
        self.others: dict[str, Any] = {}
        self.versions: dict[str, Any] | None = None
        try:
            for path in paths:
                self._sources.append(source := PtSource(path))
                for name in (*source.entries, *source.others):
                    if name in self._places:
                        raise DamagedError(f"{path} has {name!r}, and so has another file of its directory")
                    self._places[name] = source
                self.others |= source.others
                if source.versions is not None:
                    self.versions = {**(self.versions or {}), **source.versions}
        except BaseException:
            self.close()
            raise
        self.entries = {name: entry for source in self._sources for name, entry in source.entries.items()}
        self.tied = {name: first for source in self._sources for name, first in source.tied.items()}
        self.nbytes = sum(source.nbytes for source in self._sources)

    def read(self, name: str, low: int, high: int) -> Tensor:
        return self._places[name].read(name, low, high)

    def read_into(self, name: str, low: int, out: Tensor) -> None:
        self._places[name].read_into(name, low, out)

    def finish(self) -> None:
        """Files of ``torch.save`` are checked when they are opened."""

    def close(self) -> None:
        for source in self._sources:
            source.close()


class RenamedSource:
    """A source whose tensors have other names. Tensors that ``key_map`` leaves out are not part of it.

    Raises:
        ValueError: ``key_map`` maps two names to one.
    """

    def __init__(self, source: Source, key_map: KeyMap) -> None:
        self._source = source
        self._names: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        self.others: dict[str, Any] = {}
        for name, entry in source.entries.items():
            mapped = _mapped(name, key_map)
            if mapped is None:
                continue
            if mapped in self._names:
                raise ValueError(f"key_map gives {self._names[mapped]!r} and {name!r} the same name {mapped!r}")
            self._names[mapped] = name
            self.entries[mapped] = Entry(mapped, entry.dtype, entry.shape)
        names = {name: mapped for mapped, name in self._names.items()}
        firsts: dict[str, str] = {}  # the first mapped name of each tied tensor
        self.tied: dict[str, str] = {}
        for name, mapped in names.items():
            first = firsts.setdefault(source.tied.get(name, name), mapped)
            if first != mapped:
                self.tied[mapped] = first

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    def read(self, name: str, low: int, high: int) -> Tensor:
        return self._source.read(self._names[name], low, high)

    def read_into(self, name: str, low: int, out: Tensor) -> None:
        self._source.read_into(self._names[name], low, out)

    def finish(self) -> None:
        self._source.finish()


class WeightLoader:
    """Loads weights on one rank. Nothing is changed before :meth:`read` or :meth:`read_unsharded`.

    Args:
        model: the model. Parameters and buffers of plain modules may be on the meta device.
        path: see :func:`open_source`.
        key_map: see :data:`KeyMap`.
    """

    def __init__(self, model: nn.Module, path: Path, key_map: KeyMap) -> None:
        self._model, self._path = model, path
        self._opened = open_source(path)
        self._key_map = key_map
        self._source: Source = RenamedSource(self._opened, key_map)
        self._contents = contents_of_model(model)
        self._extra = self._read_extra(key_map)
        self.versions = self._opened.versions if key_map is None else None

    def _read_extra(self, key_map: KeyMap) -> dict[str, Any] | None:
        """States of modules with ``get_extra_state``, by the model's names; ``None`` if the files cannot have any."""
        states = {name: value for name, value in self._opened.others.items() if is_extra_state(name)}
        states.update({n: read_tensor(self._opened, n) for n in self._opened.entries if is_extra_state(n)})
        if not states and isinstance(self._opened, SafetensorsSource) and not (self._path / NAME).exists():
            return None
        mapped = {_mapped(name, key_map): state for name, state in states.items()}
        return {name: state for name, state in mapped.items() if name is not None}

    def names(self) -> list[str]:
        """The names of the tensors that this rank needs."""
        return [content.entry.name for content in self._contents]

    def has_code(self) -> bool:
        """Whether this rank's part of the model has its own code for saving or loading."""
        return any_own_code(self._model)

    def read_unsharded(self, device: torch.device) -> dict[str, Any]:
        """The unsharded state dict, for a model with its own code. Tensors of the model on the meta device get memory
        on ``device``."""
        values: dict[str, Any] = {**read_unsharded(self._source), **(self._extra or {})}
        for group in self._tied():
            has = [content.entry.name for content in group if content.entry.name in values]
            values.update(
                {content.entry.name: values[has[0]] for content in group if has and content.entry.name not in has}
            )
        give_memory(self._model, device)
        return values

    def _tied(self) -> Iterable[list[Content]]:
        """The contents that this rank needs, grouped by tensor. A source needs only one name of tied weights."""
        groups: dict[int, list[Content]] = {}
        for content, index in zip(self._contents, distinct_tensors(self._contents)[1]):
            groups.setdefault(index, []).append(content)
        return groups.values()

    def check(self, elsewhere: set[str], strict: bool, by_code: bool) -> None:
        """Raise ValueError unless the source fits.

        Args:
            elsewhere: the names that other ranks need.
            by_code: whether the model's own code loads the entries. It may rename and convert them.
        """
        own = {content.entry.name for content in self._contents}
        if self._key_map is None and not (self._path / NAME).exists():  # a checkpoint has the model's names
            names = names_in_model(self._model, self._opened.entries, own | elsewhere)
            self._source = RenamedSource(self._opened, names)
        self._source = PackedExperts(self._source, own | elsewhere)
        if by_code:
            plain, entries = dtypes_without_own_code(self._model), self._source.entries
            self._wanted = [c for c in self._contents if c.entry.name in plain and c.entry.name in entries]
            self._raise_unless_it_fits(
                check_fit(entries.values(), [c.entry for c in self._wanted], str(self._path), strict=False)
            )
            return
        offered = [each for each in self._source.entries.items() if not is_extra_state(each[0])]
        theirs = [entry for name, entry in offered if name in own or name not in elsewhere]
        self._wanted = []
        for group in self._tied():
            has = [content for content in group if content.entry.name in self._source.entries]
            self._wanted += has or (group if strict else [])
        problems = check_fit(theirs, [c.entry for c in self._wanted], str(self._path), strict)
        if offered and not any(name in own or name in elsewhere for name, _ in offered):
            some = ", ".join(repr(name) for name, _ in offered[:3])
            _log.warning("nothing is loaded: not one of the entries of %s, %s, ..., is the model's", self._path, some)
        lacking = [name for name in extra_states(self._model) if name not in (self._extra or {})]
        if strict and lacking and self._extra is not None:
            problems.append(f"{self._path} lacks {lacking[:5]}")
        self._raise_unless_it_fits(problems)

    def _raise_unless_it_fits(self, problems: list[str]) -> None:
        if problems:
            raise ValueError(f"{self._path} does not fit the model; nothing was loaded: " + "; ".join(problems))
        for content in self._wanted:
            check_writable(content.entry.name, content.tensor)
        check_range(self._wanted, self._source)

    def read(self, device: torch.device) -> None:
        """Fill the model. Tensors on the meta device get memory on ``device``."""
        if any(content.tensor.is_meta for content in self._wanted):
            give_memory(self._model, device, [content.owner for content in self._wanted])
            names = {content.entry.name for content in self._wanted}
            self._wanted = [content for content in contents_of_model(self._model) if content.entry.name in names]
        fill(self._wanted, self._source)
        mark_loaded(self._wanted)
        mine = extra_states(self._model)
        set_extra_states(self._model, {name: state for name, state in (self._extra or {}).items() if name in mine})

    def close(self) -> None:
        self._opened.close()


def give_memory(model: nn.Module, device: torch.device, wanted: Iterable[Any] | None = None) -> dict[int, Tensor]:
    """Replace parameters and saved buffers on the meta device by tensors with memory. Tied ones stay tied.

    Args:
        wanted: the tensors that will be filled; ``None``: all that a state dict has.

    Returns:
        the new tensors, by the identity of the replaced ones.

    Raises:
        ValueError: a tensor is a DTensor, which cannot be replaced here. Nothing was changed.
    """
    ids = None if wanted is None else {id(each) for each in wanted}
    meta: list[tuple[dict[str, Any], str, Tensor]] = []
    for path, module in model.named_modules():
        saved = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for places, tensors in ((module._parameters, module._parameters.items()), (module._buffers, saved.items())):
            for name, tensor in tensors:
                if tensor is None or not tensor.is_meta or isinstance(tensor, ShardedParameter):
                    continue
                if ids is not None and id(tensor) not in ids:
                    continue
                if hasattr(tensor, "placements"):  # its FSDP2 group has more references to it
                    raise without_memory(f"{path}.{name}" if path else name)
                meta.append((places, name, tensor))
    made: dict[int, Tensor] = {}
    for places, name, tensor in meta:
        if id(tensor) not in made:
            with torch.inference_mode(False), torch.no_grad():  # it may be trained later
                memory = torch.empty_like(local_tensor(tensor), device=device)
                is_param = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_param else memory
        places[name] = made[id(tensor)]
    return made
