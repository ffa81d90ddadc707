"""Checkpoints in one file, and Python objects between the ranks."""

from bmt_comm import allgather_objects, broadcast_object
from bmt_comm.store import DistributedStateDictWrapper
from bmt_zero import load, save
from bmt_zero import rank0_state_dict as _save_to_rank0  # what the models of ModelCenter call in state_dict()

__all__ = [
    "DistributedStateDictWrapper",
    "_save_to_rank0",
    "allgather_objects",
    "broadcast_object",
    "load",
    "save",
]
