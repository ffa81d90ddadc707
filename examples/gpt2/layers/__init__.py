"""The layers a GPT is made of."""

from .attention import Attention
from .dropout import dropout
from .embedding import PositionEmbedding, TokenEmbedding
from .experts import ExpertFeedForward
from .feedforward import FeedForward
from .layernorm import LayerNorm
from .linear import ColumnLinear, RowLinear, SequenceLinear

__all__ = [
    "Attention",
    "ColumnLinear",
    "ExpertFeedForward",
    "FeedForward",
    "LayerNorm",
    "PositionEmbedding",
    "RowLinear",
    "SequenceLinear",
    "TokenEmbedding",
    "dropout",
]
