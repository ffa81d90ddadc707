"""Adam with its state in host memory, and its arithmetic on the host or on the device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import bmt_comm
import bmt_kernels
from bmt_kernels import OffloadPipeline, OffloadRow

from .adam import MOMENTS, AdamOptimizer
from .adam_runs import RunBatch
from .gradients import reduce_over_ranks, sharing_of
from .state_layout import StateTensor


class AdamOffloadOptimizer(AdamOptimizer):
    """:class:`AdamOptimizer` with moments and master weights in host memory: 8 or 12 bytes per element less on the GPU.

    Updates and state dicts are the same, so each of the two loads what the other saved.

    With ``compute="host"`` gradients are copied to the host (D2H), which does the arithmetic (vectorised, on all of
    PyTorch's threads) and sends the parameters back (H2D). :meth:`step` waits for backward, because the host needs the
    gradients, and returns when the arithmetic is done. With ``compute="device"`` only the state is on the host, in
    page-locked memory. It is copied to the device, updated there and copied back, and :meth:`step` waits for nothing.
    In both cases the copies run on streams of their own, a chunk behind and a chunk ahead of the arithmetic, through
    staging buffers of 48 MiB (:mod:`bmt_kernels.offload`). Parameters on the CPU are updated in place, without copies.

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
        if self.compute == "host":
            self.takes_found_inf = False  # the host waits for gradients anyway
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

        Each logical element counts once, whichever ranks hold it. All ranks get the same value. The direction does not
        depend on learning rate or weight decay. There is one during ``hold_steps``, too. NaN before the first step.

        Raises:
            RuntimeError: the optimizer was made without ``record_delta=True``.
        """
        count, total, _ = self._recorded()
        return total / count if count else math.nan

    def get_var_delta(self) -> float:
        """The population variance of the direction, as :meth:`get_avg_delta` is its mean."""
        count, total, squares = self._recorded()
        return max(squares / count - (total / count) ** 2, 0.0) if count else math.nan

    def _recorded(self) -> list[float]:
        if not self.record_delta:
            raise RuntimeError("there are no statistics: make the optimizer with record_delta=True")
        return [0.0, 0.0, 0.0] if self._delta is None else self._delta.tolist()

    # --- stepping ---------------------------------------------------------------------------------

    def _update(self, batches: Sequence[RunBatch], found_inf: Tensor | None) -> None:
        work: dict[torch.device, list[tuple[list[OffloadRow], Any]]] = {}
        copies: list[tuple[Tensor, Tensor]] = []  # contiguous copies, and the parameters that get them
        deltas: list[tuple[RunBatch, Tensor]] = []
        for batch in batches:
            device = batch.params[0].device
            options, compute_device = self._kernel_options(batch), self._compute_device(device)
            if batch.grad_factor is not None:
                options["grad_factor"] = batch.grad_factor.to(compute_device)
            if self.record_delta:
                options["delta_stats"] = torch.zeros(2, dtype=torch.float64, device=compute_device)
                deltas.append((batch, options["delta_stats"]))
            if self._is_offloaded(device):
                params = [p.contiguous() for p in batch.params]
                copies += [(c, p) for c, p in zip(params, batch.params) if c is not p]
                work.setdefault(device, []).append((_rows(batch, params, options), partial(_step_rows, options)))
            else:
                self._update_batch(batch, options)
        for device, of_device in work.items():
            self._pipeline(device).run(of_device)
        for copied, param in copies:
            param.copy_(copied)
        if self.record_delta:
            total = self._total(deltas)
            if found_inf is not None:
                before = torch.zeros_like(total) if self._delta is None else self._delta.to(total.device)
                total = torch.where(found_inf.to(total.device) > 0, before, total)
            self._delta = total

    def _is_offloaded(self, device: torch.device) -> bool:
        """Whether the state of parameters on ``device`` is on another device."""
        return device.type != "cpu"

    def _compute_device(self, device: torch.device) -> torch.device:
        """Where the arithmetic for parameters on ``device`` is done."""
        return torch.device("cpu") if self.compute == "host" else device

    def _pipeline(self, device: torch.device) -> OffloadPipeline:
        if device not in self._pipelines:
            self._pipelines[device] = OffloadPipeline(device, compute=self.compute)
        return self._pipelines[device]

    def _settle(self) -> None:
        self.synchronize()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._settle()
        super().load_state_dict(state_dict)

    def sync_masters(self) -> None:
        self._settle()
        super().sync_masters()

    # --- state memory -----------------------------------------------------------------------------

    def new_state(
        self, key: str, tensor: StateTensor, shape: tuple[int, ...], device: torch.device, options: Mapping[str, Any]
    ) -> Tensor:
        if self._pins(device):
            return bmt_kernels.pinned_zeros(math.prod(shape)).view(shape)
        return super().new_state(key, tensor, shape, torch.device("cpu"), options)

    def _keeps(self, state: Tensor, device: torch.device) -> bool:
        return state.device.type == "cpu" and (not self._pins(device) or state.is_pinned())

    def _pins(self, device: torch.device) -> bool:
        """Whether the state of parameters on ``device`` is in page-locked memory."""
        return self.compute == "device" and device.type == "cuda"

    # --- mean and variance of the direction -------------------------------------------------------

    def _sharing_of(self, param: Tensor) -> Hashable:
        return sharing_of(param, bmt_comm.context_or_none()) if self.record_delta else None

    def _total(self, deltas: Sequence[tuple[RunBatch, Tensor]]) -> Tensor:
        """Count, sum and sum of squares over all ranks, from the sums of this rank's batches."""
        device = next((sums.device for _, sums in deltas), torch.device("cpu"))
        local: dict[Hashable, Tensor] = {}
        for batch, sums in deltas:
            numel = float(sum(t.numel() for t in batch.params))  # filled in there: a copy from the host would wait
            total = torch.cat([torch.full((1,), numel, dtype=torch.float64, device=device), sums.to(device)])
            local[batch.sharing] = local[batch.sharing] + total if batch.sharing in local else total
        nothing = torch.zeros(3, dtype=torch.float64, device=device)

        def of_params(params: Sequence[Tensor]) -> Tensor:
            return local.get(self._sharing_of(params[0]), nothing) if params else nothing

        return reduce_over_ranks(self._params(), of_params, bmt_comm.context_or_none(), "sum")


# The layout of a row: the gradient is read[0], the moments are update[0] and update[1]. A held parameter is read[1].
# Otherwise an fp32 parameter is update[2]. For others update[2] is the master, and write[0] the parameter.


def _rows(batch: RunBatch, params: Sequence[Tensor], options: Mapping[str, Any]) -> list[OffloadRow]:
    rows = []
    for param, grad, state in zip(params, batch.grads, batch.states):
        param, grad = param.view(-1), grad.view(-1)
        moments = tuple(state[key].view(-1) for key in MOMENTS)
        if _holds(options):
            rows.append(OffloadRow(read=(grad, param), update=moments))
        elif "master" in state:
            rows.append(OffloadRow(read=(grad,), update=(*moments, state["master"].view(-1)), write=(param,)))
        else:
            rows.append(OffloadRow(read=(grad,), update=(*moments, param)))
    return rows


def _step_rows(options: Mapping[str, Any], rows: list[OffloadRow]) -> None:
    """One Adam step on the rows of a chunk."""
    held = _holds(options)
    half = bool(rows[0].write)
    bmt_kernels.adam_step(
        [row.read[1] if held else row.write[0] if half else row.update[2] for row in rows],
        [row.read[0] for row in rows],
        [row.update[0] for row in rows],
        [row.update[1] for row in rows],
        masters=[row.update[2] for row in rows] if half else None,
        **options,
    )


def _holds(options: Mapping[str, Any]) -> bool:
    """Whether the parameters stay as they are in this step."""
    held: bool = options["step"] <= options["hold_steps"]
    return held
