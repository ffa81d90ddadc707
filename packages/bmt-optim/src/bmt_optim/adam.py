"""Adam over shards: fp32 moments and master weights, one flat tensor per run of neighbouring parameters.

[Note: runs and their state]
    The parameters of each group are planned into runs (:mod:`bmt_optim.runs`). A run's moments, and master
    weights where its parameters are of half precision, are flat fp32 tensors; ``optimizer.state[p]`` holds
    views of them. A step passes whole runs to the kernel. A run whose gradients do not lie as its parameters
    do, or whose parameters have taken different numbers of steps, goes in parameter by parameter, this time.

    Plans are only a cache over ``optimizer.state``. Every step compares addresses with the plan's, and a
    parameter that lies elsewhere (``model.to(...)``) makes its group be planned anew, keeping the state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import bmt_kernels
from bmt_comm import StateRecord, dtensor_like, is_dtensor, slice_of

from . import engine
from .adam_runs import HALF, MOMENTS, GroupPlan, Home, Launch
from .exchange import Communication
from .options import check_conventions, declared
from .requests import Rule
from .runs import on_local_tensors, zero_grads
from .state_dict import gather_state, match_groups, state_value, step_record, whole_number
from .upstream_state import from_upstream, is_upstream

Call = tuple[Launch, dict[str, Any]]
"""The tensors of a kernel call and its other arguments."""


class AdamOptimizer(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_).

    ::

        m ← β₁m + (1-β₁)g        v ← β₂v + (1-β₂)g²        g: the gradient divided by ``scale``
        p ← p(1 - lr·weight_decay) - lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + eps)

    The weight decay is decoupled for every dtype. Moments are fp32, and of the unscaled gradient, so that a
    state dict does not depend on the loss scale. fp16 and bf16 parameters have an fp32 master weight, of
    which they are the rounded copy. A master weight takes the parameter's value until the first step; one
    who writes into half-precision parameters later calls :meth:`sync_masters`.

    The parameters may be whole, shards that carry a ``bmt_slice``, or DTensors. A step communicates nothing
    and never waits for the device.

    Args:
        params: parameters (fp32, fp16 or bf16; mixed at will) or parameter groups.
        lr, betas, eps, weight_decay: as in the formula.
        hold_steps: during a parameter's first ``hold_steps`` steps only its moments change.
        conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of another dtype.
        ValueError: a setting out of range.
    """

    takes_found_inf = True
    """Whether a step with ``found_inf`` changes nothing where that is not zero, without the host's knowing it."""
    _home = Home()

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        hold_steps: int = 0,
        **conventions: Any,
    ) -> None:
        self._plans: list[GroupPlan] = []
        super().__init__(params, declared(locals()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plans = []
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where ``param_group`` names them (see ``torch.optim``)."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    # --- stepping ---------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is returned.
            scale: what the gradients are divided by (the loss scale); they are left as they are.

        Raises:
            RuntimeError: a gradient is sparse.
            ValueError: ``scale``, or an option of a group that was changed since, is out of range.

            Nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine.run([self.begin_step(scale)])
        return loss

    step._wrapped_by_lr_sched = step.runs_begin_step = True  # type: ignore[attr-defined]  # see DistributedOptimizer.step

    @on_local_tensors
    def begin_step(
        self, scale: float = 1, grad_factor: Tensor | None = None, found_inf: Tensor | None = None
    ) -> engine.Step:
        """The part of a step before anything changes (see :meth:`DistributedOptimizer.begin_step`)."""
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale!r} must be positive and finite")
        for group in self.param_groups:
            _check_options(group)
        calls: list[Call] = []
        for group, plan in zip(self.param_groups, self._current_plans()):
            launches: dict[Any, Launch] = {}
            for run in plan.runs:
                run.collect(self.state, launches)
            for (step, *_), launch in launches.items():
                options = {name: group[name] for name in ("betas", "eps", "weight_decay", "hold_steps")}
                options.update(lr=float(group["lr"]), maximize=bool(group.get("maximize")), step=step)
                options.update(grad_scale=float(scale), grad_factor=grad_factor, found_inf=found_inf)
                calls.append((launch, options))
        stepped = [(entry, options["step"]) for launch, options in calls for entry in launch.entries]

        def finish(_: Communication) -> None:
            self._opt_called = True
            for entry, step in stepped:
                entry["step"] = step

        return engine.Step([], finish, [self._rule(calls)])

    def _rule(self, calls: Sequence[Call]) -> Rule:
        yield []
        self._launch(calls)
        for launch, _ in calls:
            for copied, param in launch.copies:
                param.copy_(copied)
            if launch.in_runs:  # the flat views need not share the parameters' version counters
                torch.autograd.graph.increment_version(launch.in_runs)

    def _launch(self, calls: Sequence[Call]) -> None:
        for launch, options in calls:
            bmt_kernels.adam_step(
                launch.params,
                launch.grads,
                launch.exp_avgs,
                launch.exp_avg_sqs,
                masters=launch.masters or None,
                **options,
            )

    @on_local_tensors
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill the gradients with zeros, or drop them."""
        if set_to_none:
            super().zero_grad(set_to_none=True)
        else:
            zero_grads(self._params())

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Take over what was written into half-precision parameters since the last step.

        A master weight whose rounded value is its parameter stays as it is.
        """
        self._settle()
        for plan in self._current_plans():
            for run in plan.runs:
                if run.materialized and run.half:
                    run.sync_masters(range(len(run.params)))

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """The state by parameter index, in torch's format.

        Every parameter that requires a gradient has ``step`` (a tensor), ``exp_avg``, ``exp_avg_sq`` and,
        in half precision, ``master``: fp32, of the local shape, and the optimizer's own memory. Those of a
        DTensor are DTensors.

        Args:
            gather: assemble the unsharded tensors, on the CPU, one parameter at a time. A collective over
                the ranks that share parameters. Rank 0 gets them all, or the first rank of each pipeline stage
                those of what its stage has; on the other ranks ``state`` is empty.
        """
        self._materialize()
        found = super().state_dict()
        params = self._params()
        # A frozen neighbour in a run has memory for a state, and that depends on the layout: leave it out.
        found["state"] = {
            index: {**entry, "step": torch.tensor(float(entry["step"]))}
            for index, entry in sorted(found["state"].items())
            if params[index].requires_grad or entry["step"] > 0
        }
        if gather:
            keys = [(*MOMENTS, "master") if p.dtype in HALF else MOMENTS for p in params]
            tensors = [dict.fromkeys(k, (slice_of(p), torch.float32)) for k, p in zip(keys, params)]
            found["state"] = gather_state(found["state"], params, tensors)
            return found
        for index, entry in found["state"].items():
            param = params[index]
            if is_dtensor(param):
                where = slice_of(param)
                entry.update({key: dtensor_like(value, where, param) for key, value in entry.items() if key != "step"})
        return found

    def _materialize(self) -> None:
        """Give every parameter that requires a gradient its state."""
        self._settle()
        for plan in self._current_plans():
            for run in plan.runs:
                if not run.materialized and any(p.requires_grad for p in run.params):
                    run.materialize(self.state)

    def state_records(self) -> list[StateRecord]:
        """The state as parts of logical tensors, for checkpoints (see :class:`bmt_comm.StateRecord`).

        Of each parameter that requires a gradient, or has been stepped: ``step``, ``exp_avg``, ``exp_avg_sq`` and, in
        half precision, ``master``.
        """
        self._materialize()
        found: list[StateRecord] = []
        for param in self._params():
            entry = self.state.get(param)
            if not entry or not (param.requires_grad or entry["step"] > 0):
                continue
            keys = (*MOMENTS, "master") if param.dtype in HALF else MOMENTS
            found.append(step_record(param, entry["step"]))
            found += [StateRecord(param, key, slice_of(param), entry[key]) for key in keys]
        return found

    def adopt_state_records(self, records: Iterable[StateRecord]) -> None:
        """Go on from what was written into the tensors of :meth:`state_records`."""
        for record in records:
            if record.key == "step":
                self.state[record.param]["step"] = int(record.tensor)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise, and change nothing."""
        if is_upstream(state_dict):
            state_dict = from_upstream(state_dict, [group["params"] for group in self.param_groups])
        self._parse(state_dict)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, at this or any other layout (of a pipeline: with the same
        stages), or ``torch.optim.AdamW``'s, or BMTrain 1.0's (gathered, or of this rank in a job of as many ranks; in
        a pipeline every rank must call this for it).

        Tensors may have the local or the full shape; of a full one this rank takes its slice. Values are
        copied. A half-precision parameter without ``master`` in the dict takes its current value as master;
        parameters themselves are not touched. A parameter without state in the dict starts afresh.

        Raises:
            ValueError: the dict does not fit; the optimizer is unchanged.
        """
        if is_upstream(state_dict):
            state_dict = from_upstream(state_dict, [group["params"] for group in self.param_groups])
        entries = self._parse(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            group.update(
                {key: copy.deepcopy(value) for key, value in saved.items() if key not in ("params", "param_names")}
            )
        self._settle()
        for plan in self._current_plans():
            for run in plan.runs:
                if any(entries[p] is not None for p in run.params):
                    run.materialize(self.state)
                if run.materialized:
                    run.load(self.state, entries)

    def _parse(self, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any] | None]:
        """Per parameter what is to be loaded: the step, and tensors of the local shape."""
        saved = match_groups(self, state_dict)
        for index, group in enumerate(state_dict["param_groups"]):
            try:
                _check_options({**self.defaults, **group})
            except ValueError as error:
                raise ValueError(f"param_groups[{index}] of the state dict: {error}") from None
        entries: dict[Tensor, dict[str, Any] | None] = {}
        for index, (param, values) in enumerate(saved):
            if values is None:
                entries[param] = None
                continue
            where = slice_of(param)
            entry: dict[str, Any] = {"step": whole_number(values, "step", index)}
            for key in MOMENTS:
                entry[key] = state_value(values, key, index, where)
            if param.dtype in HALF and "master" in values:
                entry["master"] = state_value(values, "master", index, where)
            entries[param] = entry
        return entries

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    # --- plans ------------------------------------------------------------------------------------

    def _current_plans(self) -> list[GroupPlan]:
        """A plan per group that holds for where the parameters lie now."""
        groups = self.param_groups
        del self._plans[len(groups) :]
        with torch.no_grad():  # in which a DTensor hands out its local tensor without a detour
            for index, group in enumerate(groups):
                params = group["params"]
                if index == len(self._plans):
                    self._plans.append(GroupPlan(params, self._home, self._share_of))
                elif not self._plans[index].holds(params):
                    self._settle()
                    self._plans[index] = GroupPlan(params, self._home, self._share_of)
        return self._plans

    def _share_of(self, param: Tensor) -> Hashable:
        """Parameters for which this differs are given to different kernel calls."""
        return None

    def _settle(self) -> None:
        """Wait until the state can be read and written where it is."""


def _check_group(group: dict[str, Any]) -> None:
    _check_options(group)
    check_conventions({name: group[name] for name in ("capturable", "differentiable") if name in group})
    for param in group["params"]:
        if param.dtype is not torch.float32 and param.dtype not in HALF:
            raise TypeError(
                f"a parameter of shape {tuple(param.shape)} has dtype {param.dtype}; "
                f"Adam takes float32, float16 and bfloat16"
            )


def _check_options(options: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= options[name] < math.inf:
            raise ValueError(f"{name}={options[name]!r} must be finite and not negative")
    betas = options["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} must be two numbers in [0, 1)")
    hold = options["hold_steps"]
    if not isinstance(hold, int) or hold < 0:
        raise ValueError(f"hold_steps={hold!r} must be a whole number of steps, 0 or more")
