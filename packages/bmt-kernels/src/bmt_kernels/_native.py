"""The compiled modules: which are here, and which variant of the CPU kernels runs.

Everything that touches a compiled module asks here first and falls back to ``reference.py`` on ``None``.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import NamedTuple

import torch

CPU_VARIANTS = ("portable", "avx2", "avx512", "reference")
"""What ``BMT_KERNELS_CPU`` may ask for."""


class CpuKernels(NamedTuple):
    """One variant of the CPU kernels, ready to be called."""

    module: ModuleType
    variant: int
    """Its place among the variants that were built."""
    name: str


def _load(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"bmt_kernels.{name}")
    except ImportError:
        return None


cpu_module = _load("_cpu")
cuda_module = _load("_cuda")


def configure_reading(allow_exchange: bool = True) -> str:
    """Tell the compiled module how to read tensors; returns ``dlpack``, ``attributes`` or ``python`` (not at all)."""
    if cpu_module is None:
        return "python"
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
    return "dlpack" if cpu_module.set_tensor_type(torch.Tensor, dtypes, allow_exchange) else "attributes"


tensor_reading = configure_reading()


def runnable_variants() -> tuple[str, ...]:
    """The variants that were built and that this processor runs, slowest first; ``reference`` always."""
    built = cpu_module.variants(True) if cpu_module is not None else ()
    return ("reference", *built)


def _select(name: str | None) -> CpuKernels | None:
    runnable = runnable_variants()
    if name is None:
        name = runnable[-1]
    elif name not in CPU_VARIANTS:
        raise ValueError(f"BMT_KERNELS_CPU is {name!r}; it must be one of {', '.join(CPU_VARIANTS)}")
    elif name not in runnable:
        raise RuntimeError(
            f"BMT_KERNELS_CPU asks for {name!r}, which was not built or which this processor does not run; "
            f"available: {', '.join(runnable)}"
        )
    if name == "reference" or cpu_module is None:
        return None
    return CpuKernels(cpu_module, cpu_module.variants(False).index(name), name)


_selected = _select(os.environ.get("BMT_KERNELS_CPU") or None)


def cpu_kernels() -> CpuKernels | None:
    """The CPU kernels in use; None if the plain PyTorch functions serve."""
    return _selected


def use_cpu_variant(name: str | None) -> None:
    """Change the variant in use, as ``BMT_KERNELS_CPU`` would; None chooses the best."""
    global _selected
    _selected = _select(name)


@functools.cache
def cuda_kernels(device_index: int) -> ModuleType | None:
    """The CUDA module, if it was built, holds code for this GPU and has a driver that is new enough; else None."""
    if cuda_module is None or torch.version.cuda is None or not cuda_module.supports(device_index):
        return None
    return cuda_module
