"""What was built says so, loads without a driver, and is done without where it is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bmt_kernels
from bmt_kernels import _native


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_build_info_describes_the_modules_in_use():
    info = bmt_kernels.build_info()
    assert info.version == bmt_kernels.__version__
    assert info.cpu_compiled == (_native.cpu_module is not None)
    assert info.cpu_variant in _native.runnable_variants()
    assert info.cuda_compiled == bool(info.cuda_architectures) == (info.cuda_version is not None)
    assert bool(info.gpus) == torch.cuda.is_available()


def test_build_info_says_why_modules_are_missing():
    info = bmt_kernels.build_info()
    assert info.cpu_compiled == (info.cpu_note == "") == (info.compiler is not None)
    built = f"CUDA {info.cuda_version}"  # and the patch level
    assert info.cuda_note.startswith(built if info.cuda_compiled else "no CUDA module: ")


def test_command_prints_the_same():
    result = python("-m", "bmt_kernels", "--json", BMT_KERNELS_CPU="reference")
    assert result.returncode == 0, result.stderr
    info = json.loads(result.stdout)
    assert info["cpu_variant"] == "reference"
    assert info["cpu_variants_built"] == list(bmt_kernels.build_info().cpu_variants_built)
    table = python("-m", "bmt_kernels")
    assert bmt_kernels.__version__ in table.stdout
    assert "usage: python -m bmt_kernels" in python("-m", "bmt_kernels", "--help").stdout


def test_an_unknown_variant_is_refused_by_name():
    result = python("-c", "import bmt_kernels", BMT_KERNELS_CPU="sse9")
    assert "BMT_KERNELS_CPU is 'sse9'; it must be one of portable, avx2, avx512, reference" in result.stderr


def test_a_variant_that_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(_native, "runnable_variants", lambda: ("reference", "portable"))
    with pytest.raises(RuntimeError, match=r"'avx512', which was not built or .* available: reference, portable"):
        _native.use_cpu_variant("avx512")


def test_cuda_module_loads_without_a_driver_and_says_when_a_launch_fails():
    module = _native.cuda_module
    if module is None:
        assert _native.cuda_module_for(0) is None
    elif torch.cuda.is_available():
        assert module.supports(0) == (_native.cuda_module_for(0) is not None)
    else:
        assert not module.supports(0)  # as with a driver that is too old for the toolkit
        row = (0, 0, 0, 0, 0, 1, 0)
        table = b"".join(value.to_bytes(8, sys.byteorder) for value in row)
        with pytest.raises(RuntimeError, match=r"bmt_kernels: .* failed: .*\(cudaError"):
            module.adam_step(0, 0, table, (*[0.5] * 8, True, False), (0, 0), (0, 0), 0, 0, 0, 0, 0)
        with pytest.raises(RuntimeError, match=r"bmt_kernels: .* failed: .*\(cudaError"):
            module.overflow_check(0, 0, table[:24], 0)
        with pytest.raises(RuntimeError, match=r"bmt_kernels: .* failed: .*\(cudaError"):
            module.power_sum(0, 0, table[:24], 2.0, 0, 0, 0)


LOAD_ALONE = """
import importlib.machinery, importlib.util, os, sys
loader = importlib.machinery.ExtensionFileLoader(sys.argv[1], sys.argv[2])
spec = importlib.util.spec_from_loader(sys.argv[1], loader)
importlib.util.module_from_spec(spec)
if os.path.exists("/proc/self/maps"):
    print(sorted({os.path.basename(line.split()[-1]) for line in open("/proc/self/maps") if "/" in line}))
"""


@pytest.mark.parametrize(
    "module", [m for m in (_native.cpu_module, _native.cuda_module) if m], ids=lambda m: m.__name__
)
def test_modules_load_alone_and_bring_neither_torch_nor_cuda_nor_openmp(module):
    result = python("-c", LOAD_ALONE, module.__name__.rpartition(".")[2], module.__file__)
    assert result.returncode == 0, result.stderr
    for library in ("libtorch", "libcuda", "libcudart", "libgomp", "libomp"):
        assert library not in result.stdout


WITHOUT_BINARIES = """
import sys
sys.modules["bmt_kernels._cpu"] = sys.modules["bmt_kernels._cuda"] = None
import torch, bmt_kernels
info = bmt_kernels.build_info()
assert not info.cpu_compiled and not info.cuda_compiled and info.cpu_variant == "reference"
lists = [[torch.full((3,), 0.5)] for _ in range(4)]
bmt_kernels.adam_step(*lists, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, step=1)
assert (lists[0][0] < 0.5).all()
assert bmt_kernels.has_inf_or_nan(lists[0]) == 0
assert bmt_kernels.power_sum(lists[1]).total == 0.75
print("served")
"""


def test_the_package_works_without_its_binaries_and_warns_once_how_to_build_them():
    result = python("-c", WITHOUT_BINARIES)
    assert result.stdout.strip() == "served", result.stderr
    assert result.stderr.count("RuntimeWarning") == 1
    assert "_cpu was not built or not installed. Plain PyTorch functions serve" in result.stderr
    assert "pip install --force-reinstall --no-deps ./packages/bmt-kernels" in result.stderr


@pytest.mark.parametrize("environment", [{"BMT_KERNELS_CPU": "reference"}, {"LOCAL_RANK": "1"}])
def test_the_warning_goes_to_one_process_that_has_not_asked_for_plain_functions(environment):
    result = python("-c", WITHOUT_BINARIES, **environment)
    assert (result.stdout.strip(), result.stderr) == ("served", "")


def test_a_module_that_does_not_load_is_not_called_missing(tmp_path):
    (tmp_path / "bmt_kernels").mkdir()
    for path in Path(bmt_kernels.__file__).parent.rglob("*.py"):
        copy = tmp_path / "bmt_kernels" / path.relative_to(Path(bmt_kernels.__file__).parent)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "bmt_kernels" / f"_cpu{EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import bmt_kernels; print(bmt_kernels.build_info().cpu_note)"
    result = python("-c", code, str(tmp_path))
    assert "bmt_kernels._cpu does not load: " in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (12040, r"driver serves CUDA 12\.4, and they were built with the toolkit of CUDA 13\.0"),
        (13000, r"built for 90-real, and this GPU is of compute capability 8\.0\. .*ARCHITECTURES=80-real"),
    ],
)
def test_cuda_kernels_that_do_not_run_are_told_once(monkeypatch, driver, message):
    built = SimpleNamespace(supports=lambda index: False, CUDA_VERSION="13.0", ARCHITECTURES="90-real")
    monkeypatch.setattr(_native, "cuda_module", built)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    _native.cuda_module_for.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=message):
            assert _native.cuda_module_for(0) is None
        assert _native.cuda_module_for(0) is None  # and no second warning, which would be an error
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert _native.cuda_module_for(1) is None
    finally:
        _native.cuda_module_for.cache_clear()
