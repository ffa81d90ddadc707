"""Experts that are separate tensors in a file, as on Hugging Face's hub, and one tensor in the model, as in
transformers 5."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .headers import Entry
from .sources import Source

_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w3",)),
    "down_proj": (("down_proj",), ("w2",)),
}
"""The parts of each expert of a packed parameter, in order, by the names of the separate layers."""


def names_in_model(model: nn.Module, names: Iterable[str], known: Container[str]) -> Mapping[str, str]:
    """For each name in a file, the name in a model of transformers, which has renamed some layers since.

    Names that are ``known`` to be the model's stay.
    """
    mapping, kinds = (sys.modules.get(f"transformers.{each}") for each in ("conversion_mapping", "core_model_loading"))
    if mapping is None or kinds is None or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return {name: name for name in names}
    renamings = [each for each in mapping.get_model_conversion_mapping(model) if isinstance(each, kinds.WeightRenaming)]
    renamed = {}
    for name in names:
        new_name = name
        for renaming in renamings if name not in known else ():
            new_name, _ = renaming.rename_source_key(new_name)
        renamed[name] = new_name
    return renamed


class PackedExperts:
    """A source in which the experts ``prefix.0.up_proj.weight``, ``prefix.1.up_proj.weight``, ... are one tensor.

    Args:
        source: the source with the separate tensors.
        names: of the tensors that are needed. A name is ignored if the source has it, or has no parts of it.
    """

    def __init__(self, source: Source, names: Iterable[str]) -> None:
        self._source = source
        self._parts: dict[str, list[Entry]] = {}
        self.entries: dict[str, Entry] = dict(source.entries)
        self.others, self.tied = source.others, source.tied
        for name in names:
            if name in source.entries:
                continue
            parts = _parts_of(name, source.entries)
            if parts:
                self._parts[name] = [part for expert in parts for part in expert]
                outputs, inputs = sum(part.shape[0] for part in parts[0]), parts[0][0].shape[1]
                self.entries[name] = Entry(name, parts[0][0].dtype, (len(parts), outputs, inputs))
                for part in self._parts[name]:
                    self.entries.pop(part.name, None)

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    def read(self, name: str, low: int, high: int) -> Tensor:
        if name not in self._parts:
            return self._source.read(name, low, high)
        out = torch.empty(high - low, dtype=torch.uint8, device="cpu")
        for part, begin, stop, offset in self._parts_in(name, low, high):
            out[offset : offset + stop - begin].copy_(self._source.read(part, begin, stop))
        return out

    def read_into(self, name: str, low: int, out: Tensor) -> None:
        if name not in self._parts:
            self._source.read_into(name, low, out)
            return
        for part, begin, stop, offset in self._parts_in(name, low, low + len(out)):
            self._source.read_into(part, begin, out[offset : offset + stop - begin])

    def _parts_in(self, name: str, low: int, high: int) -> Iterable[tuple[str, int, int, int]]:
        """The parts that the bytes [low, high) consist of: (name, begin, stop, offset).

        Bytes [begin, stop) of the part are those from ``low + offset`` on.
        """
        start = 0
        for part in self._parts[name]:
            begin, stop = max(low, start), min(high, start + part.nbytes)
            if begin < stop:
                yield part.name, begin - start, stop - start, begin - low
            start += part.nbytes

    def finish(self) -> None:
        self._source.finish()


def _parts_of(name: str, entries: Mapping[str, Entry]) -> list[list[Entry]]:
    """The parts of each expert of a packed parameter; empty if the source has no such 2-D tensors of equal shapes."""
    prefix, _, leaf = name.rpartition(".")
    for layers in _PARTS.get(leaf, ()):
        experts: list[list[Entry]] = []
        while all(f"{prefix}.{len(experts)}.{layer}.weight" in entries for layer in layers):
            experts.append([entries[f"{prefix}.{len(experts)}.{layer}.weight"] for layer in layers])
        facts: set[Any] = {tuple((part.dtype, part.shape) for part in expert) for expert in experts}
        if len(facts) == 1:
            ((first, *rest),) = facts
            if len(first[1]) == 2 and all(part[0] == first[0] and part[1][1:] == first[1][1:] for part in rest):
                return experts
    return []
