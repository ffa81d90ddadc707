"""The arguments of a call: all stages get those of each stage, in micro-batches, and send the gradients back.

Stages exchange the signatures of their arguments in the first call with arguments of a kind, and remember them.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import logging
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

from bmt_comm import ParallelContext, agreement_time
from bmt_comm.memory_ranges import as_in_memory
from bmt_comm.plain import check_in_memory

from .messages import Form, Forms, Message, StageFailedError, TensorForm, connected
from .schedule import Schedule

_log = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _OwnValue:
    """In place of an argument that cannot be sent. Every stage uses its own."""


class _NotCopied:
    """In place of another stage's argument until a micro-batch needs it."""


@dataclass(frozen=True)
class Leaf:
    """A tensor or another value among the arguments of a call.

    Attributes:
        value: a :class:`TensorForm`; or the value itself; or ``_OwnValue``.
        batched: whether its rows are those of the batch, and are divided into micro-batches.
        requires_grad: whether its gradient is wanted.
        on_host: whether it is in host memory.
    """

    value: Any
    batched: bool = False
    requires_grad: bool = False
    on_host: bool = True

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, TensorForm)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.value.shape, dtype=self.value.dtype, device="cpu" if self.on_host else device)


@dataclass(frozen=True)
class Signature:
    """The arguments of one stage's call, without the values of tensors.

    Attributes:
        tree: (hidden states, arguments, keyword arguments, arguments of the tail), with leaves of :class:`Leaf`.
        batch: rows of the hidden states.
        grad: whether gradients are recorded.
        trains: whether the stage's own layers have parameters to train.
        version: how often the stage's layers were replaced: others may return other types of values.
        options: what else all stages must agree on, by the names that messages use.
    """

    tree: Any
    batch: int
    grad: bool
    trains: bool
    version: int
    options: dict[str, Any]

    @functools.cached_property
    def leaves(self) -> list[Leaf]:
        return tree_leaves(self.tree)

    @functools.cached_property
    def hidden(self) -> range:
        """The indices of the leaves of hidden states."""
        return range(len(tree_leaves(self.tree[0])))

    @functools.cached_property
    def tail(self) -> range:
        """The indices of the leaves of the tail's arguments."""
        return range(len(self.leaves) - len(tree_leaves(self.tree[3])), len(self.leaves))

    @functools.cached_property
    def structure(self) -> TreeSpec:
        return tree_structure(self.tree)

    def agrees(self, other: Signature) -> bool:
        """Whether two stages may call the pipeline with these signatures."""
        return (self.structure, self.grad, self.options) == (other.structure, other.grad, other.options)

    def differences(self, other: Signature) -> str:
        """In what this one differs from one that it does not agree with, with its own values."""

        def named(each: Signature) -> dict[str, Any]:
            hidden, args, kwargs, tail_args = tree_map(lambda _: "*", each.tree)
            arguments = {"hidden states": hidden, "arguments": args, "keywords": kwargs, "tail_args": tail_args}
            return arguments | {"grad enabled": each.grad} | each.options

        theirs = named(other)
        return ", ".join(f"{name}={value}" for name, value in named(self).items() if repr(value) != repr(theirs[name]))


def sign(
    hidden: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tail_args: tuple[Any, ...],
    batch_related: Sequence[int | str] | None,
    *,
    device: torch.device,
    grad: bool,
    trains: bool,
    version: int,
    options: dict[str, Any],
) -> tuple[Signature, list[Any]]:
    """The signature of a call, and the values of its leaves.

    Args:
        batch_related: which arguments belong to samples of the batch: positions in what follows the first hidden
            state, and keywords. Empty: every tensor whose first dimension is as long as the batch. None: no argument.

    Raises:
        TypeError, ValueError: hidden states or ``batch_related`` cannot be served, or an object holds a tensor
            whose gradient would be lost.
    """
    positions = range(len(hidden) - 1 + len(args))
    if batch_related is not None:
        _check_names(batch_related, positions, kwargs)
    infers = batch_related is not None and not batch_related
    first = next((v for v in tree_leaves(hidden) if isinstance(v, Tensor)), None)
    if first is None or first.dim() == 0:
        raise ValueError("the first hidden state must be a tensor with the batch as its first dimension")
    batch = len(first)
    # Each argument, with its name in batch_related; None for hidden states and arguments of the tail.
    named: list[tuple[Any, Any]] = [*((None, value) for value in hidden), *zip(positions[len(hidden) - 1 :], args)]
    named += [*kwargs.items(), *((None, value) for value in tail_args)]
    values, spec = tree_flatten((hidden, args, kwargs, tail_args))
    names = [name for name, value in named for _ in tree_leaves(value)]
    num_hidden, num_tail = len(tree_leaves(hidden)), len(tree_leaves(tail_args))
    leaves = []
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if not isinstance(value, Tensor):
            leaves.append(Leaf(_sendable(value, grad)))
            continue
        is_hidden = index < num_hidden
        if value.layout is not torch.strided:
            raise ValueError(f"an argument has layout {value.layout}; only dense tensors go through a pipeline")
        has_rows = value.dim() > 0 and len(value) == batch
        batched = has_rows if name is None or infers else name in (batch_related or ())
        is_inferred = batched and name is not None and infers
        if is_inferred and first.dim() > 2 and tuple(value.shape[:2]) == tuple(first.shape[:2]) == (batch, batch):
            _warn_of_square(name, tuple(value.shape))
        if not has_rows and (is_hidden or batched):
            what = "a hidden state" if is_hidden else "an argument that batch_related names"
            raise ValueError(
                f"{what} has shape {tuple(value.shape)}; its first dimension must be the batch, {batch} as in the "
                f"first hidden state"
            )
        if value.device not in (device, torch.device("cpu")) or (is_hidden and value.device != device):
            raise ValueError(f"an argument of shape {tuple(value.shape)} is on {value.device}; move it to {device}")
        if grad and index >= len(values) - num_tail and value.requires_grad:
            raise ValueError("a tensor in tail_args requires a gradient, which it would not get; detach it")
        form = TensorForm(tuple(value.shape), value.dtype)
        leaves.append(Leaf(form, batched, grad and value.requires_grad, value.device.type == "cpu"))
    return Signature(tree_unflatten(leaves, spec), batch, grad, trains, version, options), values


@functools.cache
def _warn_of_square(name: int | str, shape: tuple[int, ...]) -> None:
    """Warn, once, if batch and sequences are of one length: a causal mask then looks like an argument of samples."""
    _log.warning(
        "argument %r of shape %s is divided with the batch of %d samples, whose sequences are as long; if that is "
        "wrong (a causal mask), name the arguments that are divided: batch_related=[...], or None",
        *(name, shape, shape[0]),
    )


def _check_names(batch_related: Any, positions: range, kwargs: dict[str, Any]) -> None:
    if isinstance(batch_related, str) or not isinstance(batch_related, Iterable):
        raise TypeError(f"batch_related={batch_related!r} must be a list of positions and keywords")
    for name in batch_related:
        if isinstance(name, bool) or not isinstance(name, (int, str)):
            raise TypeError(f"batch_related holds {name!r}; it names arguments by their position or keyword")
        if name not in positions and name not in kwargs:
            raise ValueError(
                f"batch_related names {name!r}; there are {len(positions)} arguments after the first hidden state, "
                f"and the keywords {sorted(kwargs)}"
            )


def _sendable(value: Any, grad: bool) -> Any:
    pickler = _NoticingPickler(io.BytesIO())
    try:
        pickler.dump(value)
    except Exception:  # an object's own code may raise anything
        return _OwnValue
    if grad and pickler.wants_gradient:
        raise ValueError(
            f"an argument of type {type(value).__name__} holds a tensor that requires a gradient, which it would not "
            f"get: other stages have copies; pass the tensor by itself, or in tuples, lists and dicts"
        )
    return value


class _NoticingPickler(pickle.Pickler):
    """Notes whether what it pickles holds tensors that require gradients."""

    wants_gradient = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.requires_grad:
            self.wants_gradient = True
        return NotImplemented


# --- agreeing on them -----------------------------------------------------------------------------


def exchange_signatures(
    context: ParallelContext,
    known: dict[bytes, list[Signature]],
    mine: Signature | None,
    problem: Exception | None,
) -> tuple[bytes, list[Signature]]:
    """Every stage's signature, and a key for calls like this one. A collective of the pipeline.

    Args:
        context: the ranks.
        known: the signatures of earlier calls, by their keys; this call's are added. It is the same on every rank of
            a pipeline.
        mine: this rank's signature.
        problem: why this rank has none.

    Raises:
        Exception: ``problem``; or what an object's own code raises when this rank loads it.
        TypeError: arguments are in containers that cannot be sent.
        StageFailedError: another rank has a problem.
        StageLostError: another rank cannot be reached.
        RuntimeError: stages disagree on what they call.
    """
    comm = context.pipe_host
    packed, digest = b"", bytes(32)
    if problem is None:
        try:
            packed = pickle.dumps(mine)
            digest = hashlib.sha256(packed).digest()
        except Exception as error:  # an object's own code may raise anything
            problem = TypeError(f"arguments are in containers that cannot be sent to other stages: {error}")
    with agreement_time(), connected():
        everyone = comm.stacked(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    if not everyone.any(1).all():
        raise_first(context, problem)
    key = everyone.numpy().tobytes()
    if key in known:
        return key, known[key]
    signatures: list[Signature] = []
    with agreement_time():
        with connected():
            packs = comm.all_gather_object(packed)
        try:
            signatures = [pickle.loads(data) for data in packs]  # from ranks of this job
            for stage, other in enumerate(signatures):
                if not other.agrees(signatures[0]):
                    first = signatures[0]
                    raise RuntimeError(
                        f"stages call the pipeline in different ways: stage 0 with {first.differences(other)}; stage "
                        f"{stage} with {other.differences(first)}"
                    )
        except Exception as error:  # on this rank only, perhaps: the others must learn of it
            problem = error
        raise_first(context, problem)
    if sum(map(len, packs)) <= _MOST_REMEMBERED:  # larger ones hold objects with tensors of this call
        remember(known, key, signatures)
    return key, signatures


def remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add to a dictionary of results of earlier calls, and forget the oldest."""
    known[key] = value
    while len(known) > _MOST_KNOWN:
        del known[next(iter(known))]


_MOST_KNOWN = 128
_MOST_REMEMBERED = 1 << 16  # bytes of the pickled arguments of one call, without tensors


def raise_first(context: ParallelContext, problem: BaseException | None) -> None:
    """Raise if any rank of the pipeline has a problem: this rank's own, or else that of the first stage that has one.

    A collective of the pipeline.
    """
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    of_other = isinstance(problem, StageFailedError)  # it reports another stage's problem
    with connected():
        texts = context.pipe_host.all_gather_object(None if of_other else text)
    for stage, text in enumerate(texts):
        if text is not None:
            if problem is not None and not of_other:
                raise problem
            raise StageFailedError(f"stage {stage} of the pipeline (rank {context.pipe.ranks[stage]}) failed: {text}")
    if problem is not None:
        raise problem


def on_any_stage(context: ParallelContext, flag: bool) -> bool:
    """Whether any stage of the pipeline has a true ``flag``. A collective of one byte."""
    result = torch.tensor([flag], dtype=torch.uint8, device="cpu")
    with connected():
        context.pipe_host.all_reduce(result, "max")
    return bool(result)


@dataclass
class Plan:
    """What is the same in every call with arguments of the same kind.

    Attributes:
        signatures: of each stage's arguments.
        schedule: the actions of all stages.
        differentiable: whether anything will be differentiated.
        return_hidden_states: whether the intermediate hidden states are wanted.
        layers: which layers of the list are at each place.
        forms: the forms of messages that are known.
        learned: whether all forms are known: a call has completed.
    """

    signatures: list[Signature]
    schedule: Schedule
    differentiable: bool
    return_hidden_states: bool
    layers: Sequence[range]
    forms: Forms = field(default_factory=Forms)
    learned: bool = False

    def __post_init__(self) -> None:
        """Add the forms of the hidden states that are passed in, and of the gradients that they want."""
        for i in range(self.schedule.micro_batches):
            signature, rows = self.signature(i), self.rows(i)

            def form(leaf: Leaf, count: int = rows.stop - rows.start) -> Any:
                return TensorForm((count, *leaf.value.shape[1:]), leaf.value.dtype) if leaf.is_tensor else leaf.value

            self.forms[Message("input", i, 0)] = Form.of(tree_map(form, signature.tree[0]))
            wanted = [form(signature.leaves[n]) for n in signature.hidden if signature.leaves[n].requires_grad]
            self.forms[Message("input_grad", i, 0)] = Form.of(wanted)

    def origin(self, micro_batch: int) -> int:
        """The stage that a micro-batch comes from."""
        return micro_batch % len(self.signatures)

    def signature(self, micro_batch: int) -> Signature:
        return self.signatures[self.origin(micro_batch)]

    def rows(self, micro_batch: int) -> slice:
        """The rows of a micro-batch in the batch of its origin."""
        index, count = micro_batch // len(self.signatures), self.schedule.micro_batches // len(self.signatures)
        size, longer = divmod(self.signature(micro_batch).batch, count)
        start = index * size + min(index, longer)
        return slice(start, start + size + (index < longer))

    def weight(self, micro_batch: int) -> float:
        """A micro-batch's share of its origin's batch."""
        rows = self.rows(micro_batch)
        return (rows.stop - rows.start) / max(self.signature(micro_batch).batch, 1)

    @property
    def input_grads(self) -> tuple[bool, ...]:
        """For each stage, whether it wants the gradient of its input."""
        return tuple(any(s.leaves[n].requires_grad for n in s.hidden) for s in self.signatures)


# --- moving them ----------------------------------------------------------------------------------


class _Swap(NamedTuple):
    """What a stage sends and receives: tensors and peers."""

    sends: list[tuple[Tensor, int]]
    recvs: list[tuple[Tensor, int]]


class Arguments:
    """The arguments of one call.

    Attributes:
        values: the leaves of each stage's arguments. At first only this rank's are there.
    """

    def __init__(self, context: ParallelContext, plan: Plan, values: list[Any]) -> None:
        self.context = context
        self.plan = plan
        self.stage = context.pipe.rank
        self.values: list[list[Any]] = [[] for _ in plan.signatures]
        self.values[self.stage] = values
        self._grads: dict[tuple[int, int], Tensor] = {}  # by origin and leaf

    @property
    def own(self) -> list[tuple[Leaf, Any]]:
        """The leaves of this rank's arguments, and their values."""
        return list(zip(self.plan.signatures[self.stage].leaves, self.values[self.stage], strict=True))

    def exchange(self) -> None:
        """Get every stage's arguments, other than hidden states, for its micro-batches. A collective."""
        if any(leaf.is_tensor for s in self.plan.signatures for leaf in s.leaves[len(s.hidden) :]):
            self._swap(self._make_room)
        else:
            self._make_room()

    def _make_room(self) -> _Swap:
        """What :meth:`exchange` sends and receives."""
        swap = _Swap([], [])
        last, everyone = self.plan.schedule.stage(self.plan.schedule.last), list(range(self.context.pipe.size))
        for origin, signature in enumerate(self.plan.signatures):
            for n, leaf in enumerate(signature.leaves):
                readers = [] if n in signature.hidden else [last] if n in signature.tail else everyone
                if origin == self.stage:
                    others = [stage for stage in readers if stage != origin]
                    if leaf.is_tensor and others:
                        data = as_in_memory(self.values[origin][n].detach())
                        check_in_memory("an argument", data)
                        swap.sends.extend((data, stage) for stage in others)
                    continue
                value: Any = None
                if self.stage in readers and leaf.is_tensor:
                    value = leaf.empty(self.context.device)
                    swap.recvs.append((value, origin))
                elif self.stage in readers:
                    value = self.values[self.stage][n] if leaf.value is _OwnValue else _NotCopied
                self.values[origin].append(value)
        return swap

    def of(
        self, micro_batch: int, leaves: dict[int, Tensor] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """A micro-batch's arguments and those of the tail. Those whose gradients are wanted are put into ``leaves``."""
        signature, rows = self.plan.signature(micro_batch), self.plan.rows(micro_batch)
        of_origin = self.values[self.plan.origin(micro_batch)]
        for n, leaf in enumerate(signature.leaves):
            if of_origin[n] is _NotCopied:
                # Layers may change it. Copied here, where all stages learn of it if an object's own code raises.
                of_origin[n] = copy.deepcopy(leaf.value)
        values = list(of_origin)
        for n, leaf in enumerate(signature.leaves):
            if n in signature.hidden or not leaf.is_tensor or values[n] is None:  # None: the tail runs elsewhere
                continue
            values[n] = values[n].detach()[rows] if leaf.batched else values[n].detach()
            if leaf.requires_grad and torch.is_grad_enabled() and leaves is not None:
                values[n] = leaves[n] = values[n].detach().requires_grad_()
        _, args, kwargs, tail_args = tree_unflatten(values, signature.structure)
        return args, kwargs, tail_args

    def add_grads(self, micro_batch: int, leaves: dict[int, Tensor]) -> None:
        """Add the gradients of what :meth:`of` has put into ``leaves``."""
        signature, origin = self.plan.signature(micro_batch), self.plan.origin(micro_batch)
        for n, leaf in leaves.items():
            if leaf.grad is None:
                continue
            if (origin, n) not in self._grads:
                self._grads[origin, n] = torch.zeros_like(signature.leaves[n].empty(self.context.device))
            grad = self._grads[origin, n]
            (grad[self.plan.rows(micro_batch)] if signature.leaves[n].batched else grad).add_(leaf.grad)

    def exchange_grads(self, hidden: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of this rank's leaves that want one. ``hidden``: those of hidden states, which come first.

        None for an argument of which no stage has computed a gradient: no layer has used it. A collective.
        """
        if not any(leaf.requires_grad for s in self.plan.signatures for leaf in s.leaves[len(s.hidden) :]):
            return hidden
        parts: list[list[Tensor]] = []  # for each of this rank's leaves, the gradient from each stage
        marks: list[Tensor] = []  # for each stage, which of these it has computed
        stages = range(self.context.pipe.size)
        grads, self._grads = self._grads, {}

        def make_room() -> _Swap:
            swap = _Swap([], [])
            for origin, signature in enumerate(self.plan.signatures):
                computed: list[bool] = []
                for n, leaf in enumerate(signature.leaves):
                    if n in signature.hidden or not leaf.requires_grad:
                        continue
                    grad = grads.pop((origin, n), None)
                    computed.append(grad is not None)
                    if grad is None:
                        grad = torch.zeros_like(leaf.empty(self.context.device))
                    if origin != self.stage:
                        swap.sends.append((grad, origin))
                        continue
                    parts.append([grad if stage == origin else torch.empty_like(grad) for stage in stages])
                    swap.recvs.extend((part, stage) for stage, part in enumerate(parts[-1]) if stage != origin)
                mark = torch.tensor(computed, dtype=torch.uint8, device="cpu")
                if origin != self.stage:
                    swap.sends.append((mark, origin))
                    continue
                marks.extend(mark if stage == origin else torch.empty_like(mark) for stage in stages)
                swap.recvs.extend((mark, stage) for stage, mark in enumerate(marks) if stage != origin)
            return swap

        self._swap(make_room)
        computed = torch.stack(marks).any(0).tolist()
        return [
            *hidden,
            *(torch.stack(some).sum(0) if any_is else None for some, any_is in zip(parts, computed, strict=True)),
        ]

    def _swap(self, make_room: Callable[[], _Swap]) -> None:
        """Send and receive tensors. Those in host memory are sent on a communicator of their own.

        Nothing is sent until all stages have allocated memory. If one raised alone, the others would wait for it.
        """
        swap, problem = _Swap([], []), None
        try:
            swap = make_room()
        except Exception as error:  # of any kind: the other stages must learn of it
            problem = error
        if on_any_stage(self.context, problem is not None):
            raise_first(self.context, problem)
        with connected():
            for on_host, comm in enumerate((self.context.pipe, self.context.pipe_host)):
                mine, theirs = (
                    [(tensor, peer) for tensor, peer in some if tensor.numel() and tensor.is_cpu == bool(on_host)]
                    for some in swap
                )
                comm.send_recv(mine, theirs)
