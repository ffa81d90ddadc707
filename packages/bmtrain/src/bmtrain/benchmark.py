"""How fast the ranks communicate: tables of message size, time, algorithm and bus bandwidth."""

from bmt_comm.benchmark import all_gather, reduce_scatter, send_recv

__all__ = ["all_gather", "reduce_scatter", "send_recv"]
