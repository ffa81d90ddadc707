"""The base of rule-based optimizers: parameter groups, state, master weights, state dicts, and the step."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from bmt_comm import (
    Communicator,
    Slice,
    StateRecord,
    current_context,
    is_called_from,
    is_deterministic,
    is_dtensor,
    is_initialized,
    local_tensor,
    not_compiled,
    slice_of,
)

from .batch import HALF, Batch, sync_masters
from .engine import Step, run
from .exchange import Communication
from .logical_params import LogicalParam
from .options import check_conventions
from .requests import Rule
from .runs import local_grad, on_local_tensors, zero_grads
from .state_dict import (
    LAYERS,
    before_loading,
    check_before_loading,
    gather_state,
    match_groups,
    saved_layers,
    state_value,
    step_record,
    whole_number,
)
from .state_layout import StateTensor, like_parameter
from .step_plan import StepPlan, portions_of

Params = Iterable[Tensor] | Iterable[dict[str, Any]]

# torch's methods in a guard of our own: theirs imports the compiler, which takes 1.5 seconds and 70 MiB on every rank.
_add_param_group, _zero_grad = (
    not_compiled(inspect.unwrap(getattr(torch.optim.Optimizer, name))) for name in ("add_param_group", "zero_grad")
)

_FACTS = {"sums_over_ranks": "rule", "keeps_copies": "state_layout", "maximizes": "rule", "takes_found_inf": "rule"}
"""Attributes of classes, and the method that each is about."""


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is the same mathematics on one device and over shards of any kind.

    The parameters may be unsharded, shards that carry a ``bmt_slice``, or DTensors; fp32, bf16 or fp16. All ranks that
    share parameters give them in the same order and call the same methods. State is fp32 and does not depend on the
    loss scale. A half-precision parameter is the rounded copy of an fp32 ``master`` in its state. With
    ``stochastic_rounding`` there is no master: the parameter is updated in fp32 and rounded stochastically.

    A subclass defines what it computes in :meth:`rule` and its state in :meth:`state_layout`; see the note in
    :mod:`bmt_optim.requests`.

    Args:
        params: parameters, or parameter groups.
        defaults: the options of a group that does not set them.
        stochastic_rounding: keep no masters of half-precision parameters. Rounding depends on the step, the
            parameter's place in the optimizer and the element alone, not on how it is sharded.

    Every optimizer takes torch's ``conventions``, too: ``maximize`` (step along the gradients); ``foreach`` and
    ``fused``, which change nothing; ``capturable`` and ``differentiable``, which must be False. Learning rates may be
    tensors of one element, which the host reads.

    Attributes:
        communication: what the last step communicated; the same object for optimizers that step together.

    Raises:
        TypeError: a parameter of another dtype.
        ValueError: an option out of range, or a parameter that this optimizer does not take; or the job is
            ``deterministic``, and the optimizer adds up over ranks.
    """

    sums_over_ranks = True
    """Whether the rule sums over ranks, in an order that depends on their number."""

    keeps_copies = True
    """Whether several ranks may have copies of a state tensor, such as column statistics."""

    maximizes = False
    """Whether the rule heeds the option ``maximize``. Otherwise it gets the negative gradients."""

    layout_options: tuple[str, ...] = ()
    """The options that :meth:`state_layout` and :meth:`height` depend on. A step refuses those that the state does not
    fit."""

    takes_found_inf = False
    """Whether the rule heeds ``batch.found_inf``. The host need then not know of an overflow before a step."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # What a class says of a method does not hold for a subclass that overrides the method and says nothing.
        for fact, method in _FACTS.items():
            nearest = next(vars(c) for c in cls.__mro__ if fact in vars(c) or method in vars(c))
            if fact not in nearest:
                setattr(cls, fact, vars(DistributedOptimizer)[fact])

    def __init__(self, params: Params, defaults: dict[str, Any], stochastic_rounding: bool = False) -> None:
        if self.sums_over_ranks and is_deterministic():
            raise ValueError(
                f"{type(self).__name__} adds up over ranks in an order that depends on their number; with "
                "deterministic=True, use Adam, AdamOptimizer, AdamOffloadOptimizer, Lion, AdEMAMix, ScheduleFreeAdamW, "
                "Muon, SOAP, DistributedShampoo, Dion, or an element-wise optimizer of torch. A class whose rule does "
                "not add up over ranks has sums_over_ranks=False"
            )
        self.stochastic_rounding = stochastic_rounding
        self.communication = Communication()
        self._plan: StepPlan | None = None
        self._options = frozenset(defaults)  # that all groups have
        # By parameter, the layout of its state, and the options that it was made with.
        self._layouts: dict[Tensor, tuple[dict[str, StateTensor], dict[str, Any]]] = {}
        given: Any = params if isinstance(params, Tensor) else list(params)  # torch refuses a tensor with a message
        if not len(given) and is_initialized() and current_context().pipe_size > 1:
            given = [{"params": []}]  # a stage may have nothing to train
        super().__init__(given, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_layouts": vars(self).get("_layouts", {}), **state})
        self._plan = None

    def __getstate__(self) -> dict[str, Any]:
        self.settle_step()
        mine = {"stochastic_rounding": self.stochastic_rounding, "communication": self.communication, "_plan": None}
        mine["_options"] = self._options
        return {**super().__getstate__(), **mine, "_layouts": self._current_layouts()}

    settle_step: Callable[[], Any] = staticmethod(lambda: None)
    """Called before the state is read or written: an OptimManager may not have counted the last step yet."""

    # --- what a subclass defines ------------------------------------------------------------------

    def rule(self, batch: Batch) -> Rule:
        """The step of a batch of parameters (see :mod:`bmt_optim.requests`)."""
        raise NotImplementedError

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        """The state tensors of a parameter of the global ``shape``, besides ``step`` and ``master``.

        It is called when a group is added, too, by ``super().__init__``.

        Raises:
            ValueError: the optimizer does not take parameters of this shape.
        """
        raise NotImplementedError

    def counts_steps(self, options: Mapping[str, Any]) -> bool:
        """Whether the rule depends on ``batch.step``. A state dict must then have the step."""
        return True

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError unless the options of a group are in range."""

    def extra_defaults(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Defaults of options of this group. They come before those of the optimizer."""
        return {}

    def cost(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> float:
        """The owner's work for a parameter of the global ``shape``, in any unit. It is balanced over owners."""
        return 0

    def height(self, where: Slice, options: Mapping[str, Any]) -> int:
        """How many rows of ``where`` form a matrix that is stepped apart from the others; 0: all."""
        return 0

    def new_state(
        self, key: str, tensor: StateTensor, shape: tuple[int, ...], device: torch.device, options: Mapping[str, Any]
    ) -> Tensor:
        """Memory, filled, for this rank's part (of ``shape``) of a state tensor of a parameter on ``device``."""
        return torch.full(shape, tensor.fill, dtype=tensor.dtype, device=device)

    # --- stepping ---------------------------------------------------------------------------------

    replicas: Communicator | None = None

    def share_with_replicas(self, group: dist.ProcessGroup | Communicator) -> None:
        """Let ranks that have copies of all parameters, as under DDP, divide the work on logical parameters.

        One of them computes the update of each matrix and sends it to the others. All of them must call this, and
        have equal gradients in every step. Not needed with bmt-zero or FSDP2, whose parameters tell their replicas.

        Args:
            group: of these ranks: ``model.process_group`` of a ``DistributedDataParallel``.
        """
        device = next((local_tensor(p).device for p in self._params()), torch.device("cpu"))
        self.replicas = group if isinstance(group, Communicator) else Communicator(group, device)
        self._plan = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where ``param_group`` names them (see ``torch.optim``)."""
        for name, value in self.extra_defaults(param_group).items():
            param_group.setdefault(name, value)  # in place, because the script may keep this dict
        _add_param_group(self, param_group)
        self._plan = None
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: Mapping[str, Any]) -> None:
        self.check_options(group)
        check_conventions({name: group[name] for name in ("capturable", "differentiable") if name in group})
        if len(set(map(id, group["params"]))) < len(group["params"]):
            raise ValueError("params: a parameter is in the group twice, and each step would change it twice")
        for param in group["params"]:
            if param.dtype is not torch.float32 and param.dtype not in HALF:
                raise TypeError(
                    f"a parameter of shape {tuple(param.shape)} has dtype {param.dtype}; "
                    f"{type(self).__name__} takes float32, float16 and bfloat16"
                )
            self.state_layout(slice_of(param).shape, group)  # raises for a shape that the optimizer does not take

    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1) -> Any:
        """Update every parameter that has a gradient. The host does not wait for the device.

        Args:
            closure: evaluates the model again and returns the loss, which is returned.
            scale: what the gradients are divided by (the loss scale); they are left as they are.

        Raises:
            RuntimeError: a gradient is sparse, or is missing on some of the ranks that share its parameter.
            ValueError: ``scale``, or an option of a group that was changed since, is out of range.

            Nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run([self.begin_step(scale)])
        return loss

    # An OptimManager steps optimizers without a call of step. Without this mark, and the one that ``finish`` makes,
    # torch's schedulers would warn that they are stepped before the optimizer.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @on_local_tensors
    def begin_step(self, scale: float = 1, grad_factor: Tensor | None = None, found_inf: Tensor | None = None) -> Step:
        """The first part of a step, up to the first communication. No state and no weight changes.

        The step ends with :func:`bmt_optim.engine.run`, which takes steps of several optimizers, or with ``abandon``.
        This optimizer must not change in between.

        Args:
            scale: as for :meth:`step`.
            grad_factor: a further factor of the gradients: a 0-dim fp32 tensor on their device.
            found_inf: a 0-dim fp32 tensor on the device. If it is not zero, nothing changes but the number of the
                step. Only for optimizers with ``takes_found_inf``.

        Raises:
            What :meth:`step` raises.
        """
        self.settle_step()
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale!r} must be positive and finite")
        for number, group in enumerate(self.param_groups):
            if missing := (self._options | self.extra_defaults(group).keys()) - group.keys():
                raise ValueError(f"parameter group {number} has no options {sorted(missing)}; set them")
            self.check_options(group)
        entries, together, alone = self._rules(float(scale), grad_factor, found_inf)

        def finish(record: Communication) -> None:
            self.communication = record
            self._opt_called = True
            for entry in entries:
                entry["step"] += 1

        return Step(together, finish, alone)

    def _rules(
        self, scale: float, grad_factor: Tensor | None, found_inf: Tensor | None
    ) -> tuple[list[dict[str, Any]], list[Rule], list[Rule]]:
        """The states whose steps are to be counted, rules that communicate, and rules that do not."""
        self._drop_old_plan()
        plan = self._check_layouts(self._current_plan())
        present = [p for p, there in zip(plan.logical_params, plan.presence.update()) if there]
        grads = [self._grad(p) for p in present]
        self._materialize()
        entries = [self.state[p.param] for p in present]
        together, alone = self._batches(present, grads, entries, scale, grad_factor, found_inf)
        return entries, [self.rule(batch) for batch in together], [self.rule(batch) for batch in alone]

    def _check_layouts(self, plan: StepPlan) -> StepPlan:
        """Raise ValueError, on all ranks, if an option asks for another state than there is.

        Only groups whose options have changed since the last step are looked at. Returns the plan, or a new one if the
        parameters are to be divided into other matrices; then it is a collective.
        """
        options = [self._options_of_layout(group) for group in self.param_groups]
        changed = {n for n, (now, then) in enumerate(zip(options, plan.options)) if now != then}
        divides = False
        for logical, number, height in zip(plan.logical_params, plan.group_of, plan.heights) if changed else ():
            if number not in changed:
                continue
            group, param = self.param_groups[number], logical.param
            shape = slice_of(param).shape
            # Heights are of rows that ranks share out, and the same on all of them.
            divides = divides or (logical.tp_comm is None and self.height(slice_of(param), group) != height)
            state = self.state.get(param)
            layout = self.state_layout(shape, group) if state else {}
            made, with_options = self._layouts.get(param, (layout, {}))
            if others := [k for k, tensor in layout.items() if made.get(k) != tensor or (state and k not in state)]:
                changes = [k for k in self.layout_options if group.get(k) != with_options.get(k)]
                names = [f"{k}={group[k]!r} was set" if k in group else f"{k!r} was removed" for k in changes]
                raise ValueError(
                    f"{' or '.join(names)} after the first step and asks for another {' and '.join(others)} "
                    "than there is; set it back, or make a new optimizer"
                )
        if divides:
            self._plan = None
            plan = self._current_plan()
        plan.options = options
        return plan

    def _batches(
        self,
        present: Sequence[LogicalParam],
        grads: Sequence[Tensor],
        entries: Sequence[dict[str, Any]],
        scale: float,
        grad_factor: Tensor | None,
        found_inf: Tensor | None,
    ) -> tuple[list[Batch], list[Batch]]:
        """The batches of parameters that several ranks share, and those of parameters that only this rank has."""
        plan = self._current_plan()
        before, plan.kept = plan.kept, {}
        groups: dict[tuple[int, int, torch.device], list[int]] = {}
        for n, (logical, entry) in enumerate(zip(present, entries)):
            key = (plan.group_of[logical.index], entry["step"] + 1, logical.param.device)
            groups.setdefault(key, []).append(n)
        together: list[Batch] = []
        alone: list[Batch] = []
        for (number, step, device), members in sorted(groups.items(), key=lambda item: (*item[0][:2], str(item[0][2]))):
            group, on_cpu = self.param_groups[number], device.type == "cpu"
            locals_ = {n: local_tensor(present[n].param) for n in members}
            given = {n: grads[n] for n in members}
            if step == 1:
                sync_masters([entries[n] for n in members], locals_.values())
            if group.get("maximize") and not self.maximizes:
                group = {**group, "maximize": False}  # for a rule that calls one that heeds it
                given = dict(zip(members, torch._foreach_neg(list(given.values()))))
            divided = [n for n in members if not present[n].undivided]
            here = [n for n in members if present[n].undivided and present[n].where.numel]
            divided += [n for n in here if present[n].replicate_comm is not None]
            here = [n for n in here if present[n].replicate_comm is None]
            portions = portions_of(here, [locals_[n].numel() for n in here]) if on_cpu else [here]
            for batches, chosen in [(together, divided), *((alone, portion) for portion in portions)]:
                if not chosen:
                    continue
                params = [present[n].alone if present[n].undivided else present[n] for n in chosen]
                key_of_kept: tuple[str | int, ...] = (str(device), batches is alone, *(p.index for p in params))
                batch = Batch(
                    params,
                    [locals_[n] for n in chosen],
                    [given[n] for n in chosen],
                    [entries[n] for n in chosen],
                    group,
                    step,
                    scale,
                    grad_factor,
                    found_inf,
                    plan.kept.setdefault(key_of_kept, before.get(key_of_kept, {})),
                    plan.cache(sum(locals_[n].numel() for n in chosen)) if on_cpu and batches is alone else None,
                )
                batches.append(batch)
        return together, alone

    @staticmethod
    def _grad(logical: LogicalParam) -> Tensor:
        grad = local_grad(logical.param)
        if grad is None:  # the shard is empty; see the note in bmt_optim.logical_params
            return torch.zeros(logical.where.local_shape, dtype=torch.float32, device=logical.param.device)
        return grad.detach().contiguous().resolve_neg()  # as the imaginary part of one number may be

    @on_local_tensors
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill the gradients with zeros, or drop them."""
        if set_to_none:
            _zero_grad(self, set_to_none=True)
        else:
            zero_grads(self._params())

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Take over what was written into half-precision parameters since the last step.

        A master weight whose rounded value is its parameter stays as it is.
        """
        params = [p for p in self._params() if self.state.get(p)]
        sync_masters([self.state[p] for p in params], [local_tensor(p) for p in params])

    # --- state ------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """The state by parameter index, in torch's format.

        Every parameter that requires a gradient has ``step`` (a tensor), the tensors of :meth:`state_layout` and,
        in half precision, ``master``. They have the local shapes and are the optimizer's own memory. Those of a
        DTensor are DTensors.

        Args:
            gather: unshard the tensors, on the CPU, one at a time. A collective over the ranks that share
                parameters. Rank 0 (of each pipeline stage) gets them all; on the other ranks ``state`` is empty.
        """
        state_dict = self._own_state_dict(gather)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _own_state_dict(self, gather: bool) -> dict[str, Any]:
        """:meth:`state_dict` before its post hooks, which may give it any other form."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        asks = "torch.distributed.checkpoint.state_dict"
        if not gather and is_called_from(asks) and any(_is_our_shard(param) for param in self._params()):
            raise RuntimeError(
                f"{type(self).__name__} has this rank's part of its state where bmt_zero shards parameters, and "
                f"torch.distributed.checkpoint would take it for the full state: save with bmt_zero.Checkpointer, "
                f"save_optimizer or state_dict(gather=True)"
            )
        self.settle_step()
        self._drop_old_plan()
        self._forget_replaced()
        self._materialize()
        params = self._params()
        numbers: dict[Tensor, int] = {}
        for index, param in enumerate(params):
            numbers.setdefault(param, index)
        state_dict: dict[str, Any] = {
            "state": {
                index: {**entry, "step": torch.tensor(float(entry["step"]), dtype=torch.float32, device="cpu")}
                for index, entry in sorted((numbers[param], entry) for param, entry in self.state.items())
                if params[index].requires_grad or entry.get("step", 0) > 0
            },
            "param_groups": [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.param_groups],
        }
        if gather:
            if self.keeps_copies:
                self._current_plan()  # as in state_records
            layouts = [self._layout(p, group) for group in self.param_groups for p in group["params"]]
            tensors = []
            for index, layout in enumerate(layouts):
                parts = {key: self._maintained_part(tensor, index, params[index]) for key, tensor in layout.items()}
                tensors.append({key: (part, layout[key].dtype) for key, part in parts.items()})
                if entry := state_dict["state"].get(index):
                    entry.update({key: _maintained(entry[key], part) for key, part in parts.items()})
            state_dict["state"] = gather_state(state_dict["state"], params, tensors)
            is_pipeline = is_initialized() and current_context().pipe_size > 1
            for saved, group in zip(state_dict["param_groups"] if is_pipeline else (), self.param_groups):
                saved[LAYERS] = saved_layers(group["params"])
            return state_dict
        options = [group for group in self.param_groups for _ in group["params"]]
        for index, entry in state_dict["state"].items():
            param = params[index]
            if is_dtensor(param):
                layout = self._layout(param, options[index])
                entry.update({key: tensor.as_dtensor(entry[key], param) for key, tensor in layout.items()})
        return state_dict

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise, and change nothing."""
        check_before_loading(self, state_dict, self._parse)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, at this or any other layout.

        Tensors may have the local or the full shape; this rank takes its slice of a full one. Values are copied. A
        half-precision parameter without ``master`` in the dict takes its current value as master. Parameters do not
        change. A parameter without state in the dict starts afresh.

        Raises:
            ValueError: the dict does not fit; the optimizer is unchanged.
        """
        self.settle_step()
        state_dict = before_loading(self, state_dict)
        entries = self._parse(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            group.update(
                {k: copy.deepcopy(value) for k, value in saved.items() if k not in ("params", "param_names", LAYERS)}
            )
        self.state.clear()
        self._materialize([p for p, values in entries.items() if values is not None])
        for param, values in entries.items():
            mine = self.state.get(param)
            for key, value in (values or {}).items():
                assert mine is not None
                mine[key] = value if key == "step" else mine[key].copy_(value)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _parse(self, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any] | None]:
        """What is to be loaded for each parameter: the step, and tensors of the local shape."""
        saved = match_groups(self, state_dict)
        options: list[dict[str, Any]] = []
        for index, (mine, theirs) in enumerate(zip(self.param_groups, state_dict["param_groups"])):
            merged = {**mine, **{key: value for key, value in theirs.items() if key not in ("params", LAYERS)}}
            try:
                self.check_options(merged)
            except (TypeError, ValueError) as error:
                raise ValueError(f"param_groups[{index}] of the state dict: {error}") from None
            options += [merged] * len(mine["params"])
        entries: dict[Tensor, dict[str, Any] | None] = {}
        for index, ((param, values), group) in enumerate(zip(saved, options)):
            if values is None:
                entries[param] = None
                continue
            entry: dict[str, Any] = {"step": 0}
            if self.counts_steps(group) or "step" in values:
                entry["step"] = whole_number(values, "step", index)
            for key, tensor in self._layout(param, group).items():
                if key != "master" or key in values:
                    entry[key] = state_value(values, key, index, tensor.part(slice_of(param)))
            entries[param] = entry
        return entries

    @torch.no_grad()
    def state_records(self, also: Sequence[Tensor] = ()) -> list[StateRecord]:
        """The state as shards of logical tensors, for checkpoints (see :class:`bmt_comm.StateRecord`).

        Each parameter that requires a gradient, or has been stepped, has ``step``, the tensors of :meth:`state_layout`
        and, in half precision, ``master``. So has each parameter in ``also``. For optimizers with ``keeps_copies``, the
        first call is a collective over the ranks that share parameters.
        """
        self.settle_step()
        self._drop_old_plan()
        if self.keeps_copies:
            self._current_plan()  # a collective, which some ranks may need below: all call it here
        self._materialize(also)
        wanted = set(also)
        records: list[StateRecord] = []
        number = itertools.count()
        for group in self.param_groups:
            for param in group["params"]:
                index, entry = next(number), self.state.get(param)
                if not entry or not (param.requires_grad or entry["step"] > 0 or param in wanted):
                    continue
                records.append(step_record(param, entry["step"]))
                for key, tensor in self._layout(param, group).items():
                    part = tensor.part(slice_of(param))
                    is_current = self._maintained_part(tensor, index, param).numel == part.numel
                    records.append(StateRecord(param, key, part, entry[key], is_current))
        return records

    def adopt_state_records(self, records: Iterable[StateRecord]) -> None:
        """Continue from the values that were written into the tensors of :meth:`state_records`."""
        for record in records:
            if record.key == "step":
                self.state[record.param]["step"] = int(record.tensor)

    def _layout(self, param: Tensor, options: Mapping[str, Any]) -> dict[str, StateTensor]:
        shape = slice_of(param).shape
        layout = self.state_layout(shape, options)
        if self._has_master(param):
            layout = {**layout, "master": like_parameter(shape)}
        return layout

    @torch.no_grad()
    def _materialize(self, also: Iterable[Tensor] = ()) -> None:
        """Give every parameter that requires a gradient its state, keeping what there is."""
        wanted = set(also)
        for group in self.param_groups:
            for param in group["params"]:
                held = self.state.get(param)
                if held:
                    if ("master" in held) != self._has_master(param):
                        self._change_master(param, held, group)
                    continue
                # A look-up of a state that is not there yet leaves an empty one behind.
                if not (param.requires_grad or param.grad is not None or param in wanted):
                    continue
                local, where = local_tensor(param), slice_of(param)
                entry: dict[str, Any] = {"step": 0}
                if self.layout_options:
                    self._layouts[param] = self.state_layout(where.shape, group), self._options_of_layout(group)
                with torch.inference_mode(False), torch.no_grad():  # it is stepped outside of that mode, too
                    for key, tensor in self._layout(param, group).items():
                        entry[key] = self.new_state(key, tensor, tensor.part(where).local_shape, local.device, group)
                        if key == "master":
                            entry[key].copy_(local)
                self.state[param] = entry

    def _has_master(self, param: Tensor) -> bool:
        return param.dtype in HALF and not self.stochastic_rounding

    def _change_master(self, param: Tensor, entry: dict[str, Any], options: Mapping[str, Any]) -> None:
        """Add or drop the master of a parameter that has a new dtype, as after ``model.bfloat16()``."""
        if entry.pop("master", None) is None:
            local, where = local_tensor(param), slice_of(param)
            master = like_parameter(where.shape)
            entry["master"] = self.new_state("master", master, tuple(local.shape), local.device, options).copy_(local)

    def _maintained_part(self, tensor: StateTensor, index: int, param: Tensor) -> Slice:
        """The part of a state tensor that this rank keeps up to date.

        A parameter that one rank holds is stepped on that rank only. So state that all ranks have a copy of, such as
        column statistics, is up to date on that rank only.
        """
        where = slice_of(param)
        part = tensor.part(where)
        if part.row_comm is not None or where.row_comm is None:
            return part
        logical = self._current_plan().logical_params[index]
        comm = logical.row_comm
        if comm is None or not logical.undivided:
            return part
        stepping = next((rank for rank, (start, stop) in enumerate(logical.rows) if start < stop), 0)
        return replace(part, row_stop=part.row_stop if comm.rank == stepping else 0, row_comm=comm)

    def _options_of_layout(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: group[key] for key in self.layout_options if key in group}

    def _current_layouts(self) -> dict[Tensor, tuple[dict[str, StateTensor], dict[str, Any]]]:
        return {param: layout for param, layout in self._layouts.items() if param in self.state}

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _forget_replaced(self) -> None:
        """Drop the state of parameters that were replaced before the first step, as accelerate does."""
        params = set(self._params())
        for param in [p for p in self.state if p not in params and not self.state[p].get("step")]:
            del self.state[param]

    def _drop_old_plan(self) -> None:
        """Drop the plan if the script has edited the groups."""
        if self._plan is not None and not self._plan.holds(self.param_groups):
            self._plan = None

    def _current_plan(self) -> StepPlan:
        if self._plan is None:
            self._forget_replaced()
            self._layouts = self._current_layouts()
            self._plan = StepPlan(self.param_groups, self.cost, self.height, self.replicas)
        return self._plan


def steps_with_others(optimizer: Any) -> bool:
    """Whether a step of ``optimizer`` is what :meth:`DistributedOptimizer.begin_step` begins and nothing else.

    Global hooks with the attribute ``bmt_for_others`` do nothing for these optimizers, and do not count.
    """
    return has_our_step(optimizer) and not any(step_hooks(optimizer))


def has_our_step(optimizer: Any) -> bool:
    """Whether ``optimizer.step`` is :meth:`DistributedOptimizer.step`, but for hooks."""
    if not isinstance(optimizer, DistributedOptimizer) or "step" in vars(optimizer):
        return False
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) is inspect.unwrap(DistributedOptimizer.step)  # without torch's wrapper


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks that are called before and after a step, in torch's order."""
    of_all_before, of_all_after = (
        [hook for hook in hooks.values() if not hasattr(hook, "bmt_for_others")]
        for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    )
    return (
        [*of_all_before, *optimizer._optimizer_step_pre_hooks.values()],
        [*optimizer._optimizer_step_post_hooks.values(), *of_all_after],
    )


def begin_steps(optimizers: Iterable[DistributedOptimizer], *arguments: Any) -> list[Step]:
    """``begin_step`` of each.

    Raises:
        What :meth:`DistributedOptimizer.step` raises; nothing has been changed then.
    """
    steps: list[Step] = []
    try:
        for optimizer in optimizers:
            steps.append(optimizer.begin_step(*arguments))
    except BaseException:
        for step in steps:
            step.abandon()
        raise
    return steps


def _maintained(value: Tensor, part: Slice) -> Tensor:
    return value if tuple(value.shape) == part.local_shape else value.reshape(-1)[:0].reshape(part.local_shape)


def _is_our_shard(param: Tensor) -> bool:
    """Whether bmt_zero has other rows of a parameter on other ranks."""
    return not is_dtensor(param) and slice_of(param).row_comm is not None
