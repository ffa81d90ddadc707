"""What nvcc makes of the CUDA kernels, without a GPU. (bmt-kernels' own tests run where its sources are not.)"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCES = sorted(Path(__file__).parents[1].glob("packages/bmt-kernels/csrc/cuda/*.cu"))


def function_of(mangled: str) -> str:
    """The name of a function in namespaces, by the Itanium ABI: the last of the names, each after its length."""
    name, rest = "", mangled.removeprefix("_ZN")
    while length := re.match(r"\d+", rest):
        rest = rest[length.end() :]
        name, rest = rest[: int(length[0])], rest[int(length[0]) :]
    return name


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_compiler_keeps_every_argument_of_the_kernels(tmp_path):
    """nvcc 13.0 dropped a factor that was multiplied into a copy of a ``__grid_constant__`` argument."""

    def compiled(source: Path) -> str:
        out = tmp_path / f"{source.stem}.ptx"
        flags = ["-std=c++17", "--fmad=false", "-arch=sm_90", f"-I{source.parents[1]}"]
        subprocess.run(["nvcc", *flags, "-ptx", source, "-o", out], check=True, timeout=110)
        return out.read_text()

    arguments: dict[str, set[str]] = defaultdict(set)
    read: dict[str, set[str]] = defaultdict(set)
    with ThreadPoolExecutor(2) as threads:
        for text in threads.map(compiled, SOURCES):
            for name, parameters, body in re.findall(r"\.entry (\w+)\((.*?)\n\)(.*?)\n}\n", text, re.DOTALL):
                kernel = function_of(name)  # all instances of a template together: some have no use for an argument
                arguments[kernel] |= set(re.findall(r"_param_\d+", parameters))
                read[kernel] |= set(re.findall(r"_param_\d+", body))
    assert arguments.keys() >= {"adam_kernel", "moments_kernel"}
    assert read == arguments
