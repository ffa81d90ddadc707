"""The tail of a pipeline: what follows the layers (a head and a loss), computed inside the schedule.

[Note: the tail's parameters]
    Parameters outside the list of layers are sharded over all ranks, and all ranks must take part in their all-gather.
    But only the last stage runs the tail, and other ranks do not know when. So the parameters of the tail's modules are
    unsharded before the schedule begins, and their gradients are reduced after it, in the caller's backward pass. These
    modules are the one that the tail is, or is a method of, and ``tail_modules``. Other sharded parameters raise an
    error when the tail uses them. Plain parameters are the leaves that autograd finds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from bmt_comm import ParallelContext, expected_scale, without_autocast
from bmt_zero import Block, ShardedParameter
from bmt_zero.backward_context import step_context
from bmt_zero.parameter_group import parameters_in_forward, replaced_parameters
from bmt_zero.shard import groups_of

from .chunk import next_node
from .messages import connected, gets_gradient, take_apart
from .split_backward import graph_of


class Tail:
    """The tail of one call.

    Args:
        function: computes the loss of a micro-batch, 0-dim, from the hidden states and further arguments.
        modules: further modules whose sharded parameters it uses, besides the module that it is, or is a method of.
        context: the ranks.
        factor: the predicted gradient of the loss (0-dim, fp64), relative to the loss scale. :meth:`note` overwrites it
            with the actual one.
        grad: whether to differentiate.

    Attributes:
        shapes: of its sharded parameters.
        scale: the predicted gradient of the loss. All gradients are computed for it.
        losses: of each micro-batch, times its share of the batch.
        grads: of sharded parameters that require them; None for those that were not used.
        plain: the plain parameters that were used, and their gradients. Only allowed with one rank.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        modules: Sequence[nn.Module],
        context: ParallelContext,
        factor: Tensor,
        grad: bool,
    ) -> None:
        self.function = function
        self.context = context
        self.grad = grad
        self._last_factor, self._factor, self._loss_scale = factor, factor.clone(), expected_scale()
        self.scale = self._factor * self._loss_scale
        self.losses: dict[int, Tensor] = {}
        self._sharded = _sharded_parameters(function, modules, context)
        self.shapes = [param.bmt_slice.shape for param in self._sharded]
        self.grads: dict[ShardedParameter, Tensor | None]
        self.grads = {param: None for param in self._sharded if grad and param.requires_grad}
        self.plain: dict[Tensor, Tensor] = {}
        self._leaves: dict[ShardedParameter, Tensor] = {}

    @property
    def may_train(self) -> bool:
        """Whether it may have parameters that require gradients."""
        return bool(self.grads) or (self.grad and self.context.world_size == 1)

    def prepare(self, runs: bool) -> None:
        """Unshard the parameters. All ranks must call it. ``runs``: this rank runs the tail, and keeps them."""
        for param in self._sharded:
            param.handle.begin_unsharding_one()
            value = param.handle.flat.unshard_one(param.handle.index)
            if runs:
                self._leaves[param] = value.detach().requires_grad_(param in self.grads)

    def release(self) -> None:
        """Release the unsharded parameters."""
        self._leaves.clear()

    def run(self, micro_batch: int, weight: float, hidden: tuple[Any, ...], args: tuple[Any, ...]) -> list[Tensor]:
        """Compute the loss of a micro-batch, and its gradients. ``weight`` is its share of the batch.

        Returns the gradients of the tensors in ``hidden`` that get one.

        Raises:
            TypeError, ValueError: the function does not return a loss, or uses parameters whose gradients would not be
                reduced.
        """
        inputs = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(self.grad and gets_gradient(x)), hidden)
        wanted = [x for x in take_apart(inputs)[1] if x.requires_grad]
        first = next_node() if self.grad else 0
        torch.clear_autocast_cache()  # weights that an earlier micro-batch has cast
        with self._own_parameters_only(), torch.set_grad_enabled(self.grad):
            loss = self.function(*inputs, *args)
            if not isinstance(loss, Tensor):
                raise TypeError(f"the tail returned a {type(loss).__name__}; it must return the loss, a tensor")
            if loss.dim() or not loss.is_floating_point():
                raise ValueError(f"the tail returned {loss.dtype} of shape {tuple(loss.shape)}; a loss is one number")
            self.losses[micro_batch] = loss.detach() * weight
            if not loss.requires_grad:
                return [torch.zeros_like(x) for x in wanted]
            params = [self._leaves[param] for param in self.grads]
            plain = self._plain_leaves(loss, [*wanted, *params], first)
            seed = (self.scale * weight).to(loss.dtype)
            with without_autocast():
                grads = torch.autograd.grad(loss, [*wanted, *params, *plain], seed, allow_unused=True)
        for param, grad in zip((*self.grads, *plain), grads[len(wanted) :], strict=True):
            if grad is not None:
                sums: dict[Any, Any] = self.grads if param in self.grads else self.plain
                before = sums.get(param)
                sums[param] = grad if before is None else before + grad  # not in place: the tensor may be shared
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads)]

    def _plain_leaves(self, loss: Tensor, known: list[Tensor], first: int) -> list[Tensor]:
        """The leaves of the tail's graph that are not ``known``. ``first`` is the number of its first node."""
        nodes: list[Any] = list(graph_of([get_gradient_edge(loss).node]))
        earlier = [node.name() for node in nodes if node._sequence_nr() < first]
        if "EnterBackward" in earlier:
            raise ValueError(
                "the tail uses parameters of a sharded module that is neither the tail, nor the module whose method it "
                "is: name the module in tail_modules"
            )
        if earlier:
            raise ValueError(
                "the tail refers to a tensor that was computed outside of it and requires a gradient, which it would "
                "not get: compute it in the tail, or detach it"
            )
        leaves = [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]
        identities = set(map(id, known))
        plain = [leaf for leaf in leaves if id(leaf) not in identities]
        if plain and self.context.world_size > 1:
            raise ValueError(
                f"the tail uses a plain parameter of shape {tuple(plain[0].shape)}, whose gradient nobody reduces; "
                f"make it a DistributedParameter, or pass the model through BMTrainModelWrapper"
            )
        return plain

    @contextlib.contextmanager
    def _own_parameters_only(self) -> Iterator[None]:
        """Within, modules use the parameters that :meth:`prepare` unsharded. Unsharding others raises an error."""
        step = step_context(self.context)
        step.forbidden = (
            "in the tail of a pipeline, which only the last stage runs: pass the module that owns it as the tail, or "
            "in tail_modules, and keep it outside of Blocks"
        )
        try:
            with replaced_parameters(self._leaves):
                yield
        finally:
            step.forbidden = None

    def agree_on_use(self, stage: int) -> None:
        """Give all ranks zero gradients of what ``stage`` has used on any rank. A collective of all ranks."""
        used = torch.tensor([grad is not None for grad in self.grads.values()], dtype=torch.uint8, device="cpu")
        if self.context.world_size == 1 or len(used) == 0:
            return
        with connected():
            self.context.pipe_host.broadcast(used, stage)
        self.context.zero_host.all_reduce(used, "max")
        for param, flag in zip(list(self.grads), used.tolist(), strict=True):
            if flag and self.grads[param] is None:
                dtype = param.handle.flat.dtype
                self.grads[param] = torch.zeros(param.bmt_slice.tp_shard_shape, dtype=dtype, device=self.context.device)

    def note(self, grad: Tensor) -> None:
        """Remember the gradient that the loss got, relative to the loss scale, as the prediction for the next call.

        0, inf and NaN are ignored: gradients computed for them could not be rescaled.
        """
        factor = grad / self._loss_scale
        self._last_factor.copy_(torch.where(factor.isfinite() & (factor != 0), factor, self._factor))

    def reduce(self, factor: Tensor) -> None:
        """Reduce the gradients of sharded parameters, times ``factor``, in the running backward pass."""
        for param, grad in self.grads.items():
            if grad is not None:
                param.handle.reduce(grad * factor)
        self.grads = {}


def _sharded_parameters(
    function: Callable[..., Any], modules: Sequence[nn.Module], context: ParallelContext
) -> list[ShardedParameter]:
    """The sharded parameters, outside Blocks, of ``modules`` and of the module that the tail is, or is a method of."""
    owner = getattr(function, "__self__", function)
    sharded: dict[ShardedParameter, None] = {}
    for module in [owner, *modules] if isinstance(owner, nn.Module) else modules:
        blocks = [m for m in module.modules() if isinstance(m, Block)]
        inside = {id(param) for block in blocks for group in groups_of(block) for param in group.params}
        params = parameters_in_forward(module, step_context(context))
        sharded.update((p, None) for p in params if isinstance(p, ShardedParameter) and id(p) not in inside)
    return list(sharded)
