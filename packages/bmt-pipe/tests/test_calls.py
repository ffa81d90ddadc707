"""Calls of a pipeline: outputs and gradients are those of plain modules on the rank's own arguments."""

from __future__ import annotations

import copy
import logging
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from call_helpers import Twins, hidden, random, same, weighted
from pipe_helpers import DTYPE, WIDTH, Dropping, Layer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from bmt_comm import Communicator, ParallelContext
from bmt_pipe import PipelineTransformerBlockList
from bmt_pipe.messages import StageFailedError
from bmt_zero import BMTrainModelWrapper
from bmt_zero.shard import group_of


class Anything(nn.Module):
    """Adds something of each argument that is given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = torch.tanh(self.inner(x))
        for n, value in enumerate((*args, *kwargs.values())):
            y = y + self._share(x, value) / (n + 2)
        return x + self.gain * y

    def _share(self, x: Tensor, value: Any) -> Any:
        if isinstance(value, dict):
            return sum(self._share(x, value[key]) for key in sorted(value))
        if isinstance(value, (list, tuple)):
            return sum((self._share(x, each) for each in value), 0)
        if value is None:
            return 0.125
        if isinstance(value, (str, threading.Thread)):
            return 0.25 if getattr(value, "name", value).startswith("yes") else 0.5
        if not isinstance(value, Tensor):
            return float(value)
        if value.numel() == 0:
            return value.sum() + 0.0625
        value = value.to(x.dtype)
        if value.dim() == 2 and value.shape == x.shape[:2]:
            return value[..., None]
        if value.dim() == 1 and len(value) == len(x):
            return value[:, None, None]
        if value.dim() == 4:  # (samples or 1, heads, S, S)
            return torch.einsum("bhst,btw->bsw", value.expand(len(x), -1, -1, -1), x)
        return value


Pair = namedtuple("Pair", "left right")


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
def test_a_square_mask_is_told_in_the_log(ctx: ParallelContext) -> None:
    twins, mask, said = Twins(ctx, Anything), random(60, 3, 3), []
    log = logging.getLogger("bmt_pipe.arguments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "warning", lambda text, *values: said.append(text % values))
        for length, count in ((4, 0), (3, 1), (3, 1)):  # as many positions as samples: rows of samples, or one mask
            twins.piped(hidden(ctx, 3, length), a_mask=random(60, 3, length, 1))
            assert len(said) == count
        assert "'a_mask' of shape (3, 3, 1) is divided with the batch of 3 samples" in said[0]
        twins.check("named", [hidden(ctx, 3), mask], lambda f, x, mask: f(x, key=mask, batch_related=["key"]))
        assert len(said) == 1


class Mixing(Layer):
    """Mixes positions as a mask says, which is the same for all samples."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(mask @ x)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
def test_no_argument_belongs_to_samples(ctx: ParallelContext) -> None:
    mask = random(60, 3, 3, grad=True).tril()
    Twins(ctx, Mixing).check("none", [hidden(ctx, 3), mask], lambda f, x, mask: f(x, mask, batch_related=None))


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("interleave", [1, 2])
def test_arguments_of_all_kinds(ctx: ParallelContext, interleave: int) -> None:
    r = ctx.rank
    twins = Twins(ctx, Anything, interleave=interleave)
    x = hidden(ctx, 3)

    # The first dimension tells whether an argument belongs to samples. Both kinds get gradients.
    mask, bias = random(10 + r, 3, 3, grad=True), random(20 + r, 1, WIDTH, grad=True)
    twins.check("inferred", [x, mask, bias], lambda f, x, mask, bias: f(x, mask, bias))
    twins.check("by keyword", [x, mask, bias], lambda f, x, mask, bias: f(x, mask=mask, bias=bias))
    scalar = random(30 + r, grad=True)
    twins.check("of no dimension", [x, scalar], lambda f, x, scalar: f(x, scalar, scale=scalar))

    # More dimensions than the hidden state; other shapes on each rank; as many rows as the batch, or other numbers.
    attention = random(40 + r, 3, 1 + r, 3, 3, grad=True)
    shared = random(50 + r, 1, 2 - r, 3, 3, grad=True)
    twins.check("of more dimensions", [x, attention, shared], lambda f, x, a, s: f(x, a, other=s))
    square = random(60 + r, 3, WIDTH, grad=True)  # as many rows as the batch, but of the sequence
    twins.check("named", [x, square, mask], lambda f, x, square, mask: f(x, square, mask, batch_related=[1]))
    twins.check("named key", [x, square, mask], lambda f, x, s, m: f(x, s=s, m=m, batch_related=("m",)))
    twins.check("both", [x, square, mask, mask], lambda f, x, s, m, n: f(x, m, s=s, n=n, batch_related=[0, "n"]))

    # No tensors; nested arguments; different ones on each rank; one that cannot be sent.
    pair = Pair(mask, {"a": [bias, None], "b": (2 + r, "yes" if r else "no")})
    twins.check(
        "nested",
        [x, mask, bias],
        lambda f, x, mask, bias: f(x, Pair(mask, {"a": [bias, None], "b": pair.right["b"]}), None, 0.5 + r, k="yes"),
    )
    thread = threading.Thread(name="yes")
    twins.check("unsendable", [x], lambda f, x: f(x, thread, [thread], key=thread))
    twins.check("mask on one rank only", [x, mask], lambda f, x, mask: f(x, mask if r else None, mask))

    # Integer and boolean tensors, empty ones, of other dtypes.
    for value in (mask > 0, (mask * 4).long(), mask.detach().float(), torch.zeros(3, 0), torch.zeros(0, 4)):
        twins.check(f"{value.dtype} {value.shape}", [x, value.detach()], lambda f, x, value: f(x, value))
    empty = [torch.zeros(3, 0, dtype=DTYPE, requires_grad=True), torch.zeros(0, dtype=DTYPE, requires_grad=True)]
    twins.check("empty with gradients", [x, *empty], lambda f, x, a, b: f(x, a, b))

    # The same tensor twice; with gradients on one rank only; an argument that is a part of the input.
    twins.check("aliases", [x, mask], lambda f, x, mask: f(x, mask, mask, x, own=x))
    twins.check("one wants", [x, mask.detach().requires_grad_(r == 1)], lambda f, x, mask: f(x, mask))
    wide = random(90 + r, WIDTH, 2, grad=True)
    twins.check("strided", [x, wide], lambda f, x, wide: f(x.transpose(0, 1), wide[:, 1]))


class Stateful:
    """An object that a layer changes."""

    def __init__(self) -> None:
        self.calls = 0


class Counting(Layer):
    def forward(self, x: Tensor, state: Stateful) -> Tensor:
        state.calls += 1
        return super().forward(x) * (1.0 if state.calls <= 40 else float("nan"))


@pytest.mark.ranks(2, pipe_size=2, timeout=60)
def test_objects_are_not_remembered(ctx: ParallelContext) -> None:
    twins = Twins(ctx, Counting)
    for _ in range(12):  # a new one each time, equal to those before
        twins.check("new object", [hidden(ctx, 2)], lambda f, x: f(x, Stateful()))


class Three(nn.Module):
    """Three hidden states with different shapes and dtypes. The last one is not a floating-point tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor, y: Tensor, steps: Tensor, mask: Tensor, *, gain: float = 1.0) -> tuple[Tensor, ...]:
        z = torch.tanh(self.a(x) + self.b(y)[:, None]) * mask[..., None]
        return x + gain * z, y * z.mean((1, 2))[:, None] + steps[:, None], steps + 1


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.tanh(self.a(x)) + y.sum(-1)[:, None, None], y + self.b(x).sum(1), x]  # one more than is passed on


class Dictionary(nn.Module):
    """One hidden state, of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any] | Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = state["x"] + scale * torch.tanh(self.a(state["x"]))
        state["x"], state["sums"] = x, [state["sums"][0] + x.sum(-1), None]  # the next layer gets the same dictionary
        state["depth"] += 1
        return state


@pytest.mark.ranks(3, pipe_size=3, num_micro_batches=6, timeout=90)
def test_several_hidden_states(ctx: ParallelContext) -> None:
    r = ctx.rank
    x, y = hidden(ctx, 3), random(70 + r, 3, 2, grad=True)
    steps, mask = torch.arange(3) + r, random(80 + r, 3, 3, grad=True)
    three = Twins(ctx, Three, 7, num_hidden=3, interleave=2)
    call = [x, y, steps, mask]
    three.check("three", call, lambda f, x, y, s, m: f(x, y, s, m, gain=0.5))
    three.check("named", call, lambda f, x, y, s, m: f(x, y, s, m, batch_related=[2]))
    three.check("frozen input", [x.detach(), *call[1:]], lambda f, *xs: f(*xs))
    three.check("states", call, lambda f, *xs: f(*xs, return_hidden_states=True))
    three.check("a part of the loss", call, lambda f, *xs: f(*xs), lambda result: result[r % 2].sum())

    two = Twins(ctx, Two, 4, num_hidden=2)
    two.check("two", [x, y], lambda f, x, y: f(x, y))
    two.check(
        "states on one rank",
        [x, y],
        lambda f, x, y: f(x, y, return_hidden_states=True),
        lambda result: weighted(result[2:] if r == 1 else result[:1]),
    )

    nested = Twins(ctx, Dictionary, 4)
    for grad in (True, False):
        nested.check(
            "dictionary",
            [hidden(ctx, 4, grad=grad), random(90, 4, 3, grad=not grad)],
            lambda f, x, s: f({"x": x, "sums": [s, None], "depth": r}, scale=0.5),
        )
        nested.check(
            "states of dictionaries",
            [hidden(ctx, 4, grad=grad), random(90, 4, 3, grad=not grad)],
            lambda f, x, s: f({"x": x, "sums": [s, None], "depth": r}, scale=0.5, return_hidden_states=True),
        )


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("checkpoint", [True, False])
def test_what_is_differentiated(ctx: ParallelContext, checkpoint: bool) -> None:
    r = ctx.rank
    x, mask = hidden(ctx, 3), random(10 + r, 3, 3, grad=True)

    def frozen(*which: int) -> Any:
        return lambda index, layer: layer.requires_grad_(index not in which)

    call = lambda f, x, mask: f(x, mask)  # noqa: E731
    for layers in ((), (0, 1), (3, 4), (0, 1, 2, 3, 4), (2,)):
        twins = Twins(ctx, Layer, 5, checkpoint=checkpoint, prepare=frozen(*layers))
        for inputs in ([x, mask], [x.detach(), mask], [x, mask.detach()], [x.detach(), mask.detach()]):
            twins.check(f"frozen {layers}", inputs, call)
        twins.check("on one rank", [x.detach().requires_grad_(r == 0), mask.detach()], call)

    twins = Twins(ctx, Layer, 5, checkpoint=checkpoint)
    for _ in range(2):
        with torch.no_grad():
            twins.check("no_grad", [x, mask], call)
        with torch.inference_mode():
            result = twins.piped(x.detach(), mask.detach())
        with torch.no_grad():
            same("inference_mode", result.clone(), twins.plain(x, mask), 1e-10)
        twins.check("after it", [x, mask], call)
    twins.piped.eval()
    twins.check("eval", [x, mask], call)
    assert not any(block.training for block in twins.piped.children())
    twins.piped.train()
    for param in twins.piped.parameters():  # from one call to the next
        param.requires_grad_(False)
    twins.plain.requires_grad_(False)
    twins.check("frozen later", [x, mask], call)
    for param in [*twins.piped.parameters(), *twins.plain.parameters()]:
        param.requires_grad_(True)
    twins.check("unfrozen", [x.detach(), mask.detach()], call)

    # Several calls, several backwards.
    def twice(layers: nn.Module, x: Tensor, mask: Tensor) -> Any:
        first, second = layers(x, mask), layers(x * 2, mask)
        weighted(first).backward(retain_graph=True)
        weighted(second).backward()
        return first, second

    def reversed_(layers: nn.Module, x: Tensor, mask: Tensor) -> Any:
        first, second = layers(x, mask), layers(x * 2, mask)
        weighted(second).backward()
        weighted(first).backward()
        return first.detach(), second.detach()

    def again(layers: nn.Module, x: Tensor, mask: Tensor) -> Any:
        result = layers(x, mask, return_hidden_states=True)
        weighted(result).backward(retain_graph=True)
        weighted(result[0]).backward(retain_graph=True)
        return result

    twins.check("two calls", [x, mask], twice, lambda result: result[0].square().sum())
    twins.check("two calls, in reverse", [x, mask], reversed_, lambda result: None)
    twins.check("two calls, one backward", [x, mask], lambda f, x, m: (f(x, m), f(2 * x, m)))
    twins.check("called on its own output", [x, mask], lambda f, x, mask: f(f(x, mask), mask))
    twins.check("retain_graph", [x, mask], again, lambda result: weighted(result[1]))
    twins.check(
        "states", [x, mask], lambda f, x, m: f(x, m, return_hidden_states=True), lambda o: weighted(o[1 if r else 0])
    )
    for layers in (twins.piped, Twins(ctx, Layer, 3).piped):  # in the second pipeline, one stage has only one layer
        out = layers(x)
        out.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
    for loss in (  # linear ones, too, whose gradient is constant
        lambda: twins.piped(x, mask).square().sum(),
        lambda: twins.piped(x, mask).sum(),
        lambda: twins.piped(x, mask, tail=lambda h: h.sum()),
    ):
        [grad] = torch.autograd.grad(loss(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="a pipeline can be differentiated only once"):
            grad.sum().backward()
    grads = torch.autograd.grad(twins.piped(x, mask).square().sum(), [x, mask])
    wanted = torch.autograd.grad(twins.plain(x, mask).square().sum(), [x, mask])
    same("autograd.grad", grads, wanted, 1e-10)


class NeverIdle(Layer):
    """Fails when called without samples, unless a rank has none at all."""

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        assert len(x) or x.shape[1] == 9
        return super().forward(x, mask, bias)


@pytest.mark.ranks(4, pipe_size=4, num_micro_batches=8, timeout=90)
def test_batches_of_all_sizes(ctx: ParallelContext) -> None:
    r = ctx.rank
    twins = Twins(ctx, NeverIdle, 6)
    call = lambda f, x, mask, bias: f(x, mask, bias)  # noqa: E731
    for step, (rows, length) in enumerate([(4, 3), (2, 5), (1 + r, 2 + r), (3, 1), (4, 3), (r, 9), (1 + (r == 2), 4)]):
        mask, bias = random(step, rows, length, grad=True), random(r, WIDTH, grad=True)
        twins.check(f"{rows} rows of {length}", [hidden(ctx, rows, length, seed=step), mask, bias], call)


@pytest.mark.ranks(2, pipe_size=2, timeout=60)
def test_writing_into_the_input_is_noticed(ctx: ParallelContext) -> None:
    for count in (2, 3, 4):
        twins = Twins(ctx, Layer, count)
        bias = random(ctx.rank, WIDTH, grad=True)
        for _ in range(2):
            x = hidden(ctx, 2, grad=False)
            result = twins.piped(x, None, bias)
            if ctx.rank == 0:
                x.zero_()
            stage = "^" if ctx.rank == 0 else "stage 0 .*"
            with pytest.raises(RuntimeError, match=f"{stage}.*modified by an inplace operation"):
                result.sum().backward()
        twins.piped.zero_grad()
        twins.check("after it", [hidden(ctx, 2), bias], lambda f, x, bias: f(x, None, bias))


class InPlace(Layer):
    """Writes into its input, like many residual layers."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x += torch.tanh(self.up(x)).sum(-1, keepdim=True)
        return x


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
def test_layers_that_write_into_their_input_are_refused(ctx: ParallelContext) -> None:
    """Recomputation from the changed input would give wrong gradients."""
    for count in (2, 4):
        layers = PipelineTransformerBlockList([InPlace().to(DTYPE) for _ in range(count)])
        x = hidden(ctx, 2, grad=False)
        with pytest.raises(RuntimeError, match=r"writes into|in-place operation"):
            layers(x + 0)
        with torch.no_grad():
            layers(x + 0)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
@pytest.mark.parametrize("checkpoint", [True, False])
def test_dropout_is_replayed(ctx: ParallelContext, checkpoint: bool) -> None:
    twins = Twins(ctx, Dropping, 4, checkpoint=checkpoint)
    torch.manual_seed(7 + ctx.rank)
    x = torch.ones(4, 50, WIDTH, dtype=DTYPE, requires_grad=True)
    result = twins.piped(x)
    first, state = torch.rand(3), torch.get_rng_state()
    weights = random(3, 4, 50, WIDTH)
    (result * weights).sum().backward()
    assert torch.equal(torch.get_rng_state(), state), "backward leaves the generator as it was"
    # The output is linear in x, with a factor that the masks determine.
    same("gradient of x", x.grad, (result * weights).detach(), 1e-12)
    # The output is proportional to each layer's weight, too.
    expected = (result * weights).detach().sum((0, 1))
    ctx.world.all_reduce(expected)
    for block in twins.piped.children():
        [param] = block.parameters()
        same("gradient of a weight", param.grad * param.detach(), expected, 1e-12)
    masks = (result != 0).flatten(1)
    assert not any(torch.equal(masks[a], masks[b]) for a in range(4) for b in range(a)), "the same in two micro-batches"
    kept = masks.double().mean().item()
    assert 0.8**4 - 0.1 < kept < 0.8**4 + 0.1

    # As many random numbers as without gradients are used.
    torch.manual_seed(7 + ctx.rank)
    with torch.no_grad():
        assert torch.equal(twins.piped(x), result)
    assert torch.equal(torch.rand(3), first)


class Watching(nn.Module):
    """Records the autocast state that it runs under, and the dtype that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), y.dtype))
        return x + torch.tanh(y)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
def test_dtypes_and_autocast(ctx: ParallelContext) -> None:
    twins = Twins(ctx, Watching, 4, prepare=lambda index, layer: layer.float())
    for dtype in (torch.bfloat16, torch.float16):

        def call(layers: nn.Module, x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            with torch.autocast("cpu", dtype):
                return layers(x)  # backward comes outside

        twins.check(f"autocast {dtype}", [random(ctx.rank, 3, 2, WIDTH, grad=True).float()], call, None, 2e-2)
        for block in twins.piped.children():
            assert set(block.seen) == {(True, dtype, dtype)}
            block.seen.clear()
    twins.check("none", [random(ctx.rank, 3, 2, WIDTH, grad=True).float()], lambda f, x: f(x), None, 1e-5)
    for block in twins.piped.children():
        assert {(on, dtype) for on, _, dtype in block.seen} == {(False, torch.float32)}

    for dtype in (torch.bfloat16, torch.float16):
        half = Twins(ctx, Layer, 4, prepare=lambda index, layer, dtype=dtype: layer.to(dtype))
        x = random(ctx.rank, 3, 2, WIDTH, dtype=torch.float32).to(dtype).requires_grad_()
        half.check(f"{dtype}", [x], lambda f, x: f(x), None, 3e-2)


@pytest.mark.ranks(2, pipe_size=2, timeout=60)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_the_list(ctx: ParallelContext, reentrant: bool) -> None:
    twins = Twins(ctx, Layer, 4)

    def call(layers: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: layers(x * 2), x, use_reentrant=reentrant)

    for _ in range(2):
        twins.check("checkpoint", [hidden(ctx, 3)], call)


class Skipping(Layer):
    """Is skipped where no sample wants it."""

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) if wanted.any() else x


@pytest.mark.ranks(4, pipe_size=2, num_micro_batches=4, timeout=60)
def test_layers_that_not_all_micro_batches_use(ctx: ParallelContext) -> None:
    for level in (0, 1, 3):
        for wanted in ([True, False], [False, False]):
            twins = Twins(ctx, Skipping, 4, level=level)
            mask = torch.tensor(wanted)[:, None].expand(2, 3)

            def call(layers: nn.Module, x: Tensor, mask: Tensor = mask) -> Tensor:
                if layers is twins.piped:  # noqa: B023
                    return layers(x, mask)
                return torch.cat([layers(x[i : i + 1], mask[i : i + 1]) for i in range(2)])

            for _ in range(2):
                twins.check(f"level {level}, {wanted}", [hidden(ctx, 2)], call)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_gradients_with_the_loss_inside(ctx: ParallelContext, schedule: str) -> None:
    r = ctx.rank
    twins = Twins(ctx, Layer, 5, interleave=2 if "interleaved" in schedule else None, tail_schedule=schedule)
    target, shared = random(50 + r, 3, 3, WIDTH), random(60, WIDTH)

    def tail(x: Tensor, target: Tensor, power: int, names: list[Any]) -> Tensor:
        return ((x - target).abs() ** power * names[0]).mean()

    def call(layers: nn.Module, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        if layers is twins.plain:
            return tail(layers(x, mask, bias), target, 3, [shared])
        return layers(x, mask, bias, tail=tail, tail_args=(target, 3, [shared, "name"]))

    inputs = [hidden(ctx, 3), random(10 + r, 3, 3, grad=True), random(20 + r, WIDTH, grad=True)]
    for grads in ((True, True, True), (False, True, False), (False, False, False), (r == 0, r == 1, True)):
        given = [x.detach().requires_grad_(grad) for x, grad in zip(inputs, grads)]
        for factor in (1.0, 3.0, 3.0):
            twins.check(f"{grads}", given, call, lambda loss, factor=factor: loss * factor)
    twins.check("two calls", inputs, lambda f, *xs: (call(f, *xs), call(f, *xs) * 2), lambda result: sum(result))
    for layers in (twins.piped, twins.plain):
        losses = [call(layers, *inputs), call(layers, *inputs) * 2]
        for loss in losses:
            loss.backward()
    twins.check_parameters("two calls, two backward passes")
    with torch.no_grad():
        twins.check("no_grad", inputs, call)
    twins.piped(inputs[0], tail=tail, tail_args=(target, 2, [shared]))  # no backward: leaves no gradient
    assert all(param.grad is None or not param.grad.any() for param in twins.piped.parameters())
    twins.check("after it", inputs, call)
    for param in [*twins.piped.parameters(), *twins.plain.parameters()]:
        param.requires_grad_(False)
    twins.check("frozen", inputs, call)
    loss = call(twins.piped, *inputs)
    with pytest.raises(ValueError, match="on one stage and"):
        (loss * (1 + r)).backward()


class Computed(nn.Module):
    """Its weight is computed from parameters. The weight-gradient pass needs their values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x) @ (self.a * self.b)


@pytest.mark.ranks(4, pipe_size=2, num_micro_batches=4, timeout=60)
@pytest.mark.parametrize("schedule", ["zero_bubble_h1", "zero_bubble_v"])
@mock.patch.object(Communicator, "shares_memory", False)  # ranks with shared memory share one buffer
def test_weights_that_are_computed_are_read_in_the_second_part(ctx: ParallelContext, schedule: str) -> None:
    twins = Twins(ctx, Computed, 4, checkpoint=False, level=3, tail_schedule=schedule)

    def mean(x: Tensor) -> Tensor:
        return x.square().mean()

    def call(layers: nn.Module, x: Tensor) -> Tensor:
        return mean(layers(x)) if layers is twins.plain else layers(x, tail=mean)

    for _ in range(2):
        twins.check("computed", [hidden(ctx, 4)], call)
    for group in dict.fromkeys(map(group_of, twins.piped.children())):
        assert not any(flat.unsharded.untyped_storage().size() for flat in group.flats)


class Holder:
    """An object of which other stages receive a copy."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Holding(Layer):
    def forward(self, x: Tensor, holder: Holder) -> Tensor:  # type: ignore[override]
        return super().forward(x) + holder.tensor


@pytest.mark.ranks(2, pipe_size=2, timeout=60)
def test_a_gradient_that_would_be_lost_is_refused(ctx: ParallelContext) -> None:
    twins = Twins(ctx, Holding, 4)
    twins.check("without", [hidden(ctx, 2)], lambda f, x: f(x, Holder(random(ctx.rank, WIDTH))))
    with pytest.raises(ValueError, match="requires a gradient") if ctx.rank == 0 else pytest.raises(StageFailedError):
        twins.piped(hidden(ctx, 2), Holder(random(0, WIDTH, grad=ctx.rank == 0)))
    # In the tail: plain parameters, whose gradients are not reduced; outside tensors; tensors inside an object.
    layers = Twins(ctx, Layer, 4).piped
    plain, sharded = nn.Linear(WIDTH, WIDTH).to(DTYPE), BMTrainModelWrapper(nn.Linear(WIDTH, WIDTH).to(DTYPE))
    outside = random(1, WIDTH, grad=True) * 2
    cases = [
        (lambda x: plain(x).sum(), ValueError, "plain parameter"),
        (lambda x: (x * outside).sum(), ValueError, "computed outside of it"),
        (lambda x: sharded(x).sum(), RuntimeError, "in the tail of a pipeline, .*: pass the module that owns it"),
    ]
    for tail, error, match in cases:
        with pytest.raises(error if ctx.rank == 1 else StageFailedError, match=match):
            layers(hidden(ctx, 2), tail=tail)
    with pytest.raises(RuntimeError, match="different ways"):  # one stage would unshard, and the other not
        layers(hidden(ctx, 2), tail=lambda x: sharded(x).sum(), tail_modules=[sharded][: 1 - ctx.rank])
    layers(hidden(ctx, 2), tail=lambda x: sharded(x).sum(), tail_modules=[sharded]).backward()
    assert all(param.grad is not None for param in sharded.parameters())


class Keeping(nn.Module):
    """Keeps a loss of its own in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))  # keeps a computed weight, which is no loss

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if x.shape[1] > 3:
            self.inner.losses = [y.square().mean()]
        return y


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("length", [3, 4])
def test_losses_in_attributes_are_told_in_the_log(ctx: ParallelContext, length: int) -> None:
    layers, said = PipelineTransformerBlockList([Keeping().to(DTYPE) for _ in range(4)]), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("bmt_pipe.run"), "warning", lambda text, *values: said.append(text % values))
        for _ in range(2):
            layers(hidden(ctx, 4, length)).sum().backward()
    assert len(said) == length - 3
    assert not said or f"layer {2 * ctx.rank} of a pipeline keeps a tensor in 'inner.losses'" in said[0]


class Scaled(nn.Module):
    """A layer in a module that multiplies what it returns."""

    def __init__(self, layer: nn.Module, scale: Any = 3.0) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(x, *args, **kwargs) * self.scale


class Checkpointed(nn.Module):
    """A layer in a module that computes it again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return torch_checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("around", [Scaled, Checkpointed])
@pytest.mark.parametrize(
    ("checkpoint", "schedule"), [(True, "interleaved_1f1b"), (False, "interleaved_1f1b"), (True, "zero_bubble_h1")]
)
def test_layers_that_were_replaced(
    ctx: ParallelContext, around: Callable[[nn.Module], nn.Module], checkpoint: bool, schedule: str
) -> None:
    twins = Twins(ctx, Layer, 5, checkpoint=checkpoint, tail_schedule=schedule)
    x = hidden(ctx, 4)

    def call(layers: nn.Module, x: Tensor) -> Tensor:
        return layers(x)

    twins.check("before", [x], call)
    for index in (1, 4):
        for layers in (twins.piped, twins.plain):
            setattr(layers, str(index), around(layers[index]))
    twins.check("after", [x], call)
    assert list(twins.piped._modules) == (["0", "1", "2"] if ctx.rank == 0 else ["3", "4"])
    twins.piped = copy.deepcopy(twins.piped)
    twins.check("a copy", [x], call)
    twins.check("the loss inside", [x], lambda f, x: f(x, tail=Tensor.mean) if f is twins.piped else f(x).mean())
    for index in (0, 4):
        with pytest.raises(ValueError, match=f"parameter 'scale' of a Scaled is not one of layer {index}"):
            setattr(twins.piped, str(index), Scaled(twins.piped[index], nn.Parameter(torch.ones(1))))
    twins.check("unchanged", [x], call)
