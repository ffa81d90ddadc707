"""What each stage calls the pipeline with: found out once for arguments of the same kind, then remembered."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from bmt_comm import ParallelContext, agreement_time

from .messages import StageFailedError, Structure, TensorForm, connected


class _OwnValue:
    """An argument that cannot be sent; every stage uses its own in its place."""


OWN_VALUE = _OwnValue


class Leaf(NamedTuple):
    """A tensor or another value among the arguments of a call.

    Attributes:
        value: a :class:`TensorForm`; or the value itself; or ``OWN_VALUE``.
        batched: whether its rows are those of the batch, and go with the micro-batches.
        requires_grad: whether its gradient is wanted.
        on_host: whether it lies in host memory, whatever the device.
    """

    value: Any
    batched: bool = False
    requires_grad: bool = False
    on_host: bool = True

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, TensorForm)


class Signature(NamedTuple):
    """The arguments of one stage's call, without the values of tensors.

    Attributes:
        structure: of (hidden states, arguments, keyword arguments, arguments of the tail).
        leaves: of these.
        num_hidden: how many of the leaves are of hidden states.
        num_tail: how many of the last leaves are arguments of the tail.
        batch: rows of the hidden states.
        grad: whether gradients are recorded.
        trains: whether the stage's own layers have something to train.
        options: what all stages must agree on.
    """

    structure: Structure
    leaves: tuple[Leaf, ...]
    num_hidden: int
    num_tail: int
    batch: int
    grad: bool
    trains: bool
    options: tuple[Any, ...]

    def tensors(self, hidden: bool) -> list[int]:
        """The indices of the leaves that are tensors: of hidden states, or of all other arguments."""
        some = range(self.num_hidden) if hidden else range(self.num_hidden, len(self.leaves))
        return [i for i in some if self.leaves[i].is_tensor]


def sign(
    hidden: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tail_args: tuple[Any, ...],
    batch_related: Sequence[int | str],
    *,
    device: torch.device,
    grad: bool,
    trains: bool,
    options: tuple[Any, ...],
) -> tuple[Signature, list[Any]]:
    """The signature of a call, and its leaves.

    Args:
        batch_related: which arguments belong to samples of the batch: positions in what follows the first hidden
            state, and keywords. Empty: every tensor whose first dimension is as long as the batch.

    Raises:
        TypeError, ValueError: hidden states or ``batch_related`` cannot be served, or an object holds a tensor
            whose gradient would be lost.
    """
    values, spec = tree_flatten((hidden, args, kwargs, tail_args))
    num_hidden, num_tail = len(tree_flatten(hidden)[0]), len(tree_flatten(tail_args)[0])
    first = next((v for v in values[:num_hidden] if isinstance(v, Tensor)), None)
    if first is None or first.dim() == 0:
        raise ValueError("the first hidden state must be a tensor with the batch as its first dimension")
    batch = len(first)
    marked = _marked(hidden, args, kwargs, tail_args, batch_related)
    leaves = []
    for index, value in enumerate(values):
        if not isinstance(value, Tensor):
            leaves.append(Leaf(_sendable(value, grad)))
            continue
        if value.layout is not torch.strided:
            raise ValueError(f"an argument has layout {value.layout}; only dense tensors go through a pipeline")
        has_rows = value.dim() > 0 and len(value) == batch
        mark = marked[index]
        batched = has_rows if mark is None else mark
        if not has_rows and (index < num_hidden or batched):
            what = "a hidden state" if index < num_hidden else "an argument that batch_related names"
            raise ValueError(
                f"{what} has shape {tuple(value.shape)}; its first dimension must be the batch, {batch} as in the "
                f"first hidden state"
            )
        if value.device not in (device, torch.device("cpu")) or (index < num_hidden and value.device != device):
            raise ValueError(f"an argument of shape {tuple(value.shape)} is on {value.device}; move it to {device}")
        if index >= len(values) - num_tail and value.requires_grad:
            raise ValueError("a tensor in tail_args requires a gradient, which it would not get; detach it")
        form = TensorForm(tuple(value.shape), value.dtype)
        wanted = grad and value.requires_grad
        leaves.append(Leaf(form, batched, wanted, value.device.type == "cpu"))
    return Signature(Structure(spec), tuple(leaves), num_hidden, num_tail, batch, grad, trains, options), values


def _marked(
    hidden: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tail_args: tuple[Any, ...],
    batch_related: Sequence[int | str],
) -> list[bool | None]:
    """For each leaf whether ``batch_related`` names its argument; None where its shape is to tell."""
    positions = range(len(hidden) - 1 + len(args))
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
    named = set(batch_related)

    def mark(value: Any, name: int | str | None) -> Any:
        leaves, spec = tree_flatten(value)
        return tree_unflatten([None if name is None or not named else name in named] * len(leaves), spec)

    marks = (
        mark(hidden, None),
        tuple(mark(value, len(hidden) - 1 + i) for i, value in enumerate(args)),
        {key: mark(value, key) for key, value in kwargs.items()},
        mark(tail_args, None),
    )
    return tree_flatten(marks)[0]


def _sendable(value: Any, grad: bool) -> Any:
    pickler = _NoticingPickler(io.BytesIO())
    try:
        pickler.dump(value)
    except Exception:  # whatever an object's own code may raise
        return OWN_VALUE
    if grad and pickler.wants_gradient:
        raise ValueError(
            f"an argument of type {type(value).__name__} holds a tensor that requires a gradient, which it would not "
            f"get: other stages have copies; pass the tensor by itself, or in tuples, lists and dicts"
        )
    return value


class _NoticingPickler(pickle.Pickler):
    """Notes whether there are tensors that require gradients."""

    wants_gradient = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.requires_grad:
            self.wants_gradient = True
        return NotImplemented


class SignatureCache:
    """The signatures that stages have told each other, by digest; the same ones on every rank of a pipeline."""

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._known: dict[bytes, Signature] = {}

    def exchange(
        self, context: ParallelContext, mine: Signature | None, problem: Exception | None
    ) -> tuple[bytes, list[Signature]]:
        """Every stage's signature, and a key for calls like this one. A collective of the pipeline.

        Raises:
            Exception: this rank's ``problem``, if it has one.
            TypeError: arguments are in containers that cannot be sent.
            StageFailedError: another rank has a problem.
            StageLostError: another rank cannot be reached.
            RuntimeError: stages disagree on what they call.
        """
        comm = context.pipe_host
        packed = b""
        if mine is not None:
            try:
                packed = pickle.dumps(mine)
            except Exception as error:  # whatever an object's own code may raise
                problem = TypeError(f"arguments are in containers that cannot be sent to other stages: {error}")
        digest = hashlib.sha256(packed).digest() if packed else bytes(32)
        everyone = torch.empty(comm.size, 32, dtype=torch.uint8)
        with agreement_time(), connected():
            comm.all_gather(everyone, torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        digests = [row.numpy().tobytes() for row in everyone]
        if bytes(32) in digests:
            raise_first(context, problem)
        if any(each not in self._known for each in digests):
            with agreement_time(), connected():
                found = comm.all_gather_object(packed)
            for each, data in zip(digests, found, strict=True):
                self._known[each] = pickle.loads(data)  # from a rank of this job
        signatures = [self._known[each] for each in digests]
        while len(self._known) > self._limit:
            del self._known[next(iter(self._known))]
        for stage, other in enumerate(signatures):
            same = [(s.num_hidden, s.structure, s.grad, s.options) for s in (signatures[0], other)]
            if same[0] != same[1]:
                raise RuntimeError(
                    f"stages call the pipeline in different ways: stage 0 with {same[0]}, stage {stage} with {same[1]}"
                )
        return b"".join(digests), signatures


def raise_first(context: ParallelContext, problem: BaseException | None) -> None:
    """Raise where any rank of the pipeline has a problem: its own, or else the first stage's that has one."""
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    quotes = isinstance(problem, StageFailedError)  # tells of another stage's problem, not of one of its own
    with connected():
        found = context.pipe_host.all_gather_object((text, quotes))
    for stage, (text, quotes) in enumerate(found):
        if text is not None and not quotes:
            if problem is not None and not isinstance(problem, StageFailedError):
                raise problem
            raise StageFailedError(f"stage {stage} of the pipeline (rank {context.pipe.ranks[stage]}) failed: {text}")
    if problem is not None:
        raise problem
