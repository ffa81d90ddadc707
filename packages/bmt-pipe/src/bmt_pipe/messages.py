"""Messages between the stages of a pipeline: their names, their forms, and the errors of stages.

:mod:`.channels` sends and receives them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Message(NamedTuple):
    """The name of a message: its ``kind``, micro-batch, and place in the chain of chunks."""

    kind: str
    micro_batch: int
    place: int


class StageLostError(RuntimeError):
    """Another stage cannot be reached any more, or takes part in something else."""


class StageFailedError(RuntimeError):
    """Another stage has raised an exception."""


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Around collectives of a pipeline: raise :class:`StageLostError` if one fails."""
    try:
        yield
    except RuntimeError as error:
        raise StageLostError(
            f"the connection to another stage is lost, or that stage is doing something else: {error}"
        ) from error


@dataclass(frozen=True)
class TensorForm:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Form:
    """Nested containers with a :class:`TensorForm` in place of each tensor. Other leaves are kept."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @staticmethod
    def of(tree: Any) -> Form:
        return take_apart(tree)[0]

    @property
    def tree(self) -> Any:
        return tree_unflatten(self.leaves, self.spec)

    @property
    def tensors(self) -> list[TensorForm]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def fill(self, tensors: Iterable[Tensor]) -> Any:
        """The containers with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return Form.of, (self.tree,)  # specs cannot be pickled


def take_apart(tree: Any) -> tuple[Form, list[Tensor]]:
    """The form and the tensors of nested containers."""
    leaves, spec = tree_flatten(tree)
    forms = tuple(TensorForm(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    return Form(forms, spec), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def gets_gradient(x: Tensor | TensorForm) -> bool:
    """Whether its dtype is differentiable: floating-point or complex."""
    return x.dtype.is_floating_point or x.dtype.is_complex


class Forms(dict[Message, Form]):
    """The form of each message. A gradient's message is a list: the gradients of the tensors that get one."""

    def __missing__(self, message: Message) -> Form:
        if not message.kind.endswith("_grad"):
            raise KeyError(message)
        forms = self[message._replace(kind=message.kind.removesuffix("_grad"))].tensors
        self[message] = Form.of([form for form in forms if gets_gradient(form)])
        return self[message]
