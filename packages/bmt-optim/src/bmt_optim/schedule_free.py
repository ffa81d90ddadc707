"""Schedule-free AdamW: an average of the weights instead of a learning-rate schedule. No rounds."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import StateRecord, is_dtensor, local_tensor

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .engine import Step
from .options import check_betas, check_not_negative, declared
from .requests import Rule
from .state_layout import StateTensor, like_parameter, per_parameter

_log = logging.getLogger(__name__)


class ScheduleFreeAdamW(DistributedOptimizer):
    """Schedule-free AdamW (Defazio et al., `arXiv:2405.15682 <https://arxiv.org/abs/2405.15682>`_).

    z are the weights that are stepped, x their weighted mean, and y between them the weights at which gradients are
    computed. With γ = lr·min(1, t/warm_up), and x = y = z at first::

        v ← β₂v + (1-β₂)g²        d = g / (√(v/(1-β₂ᵗ)) + eps) + weight_decay·y
        c = w / Σw, with w = t^r · (the largest γ so far)^weight_lr_power
        y ← (1-c)y + c·z - γ(1 - β₁(1-c))d        z ← z - γd        so that  x = y + (1 - 1/β₁)(z - y)

    Parameters hold y during training. Models are evaluated, and their weights saved for others, at x::

        with optimizer.evaluating():
            ...

    A checkpoint for resuming has y. The learning rate needs no decay.

    Args:
        params: parameters, or parameter groups.
        lr, betas, eps, weight_decay, r, weight_lr_power: as in the formula; β₁ above 0.
        warm_up: steps in which γ grows to lr.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range.
    """

    sums_over_ranks = False
    keeps_copies = False

    def __init__(
        self,
        params: Params,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        warm_up: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        self._evaluates = False
        super().__init__(params, declared(locals()), stochastic_rounding)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_evaluates": False, **state})

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay", "warm_up", "r", "weight_lr_power")
        check_betas(options["betas"], 2)
        if options["betas"][0] == 0:
            raise ValueError(f"betas={options['betas']!r}: the first must be above 0")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        return {
            "z": like_parameter(shape),
            "exp_avg_sq": like_parameter(shape),
            "weight_sum": per_parameter(),
            "lr_max": per_parameter(),
        }

    def begin_step(self, *arguments: Any, **named: Any) -> Step:
        """As :meth:`DistributedOptimizer.begin_step`.

        Raises:
            RuntimeError: within :meth:`evaluating`, or what a step raises.
        """
        self._refuse_averages("a step")
        return super().begin_step(*arguments, **named)

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """As :meth:`DistributedOptimizer.state_dict`.

        Raises:
            RuntimeError: within :meth:`evaluating`: weights that are saved there do not go with the state.
        """
        self._refuse_averages("state_dict()")
        return super().state_dict(gather)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As :meth:`DistributedOptimizer.load_state_dict`.

        Raises:
            RuntimeError: within :meth:`evaluating`.
        """
        self._refuse_averages("load_state_dict()")
        super().load_state_dict(state_dict)

    def state_records(self, also: Sequence[Tensor] = ()) -> list[StateRecord]:
        """As :meth:`DistributedOptimizer.state_records`, which checkpoints read and write."""
        self._refuse_averages("a checkpoint")
        return super().state_records(also)

    def _refuse_averages(self, what: str) -> None:
        if self._evaluates:
            raise RuntimeError(f"{what} of ScheduleFreeAdamW within evaluating(): the parameters are averages there")

    def rule(self, batch: Batch) -> Rule:
        yield []
        options, step = batch.options, batch.step
        beta1, beta2 = options["betas"]
        gamma = float(options["lr"]) * min(1.0, step / max(options["warm_up"], 1))
        states = {key: batch.state(key) for key in ("z", "exp_avg_sq", "weight_sum", "lr_max")}
        for indices, weights in batch.writable():
            for i, y in zip(indices, weights):
                z, squares, total, largest = (tensors[i] for tensors in states.values())
                grad = batch.fp32_grad(i)
                if step == 1:
                    z.copy_(y)
                share = largest.clamp_(min=gamma) ** options["weight_lr_power"] * step ** options["r"]
                share = torch.where(total.add_(share) > 0, share / total, 0.0)
                squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                direction = grad.div(squares.div(1 - beta2**step).sqrt_().add_(options["eps"]))
                direction.add_(y, alpha=options["weight_decay"])
                y.lerp_(z, share).addcmul_(direction, (1 - share).mul_(beta1).sub_(1).mul_(gamma))
                z.add_(direction, alpha=-gamma)

    @contextmanager
    def evaluating(self, model: nn.Module | None = None) -> Iterator[None]:
        """A context in which the parameters are the averages x, to evaluate a model or to save its weights.

        All ranks that share parameters must enter it. It takes the memory of one copy of this rank's parameters.

        Args:
            model: required if torch's ``fully_shard`` has sharded it and it computes in the context: it may have kept
                parameters unsharded from before, and is resharded.

        Raises:
            RuntimeError: the context is entered within itself.
        """
        if self._evaluates:
            raise RuntimeError("evaluating() of ScheduleFreeAdamW within evaluating()")
        resharded: list[Any] = (
            [] if model is None else [module for module in model.modules() if hasattr(module, "reshard")]
        )
        if model is None and any(is_dtensor(param) for group in self.param_groups for param in group["params"]):
            _log.warning("FSDP2 may compute with unsharded parameters of before: evaluating(model) reshards them")
        kept: list[tuple[Tensor, Tensor, int]] = []  # a parameter, its values, and its version with the averages
        self._evaluates = True
        try:
            for module in resharded:
                module.reshard()
            with torch.no_grad():
                for group in self.param_groups:
                    for param in group["params"]:
                        entry = self.state.get(param)
                        if entry and entry["step"]:
                            local = local_tensor(param)
                            before = local.clone()
                            y = entry.get("master", local).float()
                            local.copy_(y.lerp(entry["z"], 1 - 1 / group["betas"][0]))
                            kept.append((param, before, param._version))
            yield
        finally:
            self._evaluates = False
            if any(param._version != version for param, _, version in kept):
                _log.warning("parameters were written within evaluating(), whose end undoes it")
            with torch.no_grad():
                for param, y, _ in kept:
                    local_tensor(param).copy_(y)  # a first forward may have moved them to memory that ranks share
            for module in resharded:
                module.reshard()
