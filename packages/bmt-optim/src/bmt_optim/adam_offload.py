"""Adam with its state in host memory, and its arithmetic on the host or on the device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import bmt_comm
import bmt_kernels
from bmt_kernels import OffloadPipeline, OffloadRow

from .adam import AdamOptimizer, Call
from .adam_runs import Home, Launch
from .gradients import reduce_over_ranks, share_of


class AdamOffloadOptimizer(AdamOptimizer):
    """:class:`AdamOptimizer` with moments and master weights in host memory: 8 or 12 bytes per element less on the GPU.

    Updates are the same, and so are state dicts: what one of the two saved, the other loads.

    With ``compute="host"`` gradients are copied to the host, which does the arithmetic (vectorised, on all of
    PyTorch's threads) and sends the parameters back. The host must have the gradients to work on, so
    :meth:`step` waits for backward and returns when the arithmetic is done. With ``compute="device"`` only
    the state is on the host, in page-locked memory; it is copied to the device, worked on there and copied
    back, and :meth:`step` waits for nothing. Either way the copies run on streams of their own, a chunk
    behind and a chunk ahead of the arithmetic, through staging buffers of 48 MiB (:mod:`bmt_kernels.offload`).
    Parameters on the CPU are updated in place, without copies.

    Args:
        params: parameters (fp32, fp16 or bf16; mixed at will) or parameter groups, on CUDA devices or the CPU.
        lr, betas, eps, weight_decay, hold_steps: as for :class:`AdamOptimizer`.
        record_delta: keep mean and variance of the Adam direction, m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + eps), for
            :meth:`get_avg_delta` and :meth:`get_var_delta`. Each step then reduces three numbers over the
            ranks that share parameters.
        compute: where the arithmetic is done.
        conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of another dtype.
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        hold_steps: int = 0,
        record_delta: bool = False,
        *,
        compute: Literal["host", "device"] = "host",
        **conventions: Any,
    ) -> None:
        if compute not in ("host", "device"):
            raise ValueError(f"compute={compute!r} must be 'host' or 'device'")
        self.compute = compute
        self.record_delta = record_delta
        self._delta: Tensor | None = None  # of the last step, over all ranks: count, Σd, Σd² (fp64)
        self._start_afresh()
        super().__init__(params, lr, betas, eps, weight_decay, hold_steps, **conventions)

    def _start_afresh(self) -> None:
        self.takes_found_inf = self.compute == "device"  # the host waits for gradients anyway
        self._home = Home(on_host=True, pinned=self.compute == "device")
        self._pipelines: dict[torch.device, OffloadPipeline] = {}

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        mine = {"compute": self.compute, "record_delta": self.record_delta, "_delta": self._delta}
        return {**super().__getstate__(), **mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_afresh()

    def synchronize(self) -> None:
        """Wait until the state in host memory is that after the last step.

        Needed only by those who read ``optimizer.state`` themselves, and only with ``compute="device"``.
        """
        for pipeline in self._pipelines.values():
            pipeline.synchronize()

    def get_avg_delta(self) -> float:
        """The mean of the Adam direction in the last step, over all elements of all parameters that took part.

        Each logical element counts once, whichever ranks hold it; all ranks get the same. The direction
        knows neither learning rate nor weight decay, and there is one during ``hold_steps``, too. NaN before
        the first step.

        Raises:
            RuntimeError: the optimizer was made without ``record_delta=True``.
        """
        count, total, _ = self._recorded()
        return total / count if count else math.nan

    def get_var_delta(self) -> float:
        """The variance (that of the population) that belongs to :meth:`get_avg_delta`."""
        count, total, squares = self._recorded()
        return max(squares / count - (total / count) ** 2, 0.0) if count else math.nan

    def _recorded(self) -> list[float]:
        if not self.record_delta:
            raise RuntimeError("there are no statistics: make the optimizer with record_delta=True")
        return [0.0, 0.0, 0.0] if self._delta is None else self._delta.tolist()

    # --- stepping ---------------------------------------------------------------------------------

    def _launch(self, calls: Sequence[Call]) -> None:
        direct: list[Call] = []
        batches: dict[torch.device, list[tuple[list[OffloadRow], Any]]] = {}
        deltas: list[tuple[Launch, Tensor]] = []
        skipped: Tensor | None = None
        for launch, options in calls:
            place = self._place(launch.device)
            if (factor := options["grad_factor"]) is not None:
                options = {**options, "grad_factor": factor.to(place)}
            skipped = options["found_inf"]
            if self.record_delta:
                sums = torch.zeros(2, dtype=torch.float64, device=place)
                deltas.append((launch, sums))
                options = {**options, "delta_stats": sums}
            if self._is_offloaded(launch.device):
                batches.setdefault(launch.device, []).append((_rows(launch, options), _Work(options)))
            else:
                direct.append((launch, options))
        super()._launch(direct)
        for device, found in batches.items():
            self._pipeline(device).run(found)
        if self.record_delta:
            total = self._total(deltas)
            if skipped is not None:
                before = torch.zeros_like(total) if self._delta is None else self._delta
                total = torch.where(skipped.to(total.device) > 0, before, total)
            self._delta = total

    def _is_offloaded(self, device: torch.device) -> bool:
        """Whether parameters on ``device`` and their state are apart."""
        return device.type != "cpu"

    def _place(self, device: torch.device) -> torch.device:
        """Where the arithmetic for parameters on ``device`` is done."""
        return torch.device("cpu") if self.compute == "host" else device

    def _pipeline(self, device: torch.device) -> OffloadPipeline:
        if device not in self._pipelines:
            self._pipelines[device] = OffloadPipeline(device, compute=self.compute)
        return self._pipelines[device]

    def _settle(self) -> None:
        self.synchronize()

    # --- mean and variance of the direction -------------------------------------------------------

    def _share_of(self, param: Tensor) -> Hashable:
        return share_of(param, _context()) if self.record_delta else None

    def _total(self, deltas: Sequence[tuple[Launch, Tensor]]) -> Tensor:
        """Count, sum and sum of squares over all ranks, of what this rank's launches have summed up."""
        device = next((sums.device for _, sums in deltas), torch.device("cpu"))
        local: dict[Hashable, Tensor] = {}
        for launch, sums in deltas:
            count = torch.tensor([float(sum(t.numel() for t in launch.params))], dtype=torch.float64)
            found = torch.cat([count.to(device), sums.to(device)])
            local[launch.share] = local[launch.share] + found if launch.share in local else found
        nothing = torch.zeros(3, dtype=torch.float64, device=device)

        def of_share(params: Sequence[Tensor]) -> Tensor:
            return local.get(self._share_of(params[0]), nothing) if params else nothing

        return reduce_over_ranks(self._params(), of_share, _context(), "sum")


def _context() -> bmt_comm.ParallelContext | None:
    return bmt_comm.current_context() if bmt_comm.is_initialized() else None


# Rows and work agree on what is where: the gradient is read[0], the moments are update[0] and update[1]. Held
# parameters are read[1]; else fp32 ones are update[2], and for others update[2] is the master and write[0] the copy.


def _rows(launch: Launch, options: dict[str, Any]) -> list[OffloadRow]:
    rows = []
    for i, tensors in enumerate(zip(launch.params, launch.grads, launch.exp_avgs, launch.exp_avg_sqs)):
        param, grad, exp_avg, exp_avg_sq = (tensor.view(-1) for tensor in tensors)
        if _holds(options):
            rows.append(OffloadRow(read=(grad, param), update=(exp_avg, exp_avg_sq)))
        elif launch.masters:
            master = launch.masters[i].view(-1)
            rows.append(OffloadRow(read=(grad,), update=(exp_avg, exp_avg_sq, master), write=(param,)))
        else:
            rows.append(OffloadRow(read=(grad,), update=(exp_avg, exp_avg_sq, param)))
    return rows


class _Work:
    """One Adam step on the rows of a chunk."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, rows: list[OffloadRow]) -> None:
        held = _holds(self.options)
        half = bool(rows[0].write)
        bmt_kernels.adam_step(
            [row.read[1] if held else row.write[0] if half else row.update[2] for row in rows],
            [row.read[0] for row in rows],
            [row.update[0] for row in rows],
            [row.update[1] for row in rows],
            masters=[row.update[2] for row in rows] if half else None,
            **self.options,
        )


def _holds(options: dict[str, Any]) -> bool:
    """Whether the parameters stay as they are in this step."""
    held: bool = options["step"] <= options["hold_steps"]
    return held
