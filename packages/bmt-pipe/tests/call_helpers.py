"""The same call of a pipeline and of plain modules, on the same rank's arguments, and their comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pipe_helpers import DTYPE, WIDTH, make_layers, rows_of
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from bmt_comm import ParallelContext, local_rows
from bmt_pipe import PipelineTransformerBlockList
from bmt_zero import Block


class PlainList(nn.ModuleList):
    """What a ``TransformerBlockList`` does, with plain modules and without this project's code."""

    num_hidden = 1

    def forward(
        self, *hidden_and_args: Any, batch_related: Any = (), return_hidden_states: bool = False, **kwargs: Any
    ) -> Any:
        hidden, args = hidden_and_args[: self.num_hidden], hidden_and_args[self.num_hidden :]
        inputs = []
        for layer in self:
            inputs.append(tree_map(lambda x: x, hidden))  # a layer may write into a container
            output = layer(*hidden, *args, **kwargs)
            hidden = tuple(output[: self.num_hidden]) if isinstance(output, (tuple, list)) else (output,)
        if return_hidden_states:
            return (*hidden, *tree_map(lambda *xs: torch.stack(xs) if isinstance(xs[0], Tensor) else xs[0], *inputs))
        return hidden[0] if self.num_hidden == 1 else hidden


class Twins:
    """A pipeline and the same layers, all of them on every rank, in plain PyTorch."""

    def __init__(
        self,
        ctx: ParallelContext,
        factory: Callable[[], nn.Module],
        count: int = 5,
        num_hidden: int = 1,
        checkpoint: bool = True,
        level: int | None = None,
        prepare: Callable[[int, nn.Module], object] = lambda index, layer: None,
        **options: Any,
    ) -> None:
        self.ctx = ctx
        layers = [layer.to(DTYPE) for layer in make_layers(count, factory=factory)]
        for index, layer in enumerate(layers):
            prepare(index, layer)
        self.plain = PlainList(layers)
        self.plain.num_hidden = num_hidden
        blocks = [Block(copy.deepcopy(layer), checkpoint, level) for layer in layers]
        self.piped = PipelineTransformerBlockList(blocks, num_hidden, **options)

    def check(
        self,
        what: str,
        inputs: Sequence[Tensor],
        call: Callable[..., Any],
        loss: Callable[[Any], Tensor | None] | None = None,
        tolerance: float = 1e-10,
    ) -> Any:
        """Compare outputs and gradients of ``call(layers, *inputs)``, which returns nested tensors.

        Args:
            what: for messages.
            inputs: tensors; copies of them go in.
            loss: of what ``call`` returns; by default a sum in which every element has another weight.
        """
        result, grads = self._run(self.piped, inputs, call, loss)
        wanted, wanted_grads = self._run(self.plain, inputs, call, loss)
        same(f"{what}: outputs", result, wanted, tolerance)
        for n, pair in enumerate(zip(grads, wanted_grads, strict=True)):
            same(f"{what}: gradient of input {n}", *pair, tolerance)
        self.check_parameters(what, tolerance)
        return result

    def check_parameters(self, what: str, tolerance: float = 1e-10) -> None:
        """Compare the gradients of this stage's parameters with the sum of those of all ranks; then clear them."""
        mine = {id(param): param for param in self.piped.parameters()}
        for name, param in self.plain.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            self.ctx.world.all_reduce(grad)
            index, _, inner = name.partition(".")
            if index in self.piped._modules:
                own = dict(self.piped._modules[index].named_parameters())[inner]
                assert id(own) in mine
                wanted = rows_of(grad, own) if param.requires_grad else None
                actual = None if own.grad is None else local_rows(own.grad)
                same(f"{what}: gradient of {name}", actual, wanted, tolerance)
        self.plain.zero_grad()
        self.piped.zero_grad()

    def _run(
        self, layers: nn.Module, inputs: Sequence[Tensor], call: Callable[..., Any], loss: Any
    ) -> tuple[Any, list[Tensor | None]]:
        copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        result = call(layers, *copies)
        number = weighted(result) if loss is None else loss(result)
        if number is not None and number.requires_grad:
            number.backward()
        for copied, given in zip(copies, inputs):
            assert torch.equal(copied.detach(), given.detach())
            assert copied.requires_grad == given.requires_grad
        return result, [x.grad for x in copies]


def weighted(tree: Any) -> Tensor:
    """The sum of all elements, each with another weight."""
    total = torch.zeros((), dtype=DTYPE)
    for n, leaf in enumerate(tree_leaves(tree)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            weights = torch.cos(torch.arange(leaf.numel(), dtype=DTYPE) + n).view(leaf.shape)
            total = total + (leaf.to(DTYPE) * weights).sum()
    return total


def same(what: str, actual: Any, wanted: Any, tolerance: float) -> None:
    """Compare nested tensors by relative error. A missing gradient counts as zeros."""
    if isinstance(actual, Tensor) and wanted is None:
        wanted = torch.zeros_like(actual)
    if isinstance(wanted, Tensor) and actual is None:
        actual = torch.zeros_like(wanted)
    (ours, spec), (theirs, wanted_spec) = tree_flatten(actual), tree_flatten(wanted)
    assert spec == wanted_spec, what
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, Tensor):
            assert a == b, what
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: {a.shape} {a.dtype}, not {b.shape} {b.dtype}"
        # A pipeline's output may require a gradient only because arguments of other ranks do.
        assert a.requires_grad >= b.requires_grad, f"{what}: requires_grad={a.requires_grad}"
        a, b = (x.detach().to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
        assert bool(((a - b).norm() <= tolerance * b.norm()).item()), f"{what}: {(a - b).norm() / b.norm():.1e} off"


def random(seed: int, *shape: int, grad: bool = False, dtype: torch.dtype = DTYPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)


def hidden(ctx: ParallelContext, rows: int, length: int = 3, grad: bool = True, seed: int = 0) -> Tensor:
    """This rank's own hidden states."""
    return random(1000 * seed + ctx.rank, rows, length, WIDTH, grad=grad)
