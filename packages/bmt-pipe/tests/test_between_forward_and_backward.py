"""What layers, callers and autograd do between the forward of a pipeline and its backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_helpers import Twins, hidden, random, same
from pipe_helpers import DTYPE, WIDTH, Dropping, Layer, rows_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_comm import ParallelContext

SCHEDULES = [None, "1f1b", "zero_bubble_h1"]  # None: without a tail


def mean_square(y: Tensor) -> Tensor:
    return y.abs().square().mean()


def loss_of(schedule: str | None) -> Callable[[nn.Module, Tensor], Tensor]:
    """The loss of plain layers or a pipeline, outside or inside its schedule."""

    def call(layers: Any, x: Tensor) -> Tensor:
        if schedule is None or isinstance(layers, nn.ModuleList):
            return mean_square(layers(x))
        loss: Tensor = layers(x, tail=mean_square)
        return loss

    return call


def twins(ctx: ParallelContext, factory: Callable[[], nn.Module], schedule: str | None, **options: Any) -> Twins:
    return Twins(ctx, factory, 4, **options, **({} if schedule is None else {"tail_schedule": schedule}))


class Observing(nn.Module):
    """Divides by a running maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.ones(()))
        self.largest: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest = 0.5 * self.largest + 0.5 * x.abs().max()
        return x + torch.tanh(self.inner(x / self.largest))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + torch.tanh(self.inner(normed))


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("is_checkpointed", [True, False])
@pytest.mark.parametrize("factory", [Observing, Normed])
def test_buffers_are_written_once(
    ctx: ParallelContext, factory: Callable[[], nn.Module], is_checkpointed: bool, schedule: str | None
) -> None:
    layers = twins(ctx, factory, schedule, checkpoint=is_checkpointed)
    x = random(ctx.rank, 4, 3, WIDTH)
    loss_of(schedule)(layers.piped, x).backward()
    batches = [random(rank, 4, 3, WIDTH) for rank in range(2)]
    for rows in (slice(0, 2), slice(2, 4)):  # the order of the micro-batches
        for batch in batches:
            (mean_square(layers.plain(batch[rows])) / 2).backward()
    for index, block in layers.piped._modules.items():
        for name, buffer in layers.plain[int(index)].named_buffers():
            same(f"{index}.{name}", dict(block.named_buffers())[name], buffer, 1e-10)
        for name, param in layers.plain[int(index)].named_parameters():
            own = dict(block.named_parameters())[name]
            same(f"{index}.{name}", own.grad, rows_of(param.grad, own), 1e-8)


class Ranging(nn.Module):
    """Divides by the largest value so far, which only some samples exceed. Has a sparse buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.ones((), dtype=DTYPE))
        self.register_buffer("edges", torch.eye(WIDTH, dtype=DTYPE).to_sparse(), persistent=False)
        self.largest: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 2 * self.largest:
            self.largest = x.detach().abs().max()
        return x + torch.tanh(self.inner(x) @ self.edges / self.largest)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_buffers_that_a_later_micro_batch_writes(ctx: ParallelContext, is_checkpointed: bool) -> None:
    layers = twins(ctx, Ranging, None, checkpoint=is_checkpointed)
    x = torch.cat([random(0, 2, 3, WIDTH), 100 * random(1, 2, 3, WIDTH)])  # on both ranks; the second half exceeds

    def call(each: nn.Module, x: Tensor) -> Any:
        return each(x) if each is layers.piped else torch.cat([each(x[:2]), each(x[2:])])

    layers.check("buffers", [x.requires_grad_()], call)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("level", [1, 3])
def test_gradients_of_inputs_alone_leave_those_of_parameters(
    ctx: ParallelContext, schedule: str | None, level: int
) -> None:
    layers, loss = twins(ctx, Layer, schedule, level=level), loss_of(schedule)
    x = hidden(ctx, 4)
    for each in (layers.piped, layers.plain):
        loss(each, x).backward()
    x.grad = None
    grad, wanted = (torch.autograd.grad(loss(each, x), x) for each in (layers.piped, layers.plain))
    same("gradient of x", grad, wanted, 1e-10)
    grads = []
    for each in (layers.piped, layers.plain):
        loss(each, x).backward(inputs=[x])
        grads.append(x.grad)
        x.grad = None
    same("gradient of x in backward", *grads, 1e-10)
    layers.check_parameters("after these")
    layers.check("and after that", [x], loss)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=2)
@pytest.mark.parametrize("level", [1, 3])
def test_functions_of_torch_do_not_take_a_stage_for_the_model(ctx: ParallelContext, level: int) -> None:
    layers = twins(ctx, Layer, None, level=level)
    layers.piped(hidden(ctx, 4)).sum().backward()
    for function in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.get_total_norm):
        args = [p.grad for p in layers.piped.parameters()], 1.0
        if function is torch.nn.utils.clip_grad_norm_:
            args = layers.piped.parameters(), 1.0
        with pytest.raises(RuntimeError, match="the gradients of one pipeline stage only"):
            function(*args)


class InFloat32(nn.Module):
    """Computes without autocast, also within autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            return x + self.outer(torch.tanh(self.inner(x)))


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backward_inside_of_the_call_is_without_autocast(ctx: ParallelContext, schedule: str | None) -> None:
    layers = twins(ctx, InFloat32, schedule, prepare=lambda _, layer: layer.float())

    def call(each: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(schedule)(each, x)

    layers.check("autocast", [random(ctx.rank, 4, 3, WIDTH).float().requires_grad_()], call, None, 1e-5)


class Cast(nn.Module):
    """Ends with an operation of autocast, and in another dtype in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.to(self.inner.weight.dtype))
        return y if self.training else y.double()


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=2)
def test_dtypes_depend_on_autocast_and_training(ctx: ParallelContext) -> None:
    layers = twins(ctx, Cast, None, prepare=lambda _, layer: layer.float())
    x = random(ctx.rank, 4, 3, WIDTH).float()
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert layers.piped(x).dtype is (torch.bfloat16 if enabled else torch.float32)
            layers.piped.eval()
            with torch.no_grad():
                assert layers.piped(x).dtype is torch.float64
            layers.piped.train()


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_layers_are_computed_again_as_they_were(ctx: ParallelContext, is_checkpointed: bool) -> None:
    layers = twins(ctx, Dropping, None, checkpoint=is_checkpointed).piped
    x = torch.ones(4, 50, WIDTH, dtype=DTYPE, requires_grad=True)
    y = layers(x)
    layers.eval()
    y.sum().backward()
    same("y is linear in x", x.grad, y.detach(), 1e-12)
    assert not any(module.training for module in layers.modules())
    layers.requires_grad_(False)
    y = layers(x)
    layers.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"requires_grad of a parameter of shape .* was set to True between"):
        y.sum().backward()


class Turning(nn.Module):
    """A real and a complex hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z * torch.polar(torch.ones_like(x), x * self.weight)
        return x + z.real, z


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wanted", [False, True])
def test_complex_hidden_states(ctx: ParallelContext, schedule: str | None, wanted: bool) -> None:
    layers = twins(ctx, Turning, schedule, num_hidden=2)
    z = torch.complex(random(ctx.rank + 7, 4, 3, WIDTH), random(ctx.rank + 9, 4, 3, WIDTH)).requires_grad_(wanted)

    def tail(x: Tensor, z: Tensor) -> Tensor:
        return mean_square(x) + mean_square(z)

    def call(each: Any, x: Tensor, z: Tensor) -> Tensor:
        if schedule is None or isinstance(each, nn.ModuleList):
            return tail(*each(x, z))
        loss: Tensor = each(x, z, tail=tail)
        return loss

    layers.check("complex", [hidden(ctx, 4), z], call)
    layers.check("conjugated", [hidden(ctx, 4), z], lambda each, x, z: call(each, x, z.conj()))


class Conjugating(Turning):
    """Returns what autograd and torch conjugate lazily. Has an argument."""

    def forward(self, x: Tensor, z: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, z = super().forward(x, z * factor)
        return x, z.conj()


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
def test_lazy_conjugation(ctx: ParallelContext) -> None:
    layers = twins(ctx, Conjugating, None, num_hidden=2)
    z, factor = (torch.complex(random(ctx.rank + n, WIDTH), random(ctx.rank + n + 1, WIDTH)) for n in (7, 9))
    inputs = [hidden(ctx, 4), z.expand(4, 3, WIDTH).clone().requires_grad_(), factor.requires_grad_()]
    layers.check("lazy", inputs, lambda each, x, z, factor: each(x, z.conj(), factor.conj()), lambda y: y[1].imag.sum())


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
@pytest.mark.parametrize("count", [2, 4])
def test_a_checkpoint_around_the_call(ctx: ParallelContext, count: int) -> None:
    layers = Twins(ctx, Layer, count)
    layers.check(
        "outside",
        [hidden(ctx, 4)],
        lambda each, x: checkpoint(lambda x: mean_square(each(x)), x, use_reentrant=False),
    )
    with pytest.raises(ValueError, match=r"a tail was passed inside of torch.utils.checkpoint"):
        checkpoint(lambda x: layers.piped(x, tail=mean_square), hidden(ctx, 4), use_reentrant=False)


@pytest.mark.long
@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=300)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_backward_in_two_passes_of_what_is_compiled_in_part(ctx: ParallelContext) -> None:
    sizes = WIDTH, 2 * WIDTH
    parts = nn.LayerNorm(WIDTH), nn.Linear(*sizes), nn.Tanh(), nn.Linear(*sizes[::-1])
    layers = twins(ctx, lambda: copy.deepcopy(nn.Sequential(*parts)), "zero_bubble_h1", checkpoint=False)
    next(layers.piped.children()).compile()
    for _ in range(2):
        layers.check("compiled", [hidden(ctx, 4)], loss_of("zero_bubble_h1"))
