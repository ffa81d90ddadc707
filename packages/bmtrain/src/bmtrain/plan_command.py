"""The ``bmtrain plan`` command: will it fit, and how fast?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from typing import Any

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_MOST_GPUS = 10**6  # a plan lists the ranks

_EXAMPLES = """\
MODEL is one of
  a preset                     gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt-6.7b, 13b, gpt-175b
  a Hugging Face configuration config.json, or a folder that holds one (needs transformers)
  module:function              function() is called on the meta device and returns a module, or (module, batch), where
                               batch(sequences, tokens) returns the arguments of the module's call as (args, kwargs)

examples:
  bmtrain plan 13b --gpus 32 --gpu-memory 32GB --device v100 --dtype fp16
  bmtrain plan ./llama-3-8b --gpus 8 --gpu-memory 80GB --batch-size 4 --sequence 4096
  bmtrain plan my_models:build --gpus 16 --gpu-memory 40GB --zero 3 --tp 1 2 --json

exit status: 0 if some settings fit, 1 if none does, 2 if the arguments are wrong
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's arguments to those of ``bmtrain``."""
    parser = commands.add_parser(
        "plan",
        help="tell whether a model fits a number of GPUs, with which settings, and how fast it trains",
        description="Tell what a training job needs, without any GPU: memory of each rank by what holds it, bytes sent "
        "per step, pipeline bubble and time of a step, for the settings that make sense, the fastest that fits first. "
        "Memory comes from a training step of bmtrain's own code on tensors without storage; time comes from the "
        "figures of the device, and is a bound rather than a promise.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a preset, a Hugging Face configuration, or module:function")
    parser.add_argument("--gpus", type=int, required=True, metavar="G", help="number of devices")
    parser.add_argument("--gpu-memory", type=_bytes, required=True, metavar="SIZE", help="of one device: 32GB, 80GiB")
    parser.add_argument("--batch-size", type=int, default=8, metavar="B", help="sequences per device and step (8)")
    parser.add_argument("--sequence", type=int, metavar="S", help="tokens of a sequence (default: the model's)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of parameters (bf16)")
    parser.add_argument("--zero", type=int, nargs="+", choices=range(4), default=[2, 3], help="levels to try (2 3)")
    parser.add_argument("--tp", type=int, nargs="+", metavar="N", help="numbers of tensor-parallel ranks to try")
    parser.add_argument("--pipe", type=int, nargs="+", metavar="N", help="numbers of pipeline stages to try")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", metavar="M",
        help="numbers of micro-batches to try, where they divide the batch",
    )  # fmt: skip
    parser.add_argument("--checkpointing", choices=("both", "yes", "no"), default="both", help="recompute activations")
    parser.add_argument(
        "--optimizer",
        nargs="+",
        choices=("adam", "adam_offload", "adafactor", "lion"),
        default=["adam"],
        help="optimizers to try (adam)",
    )
    parser.add_argument("--scores", action="store_true", help="attention keeps its scores, as without flash attention")
    parser.add_argument(
        "--device", choices=("v100", "a100", "h100", "h200", "cpu", "measure"), default="a100",
        help="whose figures to use (a100); measure: products and copies on this machine's device",
    )  # fmt: skip
    parser.add_argument("--flops", type=float, metavar="F", help="operations per second, instead of the device's")
    parser.add_argument("--node-size", type=int, default=8, metavar="N", help="devices of a node (8)")
    parser.add_argument("--node-link", type=_bytes, metavar="SIZE", help="bytes per second and device inside a node")
    parser.add_argument("--network", type=_bytes, default=25e9, metavar="SIZE", help="the same between nodes (25GB)")
    parser.add_argument("--show", type=int, default=10, metavar="N", help="settings in the table (10)")
    parser.add_argument("--json", action="store_true", help="print all settings as JSON")


def run(options: argparse.Namespace) -> int:
    """``bmtrain plan``; returns the exit status."""
    try:
        return _run(options)
    except (ImportError, OSError, ValueError) as error:
        print(f"bmtrain plan: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    from . import planning
    from .planning import report

    sizes = ("gpus", "gpu_memory", "batch_size", "sequence", "node_size", "show")
    for name in (*sizes, "tp", "pipe", "micro_batches", "flops", "node_link", "network"):
        value = getattr(options, name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and not each > 0:
                raise ValueError(f"--{name.replace('_', '-')} {each} must be positive")
    if options.gpus > _MOST_GPUS:
        raise ValueError(f"--gpus {options.gpus} is more than the {_MOST_GPUS} devices that can be planned")
    model = planning.load_model(options.model, materialize_scores=options.scores)
    device = planning.measured() if options.device == "measure" else planning.DEVICES[options.device]
    given: dict[str, Any] = {}
    if options.flops is not None:
        given.update(dict.fromkeys(("flops", "fp32_flops", "peak", "fp32_peak"), options.flops))
    if options.node_link is not None:
        given["node_link"] = options.node_link
    job = planning.Job(
        options.gpus,
        options.gpu_memory,
        options.batch_size,
        options.sequence or model.sequence,
        planning.DTYPES[options.dtype],
        dataclasses.replace(device, **given),
        options.node_size,
        options.network,
    )
    choices = planning.Choices(
        options.zero,
        options.tp,
        options.pipe,
        options.micro_batches,
        {"both": (False, True), "yes": (True,), "no": (False,)}[options.checkpointing],
        options.optimizer,
    )
    estimates = planning.search(model, job, choices)
    if options.json:
        print(json.dumps(report.facts(model, job, estimates), indent=1))
    else:
        print(report.text(model, job, estimates, options.show))
    return 0 if estimates[0].fits(job) else 1


def _bytes(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(|[kmgt]i?)b?(?:/s)?\s*", text.lower())
    if match is None or match[1].count(".") > 1 or (not match[2] and 0 < float(match[1]) < 10**6):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 32GB or 80GiB")
    return float(match[1]) * _UNITS[match[2]]
