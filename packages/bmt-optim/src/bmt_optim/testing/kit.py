"""Trains an optimizer over a framework and its author's code on one device, and compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from bmt_comm import ParallelContext, local_tensor, shard_of, slice_of
from bmt_comm.testing import Outcome, RankPool
from bmt_optim.distributed import DistributedOptimizer
from bmt_optim.manager import OptimManager
from bmt_optim.slices import unshard

from .cases import CASES, Bags, Case
from .frameworks import FRAMEWORKS, Framework

STEPS = 10


@dataclass(frozen=True)
class Subject:
    """An optimizer and its author's single-device code.

    Attributes:
        name: for the table.
        optimizer, author: called with parameter groups and ``options``. Importable: ranks get them by pickle.
        options: of both.
        author_options: further options of the author's code, which override ``options``.
        group_options: of every parameter group.
        dims: the numbers of dimensions that parameters may have; ``None``: any number.
        least: the smallest length of a dimension of a parameter.
        tolerance: the largest relative error of an update.
    """

    name: str
    optimizer: Callable[..., torch.optim.Optimizer]
    author: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    author_options: Mapping[str, Any] = field(default_factory=dict)
    group_options: Mapping[str, Any] = field(default_factory=dict)
    dims: tuple[int, ...] | None = None
    least: int = 0
    tolerance: float = 1e-5

    def takes(self, shape: tuple[int, ...]) -> bool:
        return (self.dims is None or len(shape) in self.dims) and min(shape, default=self.least) >= self.least


def _shapes(subject: Subject, framework: Framework, case: Case) -> list[tuple[int, ...]]:
    return [shape for shape in case.shapes if subject.takes(shape) and framework.takes(shape)]


def _values(shapes: Sequence[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes]


def _passes(case: Case, shapes: Sequence[tuple[int, ...]], step: int, rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """The coefficients of every backward pass of a step on a rank, by the names of parameters."""
    half = case.dtype is not torch.float32  # all ranks have the same gradients, so that their mean is exact
    passes = []
    for micro in range(case.micro):
        coefficients = {}
        values = _values(shapes, 1000 * (step + 1) + 10 * micro + (0 if half else rank), case.dtype)
        again = _values(shapes, 1000 * (step + 1) + 10 * micro + (500 if half else 500 + rank), case.dtype)
        for i, (one, two) in enumerate(zip(values, again)):
            if i in case.unused or (i in case.missing and rank == ranks - 1 > 0):
                continue
            coefficients[f"p{i}"] = one * math.inf if step in case.overflow and rank == ranks - 1 else one
            if i in case.tied:
                coefficients[f"p{i}_again"] = two
        passes.append(coefficients)
    return passes


def _means(case: Case, shapes: Sequence[tuple[int, ...]], step: int, ranks: int) -> dict[int, Tensor]:
    means: dict[int, Tensor] = {}
    for rank in range(ranks):
        for coefficients in _passes(case, shapes, step, rank, ranks):
            for name, value in coefficients.items():
                i = int(name[1:].split("_")[0])
                means[i] = means.get(i, torch.zeros(shapes[i], device="cpu")) + value.float() / ranks
    return means


def _groups(subject: Subject, case: Case, params: Mapping[int, Tensor]) -> list[dict[str, Any]]:
    halves = [list(params.values())]
    if case.groups:
        halves = [[p for i, p in params.items() if i % 2 == n] for n in (0, 1)]
    groups = [{"params": half, **subject.group_options} for half in halves if half]
    if len(groups) > 1 and subject.options.get("lr"):
        groups[1].update(lr=subject.options["lr"] * 0.3, weight_decay=0.0)
    return groups


def _change(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if group.get("lr"):
            group["lr"] *= 0.5
        if "betas" in group:
            group["betas"] = (0.7, *group["betas"][1:])
        elif "momentum" in group:
            group["momentum"] = 0.7


def _reference(subject: Subject, case: Case, start: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Parameters after training on one device with the author's code."""
    shapes = [tuple(t.shape) for t in start]
    params = [nn.Parameter(t.float(), requires_grad=i not in case.frozen) for i, t in enumerate(start)]
    groups = _groups(subject, case, {i: p for i, p in enumerate(params) if p.requires_grad})
    optimizer = subject.author(groups, **{**subject.options, **subject.author_options})
    for step in range(STEPS):
        if case.schedule and step == STEPS // 2:
            _change(optimizer)
        if step in case.overflow:
            continue
        for i, mean in _means(case, shapes, step, ranks).items():
            params[i].grad = mean if params[i].requires_grad else None
        if case.clip is not None:
            nn.utils.clip_grad_norm_(params, case.clip)
        optimizer.step()
    return [p.detach() for p in params]


class _Training:
    """One rank's part of a training."""

    def __init__(self, subject: Subject, framework: Framework, case: Case, context: ParallelContext) -> None:
        self.subject, self.framework, self.case, self.context = subject, framework, case, context
        self.start = _values(_shapes(subject, framework, case), 0, case.dtype)
        self.build(self.start, other=False)

    def build(self, values: Sequence[Tensor], other: bool) -> None:
        meta = self.case.meta
        tensors = [torch.empty_like(v, device="meta") if meta else v.to(self.case.dtype).clone() for v in values]
        self.model = self.framework.shard(Bags(tensors, self.case), other)
        names = [(name.rsplit(".p", 1)[1], p) for name, p in self.model.named_parameters()]
        self.params = {int(name): p for name, p in names}
        if meta:
            with torch.no_grad():
                for i, p in self.params.items():
                    local_tensor(p).copy_(shard_of(values[i], slice_of(p)))
        trained = {i: p for i, p in self.params.items() if p.requires_grad}
        self.optimizer = self.subject.optimizer(_groups(self.subject, self.case, trained), **self.subject.options)
        self.manager: OptimManager | None = None
        if isinstance(self.optimizer, DistributedOptimizer):
            if isinstance(self.model, nn.parallel.DistributedDataParallel):
                self.optimizer.share_with_replicas(self.model.process_group)
            scale = 1024.0 if self.case.overflow else None
            self.manager = OptimManager(scale, grad_scale=1, context=self.context)
            self.manager.add_optimizer(self.optimizer)

    def resume(self) -> None:
        """Go on in a new model and a new optimizer, with the full state."""
        weights = self.unsharded()
        states = StateDictOptions(full_state_dict=True, cpu_offload=True)
        ours = isinstance(self.optimizer, DistributedOptimizer)
        if ours:
            state = [self.optimizer.state_dict(gather=True)]  # type: ignore[call-arg]
        else:
            state = [get_optimizer_state_dict(self.model, self.optimizer, options=states)]
        if self.framework.ranks > 1:
            first = self.context.pipe_rank * (self.framework.ranks // self.context.pipe_size)
            dist.broadcast_object_list(state, first, group=self.context.zero.group)
        self.build(weights, other=True)
        if ours:
            self.optimizer.load_state_dict(state[0])
        else:
            set_optimizer_state_dict(self.model, self.optimizer, state[0], options=states)

    def run(self) -> None:
        case, ranks = self.case, self.framework.ranks
        shapes = [tuple(t.shape) for t in self.start]
        for step in range(STEPS):
            if case.resume and step == STEPS // 2:
                self.resume()
            if case.schedule and step == STEPS // 2:
                _change(self.optimizer)
            self.optimizer.zero_grad()
            scale = 1.0 if self.manager is None else self.manager.loss_scale
            passes = _passes(case, shapes, step, self.context.rank, ranks)
            passes = [{name: c * scale for name, c in coefficients.items()} for coefficients in passes]
            means = {i: mean * scale for i, mean in _means(case, shapes, step, ranks).items()}
            self.framework.train(self.model, passes, means)
            if self.manager is not None:
                if case.clip is not None:
                    self.manager.clip_grad_norm(self.optimizer.param_groups, case.clip)
                self.manager.step()
                continue
            if case.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), case.clip)
            if step not in case.overflow:  # GradScaler would skip this step
                self.optimizer.step()

    def unsharded(self) -> list[Tensor]:
        """The current parameters, or their masters, unsharded, on all ranks."""
        weights = {}
        for i, p in self.params.items():
            weight = self.optimizer.state.get(p, {}).get("master", local_tensor(p.detach()))
            weights[i] = unshard(weight.detach().float(), slice_of(p))
        if self.context.pipe_size > 1:
            for others in self.context.world.all_gather_object(weights):
                weights.update(others)
        return [weights[i] for i in range(len(self.start))]


def _errors(subject: Subject, framework: Framework, names: Sequence[str]) -> list[float]:
    """The largest relative error of an update in each case. Runs on a rank."""
    context = framework.start()
    worst = []
    for name in names:
        case = CASES[name]
        torch.manual_seed(0)
        training = _Training(subject, framework, case, context)
        training.run()
        errors = [0.0]
        expected = _reference(subject, case, training.start, framework.ranks)
        for start, ours, theirs in zip(training.start, training.unsharded(), expected):
            difference, update = (ours - theirs).double().norm(), (theirs - start.float()).double().norm()
            errors.append(float(difference / update if update else difference))
        worst.append(torch.tensor(errors, device="cpu").max().item())  # NaN if there is one
    return worst


_pool = RankPool()


def outcomes(subject: Subject, framework: str | Framework, names: Sequence[str], timeout: float = 60.0) -> list[str]:
    """The outcome of each case: "pass", "wrong by …", "raises …", "hangs", or "-" where the framework lacks it."""
    if isinstance(framework, str):
        framework = FRAMEWORKS[framework]
    sizes = {name: len(_shapes(subject, framework, CASES[name])) for name in names}
    wanted = [name for name in names if name not in framework.lacks and sizes[name] >= framework.least]
    reports = _pool.execute(_errors, framework.ranks, (subject, framework, wanted), timeout=timeout)
    bad = [report for report in reports if report.failed]
    if bad and len(wanted) > 1:  # which of them
        return [outcomes(subject, framework, [name], timeout)[0] for name in names]
    if not wanted:
        return ["-"] * len(names)
    if bad:
        raised = [r for r in bad if r.outcome in (Outcome.RAISED, Outcome.DIED)]
        text = raised[0].detail.strip().splitlines()[-1] if raised else ""
        told = (
            f"raises {raised[0].error_type.rsplit('.', 1)[-1]}: {text.split(': ', 1)[-1][:80]}" if raised else "hangs"
        )
        return [told if name in wanted else "-" for name in names]
    of_ranks = zip(*(r.value for r in reports))
    worst = {
        name: max(errors, key=lambda e: math.inf if math.isnan(e) else e) for name, errors in zip(wanted, of_ranks)
    }
    return [
        "-" if name not in worst else "pass" if worst[name] <= subject.tolerance else f"wrong by {worst[name]:.0e}"
        for name in names
    ]


def check(subject: Subject, framework: str | Framework, case: str, timeout: float = 60.0) -> None:
    """Raise AssertionError unless ``subject`` passes the case of :data:`CASES`, or the framework lacks it."""
    [outcome] = outcomes(subject, framework, [case], timeout)
    assert outcome in ("pass", "-"), f"{subject.name} over {framework}, {case}: {outcome}"


def close() -> None:
    """End the rank processes. They start again when they are needed."""
    _pool.close()
