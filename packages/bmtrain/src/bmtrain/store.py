"""Python objects between the ranks."""

from bmt_comm import allgather_objects, broadcast_object

__all__ = ["allgather_objects", "broadcast_object"]
