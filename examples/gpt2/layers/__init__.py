"""The layers a GPT is made of."""

from .attention import Attention
from .embedding import Embedding
from .feedforward import FeedForward
from .layernorm import LayerNorm
from .linear import Linear

__all__ = ["Attention", "Embedding", "FeedForward", "LayerNorm", "Linear"]
