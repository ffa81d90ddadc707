"""Histograms of recorded tensors and their gradients over a training. Pictures need matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmt_comm import current_context, is_initialized

from .inspect_tensor import InspectTensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST, LAST, PER_DECADE = -12, 6, 4
"""Bins go from 10⁻¹² to 10⁶, ``PER_DECADE`` for each decade. Smaller and larger magnitudes go into the first and the
last bin; zeros, infinities and NaN into no bin."""
BINS = (LAST - FIRST) * PER_DECADE


class Histograms:
    """How often a tensor has elements of each magnitude, over all ranks, for a number of steps::

        histograms = Histograms()
        ...
            with inspect_tensor() as inspector:
                ...
            histograms.add(step, inspector)
        ...
        histograms.plot("histograms.png")

    Attributes:
        counts: by name (as in a summary; for gradients with " gradient" after it): pairs of a step and the number of
            elements in each bin (fp64, (BINS,)).
    """

    def __init__(self) -> None:
        self.counts: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, step: int, inspector: InspectTensor) -> None:
        """Count the tensors that a step has recorded, and their gradients. Every rank must call it.

        Elements that several tensor-parallel ranks have are counted on each of them.
        """
        rows: dict[str, Tensor] = {}
        for name, value, grad in inspector.tensors():
            rows[name] = magnitudes(value)
            if grad is not None:
                rows[f"{name} gradient"] = magnitudes(grad)
        everyone: list[dict[str, Tensor]]
        everyone = current_context().world.all_gather_object(rows) if is_initialized() else [rows]
        for counts in everyone:
            for name, row in counts.items():
                self._add(name, step, row)

    def _add(self, name: str, step: int, row: Tensor) -> None:
        steps = self.counts.setdefault(name, [])
        if steps and steps[-1][0] == step:
            steps[-1] = (step, steps[-1][1] + row)
        else:
            steps.append((step, row))

    def figure(self, names: Sequence[str] | None = None) -> Figure:
        """A picture with a panel for each tensor: steps to the right, magnitudes upwards, darker for higher counts.

        Args:
            names: of the tensors, by default all.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: nothing was added, or no tensor with one of these names.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("drawing histograms needs matplotlib: pip install matplotlib") from error
        chosen = list(self.counts if names is None else names)
        missing = [name for name in chosen if name not in self.counts]
        if missing or not chosen:
            raise ValueError(f"names={missing} have no histogram; there are those of {list(self.counts)}")
        columns = min(4, len(chosen))
        lines = math.ceil(len(chosen) / columns)
        figure = Figure(figsize=(3.6 * columns, 2.6 * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        for name, panel in zip(chosen, axes, strict=False):
            steps = [step for step, _ in self.counts[name]]
            shares = torch.stack([row / row.sum().clamp(min=1) for _, row in self.counts[name]], dim=1)
            edges = [FIRST + i / PER_DECADE for i in range(BINS + 1)]
            panel.pcolormesh([*steps, steps[-1] + 1], edges, shares.tolist(), cmap="Blues")
            used = shares.sum(1).nonzero().flatten().tolist() or [0, BINS - 1]
            panel.set_ylim(edges[used[0]], edges[used[-1] + 1])
            panel.set_title(name, fontsize=8)
            panel.set_xlabel("step", fontsize=7)
            panel.set_ylabel("log₁₀ of the magnitude", fontsize=7)
            panel.tick_params(labelsize=7)
        for panel in axes[len(chosen) :]:
            panel.set_visible(False)
        return figure

    def plot(self, file_name: str | Path, names: Sequence[str] | None = None) -> None:
        """Write :meth:`figure` to a file (.png, .svg, .pdf), on rank 0."""
        if not is_initialized() or current_context().rank == 0:
            self.figure(names).savefig(file_name)


def magnitudes(x: Tensor) -> Tensor:
    """(BINS,) fp64 on the CPU: the number of elements of ``x`` in each bin."""
    values = x.detach().reshape(-1)
    values = (values if values.is_complex() else values.float()).abs()
    values = values[values.isfinite() & (values > 0)]
    bins = ((values.log10() - FIRST) * PER_DECADE).floor().long().clamp(0, BINS - 1)
    return torch.bincount(bins, minlength=BINS).double().cpu()
