"""The flags of train.py."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from argparse import BooleanOptionalAction
from importlib.util import find_spec
from pathlib import Path

import torch

from errors import UsageError
from generate import LEAST_TEMPERATURE
from models import PRESETS, GPTConfig
from models.gpt_config import DTYPES
from optimizers import LEARNING_RATES

SCHEDULES = ("cosine", "linear", "noam", "constant")
MAX_VOCABULARY = 2**24
DETERMINISTIC = ("muon", "adam", "adam_offload")  # optimizers
PIPE_SCHEDULES = ("recompute", "1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v")


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check what can be checked before the ranks have met."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.checkpointing is None:
        args.checkpointing = args.preset != "small-cpu"
    if args.micro_batches is None:
        args.micro_batches = max(args.pipe, 1)
    if args.lr is None:
        args.lr = LEARNING_RATES[args.optimizer]
    try:
        _check_numbers(args)
        args.config = model_config(args)
        if args.galore_rank is None:
            args.galore_rank = max(args.config.hidden_size // 4, 1)
        if args.galore_rank < 1:
            raise UsageError(f"--galore-rank {args.galore_rank} must be at least 1")
        _check_together(args)
        check_deterministic(args)
        check_pipeline(args)
        if args.step_size is not None:
            args.accumulation = accumulation_of(args)
    except (UsageError, ValueError) as error:
        parser.error(str(error))
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a GPT-2 on text.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    hidden = argparse.SUPPRESS  # no "(default: None)" where the default is told in words

    group = parser.add_argument_group("model")
    group.add_argument("--preset", choices=PRESETS, default="small-cpu", help="sizes that the next flags change")
    group.add_argument("--layers", type=int, default=hidden, help="transformer layers")
    group.add_argument("--heads", type=int, default=hidden, help="attention heads")
    group.add_argument("--hidden", type=int, default=hidden, help="length of a position's vector")
    group.add_argument("--seq-len", type=int, default=hidden, help="tokens per sequence")
    group.add_argument("--vocab-size", type=int, default=hidden, help="tokens in the vocabulary")
    group.add_argument("--dropout", type=float, default=hidden, help="probability to drop an activation")
    group.add_argument(
        "--experts", type=int, default=0, help="feed-forwards of a layer, of which each position takes two; 0: one"
    )
    group.add_argument("--tied", action=BooleanOptionalAction, default=True, help="head and embedding share a weight")

    group = parser.add_argument_group("data")
    group.add_argument("--data", type=Path, default=hidden, help="a text file or a folder; default: Python's library")
    group.add_argument("--max-bytes", type=int, default=8_000_000, help="use so much of the data; 0: all")
    group.add_argument("--held-out", type=float, default=0.04, help="share of the data that is not trained on")
    group.add_argument("--cache", type=Path, default=Path("runs/cache"), help="folder for tokenizers and encoded data")

    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=int, default=1200, help="optimizer steps")
    group.add_argument("--epochs", type=float, default=hidden, help="passes over the data, instead of --steps")
    group.add_argument("--batch-size", type=int, default=4, help="sequences per rank and micro-batch")
    group.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    group.add_argument(
        "--step-size", type=int, default=hidden, help="sequences per step on all ranks; decides --accumulation"
    )
    group.add_argument(
        "--optimizer",
        choices=LEARNING_RATES,
        default="muon",
        help="adam_offload: its state on the host; muon: of the layers' matrices, and Adam for the rest",
    )
    group.add_argument(
        "--galore-rank", type=int, default=hidden, help="of GaLore's gradients; default: a quarter of --hidden"
    )
    group.add_argument("--galore-gap", type=int, default=200, help="steps between GaLore's projections")
    group.add_argument("--lr", type=float, default=hidden, help=f"highest learning rate; default: {default_rates()}")
    group.add_argument("--schedule", choices=SCHEDULES, default="cosine", help="how the learning rate falls")
    group.add_argument("--warmup", type=int, default=20, help="steps in which the learning rate rises")
    group.add_argument("--weight-decay", type=float, default=0.1, help="of matrices; biases and norms have none")
    group.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    group.add_argument("--seed", type=int, default=0, help="of weights, data order and dropout")
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="the same losses and weights to the last bit on 1, 2, 4, ... replicas, with the same --step-size",
    )

    group = parser.add_argument_group("precision, memory, devices")
    group.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of parameters, which the optimizer keeps in fp32 too"
    )
    group.add_argument("--loss-scale", type=float, default=2.0**15, help="the first one, for fp16")
    group.add_argument("--zero-level", type=int, choices=range(4), default=3, help="what the ranks share out")
    group.add_argument("--tp", type=int, default=1, help="ranks that compute every layer together")
    group.add_argument(
        "--context-parallel",
        action="store_true",
        help="the ranks of --tp share out the sequence in the layers, and not the weights (Ulysses)",
    )
    group.add_argument(
        "--float8", action="store_true", help="the layers multiply in float8, and their weights travel in it (torchao)"
    )
    group.add_argument(
        "--compress",
        choices=("int8", "float8"),
        default=hidden,
        help="how the layers' weights and gradients travel between ranks; default: as they are",
    )
    group.add_argument("--pipe", type=int, default=1, help="stages of a pipeline, each with a part of the layers")
    group.add_argument("--micro-batches", type=int, default=hidden, help="of a pipeline; default: as many as stages")
    group.add_argument("--interleave", type=int, default=1, help="parts of the layers that each stage has")
    group.add_argument(
        "--pipe-schedule",
        choices=PIPE_SCHEDULES,
        default="recompute",
        help="recompute: the loss outside of the pipeline, and every stage computed again in backward; "
        "the others: the loss inside",
    )
    group.add_argument(
        "--checkpointing",
        action=BooleanOptionalAction,
        default=hidden,
        help="compute activations again in backward; default: all presets but small-cpu",
    )
    group.add_argument("--device", choices=("cpu", "cuda"), default=hidden, help="default: the GPU, if there is one")

    group.add_argument("--timeout", type=float, default=1800.0, help="seconds that a rank waits for the others")

    group = parser.add_argument_group("output")
    group.add_argument("--out", type=Path, default=Path("runs/gpt2"), help="folder for all that is written")
    group.add_argument("--overwrite", action="store_true", help="delete an earlier run in --out")
    group.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one"
    )
    group.add_argument("--save-interval", type=int, default=400, help="steps between checkpoints; 0: at the end only")
    group.add_argument("--keep", type=int, default=2, help="checkpoints to keep")
    group.add_argument(
        "--snapshot-every",
        type=int,
        default=0,
        help="steps between snapshots in memory, from which --resume goes on after torchrun has restarted; 0: none",
    )
    group.add_argument(
        "--roll-back", action="store_true", help="after a step that is skipped, go back to the last snapshot"
    )
    group.add_argument("--log-interval", type=int, default=20, help="steps between measurements")
    group.add_argument("--eval-interval", type=int, default=200, help="steps between held-out losses; 0: end only")
    group.add_argument("--eval-sequences", type=int, default=1024, help="held-out sequences to measure on, at most")
    group.add_argument("--prompt", default="class Reader", help="beginning of the sample")
    group.add_argument("--sample-tokens", type=int, default=200, help="length of the sample; 0: none")
    group.add_argument("--top-k", type=int, default=40, help="likeliest tokens that the sample is drawn from")
    group.add_argument("--temperature", type=float, default=0.8, help="below 1, the sample is less daring")

    parser.set_defaults(
        layers=None, heads=None, hidden=None, seq_len=None, vocab_size=None, dropout=None, data=None, epochs=None,
        step_size=None, checkpointing=None, device=None, micro_batches=None, lr=None, galore_rank=None,
        compress=None,
    )  # fmt: skip
    return parser


def _check_numbers(args: argparse.Namespace) -> None:
    """Raise unless each flag is in its range."""
    for name in (
        *("tp", "pipe", "micro_batches", "interleave", "steps", "batch_size", "accumulation"),
        *("keep", "log_interval", "eval_sequences", "top_k", "galore_gap"),
    ):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    for name in ("weight_decay", "lr", "clip", "epochs", "loss_scale", "temperature", "held_out", "timeout"):
        if not math.isfinite(getattr(args, name) or 0):
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must be finite")
    for name in (
        *("max_bytes", "warmup", "save_interval", "eval_interval", "sample_tokens", "snapshot_every"),
        *("lr", "clip", "seed", "weight_decay"),
    ):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must not be negative")
    if args.seed >= 2**63:
        raise UsageError(f"--seed {args.seed} must be below 2**63")
    if args.loss_scale < 1:
        raise UsageError(f"--loss-scale {args.loss_scale} must be at least 1")
    if args.timeout <= 0:
        raise UsageError(f"--timeout {args.timeout} must be above 0")
    if args.clip == 0:
        raise UsageError("--clip 0 would make all gradients 0; for no clipping use a large number")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: PyTorch finds no GPU here; leave the flag out, or install a CUDA build of PyTorch"
        )
    if args.epochs is not None and not args.epochs > 0:
        raise UsageError(f"--epochs {args.epochs} must be above 0")
    if not 0 < args.held_out < 1:
        raise UsageError(f"--held-out {args.held_out} must be between 0 and 1")
    if not args.temperature >= LEAST_TEMPERATURE:
        least = f"must be at least {LEAST_TEMPERATURE}; for no chance at all use --top-k 1"
        raise UsageError(f"--temperature {args.temperature} {least}")
    if args.vocab_size is not None and not 257 <= args.vocab_size <= MAX_VOCABULARY:
        raise UsageError(f"--vocab-size {args.vocab_size} must be between 257, for all bytes, and {MAX_VOCABULARY}")


def _check_together(args: argparse.Namespace) -> None:
    """Raise unless the flags go together with the sizes of the model and with each other."""
    if args.resume and args.overwrite:
        raise UsageError("--resume goes on with what --overwrite deletes; choose one")
    if args.roll_back and not args.snapshot_every:
        raise UsageError("--roll-back goes back to a snapshot; pass --snapshot-every, too")
    for flag, size in (
        ("heads", args.config.num_heads),
        ("vocab-size", args.config.vocab_size),
        ("seq-len", args.config.seq_len),
        ("experts", args.config.num_experts),
    ):
        if size % args.tp:
            raise UsageError(f"--{flag} {size} is no multiple of --tp {args.tp}")
    if args.float8 and find_spec("torchao") is None:
        raise UsageError("--float8 needs torchao: pip install torchao")
    if args.float8 and args.tp > 1 and not args.context_parallel:
        raise UsageError(f"--float8 has whole weights on every rank; with --tp {args.tp} pass --context-parallel, too")
    if args.float8 and args.config.hidden_size % 16:
        raise UsageError(f"--float8 takes sizes that 16 divides, and --hidden is {args.config.hidden_size}")
    if args.compress and args.zero_level == 0:
        raise UsageError("--compress is for weights that are gathered; choose --zero-level 1, 2 or 3")
    if args.compress and args.deterministic:
        raise UsageError("--compress rounds gradients, differently for each number of ranks; leave --deterministic out")


def default_rates() -> str:
    """The learning rates, in words."""
    by_rate: dict[float, list[str]] = {}
    for name, rate in LEARNING_RATES.items():
        by_rate.setdefault(rate, []).append(name)
    return "; ".join(f"{rate:g} for {', '.join(names)}" for rate, names in by_rate.items())


def accumulation_of(args: argparse.Namespace) -> int:
    """How many micro-batches make up ``--step-size`` sequences, on as many ranks as there are."""
    at_once = args.batch_size * (int(os.environ.get("WORLD_SIZE", 1)) // args.tp)
    if args.step_size < 1 or args.step_size % at_once:
        raise UsageError(
            f"--step-size {args.step_size} is no multiple of the {at_once} sequences that the ranks take at once; "
            f"change it or --batch-size {args.batch_size}"
        )
    return args.step_size // at_once


def check_pipeline(args: argparse.Namespace) -> None:
    """Raise unless the ranks, the layers and the batch can be cut as ``--pipe`` and its companions say."""
    ranks, together = int(os.environ.get("WORLD_SIZE", 1)), args.pipe * args.tp
    if args.pipe == 1:
        for name, default in (("micro_batches", 1), ("interleave", 1), ("pipe_schedule", "recompute")):
            if (value := getattr(args, name)) != default:
                raise UsageError(f"--{name.replace('_', '-')} {value} is for pipelines; pass --pipe, too")
    if args.pipe_schedule in ("1f1b", "zero_bubble_h1") and args.interleave > 1:
        raise UsageError(
            f"--pipe-schedule {args.pipe_schedule} has one part of the layers on each stage, and --interleave is "
            f"{args.interleave}; choose recompute or interleaved_1f1b"
        )
    if args.pipe_schedule == "zero_bubble_v" and args.interleave != 2:
        raise UsageError(f"--pipe-schedule zero_bubble_v needs --interleave 2, and it is {args.interleave}")
    parts = args.pipe * args.interleave
    if args.config.num_layers < parts:
        raise UsageError(
            f"--layers {args.config.num_layers} are too few for --pipe {args.pipe} × --interleave {args.interleave}, "
            f"which need {parts} or more"
        )
    if args.micro_batches % args.pipe:
        raise UsageError(f"--micro-batches {args.micro_batches} is no multiple of --pipe {args.pipe}")
    if args.micro_batches > args.batch_size * args.pipe:
        raise UsageError(
            f"--micro-batches {args.micro_batches} are more than the {args.batch_size * args.pipe} sequences that "
            f"--pipe {args.pipe} stages with --batch-size {args.batch_size} have"
        )
    if ranks % together:
        raise UsageError(
            f"--pipe {args.pipe} × --tp {args.tp} = {together} does not divide the number of ranks, {ranks}; start a "
            f"multiple of {together}: torchrun --nproc-per-node {together}"
        )


def check_deterministic(args: argparse.Namespace) -> None:
    """Raise unless sums can have an order that does not depend on the number of ranks."""
    if not args.deterministic:
        return
    if args.pipe > 1:
        raise UsageError("--deterministic is not for pipelines; leave --pipe out")
    if args.optimizer not in DETERMINISTIC:
        raise UsageError(f"--deterministic takes --optimizer {', '.join(DETERMINISTIC)}, and not {args.optimizer}")
    replicas = int(os.environ.get("WORLD_SIZE", 1)) // args.tp
    if replicas & (replicas - 1):
        raise UsageError(f"--deterministic takes 1, 2, 4, ... replicas of the model, and there are {replicas}")


def model_config(args: argparse.Namespace) -> GPTConfig:
    """The preset, with what the flags change."""
    changed = {
        "num_layers": args.layers,
        "num_heads": args.heads,
        "hidden_size": args.hidden,
        "seq_len": args.seq_len,
        "vocab_size": args.vocab_size,
        "dropout": args.dropout,
        "tied": args.tied,
        "dtype": args.dtype,
        "num_experts": args.experts,
    }
    return dataclasses.replace(PRESETS[args.preset], **{k: v for k, v in changed.items() if v is not None})


def check_output(args: argparse.Namespace) -> None:
    """Raise unless ``--out`` holds what ``--resume`` needs, or nothing that this run would mix with."""
    has_run = (args.out / "metrics.jsonl").exists() or any((args.out / "checkpoints").glob("step-*"))
    if has_run and not (args.resume or args.overwrite):
        raise UsageError(f"--out {args.out} holds an earlier run; go on with --resume, or delete it with --overwrite")
