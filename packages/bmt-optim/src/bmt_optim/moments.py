"""Adam's two moments of the matrices of a batch: in fp32 or 8 bits, beside the weights or in host memory."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import bmt_kernels
from bmt_comm import Slice

from .batch import Batch
from .block_edges import SharedBlocks
from .blockwise import dequantise, finite_maximum, maxima_here, maxima_of, quantise, shares_blocks, span_of
from .requests import Rule
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
        batch: with ``betas`` and ``eps`` among its options, and ``correct_bias`` unless it is True.
        parts: which part of its moments this rank holds of each matrix that has them in 8 bits.
        corrects_eps: whether eps is added to √v after its bias has been corrected, as in Adam, and not before.
    """

    def __init__(self, batch: Batch, parts: Mapping[int, Slice], corrects_eps: bool) -> None:
        self._states = batch.states
        self._device = batch.device
        self._parts = parts
        cut = {i: part for i, part in parts.items() if shares_blocks(part)}
        if "shared blocks" not in batch.kept or batch.kept["shared blocks"].parts != cut:
            batch.kept["shared blocks"] = SharedBlocks(cut, batch.matrices, batch.device)
        self.shared: SharedBlocks = batch.kept["shared blocks"]
        self._maxima: Tensor | None = None
        self._edges: list[Tensor] = []
        """The new moments of the edges, and then their codes: (edges, 256)."""
        options = batch.options
        step = batch.step if options.get("correct_bias", True) else _SETTLED
        self._settings = {
            "betas": options["betas"],
            # The kernel adds it to √v / √(1-β₂ᵗ).
            "eps": options["eps"] / (1.0 if corrects_eps else math.sqrt(1 - options["betas"][1] ** step)),
            "weight_decay": 0.0,
            "step": step,
        }

    def maxima_ahead(
        self, grad: Callable[[int], Tensor], grad_scale: float = 1.0, grad_factor: Tensor | None = None
    ) -> Tensor:
        """The maxima that :meth:`step` will give to the ``shared`` blocks; 0 where this rank has nothing.

        No state changes.

        Args:
            grad: gives the gradient of a matrix, as for :meth:`step`.
            grad_scale, grad_factor: as for :meth:`step`.
        """
        shared = self.shared
        found = shared.zeros()

        def advance(moments: Sequence[Tensor], grads: Tensor) -> None:
            settings = {**self._settings, "lr": 0.0, "hold_steps": self._settings["step"], "grad_scale": grad_scale}
            lists = [[torch.zeros_like(grads, dtype=torch.float32)], [grads], *([moment] for moment in moments)]
            bmt_kernels.adam_step(*lists, **settings, grad_factor=grad_factor)

        if shared.edges:
            self._edges = []
            for key, maxima, signed in MOMENTS:
                codes = shared.rows(functools.partial(self._state, key), torch.uint8)
                largest = shared.maxima(functools.partial(self._state, maxima)).to(self._device)
                self._edges.append(bmt_kernels.dequantize_blockwise(codes, largest, signed=signed))
            advance(self._edges, shared.rows(grad, torch.float32))
            magnitudes = [torch.where(shared.held, moment.abs(), 0) for moment in self._edges]
            found[shared.places] = torch.stack([finite_maximum(rows) for rows in magnitudes])
        for i, part in shared.parts.items():
            if i in shared.edges:
                continue
            with self._near([i], store=False) as (state,):
                moments = self._dequantised(i, state)
                advance(moments, grad(i))
                span = span_of(part)
                for row, moment in zip(shared.of(found, i), moments):
                    row[span.first : span.last] = maxima_here(moment, part)
        return found

    def agree(self, maxima: Tensor) -> None:
        """Take over the :meth:`maxima_ahead` of all ranks."""
        self._maxima = maxima
        if self.shared.edges:
            self._largest = maxima[self.shared.places]
            for n, (_, _, signed) in enumerate(MOMENTS):
                # So the kernel finds the maximum of the whole block.
                rows = torch.where(self.shared.held, self._edges[n], self._largest[n, :, None])
                self._edges[n], _ = bmt_kernels.quantize_blockwise(rows, signed=signed)

    def step(
        self,
        indices: Sequence[int],
        targets: Sequence[Tensor],
        grads: Sequence[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        masters: Sequence[Tensor | None] | None = None,
        grad_scale: float = 1.0,
        grad_factor: Tensor | None = None,
    ) -> None:
        """A step of Adam with decoupled decay, which comes first.

        Args:
            indices: which matrices.
            targets: what moves against the gradient; fp32 unless it has a master. Written.
            grads: of the same shapes.
            lr, weight_decay: as in AdamW.
            masters: fp32 copies of targets in half precision, as :meth:`Batch.for_kernels` gives them.
            grad_scale, grad_factor: as in a :class:`Batch`; with a factor all moments must be in fp32.
        """
        scaled = {**self._settings, "lr": lr, "weight_decay": weight_decay, "grad_scale": grad_scale}
        plain = [n for n, i in enumerate(indices) if i not in self._parts]
        fused = [n for n, i in enumerate(indices) if i in self._parts and span_of(self._parts[i]).dim is None]
        rest = sorted(set(range(len(indices))) - {*plain, *fused})
        assert grad_factor is None or not (fused or rest)

        def chosen(members: Sequence[int]) -> tuple[list[list[Tensor]], list[Tensor | None] | None]:
            found = None if masters is None else [masters[n] for n in members]
            return [[targets[n] for n in members], [grads[n] for n in members]], found

        with self._near(indices) as states:
            for members, eight in ((plain, False), (fused, True)):
                if not members:
                    continue
                lists, copied = chosen(members)
                keys = [key for key, _, _ in MOMENTS] + ([key for _, key, _ in MOMENTS] if eight else [])
                lists += [[states[n][key] for n in members] for key in keys]
                if eight:
                    offsets = [span_of(self._parts[indices[n]]).offset for n in members]
                    bmt_kernels.adam8bit_step(*lists, **scaled, masters=copied, block_offsets=offsets)
                else:
                    bmt_kernels.adam_step(*lists, **scaled, masters=copied, grad_factor=grad_factor)
            self._correct_edges({indices[n]: states[n] for n in fused})
            for n in rest:
                lists, copied = chosen([n])
                moments = self._dequantised(indices[n], states[n])
                bmt_kernels.adam_step(*lists, *([moment] for moment in moments), **scaled, masters=copied)
                self._store(indices[n], states[n], moments)

    def _correct_edges(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Put the codes by the maxima of all ranks in the place of those that the kernel made by this rank's."""
        for n, (key, maxima, _) in enumerate(MOMENTS if self._maxima is not None else ()):
            for i in states.keys() & self.shared.edges.keys():
                for edge, number in zip(self.shared.edges[i], self.shared.numbers[i]):
                    codes = self._edges[n][number, edge.offset : edge.offset + edge.stop - edge.start]
                    states[i][key].view(-1)[edge.start : edge.stop].copy_(codes)
                    states[i][maxima][edge.block].copy_(self._largest[n, number])

    def _store(self, i: int, state: Mapping[str, Tensor], moments: Sequence[Tensor]) -> None:
        part = self._parts[i]
        span = span_of(part)
        for n, (key, maxima, signed) in enumerate(MOMENTS):
            if self._maxima is not None and i in self.shared.parts:
                found = self.shared.of(self._maxima, i)[n, span.first : span.last]
            else:
                found = maxima_here(moments[n], part)
            state[maxima].copy_(found)
            state[key].copy_(quantise(moments[n], found, part, signed))

    def _state(self, key: str, i: int) -> Tensor:
        return self._states[i][key]

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


def adamw_rule(batch: Batch) -> Rule:
    """AdamW with moments in fp32, by the options ``lr``, ``betas``, ``eps`` and ``weight_decay``."""
    yield []
    moments, options = Moments(batch, {}, corrects_eps=True), batch.options
    rates = {"lr": float(options["lr"]), "weight_decay": options["weight_decay"]}
    for indices, params, masters in batch.for_kernels():
        grads = batch.pick(batch.grads, indices)
        moments.step(
            indices, params, grads, **rates, masters=masters,
            grad_scale=batch.grad_scale, grad_factor=batch.grad_factor,
        )  # fmt: skip
