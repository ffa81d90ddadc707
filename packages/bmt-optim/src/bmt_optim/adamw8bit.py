"""AdamW with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import bmt_kernels

from .distributed import Params
from .galore import BITSANDBYTES, DistGaloreAdamW


class AdamW8bit(DistGaloreAdamW):
    """AdamW with block-wise 8-bit moments (Dettmers et al., `arXiv:2110.02861 <https://arxiv.org/abs/2110.02861>`_).

    ::

        m ← β₁m + (1-β₁)g        v ← β₂v + (1-β₂)g²
        p ← (p - lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + eps))(1 - lr·weight_decay)

    m and v are kept as codes of 8 bits, with the absmax of each block of 256 elements of the logical tensor: 2.03 bytes
    per parameter. So a state has the same bytes on every layout. Where ranks share blocks, a step has one round, in
    which they agree on the absmax.

    It loads state dicts of ``bitsandbytes.optim.AdamW8bit`` with blocks of 256, and :meth:`bitsandbytes_state_dict`
    makes them.

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

    @torch.no_grad()
    def bitsandbytes_state_dict(self) -> dict[str, Any]:
        """The gathered state, as ``bitsandbytes.optim.AdamW8bit`` loads it.

        Moments and their absmax keep their bytes. Master weights are left out, because bitsandbytes has none. A
        collective over the ranks that share parameters. Ranks other than 0 get an empty ``state``.

        Raises:
            ValueError: ``percentile_clipping`` or ``maximize`` is on, which bitsandbytes does not have.
        """
        for group in self.param_groups:
            if group["percentile_clipping"] < 100 or group.get("maximize"):
                raise ValueError("bitsandbytes has no percentile_clipping and no maximize; leave them out")
        gathered = self._own_state_dict(gather=True)
        names = {ours: theirs for theirs, ours in BITSANDBYTES.items()}
        for index, entry in gathered["state"].items():
            renamed: dict[str, Any] = {names[key]: value for key, value in entry.items() if key in names}
            if "absmax1" in renamed:
                renamed.update({f"qmap{n}": bmt_kernels.dynamic_map(n == 1) for n in (1, 2)})
            gathered["state"][index] = {"step": int(entry["step"]), **renamed}
        options = ("params", "lr", "betas", "eps", "weight_decay")
        gathered["param_groups"] = [{name: group[name] for name in options} for group in gathered["param_groups"]]
        return gathered
