"""GaLore: AdamW with moments of gradients that are projected to a low rank, over any sharding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import StateRecord, slice_of

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .galore_projection import (
    BASES,
    DECOMPOSITIONS,
    KEPT,
    PROJECTIONS,
    basis_layout,
    low_rank,
    projected_dims,
    projector_of,
    side_of,
)
from .galore_step import Projected, plain_rule
from .moments import Moments, host_state, moments_layout
from .options import check_betas, check_not_negative, check_whole, declared
from .percentile_clipping import HISTORY
from .requests import Rule
from .state_layout import StateTensor, replicated

_PROJECTION = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
"""Options of a group with a ``rank`` that it need not name."""
BITSANDBYTES = {"state1": "exp_avg", "state2": "exp_avg_sq", "absmax1": "absmax_avg", "absmax2": "absmax_avg_sq"}
"""bitsandbytes' names of our state tensors."""
_NESTED = "__bnb_optimizer_quant_state__"  # where newer bitsandbytes puts them in a state dict


class DistGaloreAdamW(DistributedOptimizer):
    """GaLore with AdamW (Zhao et al., `arXiv:2403.03507 <https://arxiv.org/abs/2403.03507>`_), as ``galore_torch``.

    In parameter groups with a ``rank``, whose parameters are matrices (m, n), for each of them::

        P, Q ← the leading left or right singular vectors of g       every update_proj_gap steps, from the first
        r ← g·Qᵀ                             (or Pᵀ·g, or Pᵀ·g·Qᵀ)
        m ← β₁m + (1-β₁)r        v ← β₂v + (1-β₂)r²
        d ← m / (√v + eps) · √(1-β₂ᵗ) / (1-β₁ᵗ)
        p ← (p - lr·scale·d·Q)(1 - lr·weight_decay)                  (or P·d, or P·d·Q)

    In other groups r is g, and d is not projected back. The moments stay when the projection is renewed.

    ``proj_type`` says what is projected: "right" or "left" the one side, "full" both, "std" the shorter, "reverse_std"
    the longer one. :func:`get_galore_param_groups` makes groups of a model.

    One of the ranks that share a matrix, its owner, renews the projection from the unsharded gradient, in two rounds.
    Owners have about equal work. Ranks that replicate a parameter divide the work, too. Moments outlive a renewal and
    depend on the signs of the vectors. These are the signs of ``torch.linalg.svd`` unless ``svd`` is "gram". The host
    waits for the decomposition on the owner, and for nothing in other steps.

    A step has one round more where ranks shard the projected dimension (for r), one for percentile clipping (norms of
    r), and one where ranks share 8-bit blocks, because their shards do not end at multiples of 256 elements (see
    :mod:`bmt_optim.blockwise`). Moments are sharded as the dimension that is kept, and equal on ranks that shard the
    projected one.

    Args:
        params: parameters, or parameter groups, which may set any option and have a ``rank``; then also
            ``update_proj_gap`` (default 200), ``scale`` (0.25) and ``proj_type`` ("std").
        lr, betas, eps, weight_decay: as in the formula.
        nbits: 8 keeps moments in 8 bits, by blocks of 256 elements of the logical tensor; 32 in fp32.
        min_8bit_size: moments with fewer elements, of the logical tensor, are kept in fp32.
        percentile_clipping: below 100, the largest norm of a projected gradient is the percentile of its last 100
            norms (see :func:`~bmt_optim.percentile_clipping.clip_factors`).
        block_wise: must be True. (With one absmax for a tensor, small moments would be rounded to 0.)
        is_paged: keep moments of 100 000 elements and more in page-locked host memory; for parameters on CUDA.
        args: a mapping or an object with ``optim_bits``, ``min_8bit_size``, ``percentile_clipping`` and
            ``block_wise``, which override the arguments of these names.
        correct_bias: False leaves the factor √(1-β₂ᵗ) / (1-β₁ᵗ) out.
        svd: "exact" computes the vectors by ``torch.linalg.svd``, as the authors do; "gram" those of the same subspace
            by eigenvectors of a Gram matrix, in a third to a half of the time (see
            :func:`~bmt_optim.galore_projection.leading_bases`).
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range, or a parameter in a group with a rank that is no matrix.
    """

    layout_options = ("rank", "proj_type", "nbits", "min_8bit_size", "percentile_clipping")
    corrects_eps = False
    """Whether eps is added to √v after its bias has been corrected."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        nbits: int = 8,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        args: Any = None,
        correct_bias: bool = True,
        svd: str = "exact",
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, {**declared(locals()), **_quantisation(args)}, stochastic_rounding)

    # --- parameters and options -------------------------------------------------------------------

    def extra_defaults(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        return _PROJECTION if "rank" in group else {}

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay", "min_8bit_size")
        check_betas(options["betas"], 2)
        if options["nbits"] == 8 and options["lr"] * options["weight_decay"] >= 1:
            raise ValueError(
                f"lr={options['lr']!r} times weight_decay={options['weight_decay']!r} must be less than 1: weights are "
                "multiplied by one minus it"
            )
        if options["nbits"] not in (8, 32):
            raise ValueError(f"nbits={options['nbits']!r} must be 8 or 32")
        if (
            not 1 <= options["percentile_clipping"] <= 100
            or int(options["percentile_clipping"]) != options["percentile_clipping"]
        ):
            raise ValueError(
                f"percentile_clipping={options['percentile_clipping']!r} must be a whole number from 1 to 100 (off)"
            )
        if options["svd"] not in DECOMPOSITIONS:
            raise ValueError(f"svd={options['svd']!r} must be one of {DECOMPOSITIONS}")
        if not options["block_wise"]:
            raise ValueError(
                f"block_wise={options['block_wise']!r} is not supported: with one maximum for a whole tensor, small "
                "moments are lost; leave it True, or keep moments in fp32 with nbits=32"
            )
        if "rank" in options:
            check_whole(options, "rank", "update_proj_gap")
            if not math.isfinite(options["scale"]):
                raise ValueError(f"scale={options['scale']!r} must be finite")
            if options["proj_type"] not in PROJECTIONS:
                raise ValueError(f"proj_type={options['proj_type']!r} must be one of {PROJECTIONS}")

    def cost(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> float:
        """Of the singular value decomposition, about."""
        return 0.0 if "rank" not in options else float(max(shape)) * min(shape) ** 2

    # --- state ------------------------------------------------------------------------------------

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        layout: dict[str, StateTensor] = {}
        if options["percentile_clipping"] < 100:
            layout["gnorm_vec"] = replicated((HISTORY,))
        if "rank" not in options:
            return {**layout, **moments_layout(tuple(range(len(shape))), math.prod(shape), options)}
        if len(shape) != 2:
            raise ValueError(
                f"GaLore projects matrices, and a parameter in a group with rank={options['rank']} has shape {shape}; "
                "give it to a group without a rank"
            )
        side, r = side_of(shape, options["proj_type"]), low_rank(shape, options["rank"])
        for key in BASES[side]:
            layout[key] = basis_layout(key, shape, options["rank"])
        numel = r * math.prod(shape[d] for d in KEPT[side]) if side != "full" else r * r
        return {**layout, **moments_layout(projected_dims(side, r), numel, options)}

    def new_state(
        self, key: str, tensor: StateTensor, shape: tuple[int, ...], device: torch.device, options: Mapping[str, Any]
    ) -> Tensor:
        if options["is_paged"] and device.type == "cuda" and key in ("exp_avg", "exp_avg_sq"):
            paged = host_state(tensor, shape)
            if paged is not None:
                return paged
        return super().new_state(key, tensor, shape, device, options)

    def synchronize(self) -> None:
        """Wait until state in host memory is that after the last step.

        Needed only by those who read ``optimizer.state`` themselves, and only with ``is_paged``.
        """
        paged = {p.device for group in self.param_groups if group["is_paged"] for p in group["params"]}
        for device in paged:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        return super().__getstate__()

    def _own_state_dict(self, gather: bool) -> dict[str, Any]:
        """As :meth:`DistributedOptimizer._own_state_dict`.

        A gathered state has the bases of a projection in ``projector.ortho_matrix``, as galore-torch has them. With
        fp32 moments it loads into ``galore_torch.GaLoreAdamW``.
        """
        self.synchronize()
        state_dict = super()._own_state_dict(gather)
        if gather:
            params = [(p, group) for group in self.param_groups for p in group["params"]]
            for index, entry in state_dict["state"].items():
                param, group = params[index]
                if "rank" in group:
                    side = side_of(slice_of(param).shape, group["proj_type"])
                    entry["projector"] = projector_of([entry.pop(key) for key in BASES[side]], group)
        return state_dict

    def state_records(self, also: Sequence[Tensor] = ()) -> list[StateRecord]:
        """As :meth:`DistributedOptimizer.state_records`."""
        self.synchronize()
        return super().state_records(also)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, at this or any other layout, or galore-torch's.

        Raises:
            ValueError: the dict does not fit; the optimizer is unchanged.
        """
        self.synchronize()
        super().load_state_dict(state_dict)

    def _parse(self, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any] | None]:
        if {"state", "param_groups"} <= set(state_dict):
            state = dict(state_dict["state"])
            for group, saved in zip(self.param_groups, state_dict["param_groups"]):
                options = {**group, **saved}
                for param, key in zip(group["params"], saved["params"]):
                    if key in state:
                        shape = slice_of(param).shape
                        state[key] = _own_terms(state[key], shape, options)
                        _check_bits(state[key], self.state_layout(shape, options), options["nbits"])
            state_dict = {**state_dict, "state": state}
        return super()._parse(state_dict)

    # --- the step ---------------------------------------------------------------------------------

    def rule(self, batch: Batch) -> Rule:
        moments = Moments(
            batch,
            {
                i: self.state_layout(p.where.shape, batch.options)["exp_avg"].part(p.where)
                for i, (p, exp_avg) in enumerate(zip(batch.logical_params, batch.state("exp_avg")))
                if exp_avg.dtype is torch.uint8
            },
            self.corrects_eps,
        )
        return Projected(batch, moments).rule() if "rank" in batch.options else plain_rule(batch, moments)


def _quantisation(args: Any) -> dict[str, Any]:
    """The options that ``args`` replaces."""
    if args is None:
        return {}
    values = dict(args) if isinstance(args, Mapping) else vars(args)
    names = {"optim_bits": "nbits", "nbits": "nbits"}
    names.update({name: name for name in ("min_8bit_size", "percentile_clipping", "block_wise")})
    for name in ("max_unorm", "skip_zeros"):
        if values.get(name):
            raise ValueError(f"{name}={values[name]!r} in args is not supported; leave it out")
    return {names[key]: value for key, value in values.items() if key in names}


def _own_terms(values: Mapping[str, Any], shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter under our names, from that of galore-torch or bitsandbytes."""
    values = {**values, **values.get(_NESTED, {})}
    renamed = {BITSANDBYTES.get(key, key): value for key, value in values.items() if key != _NESTED}
    projector = renamed.pop("projector", None)
    if projector is not None and "rank" in options and len(shape) == 2:
        bases = getattr(projector, "ortho_matrix", None)
        keys = BASES[side_of(shape, options["proj_type"])]
        renamed.update(zip(keys, bases if isinstance(bases, (list, tuple)) else [bases]))
    return renamed


def _check_bits(values: Mapping[str, Any], layout: Mapping[str, StateTensor], nbits: int) -> None:
    """Raise ValueError if there are codes where the layout has numbers, or the reverse."""
    for key in ("exp_avg", "exp_avg_sq"):
        value = values.get(key)
        if isinstance(value, Tensor) and (value.dtype is torch.uint8) != (layout[key].dtype is torch.uint8):
            raise ValueError(
                f"{key} is {value.dtype} in the state dict, and with nbits={nbits} it is {layout[key].dtype} here; "
                "make the optimizer with the nbits and min_8bit_size that the state has"
            )


def get_galore_param_groups(
    model: nn.Module,
    weight_decay: float,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`DistGaloreAdamW`: matrices, which are projected, and the rest.

    Biases and parameters of one dimension (globally), such as those of norms, are not decayed.

    Args:
        model: sharded or not.
        weight_decay: of all other parameters.
        rank, update_proj_gap, scale, proj_type: of the matrices.
    """
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, param in model.named_parameters():
        dims = len(slice_of(param).shape)
        if name.endswith("bias") or dims < 2:
            vectors.append(param)
        else:
            (matrices if dims == 2 else rest).append(param)
    projection = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type}
    return [
        {"params": matrices, **projection, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


GaLoreAdamW = DistGaloreAdamW
