"""Training checkpoints whose files are Hugging Face safetensors (:class:`Checkpointer`), and snapshots in memory."""

from .checkpointer import Checkpointer
from .headers import DamagedError
from .job import SaveError
from .memory_snapshots import MemorySnapshots

__all__ = ["Checkpointer", "DamagedError", "MemorySnapshots", "SaveError"]
