"""Backward in two passes: gradients are those of one pass, and the weight-gradient pass computes those of products."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch
from pipe_helpers import DTYPE, FusedLinear
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bmt_comm import ParallelContext
from bmt_pipe import PipelineTransformerBlockList
from bmt_pipe.run import Run
from bmt_pipe.split_backward import SplitBackward
from bmt_zero import Block
from bmt_zero.backward_context import StepContext

WIDTH, ROWS, LENGTH = 6, 4, 3


class Products(TorchDispatchMode):
    """Counts matrix products by ``label``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.label = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.counts[self.label] += 1
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """One weight in two products, in an elementwise factor, and scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.tanh(self.a(x))) * self.a.weight[0]
        return x + nn.functional.linear(y, 2 * self.a.weight)


class Shared(nn.Module):
    """A tensor that is computed from a weight enters two products, one of them on the path of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.tanh(self.weight)
        return torch.tanh(x @ weight) @ weight


class Entangled(nn.Module):
    """The weight of a product is computed from that of another product, which makes all gradients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FusedLinear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(nn.functional.linear(x, self.inner.weight * 2)))


class WithoutInput(nn.Module):
    """A product of parameters alone meets the input later."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.linear(self.prompt)


class Checkpointed(nn.Sequential):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    reentrant = True


def linears(factory: Callable[..., nn.Module] = nn.Linear) -> list[nn.Module]:
    return [factory(WIDTH, 2 * WIDTH), nn.Tanh(), factory(2 * WIDTH, WIDTH)]


def lora() -> nn.Module:
    """A frozen layer beside a trained one of low rank."""
    layer = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.adapter = frozen, layer

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.frozen(x) + self.adapter(x))

    return Lora()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linears": lambda: nn.Sequential(*linears()),
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), *linears(), nn.LayerNorm(WIDTH)),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
    "fused": lambda: nn.Sequential(*linears(FusedLinear)),
    "lora": lora,
    "convolution": lambda: nn.Conv1d(LENGTH, LENGTH, 3, padding=1),
    "recurrent": lambda: _First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "tied": Tied,
    "shared": Shared,
    "entangled": Entangled,
    "without input": WithoutInput,
    "checkpointed": lambda: Checkpointed(*linears()),
    "reentrant": lambda: Reentrant(*linears()),
    "no parameters": nn.Tanh,
}


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]


def split(
    outputs: list[Tensor], grads: list[Tensor], leaves: list[Tensor], hooked: Collection[Node] = ()
) -> SplitBackward:
    return SplitBackward(list(map(get_gradient_edge, outputs)), grads, leaves, StepContext(), hooked)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("wants", [True, False], ids=["input wanted", "input not wanted"])
def test_gradients_and_products_are_those_of_one_backward(name: str, wants: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().to(DTYPE)
    if not wants and (name == "reentrant" or not any(p.requires_grad for p in module.parameters())):
        return  # nothing requires a gradient
    twin = copy.deepcopy(module)
    inputs = [torch.randn(ROWS, LENGTH, WIDTH, dtype=DTYPE) for _ in range(2)]
    counts: list[int] = []
    input_grads: list[Tensor | None] = []
    for param in (*module.parameters(), *twin.parameters()):
        param.grad = torch.ones_like(param) if param.requires_grad else None
    for model, splits in ((module, False), (twin, True)):
        for given in inputs:
            x = given.clone().requires_grad_(wants)
            y = model(x)
            with Products() as products:
                if splits:
                    both = split([y], [torch.cos(y.detach())], [x])
                    both.run_input_pass()
                    assert (x.grad is not None) == wants
                    both.run_weight_pass()
                else:
                    y.backward(torch.cos(y.detach()))
            counts.append(products.counts.total())
            input_grads.append(x.grad)
    if name != "checkpointed" or hasattr(
        torch.utils.checkpoint, "GraphExecGroup"
    ):  # else it is recomputed in both passes
        assert counts[:2] == counts[2:]
    torch.testing.assert_close(input_grads[:2], input_grads[2:], rtol=1e-12, atol=1e-12)
    for (key, one), two in zip(module.named_parameters(), twin.parameters()):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("linears", 2, 2), ("norm", 2, 2), ("fused", 4, 0), ("lora", 3, 2), ("reentrant", 6, 0)],
)
def test_products_of_weights_are_computed_in_the_weight_gradient_pass(name: str, first: int, second: int) -> None:
    module = MODULES[name]()
    x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    y = module(x)
    with Products() as products:
        both = split([y], [torch.ones_like(y)], [x])
        both.run_input_pass()
        assert products.counts.total() == first
        both.run_weight_pass()
    assert products.counts.total() == first + second


def test_several_inputs_and_outputs_and_hooks_of_parameters() -> None:
    a, b, c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    calls = []
    a.weight.register_hook(lambda grad: 2 * grad)
    b.weight.register_post_accumulate_grad_hook(lambda param: calls.append(param))

    def outputs(x: Tensor, y: Tensor) -> list[Tensor]:
        return [a(x) * b(y), torch.tanh(b(x)), c.weight.sum()[None]]  # the last one without an input

    def leaves() -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(ROWS, WIDTH, generator=generator).requires_grad_(n < 2) for n in range(3)]

    x, y, unused = leaves()
    results = outputs(x, y)
    both = split(results, [torch.ones_like(each) for each in results], [x, y, unused])
    both.run_input_pass()
    assert all(p.grad is None for p in (a.weight, b.weight, c.weight))
    assert not calls
    both.run_weight_pass()
    assert [id(param) for param in calls] == [id(b.weight)]
    grads = [x.grad, y.grad, *(p.grad for p in (a.weight, a.bias, b.weight, b.bias, c.weight))]
    for param in (*a.parameters(), *b.parameters(), *c.parameters()):
        param.grad = None
    x, y, unused = leaves()
    torch.autograd.backward(outputs(x, y), [torch.ones_like(each) for each in results])
    wanted = [x.grad, y.grad, *(p.grad for p in (a.weight, a.bias, b.weight, b.bias, c.weight))]
    for one, two in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, two)
    assert unused.grad is None


@pytest.mark.parametrize("enters", ["product", "factor", "product and output"])
@pytest.mark.parametrize("known", [False, True])
def test_hooks_of_what_crosses_the_boundary(enters: str, known: bool) -> None:
    runs = []
    for splits in (False, True):
        torch.manual_seed(0)
        weight, x = (torch.randn(WIDTH, WIDTH, dtype=DTYPE, requires_grad=True) for _ in range(2))
        between = 1 + weight
        calls: list[Tensor] = []
        between.register_hook(lambda grad, calls=calls: calls.append(grad) or grad.square())
        if known:
            between.retain_grad()
        y = torch.tanh(x) * between if enters == "factor" else torch.tanh(x) @ between
        outputs = [y, between] if enters == "product and output" else [y]
        grads = [torch.cos(each.detach()) for each in outputs]
        if splits:
            both = split(outputs, grads, [x], {get_gradient_edge(between).node} if known else ())
            both.run_input_pass()
            both.run_weight_pass()
        else:
            torch.autograd.backward(outputs, grads)
        assert len(calls) == 1 or not known
        runs.append([x.grad, weight.grad, between.grad if known else None])
    torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_hooks_of_parameters_are_called_once(name: str) -> None:
    linear = nn.Linear(WIDTH, WIDTH, dtype=DTYPE)
    param, calls = getattr(linear, name), list[Tensor]()
    param.register_hook(lambda grad: calls.append(grad) or 2 * grad)  # type: ignore[func-returns-value]
    x = torch.randn(ROWS, WIDTH, dtype=DTYPE, requires_grad=True)
    y = linear(x)
    both = split([y], [torch.ones_like(y)], [x])
    both.run_input_pass()
    both.run_weight_pass()
    assert len(calls) == 1
    torch.testing.assert_close(param.grad, 2 * calls[0])


def test_positions_from_a_table_need_no_values_of_parameters() -> None:
    table, linear = nn.Embedding(2 * LENGTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    y = linear(x + table(torch.arange(LENGTH)))
    both = split([y], [torch.ones_like(y)], [x])
    assert not any(group.reads_parameters for group in both._groups)
    both.run_input_pass()
    both.run_weight_pass()
    torch.testing.assert_close(x.grad.sum(0), table.weight.grad[:LENGTH])  # type: ignore[union-attr, index]


def test_other_micro_batches_come_between_the_passes() -> None:
    module = nn.Sequential(*linears())
    inputs = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(3)]
    waiting = []
    for x in inputs:
        y = module(x)
        waiting.append(split([y], [torch.ones_like(y)], [x]))
        waiting[-1].run_input_pass()
    for both in reversed(waiting):
        both.run_weight_pass()
        both.run_weight_pass()  # nothing is left
    grads = [p.grad for p in module.parameters()]
    wanted = torch.autograd.grad(sum(module(x).sum() for x in inputs), list(module.parameters()))
    torch.testing.assert_close(grads, list(wanted))


def test_what_was_written_to_between_the_passes_is_noticed() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    between = torch.tanh(x)
    y = linear(between)
    both = split([y], [torch.ones_like(y)], [x])
    both.run_input_pass()
    between.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.run_weight_pass()


class Layer(nn.Module):
    """Two plain linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("schedule", ["zero_bubble_h1", "zero_bubble_v"])
@pytest.mark.parametrize("level", [0, 3])
def test_weights_of_plain_layers_wait_for_their_action(
    ctx: ParallelContext, checkpointed: bool, schedule: str, level: int
) -> None:
    layers = PipelineTransformerBlockList(
        [Block(Layer(), checkpointed, level) for _ in range(4)], tail_schedule=schedule
    )
    x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    do, products = Run._do, Products()

    def labelled(self: Run, action: Any) -> None:
        products.label = action.kind.name
        do(self, action)

    with products, mock.patch.object(Run, "_do", labelled):
        layers(x, tail=lambda x: x.square().mean()).backward()
    each = 2 * len(layers) // 2 * 4  # linear layers of this stage, micro-batches
    again = each if checkpointed else 0
    assert products.counts == {"FORWARD": each, "INPUT": each + again, "WEIGHT": each}
