"""Adam's two moments of the parameters of a batch: in fp32 or 8 bits, on the device or in host memory."""

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
from .blockwise import absmax_layout, dequantise, finite_absmax, local_absmax, quantise, shares_blocks, span_of
from .requests import Rule
from .state_layout import StateTensor

_MOMENTS = (("exp_avg", "absmax_avg", True), ("exp_avg_sq", "absmax_avg_sq", False))
"""For each moment: its state tensor, that of its blocks' absmax where it is in 8 bits, and whether it has signs."""
_ZERO_CODES = {True: 127, False: 0}
_SETTLED = 1 << 30
"""A step at which bias corrections are 1."""
_PAGED = 100_000
"""The least elements of a state tensor that is kept in host memory: what bitsandbytes pages."""


def moments_layout(dims: tuple[Any, ...], numel: int, options: Mapping[str, Any]) -> dict[str, StateTensor]:
    """The moments of gradients with ``dims`` (see :class:`StateTensor`) and, in all, ``numel`` elements."""
    if options["nbits"] != 8 or numel < options["min_8bit_size"]:
        return {key: StateTensor(dims) for key, _, _ in _MOMENTS}
    layout = {}
    for key, absmax, signed in _MOMENTS:
        layout[key] = StateTensor(dims, torch.uint8, _ZERO_CODES[signed])
        layout[absmax] = absmax_layout(layout[key])
    return layout


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
        parts: which part of the moments this rank holds, of each parameter that has them in 8 bits.
        corrects_eps: whether eps is added to √v after the correction of its bias, as in Adam, or before.
    """

    def __init__(self, batch: Batch, parts: Mapping[int, Slice], corrects_eps: bool) -> None:
        self._states = batch.states
        self._device = batch.device
        self._parts = parts
        sharing = {i: part for i, part in parts.items() if shares_blocks(part)}
        if "shared blocks" not in batch.kept or batch.kept["shared blocks"].parts != sharing:
            batch.kept["shared blocks"] = SharedBlocks(sharing, batch.logical_params, batch.device)
        self.shared: SharedBlocks = batch.kept["shared blocks"]
        self._agreed_absmax: Tensor | None = None
        self._edges: list[Tensor] = []
        """The new moments of the edges, and then their codes: (edges, 256)."""
        options = batch.options
        step = batch.step if options.get("correct_bias", True) else _SETTLED
        self._settings = {
            "betas": options["betas"],
            # The kernel adds eps to √v / √(1-β₂ᵗ).
            "eps": options["eps"] / (1.0 if corrects_eps else math.sqrt(1 - options["betas"][1] ** step)),
            "weight_decay": 0.0,
            "step": step,
        }

    def next_absmax(
        self, grad: Callable[[int], Tensor], grad_scale: float = 1.0, grad_factor: Tensor | None = None
    ) -> Tensor:
        """The absmax that :meth:`step` will give to the ``shared`` blocks; 0 where this rank has no elements.

        No state changes.

        Args:
            grad: gives the gradient of a parameter by its index, as for :meth:`step`.
            grad_scale, grad_factor: as for :meth:`step`.
        """
        shared = self.shared
        absmax_of_all = shared.zeros()

        def advance(moments: Sequence[Tensor], grads: Tensor) -> None:
            settings = {**self._settings, "lr": 0.0, "hold_steps": self._settings["step"], "grad_scale": grad_scale}
            lists = [[torch.zeros_like(grads, dtype=torch.float32)], [grads], *([moment] for moment in moments)]
            bmt_kernels.adam_step(*lists, **settings, grad_factor=grad_factor)

        if shared.edges:
            self._edges = []
            for key, absmax_key, signed in _MOMENTS:
                codes = shared.rows(functools.partial(self._state, key), torch.uint8)
                absmax = shared.absmax(functools.partial(self._state, absmax_key)).to(self._device)
                self._edges.append(bmt_kernels.dequantize_blockwise(codes, absmax, signed=signed))
            advance(self._edges, shared.rows(grad, torch.float32))
            magnitudes = [torch.where(shared.held, moment.abs(), 0) for moment in self._edges]
            absmax_of_all[shared.places] = torch.stack([finite_absmax(rows) for rows in magnitudes])
        for i, part in shared.parts.items():
            if i in shared.edges:
                continue
            with self._on_device([i], store=False) as (state,):
                moments = self._dequantised(i, state)
                advance(moments, grad(i))
                span = span_of(part)
                for row, moment in zip(shared.of(absmax_of_all, i), moments):
                    row[span.first : span.last] = local_absmax(moment, part)
        return absmax_of_all

    def agree(self, absmax: Tensor) -> None:
        """Take over the :meth:`next_absmax` of all ranks."""
        self._agreed_absmax = absmax
        if self.shared.edges:
            self._edge_absmax = absmax[self.shared.places]
            for n, (_, _, signed) in enumerate(_MOMENTS):
                # Elements of other ranks are filled with the absmax, so that the kernel computes the same absmax.
                rows = torch.where(self.shared.held, self._edges[n], self._edge_absmax[n, :, None])
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
        """A step of Adam with decoupled decay, which is applied first.

        Args:
            indices: which parameters.
            targets: the tensors that are stepped; fp32 unless they have a master. Written.
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
            lists = [[targets[n] for n in members], [grads[n] for n in members]]
            return lists, None if masters is None else [masters[n] for n in members]

        with self._on_device(indices) as states:
            for members, eight in ((plain, False), (fused, True)):
                if not members:
                    continue
                lists, copied = chosen(members)
                keys = [key for key, _, _ in _MOMENTS] + ([key for _, key, _ in _MOMENTS] if eight else [])
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
        """Replace the codes that the kernel made by this rank's absmax by those made by the absmax of all ranks."""
        for n, (key, absmax_key, _) in enumerate(_MOMENTS if self._agreed_absmax is not None else ()):
            for i in states.keys() & self.shared.edges.keys():
                for edge, number in zip(self.shared.edges[i], self.shared.numbers[i]):
                    codes = self._edges[n][number, edge.offset : edge.offset + edge.stop - edge.start]
                    states[i][key].view(-1)[edge.start : edge.stop].copy_(codes)
                    states[i][absmax_key][edge.block].copy_(self._edge_absmax[n, number])

    def _store(self, i: int, state: Mapping[str, Tensor], moments: Sequence[Tensor]) -> None:
        part = self._parts[i]
        span = span_of(part)
        for n, (key, absmax_key, signed) in enumerate(_MOMENTS):
            if self._agreed_absmax is not None and i in self.shared.parts:
                absmax = self.shared.of(self._agreed_absmax, i)[n, span.first : span.last]
            else:
                absmax = local_absmax(moments[n], part)
            state[absmax_key].copy_(absmax)
            state[key].copy_(quantise(moments[n], absmax, part, signed))

    def _state(self, key: str, i: int) -> Tensor:
        return self._states[i][key]

    def _dequantised(self, i: int, state: Mapping[str, Tensor]) -> list[Tensor]:
        return [dequantise(state[key], state[absmax], self._parts[i], signed) for key, absmax, signed in _MOMENTS]

    @contextlib.contextmanager
    def _on_device(self, indices: Sequence[int], store: bool = True) -> Iterator[list[dict[str, Tensor]]]:
        """The states on the device. Those in host memory are copied to it (H2D), and back afterwards (D2H).

        The copies are queued on the current stream, like the work, so each sees the results of the one before it.
        """
        on_device: list[dict[str, Tensor]] = []
        for i in indices:
            state = self._states[i]
            keys = [key for key, _, _ in _MOMENTS] + ([key for _, key, _ in _MOMENTS] if i in self._parts else [])
            on_device.append({key: state[key].to(self._device, non_blocking=True) for key in keys})
        yield on_device
        for i, copies in zip(indices if store else (), on_device):
            for key, copied in copies.items():
                if copied is not self._states[i][key]:
                    self._states[i][key].copy_(copied, non_blocking=True)


def adamw_rule(batch: Batch) -> Rule:
    """AdamW with moments in fp32, by the options ``lr``, ``betas``, ``eps`` and ``weight_decay``."""
    yield []
    moments, options = Moments(batch, {}, corrects_eps=True), batch.options
    settings = {"lr": float(options["lr"]), "weight_decay": options["weight_decay"]}
    for indices, params, masters in batch.for_kernels():
        grads = batch.pick(batch.grads, indices)
        moments.step(
            indices, params, grads, **settings, masters=masters,
            grad_scale=batch.grad_scale, grad_factor=batch.grad_factor,
        )  # fmt: skip
