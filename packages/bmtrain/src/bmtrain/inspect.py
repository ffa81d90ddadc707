"""Statistics of parameters, of tensors in a forward, and of their gradients, and pictures of them over a training."""

from bmt_zero import (
    Histograms,
    InspectTensor,
    InspectTensorManager,
    format_summary,
    inspect_model,
    inspect_tensor,
    record_tensor,
)

__all__ = [
    "Histograms",
    "InspectTensor",
    "InspectTensorManager",
    "format_summary",
    "inspect_model",
    "inspect_tensor",
    "record_tensor",
]
