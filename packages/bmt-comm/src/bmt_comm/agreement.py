"""Ranks that disagree get an error that names the first difference, not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch

from .communicator import Communicator


def check_agreement(comm: Communicator, what: str, facts: Sequence[str]) -> None:
    """Raise unless every rank of ``comm`` came here with the same ``what`` and ``facts``.

    Costs one all-gather of 32 bytes per rank while they agree.  Every call has the same wire format, so
    ranks that have come to different calls are told so as well.

    Raises:
        RuntimeError: on every rank, naming the first difference and the ranks.
    """
    if comm.size == 1:
        return
    digest = hashlib.sha256(repr((what, list(facts))).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(comm.device)
    everyone = torch.empty(comm.size, 32, dtype=torch.uint8, device=comm.device)
    comm.all_gather(everyone, mine)
    if bool((everyone == everyone[0]).all()):
        return
    reports = comm.all_gather_object((what, list(facts)))
    other = next(r for r in range(comm.size) if reports[r] != reports[0])
    names = [f"rank {comm.ranks[0]}", f"rank {comm.ranks[other]}"]
    (what_a, facts_a), (what_b, facts_b) = reports[0], reports[other]
    if what_a != what_b:
        raise RuntimeError(f"ranks disagree on what comes next: {names[0]} is at {what_a}, {names[1]} at {what_b}")
    for index, (a, b) in enumerate(zip_longest(facts_a, facts_b, fillvalue=None)):
        if a != b:
            a, b = ("nothing" if fact is None else fact for fact in (a, b))
            raise RuntimeError(f"ranks disagree on {what}: item {index} is {a} on {names[0]} and {b} on {names[1]}")
