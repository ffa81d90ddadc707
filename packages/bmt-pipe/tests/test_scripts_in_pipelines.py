"""What scripts do around a pipeline, as with plain modules, or refused."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_helpers import Twins, hidden, random, same, weighted
from pipe_helpers import DTYPE, WIDTH, rows_of
from torch import Tensor, nn

import bmt_pipe.channels
from bmt_comm import ParallelContext, local_rows
from bmt_pipe import PipelineTransformerBlockList
from bmt_pipe.messages import StageFailedError
from bmt_zero import Block, BMTrainModelWrapper


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("level", [0, 2, 3])
def test_an_optimizer_in_backward(ctx: ParallelContext, level: int, inside: bool) -> None:
    """Hooks for accumulated gradients run once in a backward pass, and not for each micro-batch."""
    twins = Twins(ctx, Layer, 4, level=level)
    start = [param.detach().clone() for param in twins.plain.parameters()]
    calls = 0

    def step(param: Tensor) -> None:
        nonlocal calls
        calls += 1
        with torch.no_grad():
            param.add_(param.grad, alpha=-0.1)
        param.grad = None

    for param in twins.piped.parameters():
        param.register_post_accumulate_grad_hook(step)
    for number in range(3):
        x = random(10 * number + ctx.rank, 4, 2, WIDTH)
        if inside:
            twins.piped(x, tail=lambda y: y.square().mean()).backward()
        else:
            twins.piped(x).square().mean().backward()
        batches = [random(10 * number + rank, 4, 2, WIDTH) for rank in range(2)]
        sum(twins.plain(batch).square().mean() for batch in batches).backward()
        for param in twins.plain.parameters():
            step(param)
            calls -= 1
    assert calls == 3 * len(list(twins.piped.parameters()))
    for (name, param), before in zip(twins.plain.named_parameters(), start, strict=True):
        index, _, inner = name.partition(".")
        if index in twins.piped._modules:
            ours = dict(twins.piped._modules[index].named_parameters())[inner].full_tensor()
            assert (ours - param).norm() <= 1e-10 * (param - before).norm(), name


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=2)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_hooks_of_a_list_that_is_called_twice(ctx: ParallelContext, level: int, inside: bool) -> None:
    """They run once in a backward pass, with the sum of both calls' gradients."""
    twins = Twins(ctx, Layer, 4, level=level)
    calls: list[Tensor] = []
    accumulated: list[Tensor] = []

    def clamp(grad: Tensor) -> Tensor:
        calls.append(grad)
        return grad.clamp(-0.05, 0.05)

    for param in twins.piped.parameters():
        param.register_hook(clamp)
        param.register_post_accumulate_grad_hook(accumulated.append)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if inside and model is twins.piped:
            return model(x, tail=lambda y: y.square().mean())
        return model(x).square().mean()

    own = random(ctx.rank, 4, 2, WIDTH)
    (loss(twins.piped, own) + loss(twins.piped, 2 * own)).backward()
    sum(loss(twins.plain, factor * random(rank, 4, 2, WIDTH)) for rank in range(2) for factor in (1, 2)).backward()
    assert len(calls) == len(accumulated) == len(list(twins.piped.parameters()))
    for name, param in twins.plain.named_parameters():
        index, _, inner = name.partition(".")
        if index in twins.piped._modules:
            ours = dict(twins.piped._modules[index].named_parameters())[inner].grad.full_tensor()
            expected = param.grad.clamp(-0.05, 0.05)
            assert not expected.equal(param.grad)
            assert (ours - expected).norm() <= 1e-10 * expected.norm(), name


class WritesArgument(Layer):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        bias += 0.1
        return super().forward(x) * bias.clone()


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_that_write_into_an_argument_are_refused(
    ctx: ParallelContext, checkpoint: bool, schedule: str, grad: bool
) -> None:
    layers = [Block(WritesArgument().to(DTYPE), checkpoint) for _ in range(4)]
    piped = PipelineTransformerBlockList(layers, tail_schedule=schedule)
    bias = torch.ones(WIDTH, dtype=DTYPE)
    for options in ({}, {"tail": lambda y: y.square().mean()}):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="writes into an argument"):
            piped(hidden(ctx, 2, grad=False), bias.clone(), **options)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("learning", [False, True])
def test_no_memory_for_a_message_that_arrives(
    ctx: ParallelContext, monkeypatch: pytest.MonkeyPatch, learning: bool
) -> None:
    """Later calls get their own messages."""
    twins = Twins(ctx, Layer, 4)
    if not learning:
        twins.check("before it", [hidden(ctx, 2)], lambda f, x: f(x))
    empty, left = torch.empty, 2

    def no_room(*args: Any, **options: Any) -> Tensor:
        nonlocal left
        callers = [sys._getframe(1).f_code.co_name, sys._getframe(2).f_code.co_name]
        if "_start_receive" in callers and options.get("dtype") == DTYPE:
            left -= 1
            if left == 0:
                raise torch.OutOfMemoryError("no room")
        return empty(*args, **options)

    with monkeypatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(bmt_pipe.channels.torch, "empty", no_room)
        with pytest.raises(RuntimeError, match="no room"):
            twins.piped(hidden(ctx, 2, grad=False)).sum().backward()
    twins.piped.zero_grad()
    for _ in range(2):
        twins.check("after it", [hidden(ctx, 2)], lambda f, x: f(x))


def loss_of(head: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda y: head(y).square().mean()


@pytest.mark.ranks(1, 2, pipe_size=-1)
def test_a_tail_with_weights_under_autocast(ctx: ParallelContext) -> None:
    torch.manual_seed(3)
    head, layers = nn.Linear(WIDTH, 3), [Layer() for _ in range(2)]
    losses = []
    for piped in (False, True):
        model = nn.Module()
        model.head = copy.deepcopy(head)
        twins = copy.deepcopy(layers)
        model.layers = PipelineTransformerBlockList(twins) if piped else nn.Sequential(*twins)
        if piped:
            model = BMTrainModelWrapper(model)
        x = torch.linspace(-1, 1, 4 * 2 * WIDTH).view(4, 2, WIDTH)
        with torch.autocast("cpu", torch.bfloat16):
            if piped:
                loss = model.layers(x, tail=loss_of(model.head), tail_modules=[model.head])
            else:
                loss = model.head(model.layers(x)).square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    if ctx.world_size > 1:
        with pytest.raises((RuntimeError, ValueError), match="tail_modules"):
            model.layers(x, tail=loss_of(model.head))


@pytest.mark.ranks(2, pipe_size=2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of the compiler
def test_a_model_with_a_pipeline_is_compiled(ctx: ParallelContext) -> None:
    twins = Twins(ctx, Layer, 4)
    compiled = torch.compile(lambda layers, x: layers(x * 2.0) * 3.0, backend="aot_eager")
    for _ in range(2):
        twins.check(
            "compiled",
            [hidden(ctx, 2)],
            lambda f, x: compiled(f, x) if f is twins.piped else f(x * 2.0) * 3.0,
        )


class OfItsDtype(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.up.weight.dtype))


@pytest.mark.ranks(2, pipe_size=2)
def test_layers_that_have_changed_their_dtype(ctx: ParallelContext) -> None:
    """They return another dtype for the same arguments. This raises once; then the new dtype is learned."""
    piped = PipelineTransformerBlockList([OfItsDtype() for _ in range(2)])
    x = torch.ones(2, 3, WIDTH)
    assert piped(x).dtype == torch.float32
    piped.to(torch.float64)
    with pytest.raises(RuntimeError, match="shapes must follow"):
        piped(x)
    assert piped(x).dtype == torch.float64


@pytest.mark.ranks(2, pipe_size=2)
def test_large_objects_are_not_kept(ctx: ParallelContext) -> None:
    class Takes(Layer):
        def forward(self, x: Tensor, mask: Any) -> Tensor:  # type: ignore[override]
            return super().forward(x) + mask.value[0, 0]

    piped = PipelineTransformerBlockList([Takes().to(DTYPE) for _ in range(2)])
    for size in (10, 200, 300):
        piped(hidden(ctx, 2, grad=False), Mask(size))
    assert len(piped._pipeline._signatures) == len(piped._pipeline._plans) == 1


class Mask:
    """An object that other stages get a copy of."""

    def __init__(self, size: int) -> None:
        self.value = torch.ones(size, size, dtype=DTYPE)


@pytest.mark.ranks(2, pipe_size=2)
def test_sequence_first_layers_are_refused(ctx: ParallelContext) -> None:
    with pytest.raises(ValueError, match="batch_first=True"):
        PipelineTransformerBlockList([nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)])
    PipelineTransformerBlockList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)])


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
def test_encoders_and_decoders_of_torch(ctx: ParallelContext) -> None:
    """Their forwards loop over the layers, and read attributes of modules in the first one."""
    torch.manual_seed(0)
    plain = nn.Transformer(8, 2, 3, 3, 16, dropout=0.0, batch_first=True).double()
    piped = copy.deepcopy(plain)
    piped.encoder.layers = PipelineTransformerBlockList(piped.encoder.layers)  # type: ignore[assignment]
    piped.decoder.layers = PipelineTransformerBlockList(piped.decoder.layers)  # type: ignore[assignment]
    piped = BMTrainModelWrapper(piped)
    source, target = random(ctx.rank, 4, 5, 8), random(7 + ctx.rank, 4, 3, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=DTYPE)
    same("outputs", piped(source, target, tgt_mask=mask), plain(source, target, tgt_mask=mask), 1e-10)
    weighted(piped(source, target, tgt_mask=mask)).backward()
    weighted(plain(source, target, tgt_mask=mask)).backward()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        ctx.world.all_reduce(param.grad)
        own = dict(piped.named_parameters()).get(name)
        if own is not None:
            assert own.grad is not None
            same(name, local_rows(own.grad), rows_of(param.grad, own), 1e-8)
    layer = piped.encoder.layers._loop()._attributes[2]
    assert layer["self_attn"]["num_heads"] == 2
    with pytest.raises(AttributeError, match="'weight' of 'linear1' of layer 0 of a pipeline cannot be read"):
        _ = next(iter(piped.encoder.layers._loop())).linear1.weight


class Around(nn.Module):
    """A head, whose weight may be tied to that of a layer, and a prefix that layers read from an attribute."""

    def __init__(self, tied: int | None = None) -> None:
        super().__init__()
        layers = [Layer().to(DTYPE) for _ in range(4)]
        self.head = nn.Linear(WIDTH, 5, bias=False, dtype=DTYPE)
        if tied is not None:
            self.head.weight = layers[tied].up.weight
        self.prefix = nn.Parameter(torch.ones(WIDTH, dtype=DTYPE))
        self.layers = PipelineTransformerBlockList(layers)

    def forward(self, x: Tensor) -> Tensor:
        prefix = self.prefix * 2
        for layer in self.layers._modules.values():
            layer.register_forward_pre_hook(lambda _, args: (args[0] * prefix,))  # type: ignore[union-attr]
        return self.head(self.layers(x))


class _LoopOver(nn.Module):
    """A model whose forward finds its layers by ``layers_of``."""

    def __init__(self, layers_of: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.layers = PipelineTransformerBlockList([Layer().to(DTYPE) for _ in range(4)])
        self.layers_of = layers_of

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers_of(self.layers):
            x = layer(x)
        return x


@pytest.mark.ranks(2, pipe_size=2)
@pytest.mark.parametrize("name", ["children", "_modules", "modules"])
def test_a_loop_over_the_layers_of_this_stage_only(ctx: ParallelContext, name: str) -> None:
    """It would compute other numbers than a loop over the list. Layers may be called outside of such a forward."""
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "children": lambda layers: layers.children(),
        "_modules": lambda layers: layers._modules.values(),
        "modules": lambda layers: (module for module in layers.modules() if isinstance(module, Layer)),
    }
    model, x = _LoopOver(ways[name]), random(ctx.rank, 4, 2, WIDTH)
    with pytest.raises(RuntimeError, match=r"_LoopOver calls a layer .* _modules, where this stage's layers"):
        model(x)
    own = next(model.layers.children())
    assert own(x).shape == x.shape
    model.layers_of = iter
    assert model(x).shape == x.shape


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
def test_errors_tell_what_to_do_instead(ctx: ParallelContext) -> None:
    for tied in (0, 3):
        where = rf"head.weight, which is shared with layers.{tied}.up.weight of one pipeline stage \(tie it to"
        with pytest.raises(RuntimeError, match=where):
            BMTrainModelWrapper(Around(tied))
    model = BMTrainModelWrapper(Around())
    with pytest.raises((RuntimeError, StageFailedError), match="pass it as an argument of the list"):
        model(hidden(ctx, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="call the list of layers, or loop over it in the forward of a module"):
        model.layers[2 - 2 * ctx.rank](hidden(ctx, 4))
    layers = Around().layers.train(ctx.rank == 0)
    with pytest.raises(RuntimeError, match=r"stage 0 with training=True; stage 1 with training=False$"):
        layers(hidden(ctx, 4))
    layers.train()
    different = r"stage 0 with keywords=\{\}, grad enabled=True; stage 1 with keywords=\{'a': '\*'\}, grad enabled=F"
    with pytest.raises(RuntimeError, match=different), torch.set_grad_enabled(ctx.rank == 0):
        layers(hidden(ctx, 4), **({"a": 1} if ctx.rank else {}))


class Conditional(nn.Module):
    """Uses a frozen expert, a trained one, or no parameter at all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList([nn.Parameter(random(n, WIDTH, WIDTH) * 0.1, n > 0) for n in range(2)])
        self.bias = nn.Parameter(random(2, WIDTH))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        if chosen == 2:
            return x
        return x + torch.tanh(x @ self.experts[chosen] + (self.bias if chosen else 0))


@pytest.mark.ranks(4, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", [None, "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_layers_of_which_a_replica_uses_no_parameter(ctx: ParallelContext, level: int, schedule: str | None) -> None:
    twins = Twins(ctx, Conditional, 5, level=level, tail_schedule=schedule)
    x = hidden(ctx, 4)
    for number in range(3):
        chosen = (ctx.data_rank + number) % 3

        def loss(layers: nn.Module, x: Tensor, chosen: int = chosen) -> Tensor:
            if layers is twins.piped and schedule is not None:
                return layers(x, chosen, tail=lambda y: y.square().mean())
            return layers(x, chosen).square().mean()

        twins.check(f"call {number}", [x], loss)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("inside", [False, True])
def test_an_argument_that_no_layer_uses_gets_no_gradient(ctx: ParallelContext, inside: bool) -> None:
    class Choosing(Layer):
        def forward(self, x: Tensor, *biases: Tensor) -> Tensor:
            return super().forward(x) + biases[0]

    layers = PipelineTransformerBlockList([Choosing().to(DTYPE) for _ in range(2)])
    used, unused = random(0, WIDTH, grad=True), random(1, WIDTH, grad=True)
    if inside:
        layers(hidden(ctx, 4), used, unused, tail=lambda y: y.square().mean()).backward()
    else:
        layers(hidden(ctx, 4), used, unused).square().mean().backward()
    assert used.grad is not None
    assert unused.grad is None
