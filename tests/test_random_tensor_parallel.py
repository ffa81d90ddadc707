"""Random tensor-parallel models and training scripts, compared with plain PyTorch in one process.

A seed draws a model, how it is sharded over the tensor-parallel ranks (a plan, or layers of bmt_tp) and over the
data-parallel ones, an optimizer, and what a script does besides training in each of four steps. After every step the
update of each parameter since the beginning is that of the plain model, which trains on the batches of all replicas.
"""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
from random_programs import default_dtype, run_programs
from random_tensor_parallel_models import VOCAB, Kind, Model, plan_of, with_parallel_layers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bmt_comm import ParallelContext
from bmt_optim import AdamOptimizer, OptimManager, to_distributed
from bmt_tp import full_state_dict, load_full_state_dict, parallelize
from bmt_zero import Block, BMTrainModelWrapper, fully_shard, no_sync, shard

STEPS = 4
ACTIONS = [
    *("nothing", "clip", "evaluate", "twice", "again", "scale", "freeze", "write", "load", "reload", "hook"),
    *("exception", "interrupt", "drop", "copy", "read", "keep"),
]


class Program:
    """What a seed draws.

    Attributes:
        plain, inner, model: the plain model, the sharded one, and what wraps that.
        manager: steps the optimizer; None: the script does.
        averages: whether gradients of the sharded model are means over the replicas; otherwise sums.
        tolerance: of updates, relative to their norm.
    """

    def __init__(self, seed: int, ctx: ParallelContext) -> None:
        self.ctx, self.draw = ctx, random.Random(seed)
        torch.manual_seed(seed)
        draw = self.draw
        self.style = draw.choice(["alone", "alone", "wrapper", "blocks", "some blocks", "shard", "fully_shard"])
        self.optimizer_kind = draw.choice(["AdamW", "AdamW", "SGD", "AdamOptimizer", "Adafactor"])
        d = Kind(planned=draw.random() < 0.65, sequence=draw.random() < 0.5, ranks=ctx.tp_size)
        if not d.planned and self.style == "alone" and ctx.replicas > 1:
            self.style = "wrapper"  # which reduces the gradients of norms, too
        d.shares = draw.random() < 0.2 and self.style == "alone"  # Blocks share no parameters
        d.single = single = self.optimizer_kind in ("AdamOptimizer", "Adafactor")  # which take no float64
        self.tolerance = 1e-3 if single else 1e-7
        with default_dtype(torch.float32 if single else torch.float64):
            self.plain = Model(draw, d)
            plan, model = plan_of(self.plain, draw, d), copy.deepcopy(self.plain)
            self.what = f"{self.style}, {d}, {plan}"
            self.inner = parallelize(model, plan) if d.planned else with_parallel_layers(model, plan, d.sequence)
        self.is_ddp = self.style == "alone" and d.planned and ctx.replicas > 1
        self.averages = self.style == "fully_shard" or self.is_ddp
        self.model = self._sharded(self.inner)
        self._load(self.inner, self.plain.state_dict())
        for param, plain in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            param.requires_grad_(plain.requires_grad)
        self.reference, self.optimizer = self._optimizer(self.plain), self._optimizer(self.model)
        self.manager: OptimManager | None = None
        if not self.averages and draw.random() < 0.6:
            self.manager = OptimManager(draw.choice([None, 64.0]))
            self.manager.add_optimizer(self.optimizer)
        self.start = copy.deepcopy(self.plain.state_dict())
        self.updates = dict.fromkeys(self.start, 0.0)
        self.micro_batches = draw.choice([1, 1, 2, 3])

    def _sharded(self, model: Model) -> nn.Module:
        draw, level = self.draw, self.draw.choice([0, 1, 2, 3, 3])
        options: dict[str, Any] = {"use_checkpoint": draw.choice([False, False, True, 0.5, "matmuls"])}
        if self.is_ddp:
            group = self.ctx.tp_zero.group
            return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
        if self.style == "alone":
            return model
        if self.style == "wrapper":
            return BMTrainModelWrapper(model, zero_level=level, **options)
        for index, layer in enumerate(model.layers):
            if self.style == "fully_shard":
                fully_shard(layer, reshard_after_forward=draw.choice([True, False]))
            elif self.style == "shard":
                shard(layer, level, **options)
            elif self.style == "blocks" or index % 2 == 0:
                model.layers[index] = Block(layer, zero_level=level, **options)
        if self.style == "fully_shard":
            return fully_shard(model)
        return shard(model, level) if self.style == "shard" else BMTrainModelWrapper(model, zero_level=level)

    def _optimizer(self, model: nn.Module) -> Any:
        params, sharded = list(model.parameters()), model is not self.plain
        adamw = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}
        if self.optimizer_kind == "SGD":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9)
        if self.optimizer_kind == "Adafactor":
            optimizer = torch.optim.Adafactor(params, lr=0.02)
            return to_distributed(optimizer) if sharded else optimizer
        return (AdamOptimizer if sharded and self.optimizer_kind != "AdamW" else torch.optim.AdamW)(params, **adamw)

    def _load(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        names = dict(model.named_parameters(remove_duplicate=False))
        load_full_state_dict(model, {name: value for name, value in state.items() if name in names})

    # --- a step -----------------------------------------------------------------------------------

    def run(self) -> None:
        actions: list[str] = []
        for _ in range(STEPS):
            actions.append(self.draw.choice(ACTIONS))
            if self.is_ddp and actions[-1] in ("again", "twice", "freeze", "hook", "interrupt"):
                actions[-1] = "nothing"  # which DistributedDataParallel does not do
            ids = torch.randint(VOCAB, (self.micro_batches, self.ctx.replicas, 2, 6))
            wanted = self._step(self.plain, self.reference, None, ids, actions[-1])
            mine = self._step(self.model, self.optimizer, self.manager, ids, actions[-1])
            assert mine == pytest.approx(wanted, rel=self.tolerance, abs=1e-9), f"{actions}, {self.what}"
            self._compare(f"after {actions}, {self.what}")

    def _step(
        self, model: nn.Module, optimizer: Any, manager: OptimManager | None, ids: Tensor, action: str
    ) -> list[float]:
        """Train one step; returns the losses of this rank, and norms of gradients if ``action`` asks for them."""
        is_sharded = model is self.model
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = trained[1::3] if action == "freeze" else []
        for param in frozen:
            param.requires_grad_(False)
        hook = trained[-1].register_hook(lambda grad: grad * 2) if action == "hook" else None
        numbers = self._before(model, ids[0, self.ctx.replica_rank], action)
        scale = 1 if manager is not None or (is_sharded and self.averages) else 1 / self.ctx.replicas
        for number, of_replicas in enumerate(ids):
            for replica in [self.ctx.replica_rank] if is_sharded else range(self.ctx.replicas):
                waits = is_sharded and number < len(ids) - 1
                if self.averages and not self.is_ddp:
                    waits = False
                silence = model.no_sync() if self.is_ddp and waits else no_sync(model)  # type: ignore[operator]
                with silence if waits else contextlib.nullcontext():
                    loss = self._backward(model, of_replicas[replica], scale / len(ids), manager, action)
                if replica == self.ctx.replica_rank:
                    numbers.append(loss / scale)
        if hook is not None:
            hook.remove()
        numbers += self._edit_gradients(model, optimizer, manager, action)
        (manager or optimizer).step()
        for param in frozen:
            param.requires_grad_(True)
        if action == "write":
            with torch.no_grad():
                for param in list(model.parameters())[::3]:
                    param.mul_(0.95)
        elif action == "load" and is_sharded:
            model.load_state_dict(model.state_dict())
            self._load(self.inner, full_state_dict(self.inner))
        elif action == "reload" and manager is None:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif action == "reload" and manager is not None:
            manager.load_state_dict(copy.deepcopy(manager.state_dict()))
        (manager or optimizer).zero_grad(set_to_none=action != "keep")
        return numbers

    def _before(self, model: nn.Module, ids: Tensor, action: str) -> list[float]:
        """What a script does with a model before it trains, which changes nothing."""
        inputs, is_sharded = (ids, (3 * ids + 1) % VOCAB), model is self.model
        inner: Any = self.inner if is_sharded else self.plain
        if action == "evaluate":
            with torch.no_grad():
                loss = model.eval()(*inputs)
            model.train()
            return [loss.item()]
        if action in ("exception", "interrupt") and is_sharded:

            def fail(*_: object) -> None:
                raise KeyError("on purpose")

            backward = action == "interrupt"
            layer = inner.layers[-1].norm
            handle = (layer.register_full_backward_hook if backward else layer.register_forward_hook)(fail)
            with pytest.raises(KeyError):
                model(*inputs).backward()
            handle.remove()
            self.optimizer.zero_grad()
        elif action == "copy":
            twin = copy.deepcopy(inner)
            loss = twin(*inputs)
            loss.backward()
            return [loss.item()]
        elif action == "read":
            assert repr(model)
            if self.style != "alone":  # parameters that only parallelize has sharded are this rank's part
                return [float(param.detach().norm()) for param in model.parameters()]
        return []

    def _backward(
        self, model: nn.Module, ids: Tensor, factor: float, manager: OptimManager | None, action: str
    ) -> float:
        def loss_of(ids: Tensor) -> Tensor:
            return factor * model(ids, (3 * ids + 1) % VOCAB)

        def scaled(loss: Tensor) -> Tensor:
            return loss if manager is None else manager.scale_loss(loss)

        loss = loss_of(ids)
        if action == "twice":
            loss = loss + 0.5 * loss_of((ids + 1) % VOCAB)
        scaled(loss).backward(retain_graph=action == "again")
        if action == "again":
            scaled(loss).backward()
        return loss.item()

    def _edit_gradients(
        self, model: nn.Module, optimizer: Any, manager: OptimManager | None, action: str
    ) -> list[float]:
        trained = [p for p in model.parameters() if p.requires_grad]
        if action == "scale":
            for param in trained[::2]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        elif action == "drop":
            trained[0].grad = None
        elif action == "clip" and manager is not None:
            return [float(manager.clip_grad_norm(optimizer.param_groups, 0.1))]
        elif action == "clip":
            return [float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))]
        elif action == "read":
            scale = 1.0 if manager is None else manager.loss_scale
            return [0.0 if p.grad is None else float(p.grad.norm()) / scale for p in trained]
        return []

    def _compare(self, where: str) -> None:
        plain = self.plain.state_dict()
        for name, value in full_state_dict(self.inner).items():
            # The longest one so far: a scalar may come back to where it began.
            update = self.updates[name] = max(self.updates[name], float((plain[name] - self.start[name]).norm()))
            error = float((value - plain[name]).norm())
            assert error <= self.tolerance * (update or 1.0), f"{name} is off by {error} of {update} {where}"


@pytest.mark.ranks(2, tp_size=2, timeout=120)
@pytest.mark.parametrize("first", range(0, 16, 8))
def test_two_tensor_parallel_ranks(ctx: ParallelContext, first: int) -> None:
    run_programs(Program, ctx, range(first, first + 8))


@pytest.mark.ranks(3, tp_size=3, timeout=120)
def test_three_tensor_parallel_ranks(ctx: ParallelContext) -> None:
    run_programs(Program, ctx, range(100, 106))


@pytest.mark.ranks(4, tp_size=2, timeout=120)
def test_two_replicas(ctx: ParallelContext) -> None:
    run_programs(Program, ctx, range(200, 206))


@pytest.mark.long
@pytest.mark.ranks(4, tp_size=2, timeout=900)
def test_many_programs_of_two_replicas(ctx: ParallelContext) -> None:
    run_programs(Program, ctx, range(1000, 1100))


@pytest.mark.long
@pytest.mark.ranks(3, tp_size=3, timeout=900)
def test_many_programs_of_three_tensor_parallel_ranks(ctx: ParallelContext) -> None:
    run_programs(Program, ctx, range(2000, 2100))
