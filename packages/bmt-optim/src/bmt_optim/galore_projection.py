"""The projection of GaLore: the sides of a gradient that are projected, the bases, and their form in a state dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .state_layout import Size, StateTensor

PROJECTIONS = ("std", "reverse_std", "left", "right", "full")
Side = Literal["left", "right", "full"]
DECOMPOSITIONS = ("exact", "gram")
SIDES: tuple[Side, ...] = ("left", "right", "full")
CONTRACTED: dict[Side, tuple[int, ...]] = {"left": (0,), "right": (1,), "full": (0, 1)}
"""The dimensions of a gradient that its projection sums over."""
KEPT: dict[Side, tuple[int, ...]] = {"left": (1,), "right": (0,), "full": ()}
"""The dimensions of a gradient that the projected one still has."""
BASES: dict[Side, tuple[str, ...]] = {
    "left": ("ortho_left",),
    "right": ("ortho_right",),
    "full": ("ortho_left", "ortho_right"),
}
"""The state tensors that the projection consists of: ``ortho_left`` is (m, r), ``ortho_right`` (r, n)."""


def side_of(shape: Sequence[int], proj_type: str) -> Side:
    """Which side of a gradient of ``shape`` (m, n) is projected.

    "std" projects the shorter one, and "reverse_std" the longer one: of a square gradient the right and the left.
    """
    if proj_type == "std":
        return "right" if shape[0] >= shape[1] else "left"
    if proj_type == "reverse_std":
        return "left" if shape[0] >= shape[1] else "right"
    for side in SIDES:
        if proj_type == side:
            return side
    raise ValueError(f"proj_type={proj_type!r} must be one of {PROJECTIONS}")


def low_rank(shape: Sequence[int], rank: int) -> int:
    """The rank r of a projection of a gradient of ``shape``: at most its shorter side."""
    return min(rank, *shape)


def basis_shape(key: str, shape: Sequence[int], rank: int) -> tuple[int, int]:
    """The shape of ``ortho_left`` or ``ortho_right`` for a gradient of ``shape``."""
    r = low_rank(shape, rank)
    return (shape[0], r) if key == "ortho_left" else (r, shape[1])


def basis_layout(key: str, shape: Sequence[int], rank: int) -> StateTensor:
    """The layout of ``ortho_left`` or ``ortho_right``: sharded as the dimension of the parameter that it has."""
    r = Size(low_rank(shape, rank))
    return StateTensor((0, r) if key == "ortho_left" else (r, 1))


def projected_dims(side: Side, r: int) -> tuple[int | Size, ...]:
    """The dimensions of a projected gradient, for a :class:`StateTensor`."""
    by_side: dict[Side, tuple[int | Size, ...]] = {
        "left": (Size(r), 1),
        "right": (0, Size(r)),
        "full": (Size(r), Size(r)),
    }
    return by_side[side]


def leading_bases(gradient: Tensor, rank: int, side: Side, svd: str = "exact") -> dict[str, Tensor]:
    """Orthonormal bases of the r leading left, or right, singular vectors of an unsharded gradient.

    With "exact" their signs are those that ``torch.linalg.svd`` gives. "gram" computes eigenvectors of the Gram matrix
    of the shorter side, whose largest components are positive. They are as accurate as fp32's singular value
    decomposition where the r-th singular value is at least about a hundredth of the first. Where it is less than a
    thousandth, the last vectors are lost in rounding errors.

    A gradient that is not finite gives bases of NaN, and no error, which only the owner would raise. On CUDA the host
    waits, because the decomposition needs it.

    Args:
        gradient: fp32, (m, n). Only read.
    """
    r = low_rank(gradient.shape, rank)
    try:
        if svd == "gram":
            left, right = _by_gram(gradient, r, side)
        else:
            left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    except torch.linalg.LinAlgError:
        left, right = _in_double(gradient)
    bases = {"ortho_left": left[:, :r], "ortho_right": right[:r]}
    return {key: bases[key].float().contiguous() for key in BASES[side]}


def _by_gram(gradient: Tensor, r: int, side: Side) -> tuple[Tensor, Tensor]:
    """The r leading left vectors, (m, r), and right ones, (r, n); those of a longer side only if it is projected."""
    g = gradient / gradient.abs().max().clamp(
        min=torch.finfo(gradient.dtype).tiny
    )  # so that squares do not overflow in fp32
    tall = g.shape[0] >= g.shape[1]
    if not tall:
        g = g.T
    _, vectors = torch.linalg.eigh((g.T @ g).double())
    short = _with_signs(vectors[:, -r:].flip(1).float())
    needed = side == "full" or (side == "left") == tall
    long = _with_signs(torch.linalg.qr(g @ short)[0]) if needed else short
    return (long, short.T) if tall else (short, long.T)


def _with_signs(vectors: Tensor) -> Tensor:
    """Columns with signs that make their largest components positive. A small change of a column keeps its sign."""
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def _in_double(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The singular vectors computed in fp64, after fp32 has not converged; NaN if fp64 does not converge either."""
    try:
        left, _, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    except torch.linalg.LinAlgError:
        m, n = gradient.shape
        nan = gradient.new_full((), torch.nan)
        return nan.expand(m, min(m, n)), nan.expand(min(m, n), n)
    return left, right


class GaLoreProjector:
    """The value of ``projector`` in a full state dict, with the attributes of galore-torch's class of this name.

    galore-torch's optimizers can go on with it, because it projects as theirs does.

    Attributes:
        rank, update_proj_gap, scale, proj_type: of the parameter group.
        ortho_matrix: (m, r) for the left side, (r, n) for the right one; for "full" a list of both; or ``None``.
    """

    def __init__(
        self,
        rank: int,
        verbose: bool = False,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        proj_type: str = "std",
    ) -> None:
        self.rank = rank
        self.verbose = verbose
        self.update_proj_gap = update_proj_gap
        self.scale = scale
        self.proj_type = proj_type
        self.ortho_matrix: Tensor | list[Tensor] | None = None
        self._side: Side | None = None

    def project(self, full_rank_grad: Tensor, iter: int) -> Tensor:
        """The projected gradient; every ``update_proj_gap`` steps, counted from 0, by new bases."""
        self._side = side_of(full_rank_grad.shape, self.proj_type)
        if self.ortho_matrix is None or iter % self.update_proj_gap == 0:
            bases = list(leading_bases(full_rank_grad.float(), self.rank, self._side).values())
            self.ortho_matrix = bases if self._side == "full" else bases[0]
        low = full_rank_grad
        for key, basis in zip(BASES[self._side], self._bases(full_rank_grad)):
            low = basis.T @ low if key == "ortho_left" else low @ basis.T
        return low

    def project_back(self, low_rank_grad: Tensor) -> Tensor:
        """From the last gradient's projection to its shape, times ``scale``.

        Raises:
            RuntimeError: nothing has been projected yet.
        """
        if self._side is None:
            raise RuntimeError("project_back needs the shape of a gradient; call project first")
        full = low_rank_grad
        for key, basis in zip(BASES[self._side], self._bases(low_rank_grad)):
            full = basis @ full if key == "ortho_left" else full @ basis
        return full * self.scale

    def _bases(self, like: Tensor) -> list[Tensor]:
        bases = self.ortho_matrix if isinstance(self.ortho_matrix, list) else [self.ortho_matrix]
        return [basis.to(like) for basis in bases if basis is not None]


def projector_of(bases: Sequence[Tensor], options: dict[str, Any]) -> GaLoreProjector:
    """The object for a state dict."""
    projector = GaLoreProjector(
        options["rank"],
        update_proj_gap=options["update_proj_gap"],
        scale=options["scale"],
        proj_type=options["proj_type"],
    )
    projector.ortho_matrix = list(bases) if len(bases) > 1 else bases[0]
    return projector


# ``torch.load(..., weights_only=True)`` of a gathered state refuses classes that are not registered.
torch.serialization.add_safe_globals([GaLoreProjector])
