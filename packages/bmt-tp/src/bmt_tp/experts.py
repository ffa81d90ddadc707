"""Expert parallelism: each tensor-parallel rank has some complete experts of a mixture.

[Note: tokens and experts]
    A router gives each token k experts and a weight for each. The rank that has the expert computes a pair of a token
    and an expert, in one of two ways:

    *replicated tokens* (activations are replicated): a rank computes the pairs of its experts, and the ranks' results
    are summed. There is no other communication.

    *split tokens* (activations are split, along the sequence for example): a rank sends its pairs to the experts'
    ranks, all-to-all, and gets their results back. The number of pairs that a rank sends to another differs from step
    to step, so the ranks exchange these numbers first. On a GPU the host waits for them.

    A rank that has no pairs to compute still takes part in all communication, in forward and in backward: its result
    depends on the rows that it received, also if these are empty.

    Lepikhin et al., "GShard", arXiv:2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmt_comm import Communicator, not_compiled

from .parameters import ShardModule, check_integers, divided
from .random import per_rank_random
from .regions import copy_to_ranks, reduce_from_ranks, tensor_comm

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


@not_compiled
def expert_parallel(
    compute: Compute,
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    *,
    split_tokens: bool = False,
    comm: Communicator | None = None,
    parameters: Iterable[Tensor] = (),
) -> Tensor:
    """The weighted sum, for each token, of its experts' results.

    Args:
        compute: this rank's experts, a function of tokens (P, H), indices among this rank's experts (P, 1) and
            weights (P, 1) that returns the weighted results (P, H). It is not called if P is 0. The random numbers
            that it draws differ between ranks.
        tokens: (T, H).
        experts: (T, k), integers: the experts of each token. Rank r has those from r · num_experts / ranks on. Numbers
            outside 0 … num_experts - 1 are ignored; with one rank, ``compute`` gets them.
        weights: (T, k), of the results.
        num_experts: of all ranks.
        split_tokens: whether each rank has tokens of its own, any number of them. Otherwise all have the same.
        comm: the ranks; by default the context's tensor-parallel ones.
        parameters: of this rank's experts. If P is 0 they get gradients of zeros, as on one device.

    Returns:
        (T, H).

    Raises:
        TypeError: ``experts`` are not integers.
        ValueError: the ranks do not divide the experts, or the shapes do not fit together.
    """
    comm = tensor_comm(comm)
    experts_per_rank = divided("num_experts", num_experts, comm)
    if tokens.dim() != 2 or experts.dim() != 2 or experts.shape != weights.shape or len(experts) != len(tokens):
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, experts {tuple(experts.shape)} and weights {tuple(weights.shape)} must "
            f"have the shapes (T, H), (T, k) and (T, k)"
        )
    check_integers("experts", experts)
    expert_of_pair = experts.reshape(-1)
    if split_tokens:
        pairs = expert_of_pair.argsort(stable=True)
        pairs = pairs[(expert_of_pair[pairs] >= 0) & (expert_of_pair[pairs] < num_experts)]
        tokens, weights = _tracked(tokens), _tracked(weights)
    else:
        pairs = (expert_of_pair.div(experts_per_rank, rounding_mode="floor") == comm.rank).nonzero().squeeze(1)
        tokens, weights = copy_to_ranks(_tracked(tokens), comm), copy_to_ranks(_tracked(weights), comm)
    token_of_pair = pairs.div(experts.shape[1], rounding_mode="floor")
    rows, scales = tokens[token_of_pair], weights.reshape(-1, 1)[pairs]
    expert_of_row = expert_of_pair[pairs].unsqueeze(1)
    counts = _Counts.exchange(expert_of_row, experts_per_rank, comm) if split_tokens else None
    if counts is not None:
        (expert_of_row,) = counts.exchanged([expert_of_row])
        rows, scales = _Exchange.apply(counts, rows, scales)
    with per_rank_random(comm, rows.device):  # the ranks draw random numbers for different counts of tokens
        if len(rows):
            results = compute(rows, expert_of_row - comm.rank * experts_per_rank, scales)
        else:  # the result must depend on rows, scales and the experts' parameters
            results = rows * scales
            for param in parameters:
                results = results + param.flatten()[:0].sum().to(results.dtype)
    results = results.to(tokens.dtype)
    if counts is not None:
        (results,) = _Exchange.apply(counts.reversed(), results)
    total = torch.zeros_like(tokens).index_add(0, token_of_pair, results)
    return total if split_tokens else reduce_from_ranks(total, comm)


def _tracked(x: Tensor) -> Tensor:
    """``x``, or its detached copy that requires a gradient, so that every rank's autograd graph has the exchanges."""
    return x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()


class _Counts:
    """How many rows this rank sends to each rank, and receives from each."""

    def __init__(self, sent: Sequence[int], received: Sequence[int], comm: Communicator) -> None:
        self.sent, self.received, self.comm = list(sent), list(received), comm

    @staticmethod
    def exchange(expert_of_row: Tensor, experts_per_rank: int, comm: Communicator) -> _Counts:
        """Count the rows for each rank's experts, and exchange these counts. ``expert_of_row``: (rows, 1)."""
        sent = expert_of_row.squeeze(1).div(experts_per_rank, rounding_mode="floor").bincount(minlength=comm.size)
        rows = comm.stacked(sent, "tokens for experts").tolist()
        return _Counts(rows[comm.rank], [row[comm.rank] for row in rows], comm)

    def reversed(self) -> _Counts:
        return _Counts(self.received, self.sent, self.comm)

    def exchanged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its rows of each of ``tensors``. Returns the rows received, in rank order."""
        comm, sends, recvs, results = self.comm, [], [], []
        for tensor in tensors:
            result = tensor.new_empty(sum(self.received), *tensor.shape[1:])
            outgoing, incoming = tensor.contiguous().split(self.sent), result.split(self.received)
            incoming[comm.rank].copy_(outgoing[comm.rank])
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            sends += [(outgoing[rank], rank) for rank in others if self.sent[rank]]
            recvs += [(incoming[rank], rank) for rank in others if self.received[rank]]
            results.append(result)
        comm.send_recv(sends, recvs, label="tokens for experts")
        return results


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks by ``counts``. The backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, counts: _Counts, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.counts = counts
        return tuple(counts.exchanged(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.counts.reversed().exchanged(grads)


class ExpertParallel(ShardModule):
    """A module of packed experts that holds this rank's experts.

    Attributes:
        all_experts: the number of experts of all ranks.
        split_tokens: whether each rank has tokens of its own.
        comm: the ranks.
    """

    all_experts: int
    split_tokens: bool
    comm: Communicator

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routed = hidden_states, top_k_index, top_k_weights
        if self.comm.size == 1:
            return super().forward(*routed)
        return expert_parallel(
            super().forward,
            *routed,
            self.all_experts,
            split_tokens=self.split_tokens,
            comm=self.comm,
            parameters=self.parameters(),
        )
