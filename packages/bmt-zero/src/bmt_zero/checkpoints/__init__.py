"""Training checkpoints whose files are Hugging Face safetensors; see :class:`Checkpointer`."""

from .checkpointer import Checkpointer
from .headers import DamagedError
from .job import SaveError

__all__ = ["Checkpointer", "DamagedError", "SaveError"]
