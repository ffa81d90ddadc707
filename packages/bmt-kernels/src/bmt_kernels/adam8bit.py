"""The fused Adam step with block-wise 8-bit moments: one native call, or one CUDA launch, over a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bmt_kernels import _native, reference
from bmt_kernels._adam8bit_table import adam8bit_table
from bmt_kernels._compat import weights_written
from bmt_kernels._library import register, tracing, with_gaps, without_gaps
from bmt_kernels._tables import check_flag
from bmt_kernels.adam import _checked, _checked_betas, _checked_count


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
    """Do what `adam_step` does, with moments of one byte per element.

    The moments are kept as `quantize_blockwise` makes them, the first with ``signed=True``, the second with
    ``signed=False``; new ones are ``exp_avg`` filled with 127, ``exp_avg_sq`` and the absmax with 0. Each step
    dequantises them, computes as `adam_step` does, updates the parameters with the exact new moments, and quantises
    those, block by block in a single pass. Blocks follow the order of memory.

    An infinity or NaN among the new moments of a block makes all of the block NaN at the next step. A second moment
    less than 1.6e-7 times the largest of its block becomes 0, as published; `eps` bounds what that can do.

    Args:
        params, grads, masters: as for `adam_step`.
        exp_avgs, exp_avg_sqs: uint8, of their parameters' shapes (and strides): the codes. Written.
        absmax_avgs, absmax_avg_sqs: float32, of shape (ceil((numel + block_offset) / 256),), or (0,) for an empty
            parameter. Written.
        lr, betas, eps, weight_decay, step, grad_scale, decoupled, maximize, hold_steps, found_inf: as for
            `adam_step`.
        block_offsets: the place of each parameter's first element within its block, 0 to 255. Default: all 0.

    Raises:
        What `adam_step` raises, and as there everything is checked before anything is written.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, section 2.
    """
    if tracing():
        present, mastered = without_gaps(masters)
        _operation(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            absmax_avgs,
            absmax_avg_sqs,
            masters=present,
            mastered=mastered,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            grad_scale=grad_scale,
            decoupled=decoupled,
            maximize=maximize,
            hold_steps=hold_steps,
            found_inf=found_inf,
            block_offsets=block_offsets,
        )
        return
    beta1, beta2 = _checked_betas(betas)
    _checked_count("step", step, 1)
    _checked_count("hold_steps", hold_steps, 0)
    # In the order of AdamSettings in csrc/common/adam.h.
    settings = (
        _checked("lr", lr, 0.0),
        beta1,
        beta2,
        _checked("eps", eps, 0.0),
        _checked("weight_decay", weight_decay, 0.0),
        step,
        _checked("grad_scale", grad_scale, math.ulp(0.0)),
        hold_steps,
        bool(decoupled),
        bool(maximize),
    )
    states = (exp_avgs, exp_avg_sqs, absmax_avgs, absmax_avg_sqs)
    rows, device = adam8bit_table(params, grads, *states, masters, block_offsets)
    if found_inf is not None:
        check_flag("found_inf", found_inf, device if len(params) else None)
    if not rows:
        return

    flag = 0 if found_inf is None or device.type == "meta" else found_inf.data_ptr()
    if (run := _native.kernel("adam8bit_step", device)) is not None:
        run(rows, settings, flag)
    else:
        reference.adam8bit_step(
            params,
            grads,
            *states,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            masters=masters,
            grad_scale=grad_scale,
            decoupled=decoupled,
            maximize=maximize,
            hold_steps=hold_steps,
            found_inf=found_inf,
            block_offsets=block_offsets,
        )
        return  # PyTorch has counted its own writes
    # As in adam_step: only weights can have been saved for a backward.
    if step > hold_steps:
        weights_written(params, masters)


def _run(
    params: list[Tensor],
    *lists: list[Tensor],
    masters: list[Tensor],
    mastered: list[int],
    betas: list[float],
    **options: Any,
) -> None:
    masters_of_params = with_gaps(masters, mastered, len(params))
    adam8bit_step(params, *lists, masters=masters_of_params, betas=(betas[0], betas[1]), **options)


_operation = register(
    "adam8bit_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] absmax_avgs, Tensor(e!)[] absmax_avg_sqs, *, Tensor(f!)[] masters, int[] mastered, float lr, "
    "float[] betas, float eps, float weight_decay, SymInt step, float grad_scale, bool decoupled, bool maximize, "
    "SymInt hold_steps, Tensor? found_inf, int[]? block_offsets) -> ()",
    _run,
)
