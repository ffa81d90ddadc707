"""Training steps of one GPT: bmtrain against FSDP2, DDP, DeepSpeed and no communication, over the same transports.

Each candidate runs in fresh processes of its own, and the candidates take turns: what one leaves behind (threads,
memory, caches) meets no other, and what else the machine does meets them all. In a round each starts once, trains a few
steps that do not count, and then some that do; its time in the round is their median. A table has the median over
rounds, the least and the greatest, and ratios within a round: their median, least and greatest.

benchmarks/train_step_report.py measures a list of settings, and writes their tables to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import candidates
import torch
from candidates import PLAIN, Options
from launch import default_ranks, launched, machine, on_ranks
from link import on_hosts
from memory_peak import MemoryPeak, memory_taken
from models import GPTShape

import bmt_comm

SYSTEMS = [PLAIN, "DDP", "FSDP2", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "bmtrain ZeRO-2", "bmtrain ZeRO-3"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all candidates of a table have in common.

    Attributes:
        batch, length: sequences of a rank, and tokens of a sequence.
        link: what each rank's host sends at most, such as "1gbit"; "": the ranks are on one host.
        warm_up, steps: steps before the timed ones, and timed steps. One more step measures memory.
    """

    batch: int = 1
    length: int = 64
    ranks: int = 2
    shape: GPTShape = dataclasses.field(default_factory=GPTShape)
    options: Options = dataclasses.field(default_factory=Options)
    link: str = ""
    warm_up: int = 2
    steps: int = 5

    @classmethod
    def from_json(cls, text: str) -> Setting:
        values = json.loads(text)
        return cls(**values | {"shape": GPTShape(**values["shape"]), "options": Options(**values["options"])})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        computes = [
            name.replace("_", " ")
            for name in ("checkpointing", "compiled", "fused_loss")
            if getattr(self.options, name)
        ]
        words = [f"{self.ranks} ranks" if self.ranks > 1 else "1 rank", f"batch {self.batch} × {self.length}"]
        words += ["bf16" if self.options.bf16 else "fp32", *computes]
        return ", ".join(words + ([f"a host each, which sends {self.link}/s"] if self.link else []))


@dataclasses.dataclass(frozen=True)
class Result:
    """What one start of a candidate measured.

    Attributes:
        seconds: of a step, the median.
        mib: the most memory of a step, above what there was before the model was built. On the CPU that of the host:
            the sum over the ranks of their proportional set sizes. On GPUs that of the rank that allocates most.
    """

    seconds: float
    mib: float


def measure(name: str, setting: Setting) -> Result:
    """Start one candidate once, on ranks of its own.

    Raises:
        RuntimeError: a rank has failed; its own message is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "result.json")
        arguments = ["--alone", name, "--setting", setting.to_json(), "--into", str(into)]
        if setting.link:
            code = on_hosts(__file__, setting.ranks, arguments, setting.link)
        else:
            code = on_ranks(__file__, setting.ranks, arguments)
        if code:
            raise RuntimeError(f"{name!r} has failed: {setting}; {setting.shape}")
        return Result(**json.loads(into.read_text()))


def run_alone(name: str, setting: Setting, into: Path) -> None:
    """Measure one candidate, on the ranks that this process is one of."""
    context = candidates.start(name)
    before = memory_without_model(context)
    generator = torch.Generator().manual_seed(context.rank)
    size = (setting.batch, setting.length + 1)
    tokens = torch.randint(setting.shape.vocab, size, generator=generator).to(context.device)
    step = candidates.build(name, setting.shape, context, setting.options)
    times = []
    for number in range(-setting.warm_up, setting.steps):
        context.synchronize()
        begun = time.perf_counter()
        step(tokens[:, :-1], tokens[:, 1:])
        context.synchronize()
        if number >= 0:
            times.append(time.perf_counter() - begun)
    with MemoryPeak(context.device) as peak:
        step(tokens[:, :-1], tokens[:, 1:])
        context.synchronize()
    mib = torch.tensor([(peak.bytes - before) / 2**20], device=context.device)
    context.world.all_reduce(mib, "max" if mib.is_cuda else "sum")
    if context.rank == 0:
        into.write_text(json.dumps(dataclasses.asdict(Result(statistics.median(times), mib.item()))))
    bmt_comm.shutdown()


def memory_without_model(context: bmt_comm.ParallelContext) -> int:
    """Bytes that this rank takes once collectives, allocator and thread pools have begun."""
    warm = torch.nn.Linear(64, 64).to(context.device)
    warm(torch.randn(8, 64, device=context.device)).sum().backward()
    context.world.all_reduce(torch.ones(1 << 18, device=context.device))
    return memory_taken(context.device)


def table(
    rounds: Mapping[str, Sequence[Result]], setting: Setting, on_gpus: bool, peak_flops: float = 0
) -> Iterator[list[str]]:
    """The rows of a table, its head first, from what each candidate measured in each round.

    Args:
        rounds, setting, on_gpus: what was measured, how, and where.
        peak_flops: of a GPU; with it, the table has tokens per second and model FLOPs utilisation.
    """
    head = ["", "transport", "seconds per step", "speed, FSDP2 on this transport = 1", "speed, no communication = 1"]
    throughput = ["tokens/s", "MFU, %"] if peak_flops else []
    yield [*head, *throughput, "memory of a GPU, MiB" if on_gpus else "memory of all ranks, MiB", "memory, FSDP2 = 1"]
    for name, starts in rounds.items():
        system, transport = candidates.split(name)
        seconds = [each.seconds for each in starts]
        yardsticks = [f"FSDP2 over {transport}" if transport else "FSDP2", PLAIN]
        if name == PLAIN:
            yardsticks[0] = ""
        if name == PLAIN or setting.ranks == 1:
            transport = "none"
        row = [system, transport or "NCCL", spread(seconds)]
        for yardstick in yardsticks:
            of_rounds = zip(rounds.get(yardstick, ()), seconds, strict=False)  # a run may have ended within a round
            ratios = [theirs.seconds / ours for theirs, ours in of_rounds]
            row.append(spread(ratios) if ratios else "")
        if peak_flops:
            tokens = setting.batch * setting.length / statistics.median(seconds)
            mfu = tokens * setting.shape.flops_per_token(setting.length) / peak_flops
            row += [f"{tokens * setting.ranks:.0f}", f"{100 * mfu:.1f}"]
        most = statistics.median(each.mib for each in starts)
        theirs = rounds.get(yardsticks[0], ())
        yield [*row, f"{most:.0f}", f"{most / statistics.median(each.mib for each in theirs):.2f}" if theirs else ""]


def spread(values: Sequence[float]) -> str:
    """The median, the least and the greatest."""
    median, least, greatest = (f"{value:#.3g}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} to {greatest})" if len(values) > 1 else median


def markdown(rows: Iterator[list[str]]) -> str:
    """A table of Markdown."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=default_ranks(), help="processes (default: GPUs, or 2)")
    parser.add_argument("--sizes", nargs="+", default=["1x64", "4x256"], help="batch x tokens (default: 1x64 4x256)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations of layers again in backward")
    parser.add_argument("--compiled", action="store_true", help="compile each layer")
    parser.add_argument("--fused-loss", action="store_true", help="compute head and loss without holding the logits")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each candidate (default: 5)")
    parser.add_argument("--steps", type=int, default=7, help="timed steps in each start (default: 7)")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps in each start (default: 3)")
    parser.add_argument(
        "--candidates",
        nargs="+",
        type=candidates.candidate,
        default=candidates.candidates(SYSTEMS),
        help="what to compare; also ZeRO-0 and ZeRO-1. 'bmtrain ZeRO-3 accumulating': four micro-batches, a gradient "
        "norm and a step; 'bmtrain ZeRO-3 deterministic': the same with sums in a fixed order; 'bmtrain ZeRO-3 int8' "
        "or float8: compressed communication (default: %(default)s)",
    )
    parser.add_argument(
        "--link",
        default="",
        metavar="RATE",
        help="each rank on a host (a network namespace) that sends so much, such as 1gbit",
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # the candidate that these ranks are
    parser.add_argument("--setting", type=Setting.from_json, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if launched():
        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        run_alone(arguments.alone, arguments.setting, arguments.into)
        return 0
    for name in arguments.candidates:
        if name != PLAIN and bool(candidates.split(name)[1]) == torch.cuda.is_available():
            parser.error(
                f"--candidates {name!r}: on the CPU add ' over gloo' or ' over shared memory', on GPUs nothing"
            )
    shape = GPTShape(arguments.layers, arguments.hidden, arguments.heads, arguments.vocab)
    options = Options(arguments.bf16, arguments.checkpointing, arguments.compiled, arguments.fused_loss)
    print(f"{machine()}; {shape}; {arguments.rounds} rounds", flush=True)
    for size in arguments.sizes:
        batch, length = (int(n) for n in size.split("x"))
        setting = Setting(
            batch, length, arguments.ranks, shape, options, arguments.link, arguments.warm_up, arguments.steps
        )
        rounds: dict[str, list[Result]] = {name: [] for name in arguments.candidates}
        for round_ in range(arguments.rounds):
            for name, starts in rounds.items():
                if sys.stderr.isatty():
                    print(f"\rround {round_ + 1} of {arguments.rounds}: {name:40s}", end="", file=sys.stderr)
                starts.append(measure(name, setting))
        print(f"\n{setting}\n\n{markdown(table(rounds, setting, torch.cuda.is_available()))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
