"""The Adam step with block-wise 8-bit moments in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_kernels.reference.adam import adam_step
from bmt_kernels.reference.quantize import dequantize_blockwise, quantize_blockwise


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


@torch.no_grad()
def adam8bit_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    absmax_avgs: Sequence[Tensor],
    absmax_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    masters: Sequence[Tensor | None] | None = None,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
    hold_steps: int = 0,
    found_inf: Tensor | None = None,
    block_offsets: Sequence[int] | None = None,
) -> None:
    """See `bmt_kernels.adam8bit_step`."""
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    for i, param in enumerate(params):
        offset = 0 if block_offsets is None else block_offsets[i]
        master = None if masters is None else masters[i]
        states = [(exp_avgs[i], absmax_avgs[i], True), (exp_avg_sqs[i], absmax_avg_sqs[i], False)]
        moments = [
            dequantize_blockwise(_in_memory_order(codes), absmax, signed=signed, block_offset=offset)
            for codes, absmax, signed in states
        ]
        adam_step(
            [_in_memory_order(param)],
            [_in_memory_order(grads[i])],
            moments[:1],
            moments[1:],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            masters=None if master is None else [_in_memory_order(master)],
            grad_scale=grad_scale,
            decoupled=decoupled,
            maximize=maximize,
            hold_steps=hold_steps,
            found_inf=found_inf,
        )
        for (codes, absmax, signed), moment in zip(states, moments):
            new_codes, new_absmax = quantize_blockwise(moment, signed=signed, block_offset=offset)
            for old, new in ((_in_memory_order(codes), new_codes), (absmax, new_absmax)):
                old.copy_(new if skip is None else torch.where(skip, old, new))
