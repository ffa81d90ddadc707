"""The step of every optimizer over the shards of one GPT (ZeRO-3): its time, its state, what it communicates.

All candidates step the same parameters with the same gradients, those of one backward pass, and take turns; each has
its own state. Before each of them fused Adam makes a step, for memory may be faster after a candidate that computes
more. Reported are, for each of them,

- the median time of a step over rounds, and the median of its ratio to the fused Adam's before it;
- bytes of state, on all ranks together, per parameter of the model;
- rounds, collectives, and MB that all ranks together send;
- floating-point operations of the matrix products on the rank that has most, relative to the mean of the ranks.

GaLore projects all matrices, to --rank dimensions. The steps in which it renews the projections have lines of their
own, also with svd="gram". 8-bit Adam is AdamW8bit. Muon has the layers' matrices, and fused Adam the rest. With --whole
no matrix of the layers is divided among ranks, nor are query, key and value, which Muon then takes apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from launch import default_ranks, launched, machine, on_ranks
from models import GPT, GPTShape
from timing import median_ratio
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bmt_comm
from bmt_optim import (
    CAME,
    Adafactor,
    AdamOptimizer,
    AdamW,
    AdamW8bit,
    DistributedOptimizer,
    GaLoreAdamW,
    Lamb,
    Muon,
    get_galore_param_groups,
)
from bmt_zero import BMTrainModelWrapper, set_granularity

BASELINE = "fused Adam"
OTHERS = (
    *("Adam on the engine", "8-bit Adam", "LAMB", "Adafactor", "CAME", "GaLore", "8-bit GaLore", "Muon"),
    *("GaLore, renewing", "GaLore by Gram, renewing", "8-bit GaLore, renewing"),
)
LR, DECAY = 1e-6, 0.01  # the weights hardly move, whoever steps them
NEVER = 1 << 30  # renews in the first step only
BLUE, ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito's palette, which the colour-blind tell apart


@dataclass
class Candidate:
    """Optimizers that make a step together; ``update_proj_gap`` is GaLore's in these steps."""

    name: str
    optimizers: Sequence[torch.optim.Optimizer]
    update_proj_gap: int = NEVER

    @property
    def renews(self) -> bool:
        """Whether every step renews the projections."""
        return self.update_proj_gap == 1

    def step(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if "rank" in group:
                    group["update_proj_gap"] = self.update_proj_gap
            optimizer.step()

    def state_bytes(self) -> int:
        """On this rank; without the numbers of steps."""
        entries = [entry for optimizer in self.optimizers for entry in optimizer.state_dict()["state"].values()]
        return sum(value.nbytes for entry in entries for key, value in entry.items() if key != "step")

    def communicated(self) -> tuple[int, int, int]:
        """Rounds, collectives and bytes of the last step."""
        found = [o.communication for o in self.optimizers if isinstance(o, DistributedOptimizer)]
        return sum(c.rounds for c in found), sum(c.collectives for c in found), sum(c.bytes for c in found)


@dataclass
class Result:
    """A line of the table: ``rounds`` and ``collectives`` of the rank that has most, the rest of all ranks."""

    name: str
    renews: bool
    seconds: float
    ratio: float
    state: float  # bytes per parameter
    rounds: int
    collectives: int
    bytes: int
    balance: float | None  # None: no matrix products


def _granule(name: str, param: nn.Parameter, hidden: int) -> int | Literal["whole"] | None:
    """No matrix, nor one of query, key and value, is on two ranks."""
    return None if param.dim() < 2 else hidden if "qkv" in name else "whole"


def make_candidates(model: nn.Module, rank: int, parts: int = 1) -> list[Candidate]:
    """``rank`` is that of GaLore's projections; ``parts``: Muon's, of the fused weights."""
    params = list(model.parameters())
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    in_layers = set(matrices)
    rest = [p for p in params if p not in in_layers]

    def galore(nbits: int, svd: str = "exact") -> GaLoreAdamW:
        groups = get_galore_param_groups(model, DECAY, rank=rank)
        return GaLoreAdamW(groups, lr=LR, nbits=nbits, svd=svd)

    galore32, galore8 = galore(32), galore(8)
    fused = [p for name, p in model.layers.named_parameters() if "qkv.weight" in name]
    others = [p for p in matrices if all(p is not q for q in fused)]
    hidden: list[dict[str, Any]] = [{"params": others}, {"params": fused, "parts": parts}]
    muon = [
        Muon(hidden, lr=LR),
        AdamOptimizer(rest, lr=LR, weight_decay=DECAY),
    ]
    return [
        Candidate(BASELINE, [AdamOptimizer(params, lr=LR, weight_decay=DECAY)]),
        Candidate("Adam on the engine", [AdamW(params, lr=LR, weight_decay=DECAY)]),
        Candidate("8-bit Adam", [AdamW8bit(params, lr=LR, weight_decay=DECAY)]),
        Candidate("LAMB", [Lamb(params, lr=LR, weight_decay=DECAY)]),
        Candidate("Adafactor", [Adafactor(params, lr=LR, weight_decay=DECAY, relative_step=False)]),
        Candidate("CAME", [CAME(params, lr=LR, weight_decay=DECAY)]),
        Candidate("GaLore", [galore32]),
        Candidate("8-bit GaLore", [galore8]),
        Candidate("Muon", muon),
        Candidate("GaLore, renewing", [galore32], update_proj_gap=1),
        Candidate("GaLore by Gram, renewing", [galore(32, "gram")], update_proj_gap=1),
        Candidate("8-bit GaLore, renewing", [galore8], update_proj_gap=1),
    ]


@dataclass
class Times:
    """Seconds of a candidate's steps, and of fused Adam's before each of them, until the last rank is done."""

    own: list[float]
    baseline: list[float]


def take_turns(
    context: bmt_comm.ParallelContext, baseline: Candidate, others: Sequence[Candidate], rounds: int, warm_up: int
) -> dict[str, Times]:
    """Times of the others, by their names."""

    def seconds(candidate: Candidate) -> float:
        context.synchronize()
        start = time.perf_counter()
        candidate.step()
        context.synchronize()
        return time.perf_counter() - start

    baseline.step()  # whatever came before
    times = {candidate.name: Times([], []) for candidate in others}
    for round_ in range(-warm_up, rounds):
        for candidate in others:
            before, after = seconds(baseline), seconds(candidate)
            if round_ >= 0:
                times[candidate.name].baseline.append(before)
                times[candidate.name].own.append(after)
    return times


def matrix_flops(step: Callable[[], object]) -> int:
    """Of this rank, in one call."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def measure(arguments: argparse.Namespace) -> list[Result]:
    context = bmt_comm.init_distributed()
    shape = GPTShape(arguments.layers, arguments.hidden, arguments.heads, arguments.vocab)
    torch.manual_seed(0)
    model = GPT(shape).to(context.device)
    count = sum(p.numel() for p in model.parameters())
    if arguments.whole:
        set_granularity(model.layers, lambda name, p: _granule(name, p, shape.hidden))
    model = BMTrainModelWrapper(model, use_checkpoint=False, zero_level=arguments.zero_level)
    tokens = torch.randint(shape.vocab, (1, 65)).to(context.device)
    (model(tokens[:, :-1], tokens[:, 1:]) / context.replicas).backward()
    baseline, *others = candidates = make_candidates(model, arguments.rank, 3 if arguments.whole else 1)
    if arguments.only:
        others = [c for c in others if c.name in arguments.only]
        candidates = [baseline, *others]
    if context.rank == 0:
        print(f"{machine()}; {context.world_size} ranks, {count / 1e6:.1f} M parameters; {shape}", flush=True)
    usual = [c for c in others if not c.renews]
    times = take_turns(context, baseline, usual, arguments.rounds, arguments.warm_up)
    renewing = [c for c in others if c.renews]
    times.update(take_turns(context, baseline, renewing, arguments.renewing_rounds, warm_up=0))
    all_of_baseline = [seconds for found in times.values() for seconds in found.baseline]
    times[BASELINE] = Times(all_of_baseline, all_of_baseline)
    results = []
    for candidate in candidates:
        flops = matrix_flops(candidate.step)
        found = context.world.all_gather_object((candidate.state_bytes(), *candidate.communicated(), flops))
        states, rounds, collectives, sent, flops_of = zip(*found, strict=True)
        mean = statistics.fmean(flops_of)
        results.append(
            Result(
                candidate.name,
                candidate.renews,
                statistics.median(times[candidate.name].own),
                median_ratio(times[candidate.name].own, times[candidate.name].baseline),
                sum(states) / count,
                max(rounds),
                max(collectives),
                sum(sent),
                max(flops_of) / mean if mean else None,
            )
        )
    if context.rank == 0:
        report(results)
        if arguments.plot:
            plot(results, arguments.plot)
    bmt_comm.shutdown()
    return results


def report(results: Sequence[Result]) -> None:
    titles = ("ms", "to Adam", "bytes/param", "rounds", "collectives", "MB sent", "flops max/mean")
    print(f"{'':24s}" + "".join(f"{title:>{len(title) + 3}s}" for title in titles))
    for r in results:
        cells = (
            f"{r.seconds * 1e3:.1f}",
            f"{r.ratio:.2f}x",
            f"{r.state:.3f}",
            str(r.rounds),
            str(r.collectives),
            f"{r.bytes / 1e6:.3f}",
            "-" if r.balance is None else f"{r.balance:.3f}",
        )
        padded = (f"{cell:>{len(title) + 3}s}" for cell, title in zip(cells, titles, strict=True))
        print(f"{r.name:24s}" + "".join(padded), flush=True)


def plot(results: Sequence[Result], path: str) -> None:
    """State and time of every optimizer, away from GaLore's renewals."""
    from matplotlib.figure import Figure  # which draws to files without a window

    shown = [r for r in results if not r.renews]
    places = range(len(shown))
    figure = Figure(figsize=(10, 0.45 * len(shown) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    bars = left.barh(places, [r.state for r in shown], color=BLUE, height=0.6)
    left.bar_label(bars, [f"{r.state:.2f}" for r in shown], padding=4)
    left.set(xlabel="bytes of state per parameter, all ranks", xlim=(0, 1.15 * max(r.state for r in shown)))
    left.set_yticks(places, [r.name for r in shown])
    left.invert_yaxis()
    right.axvline(1, color="0.6", linewidth=1, zorder=0)
    right.hlines(places, 1, [r.ratio for r in shown], color=ORANGE, linewidth=3)
    right.plot([r.ratio for r in shown], places, "o", color=ORANGE)
    for place, r in zip(places, shown, strict=True):
        right.annotate(
            f"{r.ratio:.2f}×", (r.ratio, place), xytext=(8, 0), textcoords="offset points", va="center", ha="left"
        )
    right.set(xscale="log", xlabel=f"time of a step relative to {BASELINE}'s (logarithmic)")
    low, high = min(r.ratio for r in shown), max(r.ratio for r in shown)
    right.set_xlim(low / 1.3, high * (high / low) ** 0.2 * 1.3)
    ticks = [t for t in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low / 1.3 <= t <= high * 1.3]
    right.set_xticks(ticks, [f"{t:g}" for t in ticks])
    right.minorticks_off()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=default_ranks(), help="processes (default: GPUs, or 2)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--heads", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=128, help="of GaLore's projections (default: 128)")
    parser.add_argument("--zero-level", type=int, default=3, choices=range(4), help="0: replicas (default: 3)")
    parser.add_argument("--whole", action="store_true", help="every matrix is on one rank; so are query, key, value")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: 9)")
    parser.add_argument("--renewing-rounds", type=int, default=2, help="of GaLore's renewing steps (default: 2)")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed rounds, 1 at least (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=OTHERS, help="beside fused Adam: %(choices)s")
    parser.add_argument("--plot", metavar="FILE", help="draw state and relative time into this file")
    arguments = parser.parse_args()
    if arguments.warm_up < 1:
        parser.error(f"--warm-up {arguments.warm_up} must be at least 1: GaLore's first step renews")
    if not launched():
        return on_ranks(__file__, arguments.ranks, sys.argv[1:])
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
