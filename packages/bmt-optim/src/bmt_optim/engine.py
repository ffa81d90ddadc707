"""The engine: advances the rules of any number of optimizers together, one packed round of requests at a time.

[Note: phases of a round]
    The ranks that share a logical parameter form a mesh of up to three dimensions: the ranks that shard its rows, the
    tensor-parallel ranks, and the replicas. A request that concerns several dimensions is answered over one after the
    other. So a round has three phases, and at most one collective per communicator, operation and phase:

    ============= =================================== ================================ ===============
    request       phase 0                             phase 1                          phase 2
    ============= =================================== ================================ ===============
    Sum, Max      over the ranks that shard rows      over tensor-parallel ranks
    GatherToOwner tp shards, in the owner's row       the parameter, on the owner
    Scatter       tp shards, in the owner's row       slices, on all its ranks         on all replicas
    Broadcast     the tensor, in the owner's row      on all its ranks                 on all replicas
    ============= =================================== ================================ ===============

    Replicas have equal shards. Only the owner's replica takes part in the first two phases of GatherToOwner, Scatter
    and Broadcast.

    All ranks that share a parameter are in the same round at the same time, whatever other parameters they have,
    because rounds depend on options and steps alone (see the note in :mod:`bmt_optim.requests`).

[Note: parameters of one rank]
    Parameters that one rank holds unsharded need no other rank. Their rules run to their ends one after the other,
    while messages of the other rules are in flight. On the CPU each batch of them has so few elements that they stay
    in a cache from the first pass over them to the last.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from bmt_comm import Communicator, named_range, without_autocast

from .answers import Answer, answer_alone, answer_to
from .exchange import Communication, Reduction, Transfer, move_packed, reduce_packed
from .requests import Request, Rule


class Step:
    """An optimizer's step in flight: its rules, each at its first yield. No state and no weight has changed yet.

    Args:
        rules: of the batches that are stepped.
        finish: called when all rules have ended.
        alone: rules of batches that need no other rank. They have not started.
    """

    def __init__(
        self, rules: Sequence[Rule], finish: Callable[[Communication], None], alone: Iterable[Rule] = ()
    ) -> None:
        self.finish = finish
        self.alone = deque(alone)
        self.waiting: list[tuple[Rule, Sequence[Request]]] = []
        with torch.no_grad():
            self.waiting += [(rule, _first_requests(rule)) for rule in rules]

    def abandon(self) -> None:
        """End the rules before they change anything."""
        for rule, _ in self.waiting:
            rule.close()
        self.waiting = []
        self.alone.clear()


def run(steps: Sequence[Step], flag: Tensor | None = None, comm: Communicator | None = None) -> bool:
    """Take steps to their end together and count them, or abandon them all.

    Arguments are those of :func:`advance`.

    Returns:
        Whether the steps were taken.
    """
    record = advance(steps, flag, comm)
    if record is None:
        return False
    for step in steps:
        step.finish(record)
    return True


@torch.no_grad()
@without_autocast()
def advance(
    steps: Sequence[Step], flag: Tensor | None = None, comm: Communicator | None = None
) -> Communication | None:
    """Take steps to their end together, or abandon them all. Their ``finish`` is still to be called.

    A collective over the ranks that share parameters, and over ``comm``; all of them must bring the same steps in
    the same order.

    Args:
        steps: from ``begin_step`` of optimizers.
        flag: 0-dim fp32, above 0 if the steps must not be taken. It is sent with the requests of round 0 that go
            over the same ranks, and the host then waits for it. Without a flag the host does not wait. With a flag,
            ``steps`` may be empty.
        comm: the ranks that abandon their steps together; ``None``: this rank alone.

    Returns:
        What was communicated; ``None`` if the steps were abandoned.
    """
    record = Communication()
    waiting = [pair for step in steps for pair in step.waiting]

    def step_alone() -> bool:
        """Step the next batch that needs no other rank. Whether there was one."""
        step = next((step for step in steps if step.alone), None)
        if step is None or flag is not None:  # the flag may still forbid changes
            return False
        _run_alone(step.alone.popleft())
        return True

    while waiting or flag is not None:
        answers = [[answer_to(request) for request in requests] for _, requests in waiting]
        flat = [answer for of_rule in answers for answer in of_rule]
        flags = []
        if flag is not None and comm is not None and comm.size > 1:
            flags = [Reduction(comm, "sum", (flag > 0).float().reshape(1))]
        record.rounds += any(answer.asks for answer in flat)
        with named_range("optimizer round", record.rounds):
            _communicate(flat, flags, record, step_alone)
        if flag is not None:
            total = flags[0].value if flags else flag
            if bool(total > 0):
                for step in steps:
                    step.abandon()
                return None
            flag = None
        still = []
        for (rule, _), of_rule in zip(waiting, answers):
            with contextlib.suppress(StopIteration):
                still.append((rule, rule.send([answer.result() for answer in of_rule])))
        waiting = still
    with named_range("optimizer, what one rank holds"):
        while step_alone():
            pass
    for step in steps:
        step.waiting = []
    return record


def _first_requests(rule: Rule) -> Sequence[Request]:
    try:
        return next(rule)
    except StopIteration:
        raise RuntimeError(f"{rule!r} ended without a yield; its changes could not be abandoned") from None


def _run_alone(rule: Rule) -> None:
    requests = _first_requests(rule)
    with contextlib.suppress(StopIteration):
        while True:
            requests = rule.send([answer_alone(request) for request in requests])


def _communicate(
    answers: Sequence[Answer], flags: Sequence[Reduction], record: Communication, overlap: Callable[[], bool]
) -> None:
    """One round: the phases of all answers, and the flags in phase 0."""
    for phase in range(3):
        reductions = list(flags) if phase == 0 else []
        transfers: list[Transfer] = []
        for answer in answers:
            more_reductions, more_transfers = answer.begin(phase)
            reductions += more_reductions
            transfers += more_transfers
        reduce_packed(reductions, record, overlap)
        move_packed(transfers, record, overlap)
        for answer in answers:
            answer.end(phase)
