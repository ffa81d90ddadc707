"""The objects that are passed to a call of the checkpointer: a model, optimizers, and others with a state."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bmt_comm import StateRecord
from bmt_zero.state import refuse_fsdp1, stage_entries, versions_of, without_wrapper
from bmt_zero.torch_optimizers import keep_rows

from .contents import (
    Content,
    State,
    adopt_records,
    contents_of_model,
    contents_of_optimizer,
    make_state,
    parameter_names,
    records_of,
)
from .headers import Entry
from .manifest import is_file_name

_log = logging.getLogger("bmt_zero.checkpoints")

_OF_CHECKPOINTS = re.compile(
    r"manifest\.json|trainer(-stage-.*)?\.json|(rng|state|extra-state)\b.*|(model|optimizer)(-.*)?\.safetensors.*"
)
_RESERVED = {"model", "optimizer", "manager", "per_replica", "trainer", "rng", "manifest", "step", "config"}


class Objects:
    """The objects of a call.

    Args:
        objects: by keyword.
        loading: whether the objects are to be loaded, not saved.

    Raises:
        TypeError: an object is of a kind that cannot be saved, or loaded.
        ValueError: a name cannot be used.
    """

    def __init__(self, objects: Mapping[str, Any], loading: bool = False) -> None:
        self.others = dict(objects)
        self.records: list[tuple[Any, list[StateRecord], State]] = []
        self.model: nn.Module | None = without_wrapper(self.others.pop("model", None))
        self.manager: Any = self.others.pop("manager", None)
        optimizer: Any = self.others.pop("optimizer", None)
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(self.model).__name__}")
        if self.model is not None and loading:
            refuse_fsdp1(self.model)
        if self.manager is not None and optimizer is not None:
            raise ValueError("manager and optimizer are both given; a manager has its optimizers with it")
        if self.manager is not None and not hasattr(self.manager, "trainer_state"):
            raise TypeError(f"manager must be an OptimManager, not {type(self.manager).__name__}")
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self.versions: Any = None  # of the model's modules, when its contents are known
        self.optimizers: list[Any] = [] if optimizer is None else [optimizer]
        if self.manager is not None:
            self.optimizers = list(self.manager.optimizers)
        if self.optimizers and self.model is None:
            raise ValueError("an optimizer's state is saved by the names of the model's parameters; pass model=, too")
        for each in self.optimizers:
            if isinstance(each, Optimizer):
                keep_rows(each)
        for name, each in self.others.items():
            if name in _RESERVED or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
                raise ValueError(f"{name!r} cannot be the name of an object in a checkpoint; choose another one")
            if not hasattr(each, "load_state_dict" if loading else "state_dict") and not _is_pretrained(each):
                raise TypeError(
                    f"{name} is a {type(each).__name__}; a checkpoint takes objects with state_dict() and "
                    "load_state_dict()"
                )
        if loading:  # objects with save_pretrained() alone have no state
            self.others = {name: each for name, each in self.others.items() if hasattr(each, "load_state_dict")}

    def model_contents(self) -> list[Content]:
        if self.model is None:
            return []
        entries = stage_entries(self.model)
        self.versions = versions_of(entries)
        return contents_of_model(self.model, entries)

    def parameter_names(self) -> Mapping[Tensor, str]:
        return {} if self.model is None else parameter_names(self.model)

    def optimizer_contents(self, saved: Mapping[str, Entry] | None = None) -> list[Content]:
        """The state of all optimizers. If torch's optimizers have no state yet, it is allocated for the ``saved`` one.

        Raises:
            ValueError: two optimizers have state of the same name.
        """
        contents: dict[str, Content] = {}
        names = self.parameter_names()
        stored = _with_states(saved or ())
        for number, optimizer in enumerate(self.optimizers):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            frozen = [param for param in params if not param.requires_grad and names.get(param) in stored]
            made: State = {}
            if saved is not None and not hasattr(optimizer, "state_records"):
                made = make_state(optimizer, names, saved)
            records = records_of(optimizer, made, frozen)
            self.records.append((optimizer, records, made))
            for content in contents_of_optimizer(records, names, f"optimizer {number} ({type(optimizer).__name__})"):
                if content.entry.name in contents:
                    raise ValueError(f"two optimizers have the state {content.entry.name!r}; a parameter is for one")
                contents[content.entry.name] = content
        return list(contents.values())

    def remove_states_except(self, saved: Iterable[str]) -> list[tuple[Any, Tensor, dict[str, Any]]]:
        """Remove and return the states of parameters that have no ``saved`` states from torch's optimizers.

        These optimizers make new states in their next step.

        Args:
            saved: the names of states.
        """
        names, stored = self.parameter_names(), _with_states(saved)
        removed = [
            (optimizer, param, state)
            for optimizer in self.optimizers
            if not hasattr(optimizer, "state_records")
            for param, state in optimizer.state.items()
            if param in names and names[param] not in stored
        ]
        for optimizer, param, _ in removed:
            del optimizer.state[param]
        return removed

    def adopt_records(self) -> None:
        """Let the optimizers use the values that were written into their state."""
        for optimizer, records, made in self.records:
            adopt_records(optimizer, records, made)

    def pretrained_files(self) -> dict[str, bytes]:
        """The files that ``save_pretrained`` of the model's configurations and of the other objects writes, by name."""
        files: dict[str, bytes] = {}
        carried = [getattr(self.model, name, None) for name in ("config", "generation_config")]
        for each in [*carried, *self.others.values()]:
            if not _is_pretrained(each):
                continue
            with tempfile.TemporaryDirectory() as folder:
                each.save_pretrained(folder)
                for path in sorted(Path(folder).iterdir()):
                    if path.is_dir():
                        raise ValueError(
                            f"{type(each).__name__}.save_pretrained writes a folder {path.name!r}, and a checkpoint "
                            "has none; save this object beside the checkpoints"
                        )
                    if _OF_CHECKPOINTS.fullmatch(path.name):
                        raise ValueError(
                            f"{type(each).__name__}.save_pretrained writes a file {path.name!r}, a name that a "
                            "checkpoint has itself; save this object beside the checkpoints"
                        )
                    if is_file_name(path.name):
                        files[path.name] = path.read_bytes()
                    else:
                        _log.warning("%r, a file of %s, is left out of the checkpoint", path.name, type(each).__name__)
        return files


def _with_states(saved: Iterable[str]) -> set[str]:
    """The names of the parameters that have ``saved`` states."""
    return {name.rpartition(".")[0] for name in saved}


def _is_pretrained(each: Any) -> bool:
    return callable(getattr(each, "save_pretrained", None)) and not isinstance(each, nn.Module)
