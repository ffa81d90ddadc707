"""The training step around the optimizers: loss scale, backward, clipping, stepping, and their state."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_comm import (
    DisagreementError,
    ParallelContext,
    check_agreement,
    current_context,
    forget_scale,
    mark_scaled,
    named_range,
    note_place,
    note_scale,
    note_step,
    use_scaler,
)

from .adam import AdamOptimizer
from .convert import distributed_where_needed
from .distributed import DistributedOptimizer, begin_steps, has_our_step, step_hooks, steps_with_others
from .engine import Step, advance, run
from .exchange import Communication
from .gradients import HostCopy, global_norm, local_grads, overflow_here, scale_for_means, scale_grads
from .state_dict import check_before_loading, match_groups
from .upstream_state import from_upstream, is_upstream

_log = logging.getLogger(__name__)


class OptimManager:
    """Steps any number of optimizers and learning-rate schedulers, with or without a loss scale.

    ::

        manager = OptimManager(loss_scale=1024)
        manager.add_optimizer(optimizer, scheduler)
        for batch in data:
            manager.zero_grad()
            manager.backward(loss(model, batch))
            manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
            manager.step()

    Optimizers and schedulers may be ours or torch's. An optimizer whose ``step`` takes ``scale`` (ours do) divides the
    gradients by it. For any other the gradients are divided in place just before its step, which loses small values
    where they are fp16.

    The host waits for the device in one place: with a loss scale, :meth:`step` reads one overflow flag. Where all
    optimizers are Adams of ours, their kernels read the flag on the device. The host reads it when they have been
    queued, so that the device does not wait for the host. With ``reads_late`` the host reads it at the next
    :meth:`backward` at the latest. Otherwise the flag is sent with the first round of the optimizers that are a
    :class:`DistributedOptimizer`, which step together. Where that round goes over all ranks, the flag costs no
    collective of its own. The gradient norm has its own reductions, because what optimizers communicate depends on
    clipped gradients. It shows overflow, too: gradients that :meth:`clip_grad_norm` has seen are not searched again.

    Args:
        loss_scale: the first loss scale; ``None``: no loss scale, and no check for overflow.
        loss_scale_factor: by which the scale falls on overflow and grows again.
        loss_scale_steps: good steps in a row after which it grows.
        min_loss_scale, max_loss_scale: its bounds.
        grad_scale: what the loss is divided by. The default is the number of data-parallel replicas, so that
            gradients that are summed over replicas become means, and 1 for parameters of FSDP2 or of
            :func:`bmt_zero.fully_shard`, whose gradients are means. It must be given with several replicas and
            parameters that are not sharded: 1 where gradients are averaged, as DDP does.
        skip_non_finite: whether all ranks skip a step if a gradient on any rank is inf or NaN; by default if there is
            a loss scale. Without a loss scale, this costs what the overflow check costs.
        max_skipped_steps: as many steps in a row are skipped; :meth:`step` raises at the next one.
        reads_late: :meth:`step` does not wait for the overflow flag where kernels read it on the device. Schedulers are
            then stepped, and steps counted or skipped, when :meth:`settle` is called. ``backward``, ``scale_loss``,
            ``clip_grad_norm``, ``reject_step``, ``step``, the methods that save and load state (also those of the
            optimizers) and reading ``loss_scale`` or ``optimizers`` call it. The script must call it before it reads a
            learning rate or saves a scheduler by itself. A skipped step leaves its gradients to ``zero_grad``.
        context: the ranks that step together; by default the process-wide context.

    Attributes:
        loss_scale: the current loss scale; 1 without one.
        grad_norm: the norm that the last :meth:`clip_grad_norm`, or ``step(max_norm=...)``, computed; ``None`` before.
        steps_since_last_scale: good steps since it last changed.
        skipped_steps: how many steps were skipped in a row, up to now.

    Raises:
        RuntimeError: there is no context yet.
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        loss_scale: float | None = None,
        loss_scale_factor: float = 2,
        loss_scale_steps: int = 1024,
        min_loss_scale: float = 1,
        max_loss_scale: float = math.inf,
        grad_scale: float | None = None,
        *,
        skip_non_finite: bool | None = None,
        max_skipped_steps: int = 100,
        reads_late: bool = False,
        context: ParallelContext | None = None,
    ) -> None:
        self.context = current_context() if context is None else context
        self._compared = False  # whether the optimizers have been compared with those of the other ranks
        # Whether each optimizer is stepped together with others: decided at its first step, because all ranks must do
        # the same, and some of them may get hooks later.
        self._with_others: dict[Any, bool] = {}
        if not loss_scale_factor >= 1:
            raise ValueError(f"loss_scale_factor={loss_scale_factor!r} must be at least 1")
        if loss_scale_steps < 1:
            raise ValueError(f"loss_scale_steps={loss_scale_steps!r} must be at least 1")
        if not 0 < min_loss_scale <= max_loss_scale:
            raise ValueError(
                f"0 < min_loss_scale={min_loss_scale!r} <= max_loss_scale={max_loss_scale!r} does not hold"
            )
        if loss_scale is not None and not min_loss_scale <= loss_scale <= max_loss_scale:
            raise ValueError(
                f"loss_scale={loss_scale!r} is not between min_loss_scale={min_loss_scale!r} and "
                f"max_loss_scale={max_loss_scale!r}"
            )
        if grad_scale is not None and not 0 < grad_scale < math.inf:
            raise ValueError(f"grad_scale={grad_scale!r} must be positive; the loss is divided by it")
        if loss_scale is not None and skip_non_finite is False:
            raise ValueError(
                "skip_non_finite=False: a loss scale needs the check; pass loss_scale=None, or leave it out"
            )
        if max_skipped_steps < 0:
            raise ValueError(f"max_skipped_steps={max_skipped_steps!r} must not be negative")
        self.loss_scale_enabled = loss_scale is not None
        self._loss_scale: float = 1 if loss_scale is None else loss_scale
        self.loss_scale_factor = loss_scale_factor
        self.loss_scale_steps = loss_scale_steps
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._grad_scale = grad_scale
        self._inferred_grad_scale: float | None = None
        use_scaler(self)
        self.steps_since_last_scale = 0
        self.skip_non_finite = bool(skip_non_finite)
        self.max_skipped_steps = max_skipped_steps
        self.skipped_steps = 0
        self.reads_late = reads_late
        self.grad_norm: Tensor | None = None
        self._pending: tuple[HostCopy, list[Step], Communication] | None = None  # the last step, and its overflow flag
        self._rejected = ""
        self._optimizers: list[Any] = []  # torch.optim.Optimizer, some of whose methods take more than torch's
        self.lr_schedulers: list[Any] = []
        self._unscale_themselves: list[bool] = []
        # For each norm of the current gradients 1 if it is not finite (though every element may be), and the parameters
        # of these norms.
        self._bad_norms: list[Tensor] = []
        self._in_norms: set[Tensor] = set()

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None, *, elementwise: bool = False
    ) -> None:
        """Step ``optimizer``, and then ``lr_scheduler`` (anything with ``step()``), in :meth:`step`.

        Where parameters are sharded, an optimizer that needs statistics of whole layers is converted by
        :func:`to_distributed`, and the result is stepped in its place. ``optimizer`` forwards to the result: scripts
        and schedulers use it as before. Optimizers that share a parameter are stepped in the order in which they were
        added before the first step.

        Args:
            elementwise: the optimizer is of a class that is not known here, and its update of an element depends on
                nothing but that element's gradient, weight and state. An attribute ``elementwise = True`` of the
                optimizer says the same.

        Raises:
            TypeError: parameters are sharded, and this optimizer would be wrong, or is not known to be right.
            ValueError: it cannot be converted as it is, or :meth:`step` cannot step the scheduler.
        """
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "lr_scheduler: a step of ReduceLROnPlateau needs a metric; leave it out, and call its step(metric) "
                "where the metric is known"
            )
        optimizer = distributed_where_needed(optimizer, elementwise)
        self.optimizers.append(optimizer)
        self._inferred_grad_scale = None
        self.lr_schedulers.append(lr_scheduler)
        # Steps of other libraries may have an argument ``scale`` of another meaning.
        is_ours = isinstance(optimizer, DistributedOptimizer) or getattr(optimizer, "_bmtrain_optimizer", False)
        self._unscale_themselves.append(bool(is_ours) and _takes(optimizer, "step", "scale"))

    @property
    def grad_scale(self) -> float:
        """What losses are divided by.

        Raises:
            ValueError: it was not given, and the parameters do not say.
        """
        if self._grad_scale is not None:
            return self._grad_scale
        if self._inferred_grad_scale is None:
            self._inferred_grad_scale = scale_for_means(self._params(), self.context)
        return self._inferred_grad_scale

    @grad_scale.setter
    def grad_scale(self, value: float) -> None:
        self._grad_scale = value

    # --- a step -----------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` · loss_scale / grad_scale.

        Raises:
            ValueError: see :attr:`grad_scale`.
        """
        self._forget_norms()  # gradients are going to change
        scale = self.loss_scale
        scaled = loss * (scale / self.grad_scale)
        if self.loss_scale_enabled:
            mark_scaled(scaled, scale, lambda: note_scale(self._params(), scale))
        return scaled

    def backward(self, loss: Tensor) -> None:
        """Run backward from the scaled loss."""
        try:
            self.scale_loss(loss).backward()
        finally:
            forget_scale()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill every gradient with zeros, or drop it.

        A parameter that the next backward does not use keeps a gradient of zeros: weight decay and momentum still
        change it. With a dropped gradient it does not change, as after torch's ``zero_grad()``.
        """
        self._forget_norms()
        for optimizer in self._optimizers:  # not ``optimizers``, which would settle the step
            optimizer.zero_grad(set_to_none=set_to_none)
        note_scale(self._params(), None)

    def _params(self) -> list[Tensor]:
        return _parameters(group for optimizer in self._optimizers for group in optimizer.param_groups)

    @torch.no_grad()
    def clip_grad_norm(
        self,
        param_groups: Iterable[Mapping[str, Any]] | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float | str = 2,
        eps: float = 1e-6,
    ) -> Tensor:
        """Scale gradients in place so that their norm, freed of the loss scale, is at most ``max_norm``.

        The norm is over all elements of all logical parameters. Each element counts once, however it is sharded or
        replicated. All ranks must call this with the same parameters. Gradients whose norm is not finite do not
        change, and :meth:`step` will see an overflow. If the norm is finite, only a backward pass through
        :meth:`backward` or :meth:`scale_loss` may add to the gradients afterwards.

        Args:
            param_groups: ``optimizer.param_groups``, or parameters.
            max_norm: the largest norm allowed.
            norm_type: p > 0 of the p-norm; inf (or "inf") for the largest magnitude.
            eps: added to the norm that ``max_norm`` is divided by.

        Returns:
            The norm before clipping, freed of the loss scale: 0-dim fp32 on the device, the same on all
            ranks. Nothing waits for it.

        Raises:
            ValueError: ``norm_type`` is not positive, or ``max_norm`` is negative.
        """
        factor, grads = self._clip_factor(_parameters(param_groups), max_norm, norm_type, eps)
        scale_grads(grads, factor)
        assert self.grad_norm is not None
        return self.grad_norm

    def _clip_factor(
        self, params: Sequence[Tensor], max_norm: float, norm_type: float | str, eps: float = 1e-6
    ) -> tuple[Tensor, list[Tensor]]:
        """The factor that clips the gradients of ``params``, 0-dim fp32, and this rank's gradients in flat tensors."""
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type!r} is not a norm; choose a number above 0 or inf")
        if not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm!r} must not be negative")
        scaled, grads = global_norm(params, norm_type, self.context)
        norm = scaled / self.loss_scale
        factor = torch.where(torch.isfinite(norm), (max_norm / (norm + eps)).clamp(max=1), 1)
        if self._checks:
            self._bad_norms.append((~torch.isfinite(scaled)).float())
            self._in_norms.update(params)
        self.grad_norm = norm.float()
        return factor.float(), grads

    def reject_step(self, reason: str) -> None:
        """Let all ranks skip the next step, also if only this rank calls this: for a loss that is a spike, say.

        Args:
            reason: is printed by this rank.

        Raises:
            RuntimeError: this manager has neither a loss scale nor ``skip_non_finite``, so ranks exchange nothing
                before a step.
        """
        if not self._checks:
            raise RuntimeError(
                "reject_step: ranks do not agree on steps; make the OptimManager with skip_non_finite=True"
            )
        self.settle()  # the step after the pending one is rejected
        self._rejected = reason

    def _check_settings(self) -> None:
        """Raise unless all ranks have the same optimizers; pipeline stages may have other parameter groups."""
        scale = self.loss_scale if self.loss_scale_enabled else None
        kinds = [f"loss scale {scale}, {'steps checked' if self._checks else 'steps not checked'}"]
        options = []
        for number, optimizer in enumerate(self.optimizers):
            kinds.append(f"optimizer {number}: {type(optimizer).__name__}")
            for index, group in enumerate(optimizer.param_groups):
                plain = {k: v for k, v in group.items() if isinstance(v, (int, float, str, bool, tuple, type(None)))}
                options.append(f"optimizer {number}, group {index}: {plain}")
        if self.context.pipe_size == 1:
            kinds += options
        check_agreement(self.context.world, "the optimizers", kinds)
        if self.context.pipe_size > 1:
            check_agreement(self.context.zero, "the optimizers", options)
            self._check_any_parameters()
        together = [steps_with_others(each) and not self._shares(each) for each in self.optimizers]
        try:
            check_agreement(self.context.world, "which optimizers have hooks", [str(each) for each in together])
        except DisagreementError:
            together = [False] * len(together)
        self._with_others.update(zip(self.optimizers, together))

    def _shares(self, optimizer: Any) -> bool:
        """Whether another optimizer has some of its parameters. Such optimizers are stepped one by one, in order."""
        own = set(_parameters(optimizer.param_groups))
        others = (each.param_groups for each in self.optimizers if each is not optimizer)
        return not own.isdisjoint(_parameters(group for groups in others for group in groups))

    def _check_any_parameters(self) -> None:
        """Raise if no stage of a pipeline has parameters in some optimizer: one may have none."""
        empty = [str(not any(group["params"] for group in each.param_groups)) for each in self.optimizers]
        try:
            check_agreement(self.context.world, "which optimizers have parameters", empty)
        except DisagreementError:
            return
        if "True" in empty:
            raise ValueError(f"optimizer {empty.index('True')} has no parameters on any stage of the pipeline")

    def step(self, max_norm: float | None = None, norm_type: float | str = 2) -> bool | None:
        """Step every optimizer and its scheduler; or, if a gradient overflowed anywhere, none of them.

        With a loss scale or ``skip_non_finite``, an inf or NaN in any gradient on any rank, or a rank that has called
        :meth:`reject_step`, makes all ranks skip the step, fill the gradients with zeros and divide the loss scale.

        Args:
            max_norm: clip the gradients of all optimizers. Unlike :meth:`clip_grad_norm`, this takes no pass over the
                gradients: our optimizers clip as they read, and the gradients do not change. Gradients of optimizers
                with step hooks, and of others' optimizers, are scaled in place. The norm is ``grad_norm``.
            norm_type: as in :meth:`clip_grad_norm`.

        Step hooks of our optimizers that are registered after the first step may be called before it is known that
        the step is skipped, and see gradients that are not clipped.

        Returns:
            Whether the step was taken; the same on all ranks. With ``reads_late``, ``None`` where that is not known
            yet.

        Raises:
            RuntimeError: more than ``max_skipped_steps`` steps were skipped in a row.
            ValueError: see :meth:`clip_grad_norm`.
        """
        note_place("the optimizer step")
        self.settle()
        if not self._compared:
            self._check_settings()
            self._compared = True
        with torch.no_grad():  # not around steps: others' optimizers may differentiate in them
            factor = None if max_norm is None else self._clip_factor(self._params(), max_norm, norm_type)[0]
            flag = self._overflow() if self._checks else None
        # Decides on a collective, so it must not depend on hooks and devices, which ranks may have differently.
        alike = flag is not None and all(getattr(each, "takes_found_inf", False) for each in self._optimizers)
        together = self._together(alike)
        if flag is not None and alike:
            with named_range("optimizer round", 0):
                self.context.world.all_reduce(flag)
            if len(together) == len(self._optimizers) and self._is_read_on_device(flag):
                steps = begin_steps(together, self.loss_scale, factor, flag)
                copy = HostCopy(flag)
                record = advance(steps)
                assert record is not None
                self._pending = copy, steps, record
                self._note_step()
                if not self.reads_late:
                    return self.settle()
                for optimizer in together:
                    optimizer.settle_step = self.settle
                return None
        hooks = [(each, *step_hooks(each)) for each in together]
        for optimizer, before, _ in hooks:
            for hook in before:
                if hook(optimizer, (optimizer,), {"scale": self.loss_scale}) is not None:
                    raise RuntimeError(
                        f"{hook!r} was registered after the first step of the OptimManager and returns new arguments; "
                        "register it before"
                    )
        if not run(begin_steps(together, self.loss_scale, factor), flag, None if alike else self.context.world):
            self._note_step()  # skipped or not: other ranks may note it before they know
            self._skip()
            return False
        for optimizer, _, after in hooks:
            for hook in after:
                hook(optimizer, (optimizer,), {"scale": self.loss_scale})
        pairs = zip(self.optimizers, self._unscale_themselves)
        self._step_alone([pair for pair in pairs if not any(pair[0] is each for each in together)], factor)
        self._note_step()  # not before: a rank whose step has raised an exception differs from the others
        self._count()
        return True

    def _together(self, flag_goes_alone: bool) -> list[Any]:
        """The optimizers whose rounds are one. Hooks of one rank must not change what it communicates."""
        for each in self._optimizers:  # one may have been added after the first step
            self._with_others.setdefault(each, steps_with_others(each))
        joins = steps_with_others if flag_goes_alone else has_our_step  # such optimizers seldom communicate besides
        return [each for each in self._optimizers if self._with_others[each] and joins(each)]

    def _note_step(self) -> None:
        """Note the step and its learning rates, for ranks to compare. Stages of a pipeline may have other rates."""
        groups = [group for each in self._optimizers for group in each.param_groups if self.context.pipe_size == 1]
        rates = [group.get("lr") for group in groups]
        # Tensors are not compared: reading one may wait for a device.
        note_step([float(rate) if isinstance(rate, numbers.Real) else math.nan for rate in rates])

    def settle(self) -> bool:
        """Wait until it is known whether the last step was taken, and count or skip it. Returns whether it was taken.

        Raises:
            RuntimeError: more than ``max_skipped_steps`` steps were skipped in a row.
        """
        if self._pending is not None:
            (copy, steps, record), self._pending = self._pending, None
            if copy.read() > 0:
                self._skip()  # with reads_late, gradients may be those of the next step by now
            else:
                for step in steps:
                    step.finish(record)
                self._count()
        return self.skipped_steps == 0

    @property
    def optimizers(self) -> list[Any]:
        self.settle()
        return self._optimizers

    @property
    def loss_scale(self) -> float:
        self.settle()
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.settle()
        self._loss_scale = value

    def _is_read_on_device(self, flag: Tensor) -> bool:
        """Whether kernels can read the overflow flag where the parameters are."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return all(p.device == flag.device for group in groups for p in group["params"])

    def _count(self) -> None:
        """Step the schedulers and the loss scale after a step that was taken."""
        self.skipped_steps = 0
        for scheduler in self.lr_schedulers:
            if scheduler is not None:
                scheduler.step()
        if self.loss_scale_enabled:
            self.steps_since_last_scale += 1
            if self.steps_since_last_scale >= self.loss_scale_steps and self.loss_scale < self.max_loss_scale:
                self.loss_scale = min(self.loss_scale * self.loss_scale_factor, self.max_loss_scale)
                self.steps_since_last_scale = 0

    @property
    def _checks(self) -> bool:
        """Whether ranks agree on each step before they take it."""
        return self.loss_scale_enabled or self.skip_non_finite

    def _step_alone(self, optimizers: Sequence[tuple[Any, bool]], factor: Tensor | None) -> None:
        """Step (optimizer, whether it unscales its gradients) one by one. They may share parameters."""
        if factor is not None:
            scale_grads(
                local_grads(_parameters(group for each, _ in optimizers for group in each.param_groups)), factor
            )
        if self.loss_scale != 1:
            groups = (group for each, unscales in optimizers if not unscales for group in each.param_groups)
            params = _parameters(groups)
            own = _parameters(group for each, unscales in optimizers if unscales for group in each.param_groups)
            if not set(own).isdisjoint(params):  # gradients are divided once, for all optimizers
                params = _parameters([*params, *own])
                optimizers = [(each, False) for each, _ in optimizers]
            for grad in local_grads(params):
                grad.div_(self.loss_scale)
            note_scale(params, 1)
        for optimizer, unscales in optimizers:
            if unscales:
                optimizer.step(scale=self.loss_scale)
            else:
                optimizer.step()

    def _overflow(self) -> Tensor:
        """1 if the gradients of this rank, or their norm, have an inf or a NaN, or it rejects the step; else 0."""
        unseen = [p for p in self._params() if p not in self._in_norms]
        flag = overflow_here(local_grads(unseen), self.context, self._bad_norms)
        self._forget_norms()
        return torch.ones_like(flag) if self._rejected else flag

    def _forget_norms(self) -> None:
        self._bad_norms.clear()
        self._in_norms.clear()

    def _skip(self) -> None:
        """Drop the gradients and lower the loss scale, for a step that is not taken."""
        if not self.reads_late:
            self.zero_grad()
        self.skipped_steps += 1
        self.steps_since_last_scale = 0
        outcome = "step skipped"
        if self.loss_scale_enabled:
            before = self.loss_scale
            self.loss_scale = max(before / self.loss_scale_factor, self.min_loss_scale)
            outcome += f", loss scale {before:g} -> {self.loss_scale:g}"
        if self._rejected:
            print(f"Rank {self.context.rank}: {self._rejected}: {outcome}")
        elif self.context.rank == 0:
            print(f"{'Gradient overflow' if self.loss_scale_enabled else 'A rank has bad gradients'}: {outcome}")
        self._rejected = ""
        if self.skipped_steps > self.max_skipped_steps:
            raise RuntimeError(
                f"{self.skipped_steps} steps in a row had gradients that are not finite, or were rejected: training "
                "has diverged, or the data is bad. Go on from an earlier checkpoint with a lower learning rate, or "
                f"make max_skipped_steps={self.max_skipped_steps} larger"
            )

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self, gather_opt: bool = False) -> dict[str, Any]:
        """The state of all optimizers and schedulers (``None`` where there is none) and of the loss scale.

        Args:
            gather_opt: whether optimizers that can (ours) give their unsharded state, on rank 0 (of each
                pipeline stage, for what that has); a collective.
        """
        self.settle()
        return {
            "optimizers": [
                optimizer.state_dict(gather=gather_opt) if gathers(optimizer) else optimizer.state_dict()
                for optimizer in self.optimizers
            ],
            **self.trainer_state(),
        }

    def trainer_state(self) -> dict[str, Any]:
        """The state without that of the optimizers: of the schedulers and of the loss scale; the same on every rank."""
        self.settle()
        return {
            "lr_schedulers": [
                None if scheduler is None else scheduler.state_dict() for scheduler in self.lr_schedulers
            ],
            "loss_scale": self.loss_scale,
            "loss_scale_enabled": self.loss_scale_enabled,
            "steps_since_last_scale": self.steps_since_last_scale,
        }

    def check_trainer_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless :meth:`load_trainer_state` takes it."""
        for key in ("lr_schedulers", "loss_scale", "loss_scale_enabled"):
            if key not in state:
                raise ValueError(f"the state dict has no {key!r}; its keys are {sorted(map(str, state))}")
        saved = state["lr_schedulers"]
        if len(saved) != len(self.lr_schedulers):
            raise ValueError(
                f"the state dict has {len(saved)} lr_schedulers and this manager has {len(self.lr_schedulers)}"
            )
        for index, (scheduler, values) in enumerate(zip(self.lr_schedulers, saved)):
            if (scheduler is None) != (values is None):
                has, lacks = ("manager", "state dict") if values is None else ("state dict", "manager")
                raise ValueError(f"lr_scheduler {index}: the {has} has one and the {lacks} has none")
            check = getattr(scheduler, "check_state_dict", None)
            if check is not None:
                try:
                    check(values)
                except ValueError as error:
                    raise ValueError(f"lr_scheduler {index}: {error}") from None

    def load_trainer_state(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`trainer_state` returned.

        Whether losses are scaled stays as this manager was made: a state without a scale leaves it its own.
        """
        self.settle()
        for scheduler, values in zip(self.lr_schedulers, state["lr_schedulers"]):
            if scheduler is not None:
                scheduler.load_state_dict(values)
        if self.loss_scale_enabled and state["loss_scale_enabled"]:
            self.loss_scale = min(max(state["loss_scale"], self.min_loss_scale), self.max_loss_scale)
            self.steps_since_last_scale = state.get("steps_since_last_scale", 0)
        elif self.loss_scale_enabled or state["loss_scale_enabled"]:
            saved, has = ("without", "one") if self.loss_scale_enabled else ("with", "none")
            _log.warning("the state was saved %s a loss scale, and this manager has %s: it stays so", saved, has)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, gathered or not; or what BMTrain 1.0's did.

        Raises:
            ValueError: it does not fit these optimizers and schedulers; nothing has been loaded.
        """
        state_dict = self._without_upstream(state_dict)
        self._check(state_dict)
        for optimizer, saved in zip(self.optimizers, state_dict["optimizers"]):
            optimizer.load_state_dict(saved)
        self.load_trainer_state(state_dict)

    def _without_upstream(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """``state_dict`` with optimizer states of BMTrain 1.0, if any, converted to our form."""
        saved = state_dict.get("optimizers", ())
        if len(saved) != len(self.optimizers) or not any(is_upstream(each) for each in saved):
            return state_dict
        scale = state_dict.get("loss_scale")
        converted = [
            from_upstream(each, [group["params"] for group in optimizer.param_groups], scale)
            if isinstance(optimizer, AdamOptimizer) and is_upstream(each)
            else each
            for optimizer, each in zip(self.optimizers, saved)
        ]
        return {**state_dict, "optimizers": converted}

    def _check(self, state_dict: Mapping[str, Any]) -> None:
        if "optimizers" not in state_dict:
            raise ValueError(f"the state dict has no 'optimizers'; its keys are {sorted(map(str, state_dict))}")
        saved = state_dict["optimizers"]
        if len(saved) != len(self.optimizers):
            raise ValueError(f"the state dict has {len(saved)} optimizers and this manager has {len(self.optimizers)}")
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, state_dict["optimizers"])):
            check = getattr(optimizer, "check_state_dict", None)
            try:
                if check is not None:
                    check(saved)
                else:
                    match = functools.partial(match_groups, optimizer, allow_empty=True)
                    check_before_loading(optimizer, saved, match)
            except ValueError as error:
                raise ValueError(f"optimizer {index}: {error}") from None
        self.check_trainer_state(state_dict)


def gathers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.state_dict`` can give the unsharded state."""
    return _takes(optimizer, "state_dict", "gather")


def _takes(optimizer: torch.optim.Optimizer, method: str, name: str) -> bool:
    """Whether a method has a parameter ``name``. It may be that of the optimizer that this one forwards to."""
    return name in inspect.signature(getattr(optimizer, method)).parameters


def _parameters(param_groups: Iterable[Mapping[str, Any]] | Iterable[Tensor] | Tensor) -> list[Tensor]:
    """The parameters, each once."""
    if isinstance(param_groups, Tensor):
        return [param_groups]
    params: dict[Tensor, None] = {}
    for item in param_groups:
        params.update(dict.fromkeys([item] if isinstance(item, Tensor) else item["params"]))
    return list(params)
