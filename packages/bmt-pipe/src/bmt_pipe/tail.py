"""The tail of a pipeline: what follows the layers (a head and a loss), computed inside of the schedule.

[Note: the tail's parameters]
    Parameters outside of the list are spread over all ranks, and gathering one takes all of them, but only the last
    stage runs the tail, at times of its own. So they are gathered before the schedule begins, and their gradients
    are reduced after it, in the backward pass of whoever called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bmt_comm import ParallelContext
from bmt_zero import Block, ShardedParameter
from bmt_zero.backward_context import step_context
from bmt_zero.parameter_group import GroupHandle, parameters_in_forward, replaced_parameters
from bmt_zero.shard import group_of

from .messages import connected


class Tail:
    """The tail of one call.

    Args:
        function: computes the loss of a micro-batch, 0-dim, from the hidden states and further arguments.
        context: the ranks.
        factor: the gradient of the loss that is expected (0-dim, fp64), relative to ``loss_scale``.
        loss_scale: by which the loss will be multiplied.
        grad: whether to differentiate.

    Attributes:
        scale: the gradient of the loss that is expected; all gradients are computed for it.
        losses: of each micro-batch, times its share of the batch.
        params: bmt_zero's whose gradients are computed.
        plain: others; there are some where there is one rank.
        grads: of ``params`` and ``plain``, on the last stage; None for those that were not used.

    Raises:
        ValueError: the tail has parameters whose gradients nobody would reduce.
    """

    def __init__(
        self, function: Callable[..., Tensor], context: ParallelContext, factor: Tensor, loss_scale: float, grad: bool
    ) -> None:
        self.function = function
        self.context = context
        self.factor, self.loss_scale = factor, loss_scale
        self.scale = factor * loss_scale
        self.grad = grad
        self.losses: dict[int, Tensor] = {}
        self._sharded, plain = _parameters_of(function, context)
        trainable = [param for param in plain if param.requires_grad]
        if trainable and context.world_size > 1 and grad:
            raise ValueError(
                f"the tail has a plain parameter of shape {tuple(trainable[0].shape)}, whose gradient nobody reduces; "
                f"make it a DistributedParameter, or pass the model through BMTrainModelWrapper"
            )
        self.params = [p for p in self._sharded if p.requires_grad] if grad else []
        self.plain = trainable if grad else []
        self.grads: list[Tensor | None] = [None] * (len(self.params) + len(self.plain))
        self._leaves: dict[ShardedParameter, Tensor] = {}

    def prepare(self, runs: bool) -> None:
        """Gather the parameters, on all ranks; ``runs``: this rank keeps them."""
        for param in self._sharded:
            handle: GroupHandle = param.handle
            handle.begin_unsharding_one()
            value = handle.flat.unshard_one(handle.index)
            if runs:
                self._leaves[param] = value.detach().requires_grad_(self.grad and param.requires_grad)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Give up the gathered parameters after it."""
        try:
            yield
        finally:
            self._leaves.clear()

    def run(self, micro_batch: int, weight: float, hidden: tuple[Any, ...], args: tuple[Any, ...]) -> list[Tensor]:
        """The loss of a micro-batch, whose share of the batch is ``weight``, and its gradients at once.

        Returns the gradients of the floating-point tensors in ``hidden``.

        Raises:
            TypeError, ValueError: the function does not return a loss.
        """
        leaves, spec = tree_flatten(hidden)
        inputs = [
            x.detach().requires_grad_(self.grad and x.is_floating_point()) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        with self._stand_ins(), torch.set_grad_enabled(self.grad):
            loss = self.function(*tree_unflatten(inputs, spec), *args)
            if not isinstance(loss, Tensor):
                raise TypeError(f"the tail returned a {type(loss).__name__}; it must return the loss, a tensor")
            if loss.dim() or not loss.is_floating_point():
                raise ValueError(f"the tail returned {loss.dtype} of shape {tuple(loss.shape)}; a loss is one number")
        self.losses[micro_batch] = loss.detach() * weight
        if not self.grad:
            return []
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * (len(wanted) + len(self.grads))
        if loss.requires_grad:
            params = [*(self._leaves[p] for p in self.params), *self.plain]
            seed = (self.scale * weight).to(loss.dtype)
            found = torch.autograd.grad(loss, [*wanted, *params], seed, allow_unused=True)
        for n, grad in enumerate(found[len(wanted) :]):
            if grad is not None:
                before = self.grads[n]
                self.grads[n] = grad if before is None else before.add_(grad)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found)]

    @contextlib.contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Within, modules read what :meth:`prepare` has gathered, and gather nothing."""
        step = step_context(self.context)
        step.forbidden = (
            "in the tail of a pipeline, which only the last stage runs: pass the module that owns it as the tail, or a "
            "function that refers to it, and keep it outside of Blocks"
        )
        try:
            with replaced_parameters(self._leaves):
                yield
        finally:
            step.forbidden = None

    def agree_on_use(self, stage: int) -> None:
        """Let all stages have gradients of what ``stage`` has used: zeros. A collective of the pipeline."""
        comm = self.context.pipe_host
        used = torch.tensor([grad is not None for grad in self.grads[: len(self.params)]], dtype=torch.uint8)
        if comm.size == 1 or len(used) == 0:
            return
        with connected():
            comm.broadcast(used, stage)
        for n, (param, flag) in enumerate(zip(self.params, used.tolist(), strict=True)):
            if flag and self.grads[n] is None:
                dtype = param.handle.flat.unsharded.dtype
                self.grads[n] = torch.zeros(param.bmt_slice.tp_shard_shape, dtype=dtype, device=self.context.device)


def _parameters_of(
    function: Callable[..., Any], context: ParallelContext
) -> tuple[list[ShardedParameter], list[nn.Parameter]]:
    """The parameters outside of Blocks that a function can reach through modules it refers to."""
    found: dict[nn.Parameter, None] = {}
    for module in _modules_of(function):
        inside = {id(p) for m in module.modules() if isinstance(m, Block) for p in group_of(m).params}
        params = parameters_in_forward(module, step_context(context))
        found.update((p, None) for p in params if id(p) not in inside)
    for value in _references(function):
        if isinstance(value, nn.Parameter):
            found[value] = None
    sharded = [p for p in found if isinstance(p, ShardedParameter)]
    return sharded, [p for p in found if not isinstance(p, ShardedParameter)]


def _modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    return [value for value in _references(function) if isinstance(value, nn.Module)]


def _references(function: Any, depth: int = 3) -> list[Any]:
    """A function (or module), and what it refers to."""
    found = [function]
    if depth == 0 or isinstance(function, nn.Module):
        return found
    values: list[Any] = []
    if isinstance(function, functools.partial):
        values = [function.func, *function.args, *function.keywords.values()]
    elif inspect.ismethod(function):
        values = [function.__self__, function.__func__]
    elif inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        values = [*variables.nonlocals.values(), *variables.globals.values(), *(function.__defaults__ or ())]
    for value in values:
        if isinstance(value, (nn.Module, nn.Parameter)):
            found.append(value)
        elif callable(value) and not inspect.isclass(value):
            found += _references(value, depth - 1)
    return found
