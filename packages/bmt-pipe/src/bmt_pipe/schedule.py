"""Pipeline schedules: the actions of each rank, in order. Plain data, made by pure functions.

[Note: schedules]
    A pipeline of ``stages`` ranks has ``chunks`` chunks of layers on each rank: chunk c of rank r is number
    c · stages + r of the chain. A V-shaped pipeline has two chunks on each rank, and the second ones are assigned in
    reverse order: the last rank has the two in the middle of the chain, and the first rank both ends.

    A schedule is a list of actions for each rank, which runs them in order. The kind of an action determines what it
    waits for:

    =============  =========================  ====================================================================
    kind           computes                   waits for, of the same micro-batch
    =============  =========================  ====================================================================
    FORWARD        the chunk                  FORWARD of the chunk before it in the chain
    RECOMPUTE      the chunk again            its own FORWARD, which then keeps only the chunk's input
    BACKWARD       all gradients              backward of the chunk after it; its own RECOMPUTE, or else FORWARD
    INPUT          the input's gradient       the same as BACKWARD; the chunk before waits for INPUT
    WEIGHT         the parameters' gradients  its own INPUT
    =============  =========================  ====================================================================

    INPUT is the input-gradient pass, and WEIGHT the weight-gradient pass.

Sources: GPipe, arXiv:1811.06965; 1F1B, arXiv:1806.03377; interleaving, arXiv:2104.04473; zero bubble,
arXiv:2401.10241 (ZB-H1) and arXiv:2405.15362 (ZB-V).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


class Kind(enum.Enum):
    """The kind of an action; see [Note: schedules]."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True)
class Action:
    """What a rank does with one micro-batch and one of its chunks."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __repr__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    Attributes:
        stages: the number of ranks.
        micro_batches: the number of micro-batches.
        chunks: the number of chunks of each rank.
        loss_outside: whether all backwards wait for all forwards, because the loss is computed outside the pipeline.
        actions: those of each rank.
        v_shaped: whether the second chunks are assigned in reverse order.
    """

    stages: int
    micro_batches: int
    chunks: int
    loss_outside: bool
    actions: tuple[tuple[Action, ...], ...]
    v_shaped: bool = False

    @property
    def last(self) -> int:
        """The last place in the chain of chunks."""
        return self.stages * self.chunks - 1

    def place(self, stage: int, chunk: int) -> int:
        """The place of a stage's chunk in the chain."""
        return chunk * self.stages + (self.stages - 1 - stage if self.v_shaped and chunk else stage)

    def stage(self, place: int) -> int:
        """The stage that has the chunk at a place in the chain."""
        return self.last - place if self.v_shaped and place >= self.stages else place % self.stages

    @property
    def splits_backward(self) -> bool:
        """Whether backward is split into INPUT and WEIGHT."""
        return any(action.kind is Kind.INPUT for action in self.actions[0])


def recompute(stages: int, micro_batches: int, chunks: int = 1, v_shaped: bool = False) -> Schedule:
    """All forwards, which keep only the inputs of chunks; then all backwards, each after a recomputation of its chunk.

    The recomputation for the first backwards overlaps with the wait for their gradients. So a rank waits for
    (stages - 1)(F + B) / chunks, as without recomputation.

    Raises:
        ValueError: a number is not positive, or a V-shaped pipeline has other than two chunks on a rank.
    """
    _check(stages, micro_batches, chunks)
    if v_shaped and chunks != 2:
        raise ValueError(f"chunks={chunks!r} must be 2 in a V-shaped pipeline")
    actions = []
    for rank in range(stages):
        order = _interleaved(stages, micro_batches, chunks)
        if v_shaped:
            first, second = ([(c, i) for i in range(micro_batches)] for c in range(2))
            order = _by_turns(first, second, min(2 * (stages - 1 - rank), micro_batches))
        forward = [Action(Kind.FORWARD, i, c) for c, i in order]
        again = (Action(kind, i, chunks - 1 - c) for c, i in order for kind in (Kind.RECOMPUTE, Kind.BACKWARD))
        actions.append((*forward, *again))
    return Schedule(stages, micro_batches, chunks, True, tuple(actions), v_shaped)


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B: rank r runs stages - r forwards, then alternates between a backward and a forward.

    It holds the activations of at most stages - r micro-batches.

    Raises:
        ValueError: a number is not positive.
    """
    _check(stages, micro_batches, 1)
    return _alternating(stages, micro_batches, 1, [stages - 1 - rank for rank in range(stages)])


def interleaved_one_forward_one_backward(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B over several chunks on each rank. The time that ranks wait is divided by the number of chunks.

    Raises:
        ValueError: a number is not positive, or ``stages`` does not divide ``micro_batches``.
    """
    _check(stages, micro_batches, chunks)
    if chunks == 1:
        return one_forward_one_backward(stages, micro_batches)
    if micro_batches % stages:
        raise ValueError(f"micro_batches={micro_batches} must be a multiple of the {stages} stages to be interleaved")
    ahead = [2 * (stages - 1 - rank) + (chunks - 1) * stages for rank in range(stages)]
    return _alternating(stages, micro_batches, chunks, ahead)


def zero_bubble_h1(stages: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with weight-gradient passes delayed into the time that ranks would wait at the end.

    Rank r delays those of r micro-batches. With those of 1F1B, every rank holds the activations of ``stages``
    micro-batches, as many as the first rank of 1F1B.

    Raises:
        ValueError: a number is not positive.
    """
    _check(stages, micro_batches, 1)
    actions = []
    for rank, order in enumerate(one_forward_one_backward(stages, micro_batches).actions):
        mine: list[Action] = []
        for action in order:
            if action.kind is Kind.FORWARD:
                mine.append(action)
                continue
            mine.append(Action(Kind.INPUT, action.micro_batch))
            if action.micro_batch >= rank:
                mine.append(Action(Kind.WEIGHT, action.micro_batch - rank))
        mine += [Action(Kind.WEIGHT, i) for i in range(max(micro_batches - rank, 0), micro_batches)]
        actions.append(tuple(mine))
    return Schedule(stages, micro_batches, 1, False, tuple(actions))


def zero_bubble_v(stages: int, micro_batches: int) -> Schedule:
    """ZB-V: two chunks on each rank, in a V. In the second half of the chain, backward follows forward at once.

    A rank holds the activations of at most ``stages`` micro-batches, like the first rank of 1F1B, and waits half as
    long as with ZB-H1.

    Raises:
        ValueError: a number is not positive.
    """
    _check(stages, micro_batches, 1)
    count = max(micro_batches, 2 * stages - 1)  # the pattern needs so many; surplus ones are dropped
    actions = []
    for rank in range(stages):
        later = stages - rank
        ahead = count - 2 * later - rank + 1  # forwards of chunk 0 that the first part leaves to the second
        order = ["F0"] * (2 * later - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * later
        for number in range(count - stages):
            order += [*(["F0"] if number < ahead else []), "I0", "W0", "F1", "I1", "W1"]
        order += ["I0", "I1"] * rank + ["I0", "W0"] * later + ["W1"] * rank + ["W0"] * rank
        numbers = {name: itertools.count() for name in order}
        mine = (Action(Kind(name[0]), next(numbers[name]), int(name[1])) for name in order)
        actions.append(tuple(action for action in mine if action.micro_batch < micro_batches))
    return Schedule(stages, micro_batches, 2, False, tuple(actions), v_shaped=True)


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "recompute": recompute,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved_one_forward_one_backward,
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_v": zero_bubble_v,
}
"""The functions above, by their names in settings and on the command line."""

_WITH_CHUNKS = ("recompute", "interleaved_1f1b")


def make_schedule(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule with a name in ``SCHEDULES``.

    Args:
        chunks: the number on each rank; by default two for "zero_bubble_v", and one for others.

    Raises:
        ValueError: there is no schedule with this name, it needs another number of chunks, or its function raises.
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    if name in _WITH_CHUNKS:
        return SCHEDULES[name](stages, micro_batches, 1 if chunks is None else chunks)
    schedule = SCHEDULES[name](stages, micro_batches)
    if chunks not in (None, schedule.chunks):
        raise ValueError(
            f"chunks={chunks!r} must be {schedule.chunks} for {name!r}; only {' and '.join(_WITH_CHUNKS)} take any "
            f"number on a rank"
        )
    return schedule


def _check(stages: int, micro_batches: int, chunks: int) -> None:
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")


def _alternating(stages: int, micro_batches: int, chunks: int, ahead: list[int]) -> Schedule:
    """``ahead`` forwards, given for each rank, then alternately a forward and a backward."""
    order = _interleaved(stages, micro_batches, chunks)
    forward = [Action(Kind.FORWARD, i, c) for c, i in order]
    backward = [Action(Kind.BACKWARD, i, chunks - 1 - c) for c, i in order]
    actions = tuple(tuple(_by_turns(forward, backward, min(count, len(order)))) for count in ahead)
    return Schedule(stages, micro_batches, chunks, False, actions)


def _interleaved(stages: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch): ``stages`` micro-batches go through all chunks before the next ones."""
    return [
        (c, i)
        for first in range(0, micro_batches, stages)
        for c in range(chunks)
        for i in range(first, min(first + stages, micro_batches))
    ]


def _by_turns(first: list[_T], second: list[_T], ahead: int) -> list[_T]:
    """``ahead`` of ``first``, then alternately one of ``first`` and one of ``second``, then the rest of ``second``."""
    order = first[:ahead]
    for pair in zip(first[ahead:], second):
        order += pair
    return order + second[len(first) - ahead :]
