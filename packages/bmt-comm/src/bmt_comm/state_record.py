"""How an optimizer offers its state to whoever saves it: tensor by tensor, each with its place in a logical one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .slice import Slice


@dataclass(frozen=True, eq=False)
class StateRecord:
    """One state tensor of one parameter.

    An optimizer with a method ``state_records() -> list[StateRecord]`` can be saved and loaded by name, at any layout.
    The list has all that a parameter's state consists of, on every rank that shares the parameter. To load, one writes
    into ``tensor``, and gives the list to ``adopt_state_records(records)``.

    Attributes:
        param: the parameter.
        key: the name of the state.
        where: the part of the logical state tensor that ``tensor`` is.
        tensor: this rank's part, contiguous, on any device: the optimizer's own memory, or a copy of a number.
        is_current: whether the values are up to date on this rank. If not, some other rank has them.
    """

    param: Tensor
    key: str
    where: Slice
    tensor: Tensor
    is_current: bool = True
