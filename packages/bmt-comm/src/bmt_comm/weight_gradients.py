"""Backward in two parts: first everything but the gradients of linear layers' weights, later those.

[Note: the two parts]
    The gradient of a layer's input is what the layer before waits for; that of its weight nobody waits for until the
    step. Zero-bubble pipeline schedules compute the first at once and fill idle time with the second (Qi et al.,
    arXiv:2401.10241)::

        with deferred_weight_gradients() as deferred:
            torch.autograd.backward(outputs, grads)
        ...                                              # other micro-batches
        deferred.run()

    Within the block, a layer's backward offers its weight gradient to :func:`defer_weight_gradient`. It is taken if
    the weight is a leaf, or enters the computation through a node that can wait (the attribute
    ``gradient_receiver``; bmt_zero's Blocks do). The gradient of a weight that was computed of others is needed for
    theirs, and is not put off. Everything else, modules that know nothing of this included, is done in the first part.

    What is kept until ``run`` are the tensors that the products need, without their history: the graph is freed.

[Note: threads]
    On CUDA, autograd runs backward in threads of its own. It hands them those thread-local values of the caller's
    which are kept by ``torch._C._stash_obj_in_tls``, also for a backward within the backward; so that is where the
    :class:`DeferredWeightGradients` to put things into is found, and no other thread's backward sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from . import _compat

_KEY = "bmt_comm.weight_gradients"


class GradientReceiver(Protocol):
    """What brings weights into a computation and can wait for their gradients.

    It is found as the attribute ``gradient_receiver`` of the autograd node whose outputs the weights are. When the
    node's own backward runs, it calls :meth:`DeferredWeightGradients.take`.
    """

    def accepts(self, output: int, tensors: Sequence[Tensor]) -> bool:
        """Whether the gradient of the node's ``output`` may come later, though ``tensors`` are kept for it."""
        ...


class WeightGradient:
    """A gradient that is yet to be computed."""

    def __init__(
        self,
        output: int,
        dtype: torch.dtype,
        compute: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        prepare: Callable[..., None] | None,
    ) -> None:
        self.output = output
        self.upcoming: WeightGradient | None = None  # the next that is to be prepared
        self._dtype = dtype
        self._compute = compute
        self._prepare = prepare
        self._tensors = [tensor.detach() for tensor in tensors]  # with its history, the graph would be kept
        self._versions = [_version(tensor) for tensor in tensors]

    @property
    def needs_preparation(self) -> bool:
        return self._prepare is not None

    def prepare(self) -> None:
        """Do once what there is to be done ahead."""
        prepare, self._prepare = self._prepare, None
        if prepare is not None:
            prepare(*self._tensors)

    def compute(self) -> Tensor:
        """The gradient, in the dtype of the weight. What was kept for it is let go."""
        tensors = self._tensors
        if [_version(tensor) for tensor in tensors] != self._versions:
            raise RuntimeError(
                "a tensor that a deferred weight gradient needs was written to in place since its backward; give the "
                "inputs and output gradients of each micro-batch memory of their own until run()"
            )
        self.prepare()
        upcoming, self.upcoming = self.upcoming, None
        if upcoming is not None:
            upcoming.prepare()
        self._tensors = []
        return self._compute(*tensors).to(self._dtype)


def total_gradients(gradients: Sequence[WeightGradient]) -> dict[int, Tensor]:
    """By output of the node, the sum of what its uses have to give."""
    totals: dict[int, Tensor] = {}
    for gradient in gradients:
        value = gradient.compute()
        found = totals.get(gradient.output)
        totals[gradient.output] = value if found is None else found.add_(value)
    return totals


class _Work:
    """Gradients that :meth:`DeferredWeightGradients.run` computes together, and where they go."""

    def __init__(
        self, leaf: Tensor | None = None, finish: Callable[[Mapping[int, Tensor]], None] | None = None
    ) -> None:
        self.leaf = leaf
        self.finish = finish
        self.gradients: list[WeightGradient] = []


class DeferredWeightGradients:
    """Weight gradients of one or more backward passes, to be computed by :meth:`run`; len() says how many.

    Several of these may be waiting at a time. One that is dropped takes its gradients with it; parameters, and Blocks
    that have them, are as if those had been None.
    """

    def __init__(self) -> None:
        self._works: list[_Work] = []
        self._leaves: dict[int, _Work] = {}
        self._taken: dict[GradientReceiver, list[WeightGradient]] = {}  # until the receiver's node comes for them

    def __len__(self) -> int:
        return sum(len(work.gradients) for work in self._works)

    def run(self) -> None:
        """Compute the gradients and accumulate them, as backward would have done: the second part.

        It is a backward pass itself, on the present CUDA stream, which must be the one that the first part ran on or
        wait for it. Ranks that reduce gradients together run theirs in the same order. Without anything to do, or the
        second time, it does nothing.

        Raises:
            RuntimeError: an input, or the gradient of an output, was changed in place meanwhile.
        """
        works, self._works, self._leaves = self._works, [], {}
        if not works:
            return
        gradients = [gradient for work in works for gradient in work.gradients]
        upcoming: WeightGradient | None = None
        for gradient in reversed(gradients):
            gradient.upcoming = upcoming
            if gradient.needs_preparation:
                upcoming = gradient
        with torch.enable_grad():
            device = gradients[0]._tensors[0].device if gradients else None
            token = torch.zeros((), device=device, requires_grad=True)
            while works:  # backward begins with the node that was made last
                work = works.pop()
                token = _Step.apply(token, work.leaf, work)
        torch.autograd.backward(token)

    def abandon(self) -> None:
        """Drop all gradients that were put off."""
        self._works, self._leaves, self._taken = [], {}, {}

    # --- for receivers ----------------------------------------------------------------------------

    def take(self, receiver: GradientReceiver) -> list[WeightGradient]:
        """What this backward has put off for ``receiver``, which sees to it from now on."""
        return self._taken.pop(receiver, [])

    def finish_later(self, gradients: Sequence[WeightGradient], finish: Callable[[Mapping[int, Tensor]], None]) -> None:
        """Let :meth:`run` compute ``gradients`` and call ``finish`` with :func:`total_gradients` of them."""
        work = _Work(finish=finish)
        work.gradients += gradients
        self._works.append(work)

    # --- for layers -------------------------------------------------------------------------------

    def _put_off(self, node: Any, gradient: WeightGradient, tensors: Sequence[Tensor]) -> bool:
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf: Tensor = node.variable
            # Hooks would see a gradient in two parts, and None for the first.
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks or not _executes(node):
                return False
            work = self._leaves.get(id(leaf))
            if work is None:
                work = self._leaves[id(leaf)] = _Work(leaf)
                self._works.append(work)
            work.gradients.append(gradient)
            return True
        receiver: GradientReceiver | None = getattr(node, "gradient_receiver", None)
        if receiver is None or not receiver.accepts(gradient.output, tensors):
            return False
        self._taken.setdefault(receiver, []).append(gradient)
        return True


class _Step(torch.autograd.Function):
    """One piece of work as a node of the chain along which :meth:`DeferredWeightGradients.run` goes.

    Autograd does the rest: it accumulates leaves' gradients, and tells bmt_zero when the pass is over.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, leaf: Tensor | None, work: _Work) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.work = work
        return torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor | None) -> tuple[None, Tensor | None, None]:
        work: _Work = ctx.work
        del ctx.work
        totals = total_gradients(work.gradients)
        if work.finish is not None:
            work.finish(totals)
            return None, None, None
        return None, totals.pop(0), None


@contextlib.contextmanager
def deferred_weight_gradients() -> Iterator[DeferredWeightGradients]:
    """Let the backward passes within the block leave weight gradients of linear layers to ``run()``.

    See [Note: the two parts]. All gradients are put off that can be, in this thread's backward passes and those which
    they start themselves; ``torch.autograd.grad`` is left as it is, and so are passes with ``create_graph=True``.
    Parameters with hooks of their own get their gradients in the first part. An exception abandons what was put off.

    bmt_zero's Blocks that have put something off reduce all gradients of the call in ``run()``, and with the settings
    (``no_sync``) of that moment. ``torch.nn.parallel.DistributedDataParallel`` cannot wait: do not use it with this.
    """
    deferred = DeferredWeightGradients()
    before = deferring()
    _compat.stash_in_thread(_KEY, deferred)
    try:
        yield deferred
    except BaseException:
        deferred.abandon()
        raise
    finally:
        _compat.stash_in_thread(_KEY, before)
        deferred._taken.clear()  # of passes that an exception has ended


def deferring() -> DeferredWeightGradients | None:
    """Where the backward pass that is running puts weight gradients off to; None: it does not.

    Nor does a backward that ``torch.compile`` has traced.
    """
    if torch.compiler.is_compiling():
        return None
    found: DeferredWeightGradients | None = _compat.stashed_in_thread(_KEY)
    return found


def defer_weight_gradient(
    ctx: Any,
    edge: int,
    compute: Callable[..., Tensor],
    *tensors: Tensor,
    prepare: Callable[..., None] | None = None,
) -> bool:
    """In the backward of an autograd function: put off the gradient of a weight, if that is wanted and possible.

    Where it returns True, backward returns None as the gradient; else it computes it, as always.

    Args:
        ctx: the function's context.
        edge: which of the tensors among the function's arguments the weight is, counted from 0; arguments that are no
            tensors do not count.
        compute: ``compute(*tensors)`` returns the gradient in memory of its own. It refers to no other tensors.
        tensors: what it needs; at least one.
        prepare: ``prepare(*tensors)`` is called once, before the gradient that comes before this one is computed: to
            begin with communication, say.
    """
    deferred = deferring()
    if deferred is None or torch.is_grad_enabled():
        return False
    node, output = ctx.next_functions[edge]
    if node is None:
        return False
    gradient = WeightGradient(output, node._input_metadata[output].dtype, compute, tensors, prepare)
    return deferred._put_off(node, gradient, tensors)


def _executes(node: Any) -> bool:
    """Whether the pass that is running accumulates the gradient of a leaf."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad returns it
        return False


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
