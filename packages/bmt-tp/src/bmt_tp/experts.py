"""Experts of a mixture, of which each tensor-parallel rank has some, whole (expert parallelism).

[Note: tokens and experts]
    A router gives each token k experts and a weight for each. A pair of a token and an expert is computed on the rank
    that has the expert, in one of two ways:

    *tokens on every rank* (activations are whole): a rank computes the pairs of its experts, and the ranks' results
    are summed. Nothing else is communicated.

    *tokens split over the ranks* (activations are split, along the sequence for example): a rank sends its pairs to the
    experts' ranks, all-to-all, and gets their results back. How many pairs a rank sends to each of the others differs
    from step to step, so the ranks tell each other first. On a GPU the host waits for these numbers.

    A rank may have no pairs to compute. It takes part in all communication nevertheless, in forward and in backward:
    what it returns depends on what it has got, also where that is empty.

    Lepikhin et al., "GShard", arXiv:2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmt_comm import Communicator, not_compiled

from .parameters import PieceModule, divided
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
    """The sum, for each token, of what its experts compute, weighted.

    Args:
        compute: this rank's experts: tokens (P, H), numbers of experts among this rank's (P, 1) and weights (P, 1) to
            the weighted results (P, H). It is not called where P is 0. The random numbers that it draws
            differ between ranks.
        tokens: (T, H).
        experts: (T, k), integers: the experts of each token. Rank r has those from r · num_experts / ranks on. Numbers
            that no expert has are left out; one rank alone gives them to ``compute``.
        weights: (T, k), of the results.
        num_experts: of all ranks.
        split_tokens: whether each rank has tokens of its own, any number of them. Otherwise all have the same.
        comm: the ranks; by default the context's tensor-parallel ones.
        parameters: of this rank's experts. They get gradients, of zeros, also where P is 0, as on one device.

    Returns:
        (T, H).

    Raises:
        ValueError: the ranks do not divide the experts, or the shapes do not fit together.
    """
    comm = tensor_comm(comm)
    held = divided("num_experts", num_experts, comm)
    if tokens.dim() != 2 or experts.dim() != 2 or experts.shape != weights.shape or len(experts) != len(tokens):
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, experts {tuple(experts.shape)} and weights {tuple(weights.shape)} must "
            f"have the shapes (T, H), (T, k) and (T, k)"
        )
    of_pair = experts.reshape(-1)
    if split_tokens:
        pairs = of_pair.argsort(stable=True)
        pairs = pairs[(of_pair[pairs] >= 0) & (of_pair[pairs] < num_experts)]  # others belong to no expert
        tokens, weights = _tracked(tokens), _tracked(weights)
    else:
        pairs = (of_pair.div(held, rounding_mode="floor") == comm.rank).nonzero().squeeze(1)
        tokens, weights = copy_to_ranks(_tracked(tokens), comm), copy_to_ranks(_tracked(weights), comm)
    of_token = pairs.div(experts.shape[1], rounding_mode="floor")
    rows, scales, numbers = tokens[of_token], weights.reshape(-1, 1)[pairs], of_pair[pairs].unsqueeze(1)
    counts = _Counts.exchange(numbers, held, comm) if split_tokens else None
    if counts is not None:
        (numbers,) = counts.exchanged([numbers])
        rows, scales = _Exchange.apply(counts, rows, scales)
    with per_rank_random(comm, rows.device):  # each rank draws numbers for as many tokens as it has got
        if len(rows):
            results = compute(rows, numbers - comm.rank * held, scales)
        else:  # the result depends on them, and on the experts, nevertheless
            results = rows * scales
            for param in parameters:
                results = results + param.flatten()[:0].sum().to(results.dtype)
    results = results.to(tokens.dtype)
    if counts is not None:
        (results,) = _Exchange.apply(counts.reversed(), results)
    total = torch.zeros_like(tokens).index_add(0, of_token, results)
    return total if split_tokens else reduce_from_ranks(total, comm)


def _tracked(x: Tensor) -> Tensor:
    """``x``, such that autograd records what is computed with it on every rank, also where no expert is used."""
    return x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()


class _Counts:
    """How many rows this rank sends to each rank, and gets from each."""

    def __init__(self, sent: Sequence[int], received: Sequence[int], comm: Communicator) -> None:
        self.sent, self.received, self.comm = list(sent), list(received), comm

    @staticmethod
    def exchange(numbers: Tensor, held: int, comm: Communicator) -> _Counts:
        """Tell the ranks how many of ``numbers``, those of experts, are theirs."""
        sent = numbers.squeeze(1).div(held, rounding_mode="floor").bincount(minlength=comm.size)
        table = sent.new_empty(comm.size, comm.size)
        comm.all_gather(table, sent, label="tokens for experts")
        rows = table.tolist()
        return _Counts(rows[comm.rank], [row[comm.rank] for row in rows], comm)

    def reversed(self) -> _Counts:
        return _Counts(self.received, self.sent, self.comm)

    def exchanged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its rows of each of ``tensors``; what comes from the ranks, in their order."""
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
    """Rows go to the ranks as ``counts`` says, and their gradients come back."""

    @staticmethod
    def forward(ctx: Any, counts: _Counts, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.counts = counts
        return tuple(counts.exchanged(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.counts.reversed().exchanged(grads)


class ExpertParallel(PieceModule):
    """A module of packed experts that has this rank's.

    Attributes:
        all_experts: how many the ranks have together.
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
