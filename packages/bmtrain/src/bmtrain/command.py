"""The ``bmtrain`` command."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from typing import Any

PACKAGES = ("bmtrain", "bmt-comm", "bmt-kernels", "bmt-optim", "bmt-pipe", "bmt-tp", "bmt-zero")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (by default the command line's); returns the exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "benchmark":
        from bmt_comm.benchmark import main as run_benchmark

        run_benchmark(rest)
    elif options.command == "pipeline-plot":
        from .pipeline_plot import main as plot_pipeline

        plot_pipeline(rest)
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    else:
        _print_info(options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bmtrain", description="Look at an installation of bmtrain.")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser(
        "info",
        help="print versions, devices, and which compiled kernels are in use",
        description="Print the versions of the installed packages and of PyTorch, the devices, and which compiled "
        "kernels are in use: what to put into a report of a problem.",
    )
    info.add_argument("--json", action="store_true", help="print JSON instead of a table")
    # Its arguments, --help included, are those of bmt_comm.benchmark.
    commands.add_parser(
        "benchmark",
        help="measure the collectives; start it with torchrun -m bmtrain benchmark",
        add_help=False,
    )
    # Its arguments are those of bmtrain.pipeline_plot.
    commands.add_parser(
        "pipeline-plot",
        help="draw pipeline schedules, as planned and as measured, and print how long ranks wait",
        add_help=False,
    )
    return parser


def collect_info() -> dict[str, dict[str, Any]]:
    """What ``bmtrain info`` prints: sections of names and values."""
    import torch

    import bmt_kernels

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "platform": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "torch": torch.__version__,
            "torch built for CUDA": torch.version.cuda,
            "NCCL": nccl,
            "GPUs": torch.cuda.device_count(),
            "CPU threads": torch.get_num_threads(),
        },
        "kernels": dataclasses.asdict(bmt_kernels.build_info()),
    }


def _print_info(as_json: bool) -> None:
    sections = collect_info()
    if as_json:
        print(json.dumps(sections, indent=2))
        return
    for index, (title, values) in enumerate(sections.items()):
        print(f"{chr(10) if index else ''}{title}")
        for name, value in values.items():
            print(f"  {name.replace('_', ' '):22} {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
