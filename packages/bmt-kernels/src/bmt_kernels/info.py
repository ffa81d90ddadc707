"""What was built, and what of it runs here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bmt_kernels import _native
from bmt_kernels._version import __version__


@dataclass(frozen=True)
class BuildInfo:
    """The answer of `build_info`."""

    version: str
    """Version of this package."""
    torch_version: str
    cpu_compiled: bool
    """Whether the compiled CPU module is here; without it the plain PyTorch functions serve."""
    cpu_note: str
    """Why it is not; empty if it is."""
    compiler: str | None
    """The C++ compiler that built it."""
    cpu_variants_built: tuple[str, ...]
    """Instruction-set variants in the compiled module."""
    cpu_variant: str
    """The variant in use: the best that this processor runs, or what ``BMT_KERNELS_CPU`` asks for."""
    threading: str
    """Where threads come from: ``openmp`` (PyTorch's own team), ``std::thread``, or ``none``."""
    tensor_reading: str
    """How a call's tensors are read: ``dlpack`` (fastest; PyTorch 2.10 or newer), ``attributes`` or ``python``."""
    cuda_compiled: bool
    """Whether the compiled CUDA module is here."""
    cuda_note: str
    """Why it is not, or what it was built for and why."""
    cuda_architectures: tuple[str, ...]
    """The architectures it was built for, as CMake names them (``90-real``: code for sm_90 only)."""
    cuda_version: str | None
    """The CUDA toolkit it was built with."""
    gpus: tuple[str, ...]
    """The GPUs that PyTorch sees, each with a note on whether the CUDA module serves it."""


def build_info() -> BuildInfo:
    """Report what was built and what of it is in use on this machine."""
    cpu, cuda = _native.cpu_module, _native.cuda_module
    selected = _native.cpu_kernels()
    return BuildInfo(
        version=__version__,
        torch_version=torch.__version__,
        cpu_compiled=cpu is not None,
        cpu_note=_native.cpu_note,
        compiler=None if cpu is None else cpu.COMPILER,
        cpu_variants_built=() if cpu is None else cpu.variants(False),
        cpu_variant="reference" if selected is None else selected.name,
        threading="none" if cpu is None else cpu.threading_name(),
        tensor_reading=_native.tensor_reading,
        cuda_compiled=cuda is not None,
        cuda_note=_native.cuda_note,
        cuda_architectures=() if cuda is None else tuple(cuda.ARCHITECTURES.split()),
        cuda_version=None if cuda is None else cuda.CUDA_VERSION,
        gpus=_gpus(),
    )


def _gpus() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    names = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        served = "CUDA kernels" if _native.cuda_module_for(index) is not None else "plain PyTorch"
        names.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor}, {served})")
    return tuple(names)
