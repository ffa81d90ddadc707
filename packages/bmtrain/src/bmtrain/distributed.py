"""Differentiable collectives."""

from bmt_comm import all_gather, all_reduce, broadcast, recv_activations, reduce_scatter, send_activations

__all__ = ["all_gather", "all_reduce", "broadcast", "recv_activations", "reduce_scatter", "send_activations"]
