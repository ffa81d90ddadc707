"""Random layers, optimizers and training scripts, and their comparison with plain PyTorch in one process."""

from __future__ import annotations

import contextlib
import copy
import random
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bmt_comm import ParallelContext
from bmt_optim import AdamOptimizer, OptimManager, to_distributed
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
    "interrupt",
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
            # The softmax ignores a bias of the keys, whose gradient is what rounding leaves.
            bias = torch.get_default_dtype() is torch.float64
            self.inner: nn.Module = nn.MultiheadAttention(WIDTH, 1, bias=bias, batch_first=True)
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
    batches of all replicas in turn. Losses and norms are the same, too.

    Attributes:
        plain, model: the plain model and the sharded one.
        kind: of the plain model's optimizer, or AdamOptimizer, whose reference is AdamW.
        single: whether all is in single precision; otherwise in double precision.
        reference, optimizer: the optimizers of the two models.
        manager: steps ``optimizer``; None: the script does.
        averages: whether gradients of the sharded model are means over the replicas; otherwise sums.
        tolerance: of updates, relative to their norm; ``single_tolerance`` in single precision.
        vocab, length: how many tokens there are, and how many a sample has.
        style: how the model is sharded, for messages.
        actions: what a step may do besides training.
        failure: what a failing forward or backward raises.
    """

    averages: bool | None = None
    single_tolerance = 1e-4
    vocab, length = VOCAB, 4
    style = ""
    actions = ACTIONS
    failure: tuple[type[Exception], ...] = (KeyError,)

    def __init__(self, seed: int, ctx: ParallelContext) -> None:
        self.ctx, self.draw = ctx, random.Random(seed)
        torch.manual_seed(seed)
        draw, optim = self.draw, torch.optim
        self.kind: Any = draw.choice([optim.AdamW, optim.AdamW, optim.SGD, AdamOptimizer, optim.Adafactor])
        self.single = self.kind in (AdamOptimizer, optim.Adafactor)  # which take no float64
        self.dtype = torch.float32 if self.single else torch.float64
        self.tolerance = self.single_tolerance if self.single else 1e-7
        with default_dtype(self.dtype):
            self.plain = self.make_plain()
            self.model = self.make_sharded(copy.deepcopy(self.plain))
        self.in_groups = draw.random() < 0.3
        self.reference, self.optimizer = self._optimizer_of(self.plain), self._optimizer_of(self.model)
        self.manager: OptimManager | None = None
        if not self.averages and draw.random() < 0.6:
            self.manager = OptimManager(draw.choice([None, 64.0]))
            self.manager.add_optimizer(self.optimizer)
        self.start = copy.deepcopy(self.plain.state_dict())
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
        shape = self.accumulated, self.ctx.replicas, 2, self.length
        return [list(of_replicas) for of_replicas in torch.randint(self.vocab, shape)]

    def draw_style(self, styles: Sequence[str], averaging: Collection[str]) -> str:
        """One of ``styles``, of which ``averaging`` average gradients: always, or never, in one run."""
        if self.averages is not None:
            styles = [style for style in styles if (style in averaging) == self.averages]
        style = self.draw.choice(styles)
        self.averages = style in averaging
        return style

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Without communication of gradients, where ``model`` sums them."""
        return contextlib.nullcontext() if self.averages else no_sync(model)

    def load(self, model: nn.Module) -> None:
        model.load_state_dict(model.state_dict())

    def values(self) -> Mapping[str, Tensor]:
        """The unsharded parameters that this rank has a part of."""
        return {name: param.full_tensor() for name, param in self.model.named_parameters()}  # type: ignore[operator]

    def update(self, name: str) -> float:
        """The norm of a parameter's update since the beginning."""
        return (self.plain.state_dict()[name] - self.start[name]).norm().item()

    def _optimizer_of(self, model: nn.Module) -> Any:
        # Without a large eps the update of a key's bias, which the softmax ignores, would be that of rounding errors.
        own, names = _parameters(model), list(_parameters(self.plain))
        groups: list[dict[str, Any]] = [{"params": list(own.values())}]
        if self.in_groups:
            one, two = ([own[name] for name in names[first::2] if name in own] for first in (0, 1))
            groups = [{"params": one}, {"params": two, "lr": 3e-3, "weight_decay": 0.0}]
        if self.kind is torch.optim.SGD:
            return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        if self.kind is torch.optim.Adafactor:
            optimizer = torch.optim.Adafactor(groups, lr=0.02, eps=(1e-4, 1e-3))
            return optimizer if model is self.plain else to_distributed(optimizer)
        kind = torch.optim.AdamW if model is self.plain else self.kind
        return kind(groups, lr=1e-2, weight_decay=0.01, eps=1e-4)

    # --- a step -----------------------------------------------------------------------------------

    def run(self) -> None:
        actions = []
        for step in range(STEPS):
            actions.append(self.draw.choice(self.actions))
            batches = self.batches()
            wanted = self._step(self.plain, self.reference, None, batches, step, actions[-1])
            own = self._step(self.model, self.optimizer, self.manager, batches, step, actions[-1])
            where = f"after {actions}, {self.kind.__name__}, {self.style}"
            assert own == pytest.approx(wanted, rel=self.tolerance), f"losses or norms {where}"
            plain = self.plain.state_dict()
            for name, value in self.values().items():
                update, error = self.update(name), (value - plain[name]).norm().item()
                assert error <= self.tolerance * (update or 1.0), f"{name} is off by {error} of {update} {where}"

    def _step(
        self,
        model: nn.Module,
        optimizer: Any,
        manager: OptimManager | None,
        batches: list[list[Tensor]],
        step: int,
        action: str,
    ) -> list[float]:
        """Train one step; returns this rank's losses, and what else ``action`` computes."""
        is_sharded = model is self.model
        names = [name for name, param in self.plain.named_parameters() if param.requires_grad]
        params = _parameters(model)
        trained = {name: params[name] for name in names if name in params}  # of this rank
        frozen = [trained[name] for name in names[1::3] if name in trained] if action == "freeze" else []
        hooked = trained.get(names[-1]) if action == "hook" else None
        hook = None if hooked is None else hooked.register_hook(lambda grad: grad * 2)
        own = self.ctx.replica_rank
        numbers = self._before(model, batches[0][own], own, step, action)
        if action == "interrupt":
            (manager or optimizer).zero_grad(set_to_none=True)
        for param in frozen:
            param.requires_grad_(False)
        replicas = 1 if manager is not None or (is_sharded and self.averages) else self.ctx.replicas
        for number, of_replicas in enumerate(batches):
            for replica in [own] if is_sharded else range(self.ctx.replicas):
                waits = is_sharded and number < len(batches) - 1
                with self.no_sync(model) if waits else contextlib.nullcontext():
                    factor = 1 / (len(batches) * replicas)
                    loss_of = self._loss_of(model, replica, step, factor)
                    loss = self._backward(loss_of, of_replicas[replica], manager, action)
                if replica == own:
                    numbers.append(loss / factor)
        if hook is not None:
            hook.remove()
        numbers += self._edit_gradients(model, optimizer, manager, trained, action)
        (manager or optimizer).step()
        for param in frozen:
            param.requires_grad_(True)
        if action == "write":
            with torch.no_grad():
                for name in list(self.start)[::3]:
                    if name in params:
                        params[name].mul_(0.95)
        elif action == "load":
            self.load(model)
        elif action == "load optimizer":
            for part in [optimizer] if manager is None else [optimizer, manager]:
                part.load_state_dict(copy.deepcopy(part.state_dict()))
        (manager or optimizer).zero_grad(set_to_none=action != "keep zeros")
        if action == "resume" and is_sharded:
            self._resume()
        return numbers

    def _resume(self) -> None:
        """Save the run, and load it into another one, which is sharded in another way."""

        def parts() -> dict[str, Any]:
            run = {"optimizer": self.optimizer} if self.manager is None else {"manager": self.manager}
            return {"model": _unwrapped(self.model), **run}

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
            self.optimizer = self._optimizer_of(self.model)
            if self.manager is not None:
                self.manager = OptimManager(64.0 if self.manager.loss_scale_enabled else None)
                self.manager.add_optimizer(self.optimizer)
            assert checkpointer.load_latest(**parts()) == 1
            self.ctx.world.barrier()

    def _loss_of(self, model: nn.Module, replica: int, step: int, factor: float) -> Callable[[Tensor], Tensor]:
        return lambda ids: factor * self.loss(model, ids, replica, step)

    def _before(self, model: nn.Module, ids: Tensor, replica: int, step: int, action: str) -> list[float]:
        """What a script does with a model before it trains, which changes nothing. Returns what that computes."""
        if action == "evaluate":
            with torch.no_grad():
                loss = self.loss(model.eval(), ids, replica, step)
            model.train()
            return [loss.item()]
        if action == "copy":
            loss = self.loss(copy.deepcopy(_unwrapped(model)), ids, replica, step)
            loss.backward()
            return [loss.item()]
        if action == "read":
            assert repr(model)
            model.state_dict()
            return self.norms(_parameters(model))
        if action in ("exception", "interrupt") and model is self.model:
            self._fail(ids, replica, step, in_backward=action == "interrupt")
        return []

    def norms(self, params: Mapping[str, nn.Parameter]) -> list[float]:
        """Of the parameters that this rank's part of the sharded model has."""
        own = [params[name] for name in _parameters(self.model)]
        return [each.norm().item() for param in own for each in (param, param.detach())]

    def gradient_norm(self, grad: Tensor) -> float:
        return grad.norm().item()

    def _fail(self, ids: Tensor, replica: int, step: int, in_backward: bool) -> None:
        """Let forward or backward fail at the beginning of a layer, within, or at its end."""

        def fail(*_: object) -> None:
            raise KeyError("on purpose")

        def fail_in_backward(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].requires_grad:
                args[0].register_hook(fail)

        # All ranks draw alike, also those of another pipeline stage, which do not have the layer.
        layer, within, at_end = self.draw.choice(list(_unwrapped(self.model).layers)), *self.draw.choices([0, 1], k=2)
        place = next(layer.children(), layer) if within else layer
        if in_backward:
            handle = place.register_forward_pre_hook(fail_in_backward)
        else:
            handle = (place.register_forward_hook if at_end else place.register_forward_pre_hook)(fail)
        with pytest.raises(self.failure):
            self.loss(self.model, ids, replica, step).backward()
        handle.remove()

    def _backward(
        self, loss_of: Callable[[Tensor], Tensor], ids: Tensor, manager: OptimManager | None, action: str
    ) -> float:
        def scaled(loss: Tensor) -> Tensor:
            return loss if manager is None else manager.scale_loss(loss)

        loss = loss_of(ids)
        if action == "two forwards":
            loss = loss + 0.5 * loss_of((ids + 1) % self.vocab)
        scaled(loss).backward(retain_graph=action == "backward twice")
        if action == "backward twice":
            scaled(loss).backward()
        elif action == "two backwards":
            scaled(loss_of((ids + 2) % self.vocab)).backward()
        return loss.item()

    def _edit_gradients(
        self,
        model: nn.Module,
        optimizer: Any,
        manager: OptimManager | None,
        trained: Mapping[str, nn.Parameter],
        action: str,
    ) -> list[float]:
        """What a script does with gradients. Returns norms that it computes."""
        names = [name for name, param in self.plain.named_parameters() if param.requires_grad]
        if action == "scale":
            for name in names[::2]:
                if name in trained and trained[name].grad is not None:
                    trained[name].grad.mul_(0.5)  # type: ignore[union-attr]
        elif action == "drop" and names[0] in trained:
            trained[names[0]].grad = None
        elif action == "clip" and manager is not None:
            return [float(manager.clip_grad_norm(optimizer.param_groups, 0.1))]
        elif action == "clip":
            return [float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))]
        elif action == "read":
            scale, here = 1.0 if manager is None else manager.loss_scale, _parameters(self.model)
            grads = [param.grad for name, param in trained.items() if name in here]
            return [0.0 if grad is None else self.gradient_norm(grad) / scale for grad in grads]
        return []


def _unwrapped(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(_unwrapped(model).named_parameters())


def cross_entropy(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), (3 * ids + 1).flatten() % VOCAB)


def run_programs(kind: Any, ctx: ParallelContext, seeds: range) -> None:
    for seed in seeds:
        try:
            kind(seed, ctx).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
