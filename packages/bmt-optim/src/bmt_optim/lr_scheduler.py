"""Learning-rate schedules: a linear warm-up, then a decay.

With w = ``warmup_iter``, e = ``end_iter``, s = ``start_lr``, the rate at iteration n is s·n/w while n < w. From then on
it is

=============  ===============================================
NoDecay        s
Noam           s/√n, after a warm-up of s·n/w^1.5
Linear         s·(e-n)/(e-w), 0 from e on
Cosine         s·(1+cos(π·(n-w)/(e-w)))/2, 0 from e on
Exponential    s·γ^(n-w)
=============  ===============================================

A scheduler sets the rate for ``num_iter`` when it is made, so the optimizer's first step after ``num_iter=0`` uses
n = 0. Each :meth:`~WarmupLRScheduler.step` moves to the next iteration. A rate that is a tensor is written in place.
Schedulers work with any optimizer that has ``param_groups``.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

_log = logging.getLogger(__name__)


class WarmupLRScheduler(ABC):
    """A linear warm-up, and a decay that a subclass gives by :meth:`get_lr_decay`.

    Args:
        optimizer: every one of its parameter groups gets the rate.
        start_lr: the peak rate, at the end of the warm-up.
        warmup_iter: iterations of warm-up; 0 for none.
        end_iter: the iteration at which the decay has ended, for those that end (Linear and Cosine); others take None.
        num_iter: the iteration to begin at.

    Raises:
        ValueError: an argument is negative or not finite (``end_iter`` may be anything but NaN); ``end_iter`` is None
            though the decay has an end.
    """

    _ENDS = False  # whether the decay depends on end_iter
    _STATE: tuple[str, ...] = ("start_lr", "warmup_iter", "end_iter", "num_iter")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: float,
        end_iter: float | None,
        num_iter: int = 0,
    ) -> None:
        self._check_settings(
            {"start_lr": start_lr, "warmup_iter": warmup_iter, "end_iter": end_iter, "num_iter": num_iter}
        )
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None})
        if len(rates) > 1:
            _log.warning(
                "%s gives all parameter groups one rate, and they have %s: schedulers of torch.optim.lr_scheduler keep "
                "their ratios",
                type(self).__name__,
                rates,
            )
        self.optimizer = optimizer
        self.start_lr = start_lr
        self.warmup_iter = warmup_iter
        self.end_iter = end_iter
        self.num_iter = num_iter
        self._current_lr = 0.0
        self.step(num_iter)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError unless the settings are in range."""
        for name in ("start_lr", "warmup_iter", "num_iter"):
            _check_not_negative(name, settings[name])
        end_iter = settings["end_iter"]
        if (end_iter is None and self._ENDS) or (end_iter is not None and math.isnan(_number(end_iter))):
            raise ValueError(f"end_iter={end_iter!r} is not a number of iterations")

    @property
    def current_lr(self) -> float:
        """The rate that the last :meth:`step` set."""
        return self._current_lr

    def get_lr(self) -> float:
        """The rate at ``num_iter``."""
        if self.num_iter < self.warmup_iter:
            return self.get_lr_warmup(self.num_iter)
        return self.get_lr_decay(self.num_iter)

    def get_lr_warmup(self, num_iter: float) -> float:
        """The rate at an iteration before ``warmup_iter``."""
        return self.start_lr * num_iter / self.warmup_iter

    @abstractmethod
    def get_lr_decay(self, num_iter: float) -> float:
        """The rate at an iteration from ``warmup_iter`` on."""

    def step(self, num_iter: int | None = None) -> None:
        """Move to ``num_iter``, by default the next iteration, and set its rate in every parameter group."""
        if num_iter is None:
            num_iter = self.num_iter + 1
        _check_not_negative("num_iter", num_iter)
        self.num_iter = num_iter
        self._current_lr = self.get_lr()
        for group in self.optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):  # a captured or compiled step reads this tensor
                rate.fill_(self._current_lr)
            else:
                group["lr"] = self._current_lr

    def state_dict(self) -> dict[str, Any]:
        """The settings and the iteration, as plain numbers."""
        return {name: getattr(self, name) for name in self._STATE}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` if ``state_dict`` lacks an entry, or an entry is out of range."""
        missing = [name for name in self._STATE if name not in state_dict]
        if missing:
            raise ValueError(f"the state dict lacks {', '.join(missing)}; its keys are {sorted(map(str, state_dict))}")
        self._check_settings({name: state_dict[name] for name in self._STATE})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over settings and iteration, and set that iteration's rate.

        Raises:
            ValueError: an entry is missing or out of range; nothing has changed.
        """
        self.check_state_dict(state_dict)
        for name in self._STATE:
            setattr(self, name, state_dict[name])
        self.step(self.num_iter)


class NoDecay(WarmupLRScheduler):
    """Constant after the warm-up."""

    def get_lr_decay(self, num_iter: float) -> float:
        return self.start_lr


class Noam(WarmupLRScheduler):
    """The inverse square root of the iteration (`Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_).

    Unlike with the other schedules the peak rate is ``start_lr``/√``warmup_iter``.
    """

    def get_lr_warmup(self, num_iter: float) -> float:
        return self.start_lr * num_iter / self.warmup_iter**1.5

    def get_lr_decay(self, num_iter: float) -> float:
        # Without a warm-up, this is called for iteration 0, which gets the rate of iteration 1.
        return self.start_lr / math.sqrt(max(num_iter, 1))


class Linear(WarmupLRScheduler):
    """Falls in a straight line to 0 at ``end_iter``, and stays there."""

    _ENDS = True
    end_iter: float

    def get_lr_decay(self, num_iter: float) -> float:
        if num_iter >= self.end_iter:
            return 0.0
        if self.end_iter == math.inf:
            return self.start_lr
        return self.start_lr * (self.end_iter - num_iter) / (self.end_iter - self.warmup_iter)


class Cosine(WarmupLRScheduler):
    """Falls along half a cosine to 0 at ``end_iter``, and stays there (`SGDR <https://arxiv.org/abs/1608.03983>`_)."""

    _ENDS = True
    end_iter: float

    def get_lr_decay(self, num_iter: float) -> float:
        if num_iter >= self.end_iter:
            return 0.0
        done = (num_iter - self.warmup_iter) / (self.end_iter - self.warmup_iter)
        return self.start_lr * (1 + math.cos(math.pi * done)) / 2


class Exponential(WarmupLRScheduler):
    """Falls by the factor ``gamma`` each iteration.

    Raises:
        ValueError: ``gamma`` is negative or not finite.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: float,
        end_iter: float | None,
        num_iter: int = 0,
        gamma: float = 0.95,
    ) -> None:
        _check_not_negative("gamma", gamma)
        self.gamma = gamma
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    _STATE = (*WarmupLRScheduler._STATE, "gamma")

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().check_state_dict(state_dict)
        _check_not_negative("gamma", state_dict["gamma"])

    def get_lr_decay(self, num_iter: float) -> float:
        return self.start_lr * self.gamma ** (num_iter - self.warmup_iter)


def _number(value: Any) -> float:
    """A number of Python, numpy or torch; NaN if it is something else."""
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def _check_not_negative(name: str, value: Any) -> None:
    if not 0 <= _number(value) < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number, 0 or more")
