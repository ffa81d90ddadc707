"""Ranks agree on which parameters they have used; see [Note: parameters without a gradient] in gradient_reducer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bmt_comm import Communicator

from .gradient_reducer import GradientReducer


class UseAgreement:
    """Lets ranks agree on which parameters were used, for reduced gradients that wait to be added."""

    def __init__(self) -> None:
        self._waiting: dict[GradientReducer, None] = {}

    def note(self, reducer: GradientReducer) -> None:
        """``reducer`` may have added a reduced gradient."""
        if not reducer.agrees:
            self._waiting[reducer] = None

    def settle(self, reducers: Iterable[GradientReducer] | None = None) -> None:
        """Decide for all reducers that wait, or those in ``reducers``: one all-reduce for each set of ranks."""
        chosen = self._waiting if reducers is None else dict.fromkeys(reducers)
        waiting = [reducer for reducer in self._waiting if reducer in chosen]
        self.forget(waiting)
        by_ranks: dict[tuple[Communicator, ...], list[GradientReducer]] = {}
        for reducer in waiting:
            by_ranks.setdefault(reducer.flat.communicators, []).append(reducer)
        answers: dict[GradientReducer, list[bool]] = {}
        for communicators, members in by_ranks.items():
            flags = {reducer: reducer.take_used_here() for reducer in members}
            if communicators:
                used = _on_device([flag for each in flags.values() for flag in each], members[0].flat.device)
                for comm in communicators:
                    comm.all_reduce(used, "max", label="the parameters that ranks have used")
                # The host waits for the device only if some gradient waits for the answer.
                if not used.is_meta and any(reducer.awaits_others(flags[reducer]) for reducer in members):
                    answer = iter(used.tolist())
                    flags = {reducer: [bool(next(answer)) for _ in each] for reducer, each in flags.items()}
            answers.update(flags)
        for reducer, decided in answers.items():  # after all communication: hooks of parameters may raise
            reducer.decide(decided)

    def drop(self) -> None:
        """Drop the gradients that wait: the backward that computed them has failed."""
        for reducer in self._waiting:
            reducer.drop_undecided()
        self._waiting.clear()

    def forget(self, reducers: Iterable[GradientReducer]) -> None:
        for reducer in reducers:
            self._waiting.pop(reducer, None)


def _on_device(flags: Sequence[bool], device: torch.device) -> Tensor:
    """``flags`` as numbers (uint8) on a device, without waiting for it."""
    if all(flags):
        return torch.ones(len(flags), dtype=torch.uint8, device=device)
    on_host = torch.tensor(flags, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
    return on_host.to(device, non_blocking=True)
