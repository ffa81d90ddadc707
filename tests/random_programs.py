"""Random layers, optimizers and training scripts, and their comparison with plain PyTorch in one process."""

from __future__ import annotations

import contextlib
import copy
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_comm import ParallelContext
from bmt_optim import AdamOptimizer, OptimManager
from bmt_zero import Checkpointer, no_sync

WIDTH, VOCAB, STEPS = 7, 11, 4
ACTIONS = [
    "nothing",
    "clip",
    "evaluate",
    "two forwards",
    "backward twice",
    "two backwards",
    "scale",
    "freeze",
    "write",
    "load",
    "load optimizer",
    "hook",
    "exception",
    "drop",
    "copy",
    "read",
    "keep zeros",
    "resume",
]


@dataclass
class Output:
    hidden: Tensor


class Residual(nn.Module):
    """Returns tensors in containers, writes in place, or has a checkpoint within; frozen and unused parameters, too."""

    kinds = ("plain", "in place", "view", "tuple", "dict", "dataclass", "checkpoint")

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH, bias=draw.random() < 0.5)
        self.scale = nn.Parameter(torch.tensor(0.7)) if draw.random() < 0.4 else None
        self.unused = nn.Parameter(torch.randn(3, 2)) if draw.random() < 0.3 else None
        self.kind = draw.choice(self.kinds)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.kind == "checkpoint" else self.inner(x)
        y = y if self.scale is None else y * self.scale
        x = x + (y if mask is None else y * mask)
        if self.kind == "in place":
            return x.mul_(0.9)
        if self.kind == "view":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        return {"tuple": (x, None, x.detach()), "dict": {"hidden": x}, "dataclass": Output(x)}.get(self.kind, x)


class Around(nn.Module):
    """``x + inner(x)``, for modules of torch."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kind = draw.choice(["attention", "recurrent", "convolution", "weight norm"])
        if self.kind == "attention":
            self.inner: nn.Module = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        elif self.kind == "recurrent":
            self.inner = draw.choice([nn.GRU, nn.LSTM])(WIDTH, WIDTH, batch_first=True)
        elif self.kind == "convolution":
            self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=draw.choice([1, WIDTH]))
        else:
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.kind == "attention":
            return x + self.inner(x, x, x, need_weights=False)[0]
        if self.kind == "convolution":
            return x + self.inner(x.transpose(1, 2)).transpose(1, 2)
        y = self.inner(x)
        return x + (y[0] if self.kind == "recurrent" else torch.tanh(y))


def freeze_some(layers: nn.ModuleList, draw: random.Random) -> None:
    """Freeze a layer, or one of its parameters, now and then."""
    for layer in layers:
        if draw.random() < 0.15 and len(layers) > 1:
            layer.requires_grad_(False)
        elif draw.random() < 0.2:
            next(layer.parameters()).requires_grad_(False)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Program:
    """What a seed draws: a model, how it is sharded, an optimizer, and what a script does besides training.

    After every step the update of each parameter since the beginning is that of the plain model, which trains on the
    batches of all replicas in turn.

    Attributes:
        plain, model: the plain model and the sharded one.
        reference, optimizer: their optimizers.
        manager: steps ``optimizer``; None: the script does.
        averages: whether gradients of the sharded model are means over the ranks; otherwise sums.
        tolerance: of updates, relative to their norm.
        style: how the model is sharded, for messages.
        actions: what a step may do besides training.
        failure: what a failing forward raises.
    """

    averages, style = False, ""
    actions = ACTIONS
    failure: tuple[type[Exception], ...] = (KeyError,)

    def __init__(self, seed: int, ctx: ParallelContext) -> None:
        self.ctx, self.draw = ctx, random.Random(seed)
        torch.manual_seed(seed)
        draw = self.draw
        self.ours = draw.random() < 0.3
        self.dtype = torch.float32 if self.ours else torch.float64  # AdamOptimizer takes no float64
        self.tolerance = 1e-4 if self.ours else 1e-7
        with default_dtype(self.dtype):
            self.plain = self.make_plain()
            self.model = self.make_sharded(copy.deepcopy(self.plain))
        self.in_groups = draw.random() < 0.3
        self.kind: Any = draw.choice([torch.optim.AdamW, torch.optim.SGD]) if not self.ours else torch.optim.AdamW
        self.reference = self._optimizer_of(self.plain, self.kind)
        self.optimizer = self._optimizer_of(self.model, AdamOptimizer if self.ours else self.kind)
        self.manager: OptimManager | None = None
        if not self.averages and draw.random() < 0.6:
            self.manager = OptimManager()
            self.manager.add_optimizer(self.optimizer)
        self.start = {name: param.detach().clone() for name, param in self.plain.named_parameters()}
        self.accumulated = draw.choice([1, 1, 2, 3])

    def make_plain(self) -> nn.Module:
        raise NotImplementedError

    def make_sharded(self, plain: nn.Module) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: nn.Module, ids: Tensor, replica: int, step: int) -> Tensor:
        """The loss of ``model``'s predictions for a replica's batch: the mean over its samples."""
        raise NotImplementedError

    def batches(self) -> list[list[Tensor]]:
        """Token ids of each backward pass of a step, and replica."""
        return [list(of_replicas) for of_replicas in torch.randint(VOCAB, (self.accumulated, self.ctx.replicas, 2, 4))]

    def _optimizer_of(self, model: nn.Module, kind: Any) -> Any:
        own, names = dict(model.named_parameters()), [name for name, _ in self.plain.named_parameters()]
        groups: list[dict[str, Any]] = [{"params": list(own.values())}]
        if self.in_groups:
            one, two = ([own[name] for name in names[first::2] if name in own] for first in (0, 1))
            groups = [{"params": one}, {"params": two, "lr": 3e-3, "weight_decay": 0.0}]
        if kind is torch.optim.SGD:
            return kind(groups, lr=0.05, momentum=0.9)
        return kind(groups, lr=1e-2, weight_decay=0.01, eps=1e-4)

    # --- a step -----------------------------------------------------------------------------------

    def run(self) -> None:
        actions = []
        for step in range(STEPS):
            actions.append(self.draw.choice(self.actions))
            batches = self.batches()
            norm = self._step(self.plain, self.reference, None, batches, step, actions[-1])
            own = self._step(self.model, self.optimizer, self.manager, batches, step, actions[-1])
            assert own == pytest.approx(norm, rel=self.tolerance), f"gradient norm: {actions}, {self.style}"
            self._compare(f"after {actions}, {self.style}")

    def _step(
        self,
        model: nn.Module,
        optimizer: Any,
        manager: OptimManager | None,
        batches: list[list[Tensor]],
        step: int,
        action: str,
    ) -> float:
        """Train one step; returns the norm of the gradients if ``action`` clips them."""
        is_sharded = model is self.model
        names = [name for name, param in self.plain.named_parameters() if param.requires_grad]
        params = dict(model.named_parameters())
        trained = {name: params[name] for name in names if name in params}  # of this rank
        frozen = [trained[name] for name in names[1::3] if name in trained] if action == "freeze" else []
        hooked = trained.get(names[-1]) if action == "hook" else None
        hook = None if hooked is None else hooked.register_hook(lambda grad: grad * 2)
        own = self.ctx.rank // self.ctx.tp_size
        if is_sharded:
            self._disturb(batches[0][own], own, step, action)
        for param in frozen:
            param.requires_grad_(False)
        replicas = 1 if manager is not None or (is_sharded and self.averages) else self.ctx.replicas
        for number, of_replicas in enumerate(batches):
            for replica in [own] if is_sharded else range(self.ctx.replicas):
                waits = is_sharded and not self.averages and number < len(batches) - 1
                with no_sync(model) if waits else contextlib.nullcontext():
                    loss_of = self._loss_of(model, replica, step, 1 / (len(batches) * replicas))
                    _backward(loss_of, of_replicas[replica], manager, action)
        if hook is not None:
            hook.remove()
        norm = self._edit_gradients(model, optimizer, manager, trained, action)
        (manager or optimizer).step()
        for param in frozen:
            param.requires_grad_(True)
        if action == "write":
            with torch.no_grad():
                for name in list(self.start)[::3]:
                    if name in params:
                        params[name].mul_(0.95)
        elif action == "load":
            model.load_state_dict(model.state_dict())
        elif action == "load optimizer":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (manager or optimizer).zero_grad(set_to_none=action != "keep zeros")
        if action == "resume" and is_sharded:
            self._resume()
        return norm

    def _resume(self) -> None:
        """Save the run, and load it into another one, which is sharded in another way."""

        def parts() -> dict[str, Any]:
            run = {"optimizer": self.optimizer} if self.manager is None else {"manager": self.manager}
            return {"model": self.model, **run}

        with tempfile.TemporaryDirectory() as own:
            directory = [own]
            dist.broadcast_object_list(directory)
            checkpointer = Checkpointer(directory[0])
            checkpointer.save(1, **parts())
            checkpointer.wait()
            with default_dtype(self.dtype):
                fresh = copy.deepcopy(self.plain)
                for value in fresh.state_dict().values():
                    value.fill_(0.5)
                self.model = self.make_sharded(fresh)
            self.optimizer = self._optimizer_of(self.model, AdamOptimizer if self.ours else self.kind)
            if self.manager is not None:
                self.manager = OptimManager()
                self.manager.add_optimizer(self.optimizer)
            assert checkpointer.load_latest(**parts()) == 1
            self.ctx.world.barrier()

    def _loss_of(self, model: nn.Module, replica: int, step: int, factor: float) -> Callable[[Tensor], Tensor]:
        return lambda ids: factor * self.loss(model, ids, replica, step)

    def _disturb(self, ids: Tensor, replica: int, step: int, action: str) -> None:
        """What a script does with a sharded model before it trains, which changes nothing."""
        model = self.model
        if action == "evaluate":
            with torch.no_grad():
                self.loss(model.eval(), ids, replica, step)
            model.train()
        elif action == "exception":

            def fail(*_: object) -> None:
                raise KeyError("on purpose")

            handle = model.layers[0].register_forward_hook(fail)
            with pytest.raises(self.failure):
                self.loss(model, ids, replica, step)
            handle.remove()
        elif action == "copy":
            self.loss(copy.deepcopy(model), ids, replica, step)
        elif action == "read":
            assert repr(model)
            for param in model.parameters():
                param.norm()
            model.state_dict()

    def _edit_gradients(
        self,
        model: nn.Module,
        optimizer: Any,
        manager: OptimManager | None,
        trained: Mapping[str, nn.Parameter],
        action: str,
    ) -> float:
        names = [name for name, param in self.plain.named_parameters() if param.requires_grad]
        if action == "scale":
            for name in names[::2]:
                if name in trained and trained[name].grad is not None:
                    trained[name].grad.mul_(0.5)  # type: ignore[union-attr]
        elif action == "drop" and names[0] in trained:
            trained[names[0]].grad = None
        elif action == "clip" and manager is not None:
            return float(manager.clip_grad_norm(optimizer.param_groups, 0.1))
        elif action == "clip":
            return float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        return 0.0

    def _compare(self, where: str) -> None:
        plain = dict(self.plain.named_parameters())
        for name, own in self.model.named_parameters():
            update = (plain[name] - self.start[name]).norm()
            error = (own.full_tensor() - plain[name]).norm()  # type: ignore[operator]
            assert error <= self.tolerance * (update if update else 1.0), f"{name} is off by {error / update} {where}"


def _backward(loss_of: Callable[[Tensor], Tensor], ids: Tensor, manager: OptimManager | None, action: str) -> None:
    def scaled(loss: Tensor) -> Tensor:
        return loss if manager is None else manager.scale_loss(loss)

    loss = loss_of(ids)
    if action == "two forwards":
        loss = loss + 0.5 * loss_of((ids + 1) % VOCAB)
    scaled(loss).backward(retain_graph=action == "backward twice")
    if action == "backward twice":
        scaled(loss).backward()
    elif action == "two backwards":
        scaled(loss_of((ids + 2) % VOCAB)).backward()


def cross_entropy(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), (3 * ids + 1).flatten() % VOCAB)


def run_programs(kind: Any, ctx: ParallelContext, seeds: range) -> None:
    for seed in seeds:
        try:
            kind(seed, ctx).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
