"""Blocks of tensors, and the matrices of :class:`~bmt_optim.shampoo.DistributedShampoo` for each. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def blocks_of(x: Tensor, options: Mapping[str, Any]) -> list[Tensor]:
    """Views of the blocks of an unsharded tensor, after merging neighbouring dimensions up to the limit."""
    limit, merged = min(options["max_preconditioner_dim"], max(1, x.numel())), [1]
    for n in reversed(x.shape):
        merged[-1:] = [n * merged[-1]] if n == 1 or merged[-1] == 1 or n * merged[-1] <= limit else [merged[-1], n]
    blocks = [x.view(merged[::-1])] if x.numel() else []
    for d in range(len(merged)):
        blocks = [part for block in blocks for part in block.split(limit, d)]
    return blocks


def block_shapes(shape: Sequence[int], options: Mapping[str, Any]) -> list[torch.Size]:
    """The shapes of :func:`blocks_of`."""
    return [block.shape for block in blocks_of(torch.empty(shape, device="meta"), options)]


def matrices_of(flat: Tensor, shape: Sequence[int], options: Mapping[str, Any]) -> list[list[Tensor]]:
    """The square matrices, by block and dimension, that lie end to end in ``flat``."""
    shapes = block_shapes(shape, options)
    parts = iter(flat.split([n * n for sides in shapes for n in sides]))
    return [[next(parts).view(n, n) for n in sides] for sides in shapes]


def accumulate(factors: Sequence[Tensor], block: Tensor, beta: float) -> None:
    """Average the products of a block of the gradient with itself, or add them up if ``beta`` is 1."""
    for d, factor in enumerate(factors):
        others = [e for e in range(block.dim()) if e != d]
        factor.mul_(beta).add_(torch.tensordot(block, block, dims=(others, others)), alpha=1 - beta or 1)


def preconditioned(block: Tensor, roots: Sequence[Tensor]) -> Tensor:
    """A block, multiplied along each dimension by its symmetric matrix."""
    for root in roots:  # the first dimension becomes the last one
        block = torch.tensordot(block, root, dims=([0], [0]))
    return block


def inverse_root(factor: Tensor, options: Mapping[str, Any], dims: int) -> Tensor:
    """(factor + epsilon)^(-1/(2·dims)), flat. Values that are not finite count as 0: ``eigh`` would raise for them."""
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    values, vectors = torch.linalg.eigh(factor.nan_to_num(0, 0, 0).add(eye, alpha=options["epsilon"]))
    short = values[0] < options["epsilon"]  # by rounding
    values = torch.where(short, values - values[0] + options["epsilon"], values)
    return (vectors * values.pow(-1 / (2 * dims)) @ vectors.T).view(-1)
