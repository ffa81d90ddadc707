"""Pipeline parallelism: how layers are spread over stages."""

from ._version import __version__
from .partition import split_layers

__all__ = ["__version__", "split_layers"]
