"""Comparing a Block with the plain module it was made of, on the whole batch in one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bmt_zero.parameter_group
from bmt_comm import Communicator, local_rows, select_rows, slice_of
from bmt_zero import Block, DistributedParameter
from bmt_zero.shard import group_of


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, Block]:
    """A plain module and a Block of an equal one."""
    torch.manual_seed(3)
    plain = make()
    return plain, Block(copy.deepcopy(plain), **options)


def rows_of(tensor: Tensor, param: Tensor) -> Tensor:
    return select_rows(tensor, slice_of(param))


def assert_same_gradients(model: nn.Module, plain: nn.Module, tolerance: float = 1e-5) -> None:
    """This rank's rows of every gradient equal those of the plain model, which was trained on all ranks' samples."""
    expected = dict(plain.named_parameters())
    params = dict(model.named_parameters())
    assert list(params) == list(expected)
    for name, param in params.items():
        grad = expected[name].grad
        if grad is None:
            assert param.grad is None, name
            continue
        assert param.grad is not None, name
        assert param.grad.shape == param.shape
        difference = (local_rows(param.grad) - rows_of(grad, param)).norm()
        assert difference <= tolerance * grad.norm().clamp_min(1e-3), f"{name}: {difference} of {grad.norm()}"


def assert_same_parameters(model: nn.Module, plain: nn.Module, tolerance: float = 1e-6) -> None:
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), rows_of(expected[name].detach(), param), atol=tolerance, rtol=1e-5)


def compare_updates(model: nn.Module, plain: nn.Module, start: Sequence[Tensor], tolerance: float = 1e-5) -> None:
    """This rank's rows have the same update as the plain model's, whose parameters were ``start``."""
    for (name, param), expected, before in zip(model.named_parameters(), plain.parameters(), start, strict=True):
        wanted = rows_of(expected.detach() - before, param)
        error = (param.to_local() - rows_of(before, param) - wanted).norm()
        assert error <= tolerance * (expected.detach() - before).norm(), f"{name}: {error} of {wanted.norm()}"


def total(loss: Tensor) -> float:
    """The sum over ranks of a loss."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item()


def space(block: Block) -> int:
    """Bytes of unsharded parameters that this rank holds for a Block, without memory that ranks share."""
    flats = [f for f in group_of(block).flats if not f.is_shard and not f.is_shared]
    return sum(f.unsharded.untyped_storage().nbytes() for f in flats)


@contextlib.contextmanager
def of_any_size(least: int = 0) -> Iterator[None]:
    """Within (or for a test that it decorates), gradients of small weights are computed where they are reduced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmt_zero.parameter_group, "LEAST_BYTES", least)
        patch.setattr(bmt_zero.parameter_group, "uses_compiler", lambda: False)  # by other tests
        yield


@contextlib.contextmanager
def own_memory() -> Iterator[None]:
    """Within (or for a test that it decorates), each rank unshards parameters in separate memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "shares_memory", False)
        yield


def write_data(model: nn.Module, plain: nn.Module, seed: int) -> None:
    """Change weights in both in a way that no version counter sees."""
    for index, (param, expected) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
        value = seeded(seed + index, *expected.shape) * 0.3
        expected.data.copy_(value)
        assert isinstance(param, DistributedParameter)
        param.data.copy_(rows_of(value, param))
