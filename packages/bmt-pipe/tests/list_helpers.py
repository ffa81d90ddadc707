"""Layers for pipelines, and the values that they have in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmt_zero import DistributedParameter, is_stage_local


class Layer(nn.Module):
    """Of uneven sizes; has a tied parameter, a frozen one, one of another dtype, and buffers."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width, bias=False)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.randn(()), requires_grad=False)
        self.low = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("steps", torch.randint(100, ()))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale) + self.low.float().sum()


def plain_layers(count: int, make: Callable[[], nn.Module] = Layer, seed: int = 1) -> nn.ModuleList:
    """The layers that one process makes."""
    torch.manual_seed(seed)
    return nn.ModuleList(make() for _ in range(count))


def assert_same_entries(actual: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """The same names in the same order, with the same tensors, bit by bit."""
    assert list(actual) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            assert actual[name].dtype == value.dtype, name
            assert actual[name].shape == value.shape, name
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name


def assert_own_values(layers: nn.Module, plain: nn.Module) -> None:
    """The parameters of this stage's layers are those of the plain layers of the same names."""
    wanted = dict(plain.named_parameters())
    for name, param in layers.named_parameters():
        assert isinstance(param, DistributedParameter)
        assert is_stage_local(param)
        assert param.requires_grad == wanted[name].requires_grad
        assert torch.equal(param.gather_all(), wanted[name]), name


class Held(TorchDispatchMode):
    """The largest number of bytes of storages that were made within, after any operation, without the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {key: held for key, held in self.storages.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return out
