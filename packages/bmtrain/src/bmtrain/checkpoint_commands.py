"""The commands ``bmtrain convert`` and ``bmtrain checkpoint``. They need neither ranks nor GPUs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bmt_zero.checkpoints.tools import convert, describe, find_checkpoints, problem_of, progress, verify

from .convert_upstream import convert_upstream, is_optimizer_file


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands' arguments to those of ``bmtrain``."""
    parser = commands.add_parser(
        "convert",
        help="write the weights of a checkpoint in another form",
        description="Write weights in another form, in bounded memory. SOURCE is a checkpoint (step-...), a Hugging "
        "Face directory, a .safetensors file or one of torch.save, such as a checkpoint of BMTrain. TARGET is "
        "x.safetensors, x.pt, or a directory as Hugging Face has it. Or: SOURCE is the state of an optimizer, or of an "
        "OptimManager, that BMTrain has saved: one file if it was gathered, else those of all ranks in their order. "
        "TARGET is then a file for torch.load, and --model is needed.",
    )
    parser.add_argument("sources", type=Path, nargs="+", metavar="SOURCE")
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--model", type=Path, help="weights of the model that an optimizer's state belongs to")
    parser.add_argument("--max-file-size", type=float, default=5e9, help="bytes of a file in a directory (5e9)")
    parser = commands.add_parser(
        "checkpoint",
        help="list checkpoints, or verify that none of their bytes has changed",
        description="List the checkpoints in a directory, or read them and compare their checksums. The exit status "
        "is 1 if one is damaged or cannot be read.",
    )
    parser.add_argument("action", choices=("ls", "verify"))
    parser.add_argument("directory", type=Path, metavar="DIR", help="a directory of checkpoints, or one checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON, a line per checkpoint")


def run_convert(options: argparse.Namespace) -> int:
    """``bmtrain convert``; returns the exit status."""
    try:
        if any(is_optimizer_file(path) for path in options.sources):
            convert_upstream(options.sources, options.target, model=options.model)
            return 0
        for path in options.sources:
            if not path.exists():
                raise FileNotFoundError(f"there is no checkpoint file or directory {path}")
        if options.model is not None:
            raise ValueError(f"--model is for the state of an optimizer, and {options.sources[0]} holds weights")
        if len(options.sources) > 1:
            raise ValueError(f"{options.sources[0]} holds weights, of which there is one SOURCE")
        if not 1 <= options.max_file_size < float("inf"):
            raise ValueError(f"--max-file-size={options.max_file_size:g} must be a number of bytes, at least 1")
        with progress(f"writing {options.target}") as report:
            convert(options.sources[0], options.target, int(options.max_file_size), report)
    except (OSError, TypeError, ValueError) as error:
        print(f"bmtrain convert: {error}", file=sys.stderr)
        return 1
    return 0


def run_checkpoint(options: argparse.Namespace) -> int:
    """``bmtrain checkpoint``; returns the exit status."""
    try:
        paths = find_checkpoints(options.directory)
    except OSError as error:
        print(f"bmtrain checkpoint: {error}", file=sys.stderr)
        return 1
    status = 0
    described = [describe(path) for path in paths]
    complete = [facts for facts in described if facts["problem"] is None and paths != [options.directory]]
    newest = max(complete, key=lambda facts: (facts["order"], facts["step"]), default=None)
    for path, facts in zip(paths, described, strict=True):
        facts["is_newest"] = facts is newest
        if options.action == "verify" and facts["problem"] is None:
            try:
                with progress(f"reading {path}") as report:
                    verify(path, report)
            except (OSError, ValueError) as error:
                facts.update(problem_of(error))
        status = status or int(facts["problem"] is not None)
        print(json.dumps(facts) if options.json else _line(path, facts, options.action))
    return status


def _line(path: Path, facts: dict[str, object], action: str) -> str:
    if facts["problem"] is not None:
        return f"{path}  {'DAMAGED' if facts['is_damaged'] else 'CANNOT BE READ NOW'}: {facts['problem']}"
    layout = facts["layout"]
    shown = ", ".join(f"{key} {value}" for key, value in layout.items()) if isinstance(layout, dict) else "unknown"
    checked = "every byte as it was written" if action == "verify" else "complete"
    finite = "" if facts["is_finite"] else ", WEIGHTS NOT FINITE"
    newest = ", saved last" if facts["is_newest"] else ""
    return f"{path}  {int(str(facts['bytes'])) / 1e9:.3f} GB, {checked}{finite}{newest}; saved with {shown}"
