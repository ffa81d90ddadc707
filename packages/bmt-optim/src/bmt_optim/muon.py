"""Muon: orthogonalised momentum. One of the ranks that share a matrix gathers and orthogonalises it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import Slice, slice_of

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .logical_params import LogicalParam
from .moments import adamw_rule
from .options import check_betas, check_not_negative, check_whole, declared, is_whole
from .requests import GatherToOwner, Rule, Scatter
from .state_layout import StateTensor, like_parameter

_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
"""Options of a group without Muon that it need not name, as in the author's ``MuonWithAuxAdam``."""
Triple = tuple[float, float, float]
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_SENT_DTYPE = torch.bfloat16
"""In which updates are gathered to the owners of matrices, and results scattered."""

_MIN_SYMMETRIC_ROWS = 1024
"""From this number of rows on, :func:`_symmetric_product` takes a sixth to a quarter less time, in fp32 on the CPU."""
_SAFE = [1.01**2, *[1.01] * 6]  # the expected numbers are smaller by these factors; the first is for the norm, too
POLAR_EXPRESS: tuple[Triple, ...] = (
    *((a / safe, b / safe**3, c / safe**5) for (a, b, c), safe in zip(_POLAR_EXPRESS, _SAFE)),
    (1.875, -1.25, 0.375),
)
"""``ns_coefficients`` of Polar Express (Amsel et al., `arXiv:2505.16932 <https://arxiv.org/abs/2505.16932>`_).

They are those of its algorithm 1, the best for each step, and include its margin for rounding."""


class Muon(DistributedOptimizer):
    """Muon (Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_), as ``torch.optim.Muon``.

    For each matrix, of the shape (R, C)::

        b ← momentum·b + (1-momentum)·g
        u = momentum·b + (1-momentum)·g     if nesterov, else b
        p ← p(1 - lr·weight_decay) - lr·adjusted·orthogonalised(u)

    :func:`orthogonalised` is the Newton-Schulz iteration, in bf16. ``adjusted`` is √max(1, R/C) for "original" (and
    ``None``) and 0.2·√max(R, C) for "match_rms_adamw" (Liu et al., `arXiv:2502.16982
    <https://arxiv.org/abs/2502.16982>`_).

    A parameter of three dimensions (experts, R, C) is one matrix per expert. A parameter of more dimensions is a
    convolution's weight (out, in, …), and is the matrix (out, rest). ``parts`` is the number of matrices of equal
    height that the rows of one are divided into, such as the three of a fused QKV weight, or its heads.

    Groups with ``use_muon=False`` have AdamW: for embeddings, the output head and vectors (see
    :func:`get_muon_param_groups`). Their options are ``lr`` (3e-4 unless given), ``betas`` (0.9, 0.95), ``eps`` (1e-10)
    and ``weight_decay`` (0).

    A step has two rounds: u is gathered to the matrix's owner in bf16. The owner orthogonalises it and scatters the
    result. Owners have about equal numbers of floating-point operations. A matrix that one rank holds (also a head or
    an expert) is orthogonalised there and not sent. Ranks that replicate a parameter (ZeRO-0, hybrid sharding; DDP
    after :meth:`~DistributedOptimizer.share_with_replicas`) divide its matrices among them, and send results in bf16.

    Args:
        params: parameters of two dimensions (globally) or more, or groups.
        lr, weight_decay, momentum, nesterov: as in the formula.
        ns_coefficients, eps, ns_steps: see :func:`orthogonalised`.
        adjust_lr_fn: "original", "match_rms_adamw" or ``None``.
        parts: the number of matrices that the rows of one matrix are divided into.
        use_muon: False: AdamW.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range, or a parameter that is no matrix.
    """

    sums_over_ranks = False
    keeps_copies = False
    layout_options = ("use_muon", "parts")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Triple | Sequence[Triple] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        parts: int = 1,
        use_muon: bool = True,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def extra_defaults(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        return {} if group.get("use_muon", self.defaults["use_muon"]) else _ADAM

    def counts_steps(self, options: Mapping[str, Any]) -> bool:
        """As :meth:`DistributedOptimizer.counts_steps`."""
        return not options["use_muon"]

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "weight_decay", "momentum", "eps")
        if not options["use_muon"]:
            check_betas(options.get("betas", ()), 2)
        if any(len(triple) != 3 for triple in _triples(options["ns_coefficients"])):
            raise ValueError(f"ns_coefficients={options['ns_coefficients']!r} must be three numbers, or lists of three")
        if not is_whole(options["ns_steps"]) or not 0 <= options["ns_steps"] < 100:
            raise ValueError(f"ns_steps={options['ns_steps']!r} must be a whole number from 0 to 99")
        if options["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn={options['adjust_lr_fn']!r} must be one of {_ADJUSTMENTS}")
        check_whole(options, "parts")
        for param in options["params"] if options["use_muon"] else ():
            _check_matrices(slice_of(param).shape, options["parts"])

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        keys = ("momentum_buffer",) if options["use_muon"] else ("exp_avg", "exp_avg_sq")
        return {key: like_parameter(shape) for key in keys}

    def cost(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> float:
        """Floating-point operations of :func:`orthogonalised`."""
        if not options["use_muon"]:
            return 0.0
        count, *sides = _matrices(shape, options["parts"])
        small, large = sorted(sides)
        return options["ns_steps"] * (4.0 * small * small * large + 2.0 * small**3) * count

    def height(self, where: Slice, options: Mapping[str, Any]) -> int:
        """The rows of a head or an expert: each is a matrix of its own."""
        if not options["use_muon"]:
            return 0
        count, rows = _matrices(where.shape, options["parts"])[0], where.tp_shard_rows
        if rows == where.shape[0] and len(where.shape) == 3:  # a row is an expert
            count = where.shape[0]
        return rows // count if count > 1 else 0

    def rule(self, batch: Batch) -> Rule:
        return self._muon(batch) if batch.options["use_muon"] else adamw_rule(batch)

    def _muon(self, batch: Batch) -> Rule:
        options, params = batch.options, batch.logical_params
        momentum, buffers = options["momentum"], batch.state("momentum_buffer")
        updates = []
        for i, buffer in enumerate(buffers):
            grad = batch.fp32_grad(i)
            average = torch.lerp(buffer, grad, 1 - momentum)
            update = torch.lerp(grad, average, momentum) if options["nesterov"] else average
            updates.append(update.to(_SENT_DTYPE))
        parts = [logical.parts or [logical] for logical in params]
        flat = [part for of_param in parts for part in of_param]
        shards = [shard for update, of_param in zip(updates, parts) for shard in _split_by_parts(update, of_param)]
        (gathered,) = yield [GatherToOwner(shards, flat)]
        for i, buffer in enumerate(buffers):
            buffer.lerp_(batch.fp32_grad(i), 1 - momentum)
        settings = options["ns_coefficients"], options["ns_steps"], options["eps"]
        sizes = [_matrices(p.where.shape, options["parts"]) for p in params]
        remaining = iter(gathered)
        results: list[Tensor | None] = []
        for size, of_param in zip(sizes, parts):
            results += _orthogonalised_parts([next(remaining) for _ in of_param], size, settings)
        (scattered,) = yield [Scatter(results, flat, _SENT_DTYPE)]
        remaining = iter(scattered)
        for i, (update, of_param) in enumerate(zip(updates, parts)):
            taken = [next(remaining).reshape(-1) for _ in of_param]
            updates[i] = (taken[0] if len(taken) == 1 else torch.cat(taken)).view(update.shape)
        lr = float(options["lr"])
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                weight.mul_(1 - lr * options["weight_decay"])
                weight.add_(updates[i], alpha=-lr * _adjustment(options["adjust_lr_fn"], *sizes[i][1:]))


def orthogonalised(
    matrix: Tensor,
    coefficients: Triple | Sequence[Triple] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """An approximation of U·Vᵀ, where U·S·Vᵀ is the singular value decomposition of ``matrix``.

    With (a, b, c) = ``coefficients``, X = ``matrix`` divided by its norm (by ``eps`` if that is larger), and ``steps``
    times X ← aX + (bA + cA²)X where A = XXᵀ. The default coefficients leave singular values between about 0.5 and
    1.5, and take the fewest steps. They may differ by step: a sequence, such as :data:`POLAR_EXPRESS`, whose last
    element further steps repeat.

    Args:
        matrix: of shape (R, C), or several, (matrices, R, C). Only read.

    Returns:
        bf16, of the same shape.
    """
    triples = _triples(coefficients)
    x = matrix.to(_product_dtype(matrix.device), copy=True)
    tall = matrix.shape[-2] > matrix.shape[-1]
    if tall:
        x = x.mT
    batched = x.dim() == 3
    add = torch.baddbmm if batched else torch.addmm
    x.div_((x.norm(dim=(-2, -1), keepdim=True) if batched else x.norm()).clamp(min=eps))
    symmetric = x.dtype is torch.float32 and x.device.type == "cpu" and x.shape[-2] >= _MIN_SYMMETRIC_ROWS
    for step in range(steps):
        a, b, c = triples[min(step, len(triples) - 1)]
        if symmetric:
            gram = _symmetric_product(x, x.mT)
            gram = _symmetric_product(gram, gram).mul_(c).add_(gram, alpha=b)
        else:
            gram = x @ x.mT
            gram = add(gram, gram, gram, beta=b, alpha=c)
        x = add(x, gram, x, beta=a)
    return (x.mT if tall else x).to(_SENT_DTYPE).reshape(matrix.shape)


def _symmetric_product(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``, which is symmetric. Only five eighths are computed: rows of blocks up to the diagonal."""
    rows = x.shape[-2]
    height = -(-rows // 4)
    product = x.new_empty(*x.shape[:-1], rows)
    for start in range(0, rows, height):
        stop = min(start + height, rows)
        strip = x[..., start:stop, :] @ y[..., :stop]
        product[..., start:stop, :stop] = strip
        product[..., :start, start:stop] = strip[..., :start].mT
    return product


def _split_by_parts(update: Tensor, parts: Sequence[LogicalParam]) -> list[Tensor]:
    """The local values of a parameter, by its parts."""
    sizes = [part.where.numel for part in parts]
    return [shard.view(part.where.local_shape) for shard, part in zip(update.reshape(-1).split(sizes), parts)]


def _orthogonalised_parts(
    parts: Sequence[Tensor | None], size: tuple[int, int, int], settings: tuple[Any, ...]
) -> list[Tensor | None]:
    """The parts of a parameter that this rank owns, orthogonalised in one batch; ``None`` for the others."""
    here = [part for part in parts if part is not None]
    if not here or not here[0].numel():
        return [None if part is None else part.to(_SENT_DTYPE) for part in parts]
    stacked = torch.stack(here)
    results = orthogonalised(stacked.view(size[1:] if size[0] == 1 else (-1, *size[1:])), *settings)
    remaining = iter(results.reshape(stacked.shape))
    return [None if part is None else next(remaining) for part in parts]


def _triples(coefficients: Triple | Sequence[Triple]) -> Sequence[Sequence[float]]:
    if coefficients and isinstance(coefficients[0], Sequence):
        return coefficients  # type: ignore[return-value]
    return [coefficients]  # type: ignore[list-item]


def _check_matrices(shape: Sequence[int], parts: int) -> None:
    if len(shape) < 2:
        raise ValueError(
            f"Muon takes matrices, and a parameter has shape {shape}; give it to a group with use_muon=False"
        )
    if shape[1 if len(shape) == 3 else 0] % parts:
        raise ValueError(f"parts={parts} must divide the rows of a parameter of shape {shape}")


def _matrices(shape: Sequence[int], parts: int) -> tuple[int, int, int]:
    """The number of matrices of a parameter, and the rows and columns of each."""
    experts, rows = (shape[0], shape[1]) if len(shape) == 3 else (1, shape[0])
    return experts * parts, rows // parts, math.prod(shape[2 if len(shape) == 3 else 1 :])


def _product_dtype(device: torch.device) -> torch.dtype:
    """bf16, or fp32 on CPUs without fast matrix products in bf16, where bf16 takes about 40 times as long."""
    if device.type != "cpu":
        return torch.bfloat16
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _adjustment(name: str | None, rows: int, columns: int) -> float:
    if not rows or not columns:
        return 1.0
    return 0.2 * math.sqrt(max(rows, columns)) if name == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def get_muon_param_groups(
    model: nn.Module, adam: Mapping[str, Any] | None = None, also_adam: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`Muon`: the hidden matrices; embeddings and the output head; vectors.

    Embeddings are the parameters of modules whose class is named ``…Embedding…``. A matrix of the shape of the largest
    of them is an output head. AdamW steps them, parameters of three dimensions without "expert" in their names
    (position embeddings of images, weights of ``Conv1d``), and vectors. Vectors are not decayed.

    Args:
        model: sharded or not.
        adam: options of the AdamW groups (see :class:`Muon`).
        also_adam: parts of the names of further parameters for AdamW.
    """
    modules = [m for m in model.modules() if "Embedding" in type(m).__name__]
    embeddings = {id(p): slice_of(p).shape for m in modules for p in m.parameters(recurse=False)}
    vocabulary = max((shape for shape in embeddings.values() if len(shape) == 2), default=None)
    hidden: list[Tensor] = []
    ends: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, param in model.named_parameters():
        shape = slice_of(param).shape
        at_end = id(param) in embeddings or shape == vocabulary or any(part in name for part in also_adam)
        at_end |= len(shape) == 3 and "expert" not in name.lower()
        (vectors if len(shape) < 2 else ends if at_end else hidden).append(param)
    rest = {"use_muon": False, **(adam or {})}
    return [
        {"params": hidden, "use_muon": True},
        {"params": ends, **rest},
        {"params": vectors, **rest, "weight_decay": 0.0},
    ]
