"""Fill the modules of all pipeline stages in the order, and with the random numbers, of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from bmt_comm import ParallelContext, errors_on_all

from .stage_entry import natural_key

_Position: TypeAlias = tuple[int, tuple[Any, ...], int]
"""The position of a fill among those of all stages: the number of modules before it, without those in Blocks of one
stage; the key of the Block around it; its number there."""


class Fill(NamedTuple):
    """A function that fills a part of a module."""

    path: str  # of the module
    run: Callable[[], None]


@contextmanager
def generators_of_rank_0(context: ParallelContext, seed: int | None) -> Iterator[None]:
    """Within, torch's generators have the states of rank 0's on all ranks. Every rank must call it.

    Afterwards, generators that had these states before continue from their last state. Others are restored.

    Args:
        context: the ranks.
        seed: seed the generators with it instead, and restore all of them afterwards.
    """
    generators = _generators(context)
    before = after = [generator.get_state() for generator in generators]
    start = context.world.broadcast_object(before, 0) if seed is None and context.world_size > 1 else before
    try:
        _set_states(context, start)
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed)
        yield
        if seed is None:
            drawn = [generator.get_state() for generator in generators]
            after = [d if torch.equal(b, s) else b for b, s, d in zip(before, start, drawn, strict=True)]
    finally:
        _set_states(context, after)


@contextmanager
def without_drawing(context: ParallelContext) -> Iterator[None]:
    """Restore the states of torch's generators afterwards."""
    states = [generator.get_state() for generator in _generators(context)]
    try:
        yield
    finally:
        _set_states(context, states)


def run_in_order(
    fills: Sequence[Fill], modules: Sequence[tuple[str, nn.Module]], local: set[str], context: ParallelContext
) -> None:
    """Run the fills of all stages, one after the other. Every rank must call it.

    After a stage has run a fill of a Block that only it has, the generators of all stages take the states of its
    generators.

    Args:
        fills: this rank's fills, in order.
        modules: all paths and modules of this rank, in order.
        local: the paths of Blocks that only this stage has.
        context: the ranks.

    Raises:
        Exception: the error of a fill, on all stages.
    """
    if context.pipe_size == 1:
        for fill in fills:
            fill.run()
        return
    mine = dict(zip(_positions(fills, modules, local), fills, strict=True))
    owners: dict[_Position, int | None] = {}
    for stage, positions in enumerate(context.pipe_host.all_gather_object(list(mine))):
        owners.update({position: stage if position[1] else None for position in positions})
    for owner, together in groupby(sorted(owners), key=lambda position: owners[position]):
        with errors_on_all(context.pipe):
            for position in together if owner in (None, context.pipe_rank) else ():
                mine[position].run()
        if owner is not None:
            states = [generator.get_state() for generator in _generators(context)]
            _set_states(context, context.pipe_host.broadcast_object(states, owner))


def _positions(fills: Sequence[Fill], modules: Sequence[tuple[str, nn.Module]], local: set[str]) -> list[_Position]:
    keys: dict[str, tuple[int, tuple[Any, ...]]] = {}
    outside = 0
    for path, _ in modules:
        parts = path.split(".")
        around = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        block = next((each for each in around if each in local), None)
        outside += block is None
        keys[path] = (outside, () if block is None else natural_key(block))
    counts: dict[Any, int] = {}
    positions = []
    for fill in fills:
        key = keys[fill.path]
        counts[key] = counts.get(key, -1) + 1
        positions.append((*key, counts[key]))
    return positions


def _generators(context: ParallelContext) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if context.device.type == "cuda":
        index = torch.cuda.current_device() if context.device.index is None else context.device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def _set_states(context: ParallelContext, states: Sequence[Tensor]) -> None:
    for generator, state in zip(_generators(context), states, strict=True):
        generator.set_state(state)
