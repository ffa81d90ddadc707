"""The ``bmtrain`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import checkpoint_commands, plan_command


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
    elif options.command == "convert":
        return checkpoint_commands.run_convert(options)
    elif options.command == "checkpoint":
        return checkpoint_commands.run_checkpoint(options)
    elif options.command == "plan":
        return plan_command.run(options)
    elif options.command == "doctor":
        from .doctor import diagnose
        from .job_doctor import diagnose_job, is_launched

        return diagnose_job(options.json) if is_launched() else diagnose(options.json)
    else:
        from .doctor import print_info

        print_info(options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bmtrain", description="Plan training jobs; look at an installation of bmtrain, and at checkpoints."
    )
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser(
        "info",
        help="print versions, devices, and which compiled kernels are in use",
        description="Print the versions of the installed packages and of PyTorch, the devices, and which compiled "
        "kernels are in use.",
    )
    doctor = commands.add_parser(
        "doctor",
        help="print the same, and check that kernels, GPUs and collectives work",
        description="Print what info prints, and check the packages, the kernels, the GPUs and the collectives: two "
        "processes of this machine, or one for each of up to two GPUs, run collectives and compare their results. "
        "Each failure says what to do. The exit status is 1 if a check failed. Put the output into a bug report.",
        epilog="On several hosts, torchrun ... -m bmtrain doctor checks what is between them: addresses, rendezvous, "
        "versions, placement of ranks, transport, and how fast each two hosts send to each other.",
    )
    for command in (info, doctor):
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    checkpoint_commands.add_parsers(commands)
    plan_command.add_parser(commands)
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
