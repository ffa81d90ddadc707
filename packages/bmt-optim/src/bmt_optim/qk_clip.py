"""QK clipping: scale down the query and key weights of heads whose attention logits have become too large."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bmt_comm import (
    Communicator,
    current_context,
    is_initialized,
    local_tensor,
    reduce_over,
    slice_of,
    without_autocast,
)

from .slices import row_indices


@dataclass(eq=False)
class _Layer:
    query: list[tuple[Tensor, int]]  # parameters, and the first of their rows that belongs to a head
    key: list[tuple[Tensor, int]]
    heads: int
    kv_heads: int
    head_dim: int
    largest: Tensor | None = None


class QKClip:
    """MuonClip's bound on attention logits (Kimi K2, `arXiv:2507.20534 <https://arxiv.org/abs/2507.20534>`_).

    If the largest logit m of a head in a step is above ``tau``, the rows of its query and key weights are multiplied by
    √(tau/m) each after the step, so that this logit would be ``tau``. Where several heads share a key (grouped
    queries), the key's rows are multiplied by the smallest of these factors, and each query's by the rest of tau/m. The
    products of heads within the bound do not change. It works with any optimizer whose only copies of weights are
    ``master`` and ``z`` in its state, such as all of this package::

        clip = QKClip(optimizer, tau=100.0)
        layer = clip.add([attention.q.weight], [attention.k.weight], heads=16, kv_heads=4, head_dim=64)
        clip.record(layer, largest_logits(query, key))     # in every forward pass, in the attention
        manager.step()
        clip.step()

    Parameters may be sharded in any way. Latent attention, whose keys share rows among heads, is not supported.

    Args:
        optimizer: of the parameters; its fp32 masters are scaled as the parameters are.
        tau: the largest logit allowed, above 0.
        comm: the ranks that agree on the largest logits. Default: all ranks of the pipeline stage.

    Raises:
        ValueError: ``tau`` is not positive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tau: float = 100.0, comm: Communicator | None = None) -> None:
        if not 0 < tau < math.inf:
            raise ValueError(f"tau={tau!r} must be finite and positive")
        self.optimizer = optimizer
        self.tau = tau
        self.comm = current_context().zero if comm is None and is_initialized() else comm
        self._layers: list[_Layer] = []

    def add(
        self,
        query: Iterable[Tensor],
        key: Iterable[Tensor],
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        query_row: int = 0,
        key_row: int = 0,
    ) -> int:
        """Add an attention layer; all ranks of a stage add the same layers in the same order.

        Args:
            query, key: weights, and biases if there are any, with ``head_dim`` rows per head.
            heads, kv_heads: of queries and of keys (default: as many), of the whole model.
            head_dim: rows of a head.
            query_row, key_row: the first row of queries and keys; above 0 in a fused weight.

        Returns:
            The number of the layer, for :meth:`record`.

        Raises:
            ValueError: a parameter has too few rows, or ``kv_heads`` does not divide ``heads``.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads!r} must divide heads={heads!r}")
        sides = [(p, query_row, heads) for p in query], [(p, key_row, kv_heads) for p in key]
        for p, row, count in (*sides[0], *sides[1]):
            if row + count * head_dim > slice_of(p).shape[0]:
                raise ValueError(
                    f"{count} heads of head_dim={head_dim} from row {row} are not in a parameter of shape "
                    f"{slice_of(p).shape}"
                )
        queries, keys = ([(p, row) for p, row, _ in side] for side in sides)
        self._layers.append(_Layer(queries, keys, heads, kv_heads, head_dim))
        return len(self._layers) - 1

    @torch.no_grad()
    def record(self, layer: int, logits: Tensor, first_head: int = 0) -> None:
        """Record the largest logits of a forward pass, (heads,). The host does not wait for them.

        Args:
            layer: its number.
            logits: one per head that this rank has computed.
            first_head: the first of these; above 0 on tensor-parallel ranks.
        """
        mine = self._layers[layer]
        if mine.largest is None:
            mine.largest = torch.full((mine.heads,), -math.inf, dtype=torch.float32, device=logits.device)
        here = mine.largest[first_head : first_head + len(logits)]
        torch.maximum(here, logits.detach().float().nan_to_num(-math.inf, -math.inf, -math.inf), out=here)

    @torch.no_grad()
    def step(self) -> None:
        """Scale the heads above the bound, and drop the logits. A collective over ``comm``, after each step."""
        if not self._layers:
            return
        if hasattr(self.optimizer, "synchronize"):  # its master weights may be on their way to host memory
            self.optimizer.synchronize()
        device = local_tensor(self._layers[0].query[0][0]).device
        nothing = torch.full((), -math.inf, dtype=torch.float32, device=device)
        logits = [nothing.expand(x.heads) if x.largest is None else x.largest.to(device) for x in self._layers]
        largest = torch.cat(logits)
        if self.comm is not None:
            reduce_over(largest, (self.comm,), "max")
        factors = torch.where(largest > self.tau, self.tau / largest, 1.0)
        for layer, mine in zip(self._layers, factors.split([x.heads for x in self._layers])):
            layer.largest = None
            keys = mine.view(layer.kv_heads, -1).amin(dim=1).sqrt()
            queries = (mine.view(layer.kv_heads, -1) / keys[:, None]).flatten()
            for params, scales in ((layer.query, queries), (layer.key, keys)):
                for param, row in params:
                    self._scale(param, scales.repeat_interleave(layer.head_dim), row)

    def _scale(self, param: Tensor, scales: Tensor, first: int) -> None:
        """Multiply the rows of ``param`` from the ``first`` on."""
        where, local = slice_of(param), local_tensor(param)
        per_row = torch.ones(where.shape[0], dtype=torch.float32, device=scales.device)
        per_row[first : first + len(scales)] = scales
        mine = per_row[row_indices(where, scales.device)].view(-1, *[1] * (local.dim() - 1))
        state = self.optimizer.state.get(param, {})
        for value in (state[key] for key in ("master", "z") if key in state):  # z: of ScheduleFreeAdamW
            value.mul_(mine.to(value.device))
        if "master" in state:
            local.copy_(state["master"])
        else:
            local.mul_(mine)


@torch.no_grad()
@without_autocast()  # which would multiply in fp16
def largest_logits(query: Tensor, key: Tensor, scale: float | None = None, causal: bool = True) -> Tensor:
    """The largest attention logit of each head, fp32 (heads,). It takes one more matrix product per sequence.

    Args:
        query: (B, heads, S, D), after rotary embedding.
        key: (B, kv_heads, T, D); ``kv_heads`` divides ``heads``.
        scale: of the products; ``None``: 1/√D.
        causal: positions do not see later ones; the last of the S is the last of the T.
    """
    dtype = torch.promote_types(query.dtype, key.dtype)
    if dtype is torch.float16:  # in which logits above 65504 are inf
        dtype = torch.float32
    largest = query.new_full((query.shape[1],), -math.inf, dtype=torch.float32)
    for q, k in zip(query, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)):
        q, k = q.to(dtype), k.to(dtype)
        logits = (q * (q.shape[-1] ** -0.5 if scale is None else scale) @ k.mT).float()
        if causal:
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
            logits.masked_fill_(hidden.triu_(1 + logits.shape[-1] - logits.shape[-2]), -math.inf)
        largest = torch.maximum(largest, logits.amax(dim=(-2, -1)))
    return largest
