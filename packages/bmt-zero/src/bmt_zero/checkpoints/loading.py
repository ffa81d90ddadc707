"""Loading one checkpoint of a :class:`Checkpointer`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmt_zero.state import load_state_dict, valid_versions, with_versions

from . import trainer_state
from .contents import Content, any_own_code, extra_states, mark_loaded, require_memory, set_extra_states
from .headers import DamagedError, parse_json
from .job import EXTRA_STATE
from .manifest import FileRecord, read_manifest, read_small_file
from .objects import Objects
from .reader import check_fit, check_range, fill, read_unsharded
from .sources import checkpoint_source
from .trainer_state import replica_file, replica_of, rng_file
from .trees import decode


def read_extra_states(path: Path, record: FileRecord | None) -> dict[str, Any]:
    """The encoded states in a file :data:`EXTRA_STATE`, by their names in the state dict.

    Raises:
        DamagedError: the file is damaged or has another structure.
    """
    states = parse_json(path, read_small_file(path, record))
    if not isinstance(states, dict):
        raise DamagedError(f"{path} has something else than states by name")
    return states


class Loading:
    """Loads one checkpoint on one rank, in phases. All ranks complete a phase before any rank starts the next."""

    def __init__(self, path: Path, step: int, rank: int, size: int) -> None:
        self._path, self._step, self._rank, self._size = path, step, rank, size
        self._sources: dict[str, Any] = {}
        self._removed: list[tuple[Any, Tensor, dict[str, Any]]] = []  # states that the checkpoint does not have

    def prepare(self, given: Objects) -> None:
        """Open the files, and list the tensors of the model that this rank needs."""
        self._given = given
        if not self._path.is_dir():
            raise FileNotFoundError(
                f"rank {self._rank} does not see {self._path}; all ranks must share the directory of the checkpoints"
            )
        self._manifest = read_manifest(self._path)
        if self._manifest.step != self._step:
            raise DamagedError(f"the manifest of {self._path} is that of step {self._manifest.step}")
        self._trainer = self._read_trainer()
        self._contents: dict[str, list[Content]] = {}
        if given.model is not None:
            self._sources["model"] = checkpoint_source(self._path, self._manifest, "model")
            self._contents["model"] = given.model_contents()
        if given.optimizers:
            self._sources["optimizer"] = checkpoint_source(self._path, self._manifest, "optimizer")

    def prepare_optimizers(self) -> None:
        """List the tensors of the optimizers that this rank needs. Some optimizers communicate here, so this is a phase
        of its own."""
        given = self._given
        if given.optimizers:
            source = self._sources["optimizer"]
            self._removed = given.remove_states_except(source.entries)
            self._contents["optimizer"] = given.optimizer_contents(source.entries)

    def names(self) -> dict[str, Any]:
        """The names of the tensors that this rank needs, by section, for :meth:`check` on the other ranks."""
        needs: dict[str, Any] = {
            s: [content.entry.name for content in contents] for s, contents in self._contents.items()
        }
        return {**needs, "has_code": self._given.model is not None and any_own_code(self._given.model)}

    def check(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Read all but tensors, and raise unless the checkpoint fits. Nothing is changed yet.

        Args:
            everyone: the results of :meth:`names` of all ranks.
        """
        self._has_code = any(names["has_code"] for names in everyone)
        problems: list[str] = []
        for section, source in self._sources.items():
            elsewhere = {name for names in everyone for name in names.get(section, ())}
            mine = [content.entry for content in self._contents[section]]
            own = {entry.name for entry in mine}
            theirs = [entry for name, entry in source.entries.items() if name in own or name not in elsewhere]
            problems += check_fit(theirs, mine, f"the checkpoint's {section}", exact=section == "optimizer")
        if problems:
            raise ValueError(f"{self._path} does not fit; nothing was loaded: " + "; ".join(problems))
        for section, contents in self._contents.items():
            require_memory(contents)
            check_range(contents, self._sources[section])
        what = str(self._path / trainer_state.FILE)
        given = self._given
        self._settings: trainer_state.OptimizerSettings | None = None
        if given.optimizers or given.manager is not None:
            self._settings = trainer_state.OptimizerSettings(
                self._settings_of_stage(), given.optimizers, given.manager, what, given.parameter_names()
            )
        self._states = {name: self._read_state(name) for name in self._given.others}
        self._random = self._read_random()
        self._extra = self._read_extra()

    def read(self) -> None:
        """Read all tensors: into the model and the optimizers, or into a state dict for a model with its own code."""
        self._state_dict: dict[str, Tensor] = {}
        for section, contents in self._contents.items():
            if section == "model" and self._has_code:
                self._state_dict = read_unsharded(self._sources[section])
            else:
                fill(contents, self._sources[section])

    def commit(self) -> None:
        """Set the state that is not tensors, and let the model's own code load its state dict."""
        if self._state_dict:
            assert self._given.model is not None
            versions = valid_versions(self._trainer.get("module_versions"))
            load_state_dict(self._given.model, with_versions({**self._state_dict, **self._extra}, versions))
            self._state_dict = {}
        elif self._extra:
            assert self._given.model is not None
            set_extra_states(self._given.model, self._extra)
        self._removed = []
        mark_loaded(self._contents.get("model", ()))
        if self._settings is not None:
            self._settings.apply()
        self._given.adopt_records()
        for name, state in self._states.items():
            self._given.others[name].load_state_dict(state)
        if self._random is not None:
            trainer_state.set_random_state(self._random)

    def close(self) -> None:
        for optimizer, param, state in self._removed:  # empty after commit()
            optimizer.state[param] = state
        for source in self._sources.values():
            source.close()

    def _small(self, name: str) -> bytes:
        record = self._manifest.files.get(name)
        if record is None:
            raise DamagedError(f"{self._path} has no {name}")
        return read_small_file(self._path / name, record)

    def _read_trainer(self) -> dict[str, Any]:
        settings = parse_json(self._path / trainer_state.FILE, self._small(trainer_state.FILE))
        if not isinstance(settings, dict) or settings.get("format") != trainer_state.FORMAT:
            raise DamagedError(f"{self._path / trainer_state.FILE} has an unknown format")
        return settings

    def _settings_of_stage(self) -> Any:
        """The saved settings of the optimizers and the schedulers of this rank's pipeline stage."""
        files = {n: r for n, r in self._manifest.files.items() if n.startswith(trainer_state.STAGE_FILES)}
        if len(set(files.values())) <= 1:  # all stages had the same
            return self._trainer
        stage = trainer_state.stage_file()
        if stage is None or stage[0] not in files:
            raise ValueError(
                f"{self._path} was saved by {len(files)} pipeline stages with different parameter groups, options or "
                "schedulers; load it with as many stages, or load the model alone"
            )
        return parse_json(self._path / stage[0], self._small(stage[0]))

    @torch.inference_mode(False)  # objects may keep the tensors and change them later
    def _read_state(self, name: str) -> Any:
        saved = self._trainer.get("objects")
        saved = saved.get(name) if isinstance(saved, dict) else None
        if not isinstance(saved, dict):
            raise ValueError(f"{self._path} has no state of {name!r}")
        file, replicas = f"state-{name}.json", saved.get("replicas")
        if replicas is not None:
            replica, count, _ = replica_of(self._rank, self._size)
            if replicas != count:
                raise ValueError(
                    f"{self._path} has the states of {name!r} of {replicas} replicas, and there are {count} now; leave "
                    f"{name} out, or use as many"
                )
            file = replica_file(name, replica, count)
        return decode(parse_json(self._path / file, self._small(file)), f"{self._path / file}")

    @torch.inference_mode(False)
    def _read_extra(self) -> dict[str, Any]:
        """The extra states that this rank's modules need (all of them, if the model's own code loads them)."""
        if self._given.model is None:
            return {}
        mine, files = extra_states(self._given.model), self._manifest.files
        states = read_extra_states(self._path / EXTRA_STATE, files[EXTRA_STATE]) if EXTRA_STATE in files else {}
        missing = [name for name in mine if name not in states]
        if missing:
            raise ValueError(f"{self._path} lacks {missing[:5]}, which the model has; nothing was loaded")
        return {name: decode(states[name], repr(name)) for name in (states if self._has_code else mine)}

    def _read_random(self) -> dict[str, Tensor] | int | None:
        """The states of this rank's generators, or a seed for them."""
        files = {name: record for name, record in self._manifest.files.items() if name.startswith("rng-")}
        if not files:
            return None
        own, differ = rng_file(self._rank, self._size), len(set(files.values())) > 1
        has_own = own in files and trainer_state.has_this_layout(self._trainer)
        name = own if has_own else min(files)
        content = self._small(name)
        if differ and not has_own:
            replica, _, _ = replica_of(self._rank, self._size)
            return int.from_bytes(hashlib.sha256(content + bytes(str(replica), "ascii")).digest()[:4], "little")
        states = trainer_state.parse_small_safetensors(self._path / name, content)
        trainer_state.check_random_state(states, str(self._path / name))
        return states
