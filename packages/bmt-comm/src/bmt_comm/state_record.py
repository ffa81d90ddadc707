"""The state of an optimizer for checkpoints: one record per tensor, with its slice of a logical tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .slice import Slice


@dataclass(frozen=True, eq=False)
class StateRecord:
    """One state tensor of one parameter.

    An optimizer with a method ``state_records() -> list[StateRecord]`` can be saved and loaded by name, at any layout.
    The list has the complete state of a parameter, on every rank that has a part of the parameter. To load, write into
    ``tensor``, and pass the list to ``adopt_state_records(records)``. If what is loaded has states of parameters that
    are frozen now, the call is ``state_records(also=these)``.

    Attributes:
        param: the parameter.
        key: the name of the state.
        where: the slice of the logical state tensor that ``tensor`` has.
        tensor: this rank's part, contiguous, on any device: the optimizer's memory itself, or a copy of a number.
        is_current: whether the values are up to date on this rank. If not, some other rank has them.
    """

    param: Tensor
    key: str
    where: Slice
    tensor: Tensor
    is_current: bool = True
