"""AdamW with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .distributed import Params
from .galore import DistGaloreAdamW


class AdamW8bit(DistGaloreAdamW):
    """AdamW with block-wise 8-bit moments (Dettmers et al., `arXiv:2110.02861 <https://arxiv.org/abs/2110.02861>`_).

    ::

        m ← β₁m + (1-β₁)g        v ← β₂v + (1-β₂)g²
        p ← (p - lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + eps))(1 - lr·weight_decay)

    m and v are kept as codes of 8 bits, with a largest magnitude per block of 256 elements of the logical tensor: 2.03
    bytes per parameter. So a state has the same bytes on every layout. Where a cut runs through blocks, a step has one
    round, in which ranks agree on the largest magnitudes.

    It loads state dicts of ``bitsandbytes.optim.AdamW8bit`` that have blocks of 256.

    Args:
        params: parameters, or parameter groups.
        lr, betas, eps, weight_decay: as in the formula.
        min_8bit_size: moments with fewer elements, of the logical tensor, are kept in fp32.
        percentile_clipping, is_paged: as for :class:`DistGaloreAdamW`.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range.
    """

    corrects_eps = True

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        is_paged: bool = False,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            min_8bit_size=min_8bit_size,
            percentile_clipping=percentile_clipping,
            is_paged=is_paged,
            stochastic_rounding=stochastic_rounding,
            **conventions,
        )

    def check_options(self, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        if "rank" in options:
            raise ValueError(f"rank={options['rank']!r}: AdamW8bit projects nothing; GaLoreAdamW does")
