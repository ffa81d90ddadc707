"""Adam's two moments of the matrices of a batch: in fp32 or 8 bits, beside the weights or in host memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import bmt_kernels
from bmt_comm import Slice

from .batch import Batch
from .blockwise import block_count, dequantise, maxima_here, maxima_of, quantise, shares_blocks, span_of
from .state_layout import StateTensor

MOMENTS = (("exp_avg", "absmax_avg", True), ("exp_avg_sq", "absmax_avg_sq", False))
"""Of each moment the state tensor, that of its blocks' maxima where it is in 8 bits, and whether it has signs."""
_ZERO_CODES = {True: 127, False: 0}
_SETTLED = 1 << 30
"""A step at which bias corrections are 1."""
_PAGED = 100_000
"""The least elements of a state tensor that is worth keeping in host memory: what bitsandbytes pages."""


def moments_layout(dims: tuple[Any, ...], numel: int, options: Mapping[str, Any]) -> dict[str, StateTensor]:
    """The moments of gradients with ``dims`` (see :class:`StateTensor`) and, in all, ``numel`` elements."""
    if options["nbits"] != 8 or numel < options["min_8bit_size"]:
        return {key: StateTensor(dims) for key, _, _ in MOMENTS}
    found = {}
    for key, maxima, signed in MOMENTS:
        found[key] = StateTensor(dims, torch.uint8, _ZERO_CODES[signed])
        found[maxima] = maxima_of(found[key])
    return found


def host_state(tensor: StateTensor, shape: tuple[int, ...]) -> Tensor | None:
    """Page-locked memory for a moment of ``shape``, filled; ``None`` if it is too small."""
    numel = math.prod(shape)
    if numel < _PAGED:
        return None
    return bmt_kernels.pinned_zeros(numel, tensor.dtype).fill_(tensor.fill).view(shape)


class Moments:
    """The moments of a batch in one step.

    Args:
        batch: with ``betas``, ``eps`` and ``correct_bias`` among its options.
        parts: which part of its moments this rank holds of each matrix that has them in 8 bits.
        corrects_eps: whether eps is added to √v after its bias has been corrected, as in Adam, and not before.
    """

    def __init__(self, batch: Batch, parts: Mapping[int, Slice], corrects_eps: bool) -> None:
        self._states = batch.states
        self._device = batch.device
        self._parts = parts
        self._maxima: dict[int, Tensor] = {}
        options = batch.options
        step = batch.step if options["correct_bias"] else _SETTLED
        self._settings = {
            "betas": options["betas"],
            # The kernel adds it to √v / √(1-β₂ᵗ).
            "eps": options["eps"] / (1.0 if corrects_eps else math.sqrt(1 - options["betas"][1] ** step)),
            "weight_decay": 0.0,
            "step": step,
        }

    @property
    def shared(self) -> list[int]:
        """The matrices whose blocks' maxima ranks have to agree on before :meth:`step`."""
        return [i for i, part in self._parts.items() if shares_blocks(part)]

    def maxima_ahead(self, i: int, grad: Tensor) -> Tensor:
        """The maxima that a step by ``grad`` (fp32) will give: of all blocks, 0 where this rank has nothing.

        fp32, of shape (2, blocks). Nothing changes.
        """
        found = torch.zeros(2, block_count(self._parts[i].shape), device=self._device)
        span = span_of(self._parts[i])
        with self._near([i], store=False) as (state,):
            moments = self._dequantised(i, state)
            held = {**self._settings, "hold_steps": self._settings["step"]}
            bmt_kernels.adam_step([torch.zeros_like(grad)], [grad], moments[:1], moments[1:], lr=0.0, **held)
        for row, moment in zip(found, moments):
            row[span.first : span.last] = maxima_here(moment, self._parts[i])
        return found

    def agree(self, indices: Sequence[int], maxima: Sequence[Tensor]) -> None:
        """Take over the :meth:`maxima_ahead` of all ranks."""
        self._maxima = dict(zip(indices, maxima))

    def step(
        self,
        indices: Sequence[int],
        targets: Sequence[Tensor],
        grads: Sequence[Tensor],
        lr: float,
        grad_scale: float = 1.0,
        grad_factor: Tensor | None = None,
    ) -> None:
        """A step of Adam, without decay.

        Args:
            indices: which matrices.
            targets: what moves against the gradient, fp32. Written.
            grads: of the same shapes.
            lr: the rate.
            grad_scale, grad_factor: as in a :class:`Batch`; with a factor all moments must be in fp32.
        """
        scaled = {**self._settings, "lr": lr, "grad_scale": grad_scale}
        plain = [n for n, i in enumerate(indices) if i not in self._parts]
        fused = [n for n, i in enumerate(indices) if i in self._parts and self._is_fused(i)]
        rest = sorted(set(range(len(indices))) - {*plain, *fused})
        assert grad_factor is None or not (fused or rest)
        with self._near(indices) as states:
            for members, eight in ((plain, False), (fused, True)):
                if not members:
                    continue
                lists = [[targets[n] for n in members], [grads[n] for n in members]]
                keys = [key for key, _, _ in MOMENTS] + ([key for _, key, _ in MOMENTS] if eight else [])
                lists += [[states[n][key] for n in members] for key in keys]
                if eight:
                    offsets = [span_of(self._parts[indices[n]]).offset for n in members]
                    bmt_kernels.adam8bit_step(*lists, **scaled, block_offsets=offsets)
                else:
                    bmt_kernels.adam_step(*lists, **scaled, grad_factor=grad_factor)
            for n in rest:
                self._step_apart(indices[n], states[n], targets[n], grads[n], scaled)

    def _is_fused(self, i: int) -> bool:
        """Whether the kernel that reads and writes codes sees whole blocks."""
        return span_of(self._parts[i]).dim is None and not shares_blocks(self._parts[i])

    def _step_apart(
        self, i: int, state: Mapping[str, Tensor], target: Tensor, grad: Tensor, settings: Mapping[str, Any]
    ) -> None:
        part = self._parts[i]
        moments = self._dequantised(i, state)
        bmt_kernels.adam_step([target], [grad], moments[:1], moments[1:], **settings)
        span = span_of(part)
        for n, (key, maxima, signed) in enumerate(MOMENTS):
            whole = self._maxima.get(i)
            found = maxima_here(moments[n], part) if whole is None else whole[n, span.first : span.last]
            state[maxima].copy_(found)
            state[key].copy_(quantise(moments[n], found, part, signed))

    def _dequantised(self, i: int, state: Mapping[str, Tensor]) -> list[Tensor]:
        return [dequantise(state[key], state[maxima], self._parts[i], signed) for key, maxima, signed in MOMENTS]

    @contextlib.contextmanager
    def _near(self, indices: Sequence[int], store: bool = True) -> Iterator[list[dict[str, Tensor]]]:
        """The states beside the weights: those in host memory as copies, which go back afterwards.

        The copies are queued on the current stream, like the work, so each finds what the one before it left.
        """
        near: list[dict[str, Tensor]] = []
        for i in indices:
            state = self._states[i]
            keys = [key for key, _, _ in MOMENTS] + ([key for _, key, _ in MOMENTS] if i in self._parts else [])
            near.append({key: state[key].to(self._device, non_blocking=True) for key in keys})
        yield near
        for i, copies in zip(indices if store else (), near):
            for key, copied in copies.items():
                if copied is not self._states[i][key]:
                    self._states[i][key].copy_(copied, non_blocking=True)
