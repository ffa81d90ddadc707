"""Adam over shards: no rounds, and one kernel call per run of neighbouring parameters.

[Note: runs and their state]
    The parameters of each group are planned into runs (:mod:`bmt_optim.adam_runs`). A run's moments, and its master
    weights in half precision, are flat fp32 tensors; ``optimizer.state[p]`` holds views of them. A step passes runs to
    the kernel. In a step in which a run's gradients are not laid out as its parameters are, or its parameters have
    taken different numbers of steps, the kernel gets its parameters one by one.

    Plans are only a cache over ``optimizer.state``. Every step compares addresses with the plan's. If a parameter has
    moved (``model.to(...)``), its group is planned anew and keeps its state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import bmt_kernels

from .adam_runs import GroupPlan, RunBatch, RunLists
from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_betas, check_not_negative, declared
from .requests import Rule
from .state_layout import StateTensor, like_parameter
from .upstream_state import from_upstream, is_upstream

MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam(DistributedOptimizer):
    """Adam (Kingma & Ba, `arXiv:1412.6980 <https://arxiv.org/abs/1412.6980>`_), as ``torch.optim.Adam``.

    ::

        g ← g + weight_decay·p                      unless the weight decay is decoupled
        m ← β₁m + (1-β₁)g        v ← β₂v + (1-β₂)g²
        p ← p(1 - lr·weight_decay)                  if it is
        p ← p - lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + eps)

    Args:
        params: parameters, or parameter groups.
        lr, betas, eps, weight_decay, decoupled_weight_decay: as in the formula.
        maximize: step along the gradients, not against them.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range.
    """

    sums_over_ranks = False
    keeps_copies = False
    maximizes = True
    takes_found_inf = True
    _is_decoupled = False  # True: overrides the option, which a loaded state dict may set
    _agrees = True
    """Whether ranks tell each other which parameters have gradients."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        self._plans: list[GroupPlan] = []
        super().__init__(params, declared(locals()), stochastic_rounding)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = []

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay")
        check_betas(options["betas"], 2)
        if options.get("amsgrad"):  # of a state dict of torch's
            raise ValueError("amsgrad=True is not supported; only amsgrad=False is")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        return {key: like_parameter(shape) for key in MOMENTS}

    def rule(self, batch: Batch) -> Rule:
        yield []
        self._update_batch(batch, self._kernel_options(batch))

    # --- runs -------------------------------------------------------------------------------------

    def _rules(
        self, scale: float, grad_factor: Tensor | None, found_inf: Tensor | None
    ) -> tuple[list[dict[str, Any]], list[Rule], list[Rule]]:
        if type(self).rule is not Adam.rule:  # a subclass's rule, for logical parameters
            return super()._rules(scale, grad_factor, found_inf)
        self._drop_old_plan()
        without: set[Tensor] = set()  # stepped parameters whose shard is empty and has no gradient
        if self._agrees:
            step_plan = self._current_plan()
            present = zip(step_plan.logical_params, step_plan.presence.update())
            without = {logical.param for logical, there in present if there and logical.param.grad is None}
        entries: list[dict[str, Any]] = []
        batches: list[RunBatch] = []
        in_runs: list[Tensor] = []
        for group, plan in zip(self.param_groups, self._current_runs()):
            lists_of: dict[Any, RunLists] = {}
            for each in plan.runs:
                each.collect(self, group, lists_of, without)
            for (step, *_), lists in lists_of.items():
                entries += lists.entries
                in_runs += lists.in_runs
                batches.append(RunBatch(lists, group, step, scale, grad_factor, found_inf, {}, None))
        return entries, [], [self._step_rule(batches, in_runs, found_inf)]

    def _step_rule(self, batches: Sequence[RunBatch], in_runs: Sequence[Tensor], found_inf: Tensor | None) -> Rule:
        yield []
        self._update(batches, found_inf)
        if in_runs:  # the flat views need not share the parameters' version counters
            torch.autograd.graph.increment_version(in_runs)

    def _update(self, batches: Sequence[RunBatch], found_inf: Tensor | None) -> None:
        """Step the batches, of which this rank may have none. All have this ``found_inf``."""
        for batch in batches:
            self._update_batch(batch, self._kernel_options(batch))

    def _update_batch(self, batch: Batch, options: Mapping[str, Any]) -> None:
        """Step a batch whose state is on the device of its parameters."""
        for indices, params, masters in batch.for_kernels():
            grads, *moments = (batch.pick(v, indices) for v in (batch.grads, *map(batch.state, MOMENTS)))
            bmt_kernels.adam_step(params, grads, *moments, masters=masters, **options)

    def _kernel_options(self, batch: Batch) -> dict[str, Any]:
        """The arguments of :func:`bmt_kernels.adam_step` that are not lists of tensors."""
        options = batch.options
        return {
            **{name: float(options[name]) for name in ("lr", "eps", "weight_decay")},
            "betas": tuple(map(float, options["betas"])),
            "decoupled": self._is_decoupled or options["decoupled_weight_decay"],
            "maximize": bool(options.get("maximize")),
            "hold_steps": options.get("hold_steps", 0),
            "step": batch.step,
            "grad_scale": batch.grad_scale,
            "grad_factor": batch.grad_factor,
            "found_inf": batch.found_inf,
        }

    def _materialize(self, also: Iterable[Tensor] = ()) -> None:
        self._settle()
        wanted = set(also)
        for group, plan in zip(self.param_groups, self._current_runs()):
            for each in plan.runs:
                if any(p.requires_grad or p.grad is not None or p in wanted for p in each.params):
                    each.materialize(self, group)

    def _current_runs(self) -> list[GroupPlan]:
        """A plan per group, for the current addresses of the parameters."""
        count = 0
        with torch.no_grad():  # a DTensor gives its local tensor faster without autograd
            for number, group in enumerate(self.param_groups):
                params = group["params"]
                if number == len(self._plans) or not self._plans[number].holds(params, count, self.state):
                    self._settle()
                    self._forget_replaced()
                    self._plans[number : number + 1] = [GroupPlan(self, params, count)]
                count += len(params)
        return self._plans

    def _sharing_of(self, param: Tensor) -> Hashable:
        """Parameters for which this differs are passed to different kernel calls."""
        return None

    def _keeps(self, state: Tensor, device: torch.device) -> bool:
        """Whether a state tensor of parameters on ``device`` is in the right memory."""
        return state.device == device

    def _settle(self) -> None:
        """Wait until the state can be read and written."""


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter, `arXiv:1711.05101 <https://arxiv.org/abs/1711.05101>`_).

    Args:
        params, lr, betas, eps, weight_decay, maximize, stochastic_rounding, conventions: as for :class:`Adam`.
    """

    _is_decoupled = True

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, True, maximize, stochastic_rounding, **conventions)


class AdamOptimizer(Adam):
    """:class:`AdamW` as BMTrain has it: no weight decay by default, and steps that hold the parameters.

    Moments are of the unscaled gradient, so that a state dict does not depend on the loss scale. A master weight takes
    the parameter's value until the first step. After later writes into half-precision parameters, call
    :meth:`sync_masters`. A step communicates nothing: each rank steps those of its parameters that have a gradient.

    Args:
        params: parameters (fp32, fp16 or bf16; mixed at will) or parameter groups.
        lr, betas, eps, weight_decay: as for :class:`AdamW`.
        hold_steps: during a parameter's first ``hold_steps`` steps only its moments change.
        conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of another dtype.
        ValueError: a setting out of range.
    """

    _is_decoupled = True
    _agrees = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        hold_steps: int = 0,
        **conventions: Any,
    ) -> None:
        self._plans = []
        DistributedOptimizer.__init__(self, params, declared(locals()))

    def check_options(self, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        hold = options["hold_steps"]
        if not isinstance(hold, int) or hold < 0:
            raise ValueError(f"hold_steps={hold!r} must be a whole number of steps, 0 or more")

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().check_state_dict(self._converted(state_dict))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As :meth:`DistributedOptimizer.load_state_dict`. It takes the state of BMTrain 1.0, too.

        That state may be gathered, or of this rank in a job of as many ranks. In a pipeline every rank must call this.
        """
        super().load_state_dict(self._converted(state_dict))

    def _converted(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        if not is_upstream(state_dict):
            return state_dict
        return from_upstream(state_dict, [group["params"] for group in self.param_groups])
