"""Attention over a sequence that is split over the ranks: each rank computes some of the heads (Ulysses).

The rest of a layer computes with this rank's part of the sequence. Before the attention an all-to-all exchange reshards
queries, keys and values: from a part of the sequence and all heads to the whole sequence and a part of the heads. After
it another exchange reshards the result back. With n ranks an exchange sends (n - 1)/n of a rank's activation.

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from bmt_comm import Communicator, not_compiled

from .regions import split_along, tensor_comm

HEADS, SEQUENCE = 1, 2  # dimensions of queries, keys and values: (B, heads, S, head size)


@not_compiled
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    enable_gqa: bool = False,
    comm: Communicator | None = None,
    **options: Any,
) -> Tensor:
    """``F.scaled_dot_product_attention`` over a sequence that is split over the n ranks.

    Args:
        query: (B, heads, S/n, head size): this rank's part of the sequence. Parts are in rank order.
        key, value: the same, or with fewer heads (``enable_gqa``). If the ranks do not divide these, they are repeated.
        args, options: of ``F.scaled_dot_product_attention``. A mask must be that of the whole sequence, and the same
            for all heads.
        enable_gqa: whether several query heads share one key and value head.
        comm: the ranks; by default the context's tensor-parallel ones.

    Returns:
        (B, heads, S/n, head size).

    Raises:
        ValueError: the ranks do not divide the heads, or masks differ by head.
    """
    comm = tensor_comm(comm)
    if query.dim() != 4 or query.shape[HEADS] % comm.size:
        raise ValueError(
            f"query has the shape {tuple(query.shape)}; it must be (B, heads, S, head size), with heads that "
            f"{comm.size} ranks divide"
        )
    mask = args[0] if args else options.get("attn_mask")
    if mask is not None and mask.dim() >= 3 and mask.shape[-3] != 1:
        raise ValueError(f"attn_mask has the shape {tuple(mask.shape)}; it must be the same for all heads")
    if key.shape[HEADS] % comm.size:
        repeats = query.shape[HEADS] // key.shape[HEADS]
        key, value = (x.repeat_interleave(repeats, HEADS) for x in (key, value))
    query, key, value = (_Exchange.apply(x, HEADS, SEQUENCE, comm) for x in (query, key, value))
    options["enable_gqa"] = enable_gqa
    result = F.scaled_dot_product_attention(query, key, value, *args, **options)
    return _Exchange.apply(result, SEQUENCE, HEADS, comm)


class _Exchange(torch.autograd.Function):
    """Splits the dimension ``split`` over the ranks, and gathers the dimension ``gather``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, gather: int, comm: Communicator) -> Tensor:
        ctx.split, ctx.gather, ctx.comm = split, gather, comm
        return _exchanged(x, split, gather, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.gather, ctx.split, ctx.comm), None, None, None


def _exchanged(x: Tensor, split: int, gather: int, comm: Communicator) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(comm.size, split)]
    received = [part if rank == comm.rank else torch.empty_like(part) for rank, part in enumerate(parts)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    comm.send_recv([(parts[rank], rank) for rank in others], [(received[rank], rank) for rank in others])
    return torch.cat(received, gather)


class UlyssesModule:
    """Hooks that replace ``F.scaled_dot_product_attention`` by :func:`ulysses_attention` in a module's forward.

    They split the module's ``position_embeddings`` and ``position_ids`` along the sequence.
    """

    def __init__(self, comm: Communicator, sequence_dim: int, name: str) -> None:
        self.comm, self.sequence_dim, self.name = comm, sequence_dim, name
        self._modes: list[_Mode] = []

    def register(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        for name in ("position_embeddings", "position_ids"):
            if kwargs.get(name) is not None:
                kwargs[name] = tree_map_only(Tensor, self._split, kwargs[name])
        self._modes.append(_Mode(self.comm, self.name))
        self._modes[-1].__enter__()
        return args, kwargs

    def _split(self, x: Tensor) -> Tensor:
        return split_along(x, self.sequence_dim, self.comm)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        mode = self._modes.pop()
        mode.__exit__(None, None, None)
        if output is not None and not mode.calls:
            raise RuntimeError(
                f"{self.name!r}, which the plan has as 'ulysses', has not called F.scaled_dot_product_attention; "
                "choose that attention (attn_implementation='sdpa' for a model of transformers)"
            )


class _Mode(TorchFunctionMode):
    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__()
        self.comm, self.name, self.calls = comm, name, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        options = {**dict(zip(("query", "key", "value", "attn_mask"), args)), **(kwargs or {})}
        if options["query"].shape[SEQUENCE] == 1 and options.get("attn_mask") is None:
            raise ValueError(
                f"{self.name!r}, which the plan has as 'ulysses', got one position of the sequence on this rank. "
                "Attentions of one position are not causal, and the model may have asked for none; pass longer ones"
            )
        return ulysses_attention(*args, comm=self.comm, **(kwargs or {}))
