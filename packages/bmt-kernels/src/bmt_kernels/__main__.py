"""``python -m bmt_kernels`` prints what was built and what of it is in use."""

from __future__ import annotations

import argparse
import dataclasses
import json


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bmt_kernels",
        description="Print what of bmt_kernels was built and what is in use on this machine.",
        epilog="BMT_KERNELS_CPU=portable|avx2|avx512|reference in the environment chooses the CPU variant.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)

    from bmt_kernels.info import build_info

    info = dataclasses.asdict(build_info())
    if options.json:
        print(json.dumps(info, indent=2))
        return
    for name, value in info.items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, tuple):
            value = ", ".join(value) or "none"
        print(f"{name.replace('_', ' '):20} {'none' if value in (None, '') else value}")


if __name__ == "__main__":
    main()
