"""The loss scale of gradients, for functions that show gradients.

A backward pass has the scale of the loss that it began with. Gradients of parameters outlive the pass, so their scale
is noted on those that an ``OptimManager`` steps. Other gradients have the scale of the last backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

_ATTRIBUTE = "bmt_loss_scale"  # of a gradient
_current = 1.0
_last = 1.0


class LossScaler(Protocol):
    """Multiplies losses by ``loss_scale / grad_scale`` before their backward."""

    @property
    def loss_scale(self) -> float: ...

    @property
    def grad_scale(self) -> float: ...


_scaler: weakref.ref[LossScaler] | None = None


def use_scaler(scaler: LossScaler) -> None:
    """Later losses will be multiplied by the scale that ``scaler`` has then. Keeps a weak reference to it."""
    global _scaler
    _scaler = weakref.ref(scaler)


def expected_scale() -> float:
    """The factor by which a loss that is computed now will be multiplied before its backward; 1 if it is not known."""
    scaler = None if _scaler is None else _scaler()
    return 1.0 if scaler is None else scaler.loss_scale / scaler.grad_scale


def scale_in_backward() -> float:
    """The loss scale of the backward pass that is running; 1 if its loss is not scaled."""
    return _current


def begin_backward() -> None:
    """A backward pass begins."""
    global _last
    _last = _current


def forget_scale() -> None:
    """The backward pass has ended, or has failed."""
    global _current
    _current = 1.0


def mark_scaled(loss: Tensor, scale: float, after: Callable[[], None] | None = None) -> None:
    """A backward pass from ``loss`` has the loss scale ``scale``, from its beginning to its end.

    Args:
        loss: the loss, which was multiplied by the scale.
        after: called when the backward pass has ended.
    """

    def begin(_grad: Tensor) -> None:
        global _current
        _current = float(scale)
        begin_backward()
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(end))  # after the callbacks of this pass

    def end() -> None:
        forget_scale()
        if after is not None:
            after()

    if loss.requires_grad:
        loss.register_hook(begin)


def note_scale(params: Iterable[Tensor], scale: float | None) -> None:
    """The gradients that parameters have now are multiplied by ``scale``; None: they are to be computed anew."""
    for param in params:
        if param.grad is not None:
            setattr(param.grad, _ATTRIBUTE, scale)


def scale_of(grad: Tensor) -> float:
    """The scale of a parameter's gradient."""
    scale: float | None = getattr(grad, _ATTRIBUTE, None)
    return _last if scale is None else scale
