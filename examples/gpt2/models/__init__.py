"""Models and their sizes."""

from .gpt import GPT
from .gpt_config import PRESETS, GPTConfig

__all__ = ["GPT", "PRESETS", "GPTConfig"]
