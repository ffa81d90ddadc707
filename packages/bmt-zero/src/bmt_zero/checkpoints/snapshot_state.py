"""Conversion between this rank's part of a training run and plain tensors and JSON. Parameters stay sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_comm import StateRecord

from . import trainer_state
from .contents import (
    Content,
    check_has_values,
    contents_of_optimizer,
    distinct_tensors,
    extra_states,
    mark_loaded,
    records_of,
    require_memory,
    set_extra_states,
)
from .headers import Entry
from .objects import Objects
from .trees import decode, encode

_WHAT = "the snapshot"


def describe(given: Objects) -> tuple[dict[str, Any], list[Tensor]]:
    """This rank's part of a run: all state except tensors as JSON, and the tensors of the model and the optimizers.

    Raises:
        TypeError, ValueError: something cannot be saved.
    """
    sections = {"model": given.model_contents(), "optimizer": given.optimizer_contents()}
    contents = [content for held in sections.values() for content in held]
    for content in contents:
        check_has_values(content.entry.name, content.tensor)
    described = {
        "sections": {section: _entries(held) for section, held in sections.items()},
        "extra": {} if given.model is None else encode(extra_states(given.model), "the extra state of the model"),
        "trainer": {
            **trainer_state.state_of_optimizers(given.optimizers, given.manager),
            "parameters": trainer_state.names_of_groups(given.optimizers, given.parameter_names()),
        },
        "objects": {
            name: encode(each.state_dict(), f"the state of {name!r}")
            for name, each in given.others.items()
            if hasattr(each, "state_dict")  # objects with save_pretrained() alone have no state
        },
        "random": encode(trainer_state.random_state(), "the state of the random generators"),
    }
    return described, [tensor.contiguous() for tensor in distinct_tensors(contents)[0]]


def prepare_restore(given: Objects, described: Mapping[str, Any], copies: Sequence[Tensor]) -> Callable[[], None]:
    """A function that restores the state that :func:`describe` returned.

    Nothing is changed before that function is called.

    Args:
        copies: the bytes (uint8, 1-D) of the tensors.

    Raises:
        ValueError: the snapshot does not fit the objects.
    """
    stale = _take_stale_states(given, described["sections"]["optimizer"])
    try:
        sections, settings = _checked(given, described)
    finally:
        for optimizer, param, state in stale:
            optimizer.state[param] = state

    @torch.no_grad()
    def restore() -> None:
        for optimizer, param, _ in stale:
            del optimizer.state[param]
        tensors, _ = distinct_tensors(content for held in sections.values() for content in held)
        for tensor, copied in zip(tensors, copies):
            if copied.numel():
                tensor.copy_(copied.view(tensor.dtype).view(tensor.shape))
        if given.model is not None:
            set_extra_states(given.model, decode(described["extra"], _WHAT))
        mark_loaded(sections["model"])
        if settings is not None:
            settings.apply()
        given.adopt_records()
        for name, each in given.others.items():
            each.load_state_dict(decode(described["objects"][name], _WHAT))
        trainer_state.set_random_state(decode(described["random"], _WHAT))

    return restore


def _checked(
    given: Objects, described: Mapping[str, Any]
) -> tuple[dict[str, list[Content]], trainer_state.OptimizerSettings | None]:
    """The tensors to write to and the settings to apply. Raises ValueError if the snapshot does not fit the objects."""
    saved = described["sections"]
    made = {name: Entry(name, dtype, tuple(shape)) for name, dtype, shape, _ in saved["optimizer"]}
    sections = {"model": given.model_contents(), "optimizer": given.optimizer_contents(made)}
    for section, held in sections.items():
        if given.model is None or (section == "optimizer" and not given.optimizers):
            continue  # not given, so not restored
        if _entries(held) != saved[section]:
            raise ValueError(f"{_WHAT} is of another {section}; give restore what take was given")
        require_memory(held)
    missing = [name for name in given.others if name not in described["objects"]]
    if missing:
        raise ValueError(f"{_WHAT} has no state of {missing}")
    if not given.optimizers:
        return sections, None
    return sections, trainer_state.OptimizerSettings(
        described["trainer"], given.optimizers, given.manager, _WHAT, given.parameter_names()
    )


def _take_stale_states(given: Objects, saved: Iterable[Any]) -> list[tuple[Any, Tensor, dict[str, Any]]]:
    """Remove and return the states of torch's optimizers that the snapshot does not have, or has with other tensors."""
    names = given.parameter_names()
    saved_of_param: dict[str, list[Any]] = {}
    for entry in saved:
        saved_of_param.setdefault(entry[0].rpartition(".")[0], []).append(entry)
    stale = []
    for optimizer in given.optimizers:
        if hasattr(optimizer, "state_records"):
            continue
        records: dict[Tensor, list[StateRecord]] = {}
        for record in records_of(optimizer):
            records.setdefault(record.param, []).append(record)
        for param in list(optimizer.state):
            current = _entries(contents_of_optimizer(records.get(param, []), names, type(optimizer).__name__))
            if current != saved_of_param.get(names.get(param, "")):
                stale.append((optimizer, param, optimizer.state[param]))
    for optimizer, param, _ in stale:  # after all calls that may raise
        del optimizer.state[param]
    return stale


def _entries(contents: Iterable[Content]) -> list[Any]:
    return [[c.entry.name, c.entry.dtype, list(c.entry.shape), list(c.tensor.shape)] for c in contents]
