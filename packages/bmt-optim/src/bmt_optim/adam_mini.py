"""Adam-mini: Adam with one second moment for a block of elements. One round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import bmt_kernels
from bmt_comm import Slice, slice_of

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_betas, check_not_negative, declared
from .requests import Rule, Sum
from .slices import row_indices
from .state_layout import StateTensor, like_parameter, per_parameter, replicated, row_statistic

BLOCKS = ("element", "row", "tensor")

# The author's groups: parts of names, and which rows share a second moment (None: those of a head).
_BLOCK_OF_NAMES: Sequence[tuple[Sequence[str], str | None]] = (
    (("bias",), "element"),
    (("k_proj", "q_proj", "wq", "wk", "query", "key"), None),
    (("embed", "embd", "wte", "lm_head", "output", "final_layer", "v_proj", "wv", "value"), "row"),
    (("feed_forward", "linear", "mlp", "o_proj", "wo", "attn.proj"), "row"),
)


class AdamMini(DistributedOptimizer):
    """Adam-mini (Zhang et al., `arXiv:2406.16793 <https://arxiv.org/abs/2406.16793>`_), with decoupled weight decay.

    ::

        m ← β₁m + (1-β₁)g        v ← β₂v + (1-β₂)·mean(g²)        the mean over a block
        p ← p(1 - lr·weight_decay) - lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + eps)

    Args:
        params: parameters, or parameter groups; :func:`get_adam_mini_param_groups` makes those of the paper.
        lr, betas, eps, weight_decay: as in the formula.
        block: "row" (along the last dimension), a number of rows of a matrix (those of an attention head), "tensor" or
            "element" (Adam). The rows of a vector are its elements.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range, or blocks of several rows for what is no matrix of a multiple of them.
    """

    layout_options = ("block",)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        block: str | int = "row",
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay")
        check_betas(options["betas"], 2)
        block = options["block"]
        if block not in BLOCKS and not (isinstance(block, int) and block > 0):
            raise ValueError(f"block={block!r} must be one of {BLOCKS}, or a number of rows")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        return {"exp_avg": like_parameter(shape), "exp_avg_sq": _statistic(shape, options["block"])}

    def rule(self, batch: Batch) -> Rule:
        options, params, block = batch.options, batch.logical_params, batch.options["block"]
        beta1, beta2 = options["betas"]
        grads = [batch.fp32_grad(i) for i in range(len(batch))]
        shared = [i for i, p in enumerate(params) if _is_blockwise(p.where.shape, block)]
        sums = [_block_sums(grads[i], params[i].where, block) for i in shared]
        over = (-1,) if block == "row" else None
        (sums,) = yield [Sum(sums, batch.pick(params, shared), over)]
        totals = dict(zip(shared, sums, strict=True))
        correction, root = 1 - beta1**batch.step, math.sqrt(1 - beta2**batch.step)
        lr = float(options["lr"])
        averages, squares = batch.state("exp_avg"), batch.state("exp_avg_sq")
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                where = params[i].where
                means = totals[i] / _block_size(where.shape, block) if i in totals else grads[i].square()
                averages[i].lerp_(grads[i], 1 - beta1)
                squares[i].mul_(beta2).add_(means, alpha=1 - beta2)
                scale = squares[i].sqrt().div_(root).add_(options["eps"])
                if i in totals and block != "tensor":
                    rows = scale if block == "row" else scale[row_indices(where, scale.device) // block]
                    scale = rows.unsqueeze(-1)
                weight.mul_(1 - lr * options["weight_decay"])
                weight.addcdiv_(averages[i], scale, value=-lr / correction)


def _is_blockwise(shape: tuple[int, ...], block: str | int) -> bool:
    """Whether a second moment covers several elements, or would for a larger parameter."""
    return block != "element" and not (block == "row" and len(shape) < 2)


def _block_size(shape: tuple[int, ...], block: str | int) -> int:
    """Elements of a block of a parameter of ``shape``."""
    if block == "tensor":
        return max(math.prod(shape), 1)
    return shape[-1] if block == "row" else int(block) * shape[-1]


def _statistic(shape: tuple[int, ...], block: str | int) -> StateTensor:
    if not _is_blockwise(shape, block):
        return like_parameter(shape)
    if block == "tensor":
        return per_parameter()
    if block == "row":
        return row_statistic(shape)
    if len(shape) != 2 or shape[0] % int(block):
        raise ValueError(f"block={block!r}: a parameter of shape {shape} is no matrix of a multiple of {block} rows")
    return replicated((shape[0] // int(block),))


def _block_sums(grad: Tensor, where: Slice, block: str | int) -> Tensor:
    """The sums of squares of all blocks, or of this rank's rows."""
    if block == "tensor":
        return bmt_kernels.square_sums([grad])[0]
    rows = grad.square().sum(-1)
    if block == "row":
        return rows
    of_all = torch.zeros(where.shape[0], dtype=torch.float32, device=grad.device)
    of_all[row_indices(where, grad.device)] = rows
    # Not index_add_: it has no fixed order on a GPU, and replicas must get the same bits.
    return of_all.view(-1, int(block)).sum(1)


def get_adam_mini_param_groups(
    named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float, head_dim: int
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`AdamMini`, by the usual names of layers.

    Queries and keys have a second moment per head, embeddings, values and other matrices one per row, biases one per
    element, and a norm's weight has one. Biases and norms are not decayed.

    Args:
        named_parameters: ``model.named_parameters()``.
        weight_decay: of matrices.
        head_dim: rows per head.
    """
    groups: dict[tuple[str | int, bool], list[Tensor]] = {}
    for name, param in named_parameters:
        matches = [block for names, block in _BLOCK_OF_NAMES if any(part in name.lower() for part in names)]
        is_matrix = len(slice_of(param).shape) > 1
        block: str | int = "row" if is_matrix else "tensor"
        if matches and (is_matrix or matches[0] == "element"):
            block = matches[0] if matches[0] is not None else head_dim
        groups.setdefault((block, is_matrix), []).append(param)
    return [
        {"params": params, "block": block, "weight_decay": weight_decay if decays else 0.0}
        for (block, decays), params in groups.items()
    ]
