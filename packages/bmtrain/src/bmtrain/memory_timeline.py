"""Memory during a training step by owner, as numbers and as a picture."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import local_tensor
from bmt_zero.memory_owners import owned_storages

OWNERS = ("parameters", "gradients", "optimizer state", "unsharded parameters", "activations", "other")


@dataclass(frozen=True)
class MemorySample:
    """This rank's memory at one moment.

    Attributes:
        where: "forward NAME", "after NAME" or "backward NAME" of a module, or "start" or "end".
        bytes: by owner, one of ``OWNERS``. "other" is the rest that CUDA's allocator has allocated; 0 on CPU.
    """

    where: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass
class MemoryTimeline:
    """The samples of a step, in order."""

    samples: list[MemorySample] = field(default_factory=list)

    @property
    def peak(self) -> MemorySample:
        return max(self.samples, key=lambda sample: sample.total)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline into a file (PNG, SVG, PDF) as areas by owner.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("drawing memory needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot()
        heights = [[sample.bytes[owner] / 2**20 for sample in self.samples] for owner in OWNERS]
        axes.stackplot(range(len(self.samples)), heights, labels=OWNERS)
        axes.set(xlabel=f"sample; the peak is at: {self.peak.where}", ylabel="MiB", xlim=(0, len(self.samples) - 1))
        axes.legend(loc="upper left", fontsize="small")
        figure.savefig(os.fspath(path))


@contextlib.contextmanager
def memory_timeline(
    model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = ()
) -> Iterator[MemoryTimeline]:
    """Within, sample this rank's memory by owner before and after every module, and during backward.

    ::

        with bmt.memory_timeline(model, optimizer) as memory:
            ...  # a training step
        print(memory.peak)
        memory.draw("memory.svg")

    Activations are the tensors that autograd saves for backward. Other results, and gradients of activations, have no
    owner: on CUDA they are in "other".

    Args:
        model: the model whose modules and parameters are observed.
        optimizers: the optimizers whose states are observed.
    """
    chosen = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    sampler = _Sampler(model, chosen)
    hooks: list[Any] = []
    for name, module in model.named_modules():
        label = name or type(module).__name__
        hooks.append(module.register_forward_pre_hook(sampler.entering(label)))
        hooks.append(module.register_forward_hook(sampler.leaving(label), always_call=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(sampler.save, sampler.use):
            sampler.sample("start")
            yield sampler.timeline
            sampler.sample("end")
    finally:
        for hook in hooks:
            hook.remove()


class _Saved:
    """A tensor that autograd saves. Only autograd refers to this object."""

    def __init__(self, tensor: Tensor, where: str) -> None:
        self.tensor, self.where = tensor, where


class _Sampler:
    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.params = list(model.parameters())  # modules have other ones while they compute
        self.optimizers = optimizers
        self.timeline = MemoryTimeline()
        self._inside: list[str] = []
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def entering(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            self._inside.append(name)
            self.sample(f"forward {name}")

        return hook

    def leaving(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            self._inside.pop()
            self.sample(f"after {name}")

        return hook

    def save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self._inside[-1] if self._inside else "the rest")
        self._saved.add(saved)
        return saved

    def use(self, saved: _Saved) -> Tensor:
        where = f"backward {saved.where}"
        if self.timeline.samples[-1].where != where:
            self.sample(where)
        return saved.tensor

    def sample(self, where: str) -> None:
        counted: set[int] = set()
        sizes = dict.fromkeys(OWNERS, 0)

        def count(owner: str, storage: torch.UntypedStorage) -> None:
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                sizes[owner] += storage.nbytes()

        device = None
        for owner, storage in owned_storages(self.params):
            count(owner, storage)
            device = storage.device
        for optimizer in self.optimizers:
            for entry in optimizer.state.values():
                for value in entry.values():
                    if isinstance(value, Tensor):
                        count("optimizer state", local_tensor(value).untyped_storage())
        for saved in self._saved:
            count("activations", local_tensor(saved.tensor.detach()).untyped_storage())
        if device is not None and device.type == "cuda":
            sizes["other"] = max(0, torch.cuda.memory_allocated(device) - sum(sizes.values()))
        self.timeline.samples.append(MemorySample(where, sizes))
