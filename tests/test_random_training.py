"""Random models and training scripts on several ranks, compared with plain PyTorch in one process.

A seed draws a model, how it is sharded, an optimizer, and what a script does besides training in each of four steps.
After every step the update of each parameter since the beginning is that of the plain model, which trains on the
batches of all ranks in turn.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_comm import ParallelContext
from bmt_optim import AdamOptimizer, OptimManager
from bmt_zero import Block, BMTrainModelWrapper, MixedPrecision, fully_shard, no_sync, shard

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
]


@dataclass
class Output:
    hidden: Tensor


class Residual(nn.Module):
    """Returns tensors in containers, writes in place, or has a checkpoint within; frozen and unused parameters, too."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH, bias=draw.random() < 0.5)
        self.scale = nn.Parameter(torch.tensor(0.7)) if draw.random() < 0.4 else None
        self.unused = nn.Parameter(torch.randn(3, 2)) if draw.random() < 0.3 else None
        self.kind = draw.choice(["plain", "in place", "view", "tuple", "dict", "dataclass", "checkpoint"])

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


class Experts(nn.Module):
    """Uses another parameter on each rank."""

    chosen = 0

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1) for _ in range(3)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.all(x) + x @ self.experts[self.chosen]


class Model(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        count = draw.randint(1, 4)
        kinds = [draw.choice([Residual, Residual, Residual, Around, Around, Experts]) for _ in range(count)]
        self.layers = nn.ModuleList([kind(draw) for kind in kinds])
        self.order = [*range(count), *([draw.randrange(count)] if draw.random() < 0.25 else [])]  # perhaps one twice
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if draw.random() < 0.4:
            self.head.weight = self.embedding.weight
        self.passes_mask = draw.random() < 0.3
        for layer in self.layers:
            if draw.random() < 0.15 and count > 1:
                layer.requires_grad_(False)
            elif draw.random() < 0.2:
                next(layer.parameters()).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for index in self.order:
            kwargs = {"mask": torch.full((WIDTH,), 0.5)} if self.passes_mask else {}
            y = self.layers[index](x, **kwargs)
            x = y[0] if isinstance(y, tuple) else y["hidden"] if isinstance(y, dict) else getattr(y, "hidden", y)
        return self.head(self.norm(x))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Program:
    """What a seed draws.

    Attributes:
        plain, model: the plain model and the sharded one.
        reference, optimizer: their optimizers.
        manager: steps ``optimizer``; None: the script does.
        averages: whether gradients of the sharded model are means over the ranks; otherwise sums.
        tolerance: of updates, relative to their norm.
    """

    def __init__(self, seed: int, ctx: ParallelContext) -> None:
        self.ctx, self.draw = ctx, random.Random(seed)
        torch.manual_seed(seed)
        draw = self.draw
        self.ours = draw.random() < 0.3
        self.dtype = torch.float32 if self.ours else torch.float64  # AdamOptimizer takes no float64
        with default_dtype(self.dtype):
            self.plain = Model(draw)
        self.tolerance = 1e-4 if self.ours else 1e-7
        self.model, self.averages = self._sharded(copy.deepcopy(self.plain)), self.style == "fully_shard"
        self.reference, self.optimizer = self._optimizers()
        self.manager: OptimManager | None = None
        if not self.averages and draw.random() < 0.6:
            self.manager = OptimManager()
            self.manager.add_optimizer(self.optimizer)
        self.start = [p.detach().clone() for p in self.plain.parameters()]
        self.micro_batches = draw.choice([1, 1, 2, 3])

    def _sharded(self, model: Model) -> nn.Module:
        draw = self.draw
        level = draw.choice([0, 1, 2, 3, 3])
        options: dict[str, Any] = {"use_checkpoint": draw.choice([False, False, True, 0.5, "matmuls"])}
        options["offload"] = draw.random() < 0.25
        self.style = draw.choice(["wrapper", "blocks", "some blocks", "fully_shard", "shard"])
        if self.style == "fully_shard":
            for layer in model.layers:
                fully_shard(layer, reshard_after_forward=draw.choice([True, False]))
            return fully_shard(model)
        if draw.random() < 0.2 and not self.ours:
            options["precision"] = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
            self.tolerance = 1e-4
        if self.style == "shard":
            rest = {"precision": options.get("precision")}
            shard(model.embedding, level, **rest)
            for layer in model.layers:
                shard(layer, level, **options)
            return shard(model, level, **rest)
        for index, layer in enumerate(model.layers):
            if self.style == "blocks" or (self.style == "some blocks" and index % 2 == 0):
                own = level if self.style == "blocks" else draw.choice([2, 3, level])
                model.layers[index] = Block(layer, zero_level=own, **options)
        return BMTrainModelWrapper(model, zero_level=level, **options)

    def _optimizers(self) -> tuple[torch.optim.Optimizer, Any]:
        in_groups = self.draw.random() < 0.3

        def groups(model: nn.Module) -> list[dict[str, Any]]:
            params = list(model.parameters())
            two = [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3, "weight_decay": 0.0}]
            return two if in_groups else [{"params": params}]

        adamw = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}
        if self.ours:
            return torch.optim.AdamW(groups(self.plain), **adamw), AdamOptimizer(groups(self.model), **adamw)
        kind: Any = torch.optim.AdamW if self.draw.random() < 0.5 else torch.optim.SGD
        options = adamw if kind is torch.optim.AdamW else {"lr": 0.05, "momentum": 0.9}
        return kind(groups(self.plain), **options), kind(groups(self.model), **options)

    # --- a step -----------------------------------------------------------------------------------

    def run(self) -> None:
        actions = []
        for step in range(STEPS):
            actions.append(self.draw.choice(ACTIONS))
            ids = torch.randint(VOCAB, (self.micro_batches, self.ctx.world_size, 2, 4))
            norm = self._step(self.plain, self.reference, None, ids, step, actions[-1])
            own = self._step(self.model, self.optimizer, self.manager, ids, step, actions[-1])
            assert own == pytest.approx(norm, rel=self.tolerance), f"gradient norm: {actions}"
            self._compare(f"after {actions}, {self.style}")

    def _step(
        self, model: nn.Module, optimizer: Any, manager: OptimManager | None, ids: Tensor, step: int, action: str
    ) -> float:
        """Train one step; returns the norm of the gradients if ``action`` clips them."""
        is_sharded = model is self.model
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = trained[1::3] if action == "freeze" else []
        for param in frozen:
            param.requires_grad_(False)
        hook = trained[-1].register_hook(lambda grad: grad * 2) if action == "hook" else None
        if is_sharded:
            self._disturb(ids[0, self.ctx.rank], action)
        replicas = 1 if manager is not None or (is_sharded and self.averages) else self.ctx.world_size
        for number, of_ranks in enumerate(ids):
            for rank in [self.ctx.rank] if is_sharded else range(self.ctx.world_size):
                Experts.chosen = (rank + step) % 2
                waits = is_sharded and not self.averages and number < len(ids) - 1
                with no_sync(model) if waits else contextlib.nullcontext():
                    self._backward(model, of_ranks[rank], 1 / (len(ids) * replicas), manager, action)
        if hook is not None:
            hook.remove()
        norm = self._edit_gradients(model, optimizer, manager, action)
        (manager or optimizer).step()
        for param in frozen:
            param.requires_grad_(True)
        if action == "write":
            with torch.no_grad():
                for param in list(model.parameters())[::3]:
                    param.mul_(0.95)
        elif action == "load":
            model.load_state_dict(model.state_dict())
        elif action == "load optimizer":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (manager or optimizer).zero_grad(set_to_none=action != "keep zeros")
        return norm

    def _disturb(self, ids: Tensor, action: str) -> None:
        """What a script does with a sharded model before it trains, which changes nothing."""
        model = self.model
        if action == "evaluate":
            with torch.no_grad():
                model.eval()(ids)
            model.train()
        elif action == "exception":

            def fail(*_: object) -> None:
                raise KeyError("on purpose")

            handle = model.layers[0].register_forward_hook(fail)
            with pytest.raises(KeyError):
                model(ids)
            handle.remove()
        elif action == "copy":
            copy.deepcopy(model)(ids)
        elif action == "read":
            assert repr(model)
            for param in model.parameters():
                param.norm()
            model.state_dict()

    def _backward(
        self, model: nn.Module, ids: Tensor, factor: float, manager: OptimManager | None, action: str
    ) -> None:
        scaled: Callable[[Tensor], Tensor] = (lambda loss: loss) if manager is None else manager.scale_loss

        def loss_of(ids: Tensor) -> Tensor:
            return factor * F.cross_entropy(model(ids).flatten(0, 1), (3 * ids + 1).flatten() % VOCAB)

        loss = loss_of(ids)
        if action == "two forwards":
            loss = loss + 0.5 * loss_of((ids + 1) % VOCAB)
        scaled(loss).backward(retain_graph=action == "backward twice")
        if action == "backward twice":
            scaled(loss).backward()
        elif action == "two backwards":
            scaled(loss_of((ids + 2) % VOCAB)).backward()

    def _edit_gradients(self, model: nn.Module, optimizer: Any, manager: OptimManager | None, action: str) -> float:
        trained = [p for p in model.parameters() if p.requires_grad]
        if action == "scale":
            for param in trained[::2]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        elif action == "drop":
            trained[0].grad = None
        elif action == "clip" and manager is not None:
            return float(manager.clip_grad_norm(optimizer.param_groups, 0.1))
        elif action == "clip":
            return float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        return 0.0

    def _compare(self, where: str) -> None:
        for (name, plain), own, start in zip(
            self.plain.named_parameters(), self.model.parameters(), self.start, strict=True
        ):
            update = (plain - start).norm()
            error = (own.full_tensor() - plain).norm()  # type: ignore[operator]
            assert error <= self.tolerance * (update if update else 1.0), f"{name} is off by {error / update} {where}"


def run(ctx: ParallelContext, seeds: range) -> None:
    for seed in seeds:
        try:
            Program(seed, ctx).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", range(0, 32, 8))
def test_random_training(ctx: ParallelContext, first: int) -> None:
    run(ctx, range(first, first + 8))


@pytest.mark.long
@pytest.mark.ranks(2, 3, timeout=900)
def test_much_random_training(ctx: ParallelContext) -> None:
    run(ctx, range(1000, 1150))
