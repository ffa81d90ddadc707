"""The compiled modules: which are here, and which variant of the CPU kernels runs.

Everything that touches a compiled module asks here first and falls back to ``reference/`` on ``None``. Without the CPU
module everything works, several times slower; one warning says so and how to build it. An ImportError would stop those
who run the sources as they are, or on a system without a compiler.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from bmt_kernels._compat import cuda_driver_version

CUDA_ON_HOST = "cuda-on-host"
"""The CUDA kernels, compiled for the host with ``BMT_CUDA_ON_HOST=ON``: for tests, many times slower."""

CPU_VARIANTS = ("portable", "avx2", "avx512", "reference", CUDA_ON_HOST)
"""What ``BMT_KERNELS_CPU`` may ask for."""


class CpuKernels(NamedTuple):
    """One variant of the CPU kernels, ready to be called."""

    module: ModuleType
    variant: int
    """Its place among the variants that were built."""
    name: str


class CudaKernels(NamedTuple):
    """The CUDA kernels and where to launch them."""

    module: ModuleType
    device: int
    stream: int
    """The address of the device's current stream."""


def _load(name: str) -> tuple[ModuleType | None, str]:
    """A compiled module, and why it is not there."""
    try:
        return importlib.import_module(f"bmt_kernels.{name}"), ""
    except ModuleNotFoundError:
        return None, f"the compiled module bmt_kernels.{name} was not built or not installed"
    except ImportError as error:
        return None, f"the compiled module bmt_kernels.{name} does not load: {error}"


cpu_module, cpu_note = _load("_cpu")
cuda_module, cuda_note = _load("_cuda")
cuda_on_host_module = _load("_cuda_on_host")[0]
if cpu_module is not None and (cuda_module is None) == cpu_module.CUDA_NOTE.startswith("no CUDA"):
    cuda_note = cpu_module.CUDA_NOTE  # else the module was built and does not load


def _warn_if_not_compiled(asked_for: str | None) -> None:
    """Warn, in one process of a host, that the CPU kernels are missing, unless the plain functions were asked for."""
    if cpu_module is None and asked_for != "reference" and os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(
            f"bmt_kernels: {cpu_note}. Plain PyTorch functions serve CPU tensors, several times slower. To build it, "
            "with a C++ compiler: pip install --force-reinstall --no-deps ./packages/bmt-kernels, in a checkout. "
            "BMT_KERNELS_CPU=reference silences this warning.",
            RuntimeWarning,
            stacklevel=2,
        )


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
    elif name == CUDA_ON_HOST and cuda_on_host_module is None:
        raise RuntimeError(f"BMT_KERNELS_CPU asks for {name!r}, which BMT_CUDA_ON_HOST=ON builds")
    elif name not in (*runnable, CUDA_ON_HOST):
        raise RuntimeError(
            f"BMT_KERNELS_CPU asks for {name!r}, which was not built or which this processor does not run; "
            f"available: {', '.join(runnable)}"
        )
    if name in ("reference", CUDA_ON_HOST) or cpu_module is None:
        return None
    return CpuKernels(cpu_module, cpu_module.variants(False).index(name), name)


_asked_for = os.environ.get("BMT_KERNELS_CPU") or None
_selected = _select(_asked_for)
_cuda_on_host = _asked_for == CUDA_ON_HOST
_warn_if_not_compiled(_asked_for)


def cpu_kernels() -> CpuKernels | None:
    """The CPU kernels in use; None if the plain PyTorch functions serve."""
    return _selected


def use_cpu_variant(name: str | None) -> None:
    """Change the variant in use, as ``BMT_KERNELS_CPU`` would; None chooses the best."""
    global _selected, _cuda_on_host
    _selected = _select(name)
    _cuda_on_host = name == CUDA_ON_HOST


def cuda_kernels(device: torch.device) -> CudaKernels | None:
    """The CUDA kernels for tensors on this device; None if the plain PyTorch functions serve, or those for the CPU."""
    if device.type == "cuda" and (module := cuda_module_for(device.index)) is not None:
        return CudaKernels(module, device.index, torch.cuda.current_stream(device).cuda_stream)
    if device.type == "cpu" and _cuda_on_host and cuda_on_host_module is not None:
        return CudaKernels(cuda_on_host_module, 0, 0)
    return None


def kernel(name: str, device: torch.device) -> Callable[..., None] | None:
    """A function of the module that serves tensors on this device, given all but the first and last arguments, which
    say how to run it; None if the plain PyTorch functions serve."""
    if device.type == "cpu" and (cpu := cpu_kernels()) is not None:
        function = getattr(cpu.module, name)
        return lambda *arguments: function(cpu.variant, *arguments, torch.get_num_threads())
    if (cuda := cuda_kernels(device)) is not None:
        return functools.partial(getattr(cuda.module, name), cuda.device, cuda.stream)
    return None


@functools.cache
def cuda_module_for(device_index: int) -> ModuleType | None:
    """The CUDA module, if it was built, holds code for this GPU and has a driver that is new enough; else None."""
    if cuda_module is None or torch.version.cuda is None:
        return None
    if not cuda_module.supports(device_index):
        _warn_of_unsupported(device_index)
        return None
    return cuda_module


def _warn_of_unsupported(device_index: int) -> None:
    """Warn, in one process of a host and once for a GPU, that its CUDA kernels were built and do not run."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or not torch.cuda.is_available() or cuda_module is None:
        return
    driver, toolkit = cuda_driver_version(), cuda_module.CUDA_VERSION
    if driver[0] < int(toolkit.partition(".")[0]):
        why = (
            f"the driver serves CUDA {driver[0]}.{driver[1]}, and they were built with the toolkit of CUDA {toolkit}. "
            f"Update the driver, or build them with a toolkit that is not newer than it"
        )
    else:
        major, minor = torch.cuda.get_device_capability(device_index)
        why = (
            f"they were built for {cuda_module.ARCHITECTURES}, and this GPU is of compute "
            f"capability {major}.{minor}. Build them with BMT_CUDA_ARCHITECTURES={major}{minor}-real"
        )
    warnings.warn(
        f"bmt_kernels: the CUDA kernels do not run on cuda:{device_index}, which PyTorch serves, slower: {why}: "
        "pip install --force-reinstall --no-deps ./packages/bmt-kernels, in a checkout.",
        RuntimeWarning,
        stacklevel=2,
    )
