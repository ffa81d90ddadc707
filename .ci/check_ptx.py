"""Check that the compiler has kept every argument of the CUDA kernels.

nvcc 13.0 dropped a factor that was multiplied into a copy of a ``__grid_constant__`` argument.

Argument: the folder of a build with nvcc's option ``--keep``, which leaves the PTX of each source there.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "packages" / "bmt-kernels" / "csrc" / "cuda"


def function_of(mangled: str) -> str:
    """The name of a function in namespaces, by the Itanium ABI: the last of the names, each after its length."""
    name, rest = "", mangled.removeprefix("_ZN")
    while length := re.match(r"\d+", rest):
        rest = rest[length.end() :]
        name, rest = rest[: int(length[0])], rest[int(length[0]) :]
    return name


def main(folder: Path) -> int:
    arguments: dict[tuple[str, str], set[str]] = defaultdict(set)  # by file and kernel
    read: dict[tuple[str, str], set[str]] = defaultdict(set)
    for source in sorted(SOURCES.glob("*.cu")):
        paths = list(folder.glob(f"{source.stem}.*ptx"))  # one for each architecture
        if not paths:
            print(f"{folder} has no PTX of {source.name}")
            return 1
        for path in paths:
            text = path.read_text()
            for name, parameters, body in re.findall(r"\.entry (\w+)\((.*?)\n\)(.*?)\n}\n", text, re.DOTALL):
                # All instances of a template together: some have no use for an argument.
                kernel = path.name, function_of(name)
                arguments[kernel] |= set(re.findall(r"_param_\d+", parameters))
                read[kernel] |= set(re.findall(r"_param_\d+", body))
    if not {kernel for _, kernel in arguments} >= {"adam_kernel", "moments_kernel"}:
        print(f"the kernels are not there: {sorted(arguments)}")
        return 1
    dropped = {kernel: sorted(names - read[kernel]) for kernel, names in arguments.items() if names != read[kernel]}
    if dropped:
        print(f"arguments that no instance of a kernel reads: {dropped}")
        return 1
    print(f"{len(arguments)} kernels are fine")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
