"""Linear layers over sharded or plain parameters."""

from ._version import __version__
from .linear import Linear
from .ops import OpLinear

__all__ = ["Linear", "OpLinear", "__version__"]
