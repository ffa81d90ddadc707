"""Layers."""

from bmt_tp import Linear, OpLinear

__all__ = ["Linear", "OpLinear"]
