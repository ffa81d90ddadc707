"""Training steps in many settings: measures them, and writes tables and a picture to docs/benchmarks.md.

Every setting of the list below is measured as benchmarks/train_step.py does it: each candidate in fresh processes of
its own, by turns. Results go to a file after each start; starts that the file has are not measured again. So a run that
was interrupted goes on where it was, and more --rounds are added to those that are there.

On a machine with GPUs other settings are measured, over NCCL, and the section "On a GPU" is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from candidates import GLOO, PLAIN, SHARED, Options, candidates, split
from launch import ROOT, commit, device
from models import GPTShape
from train_step import SYSTEMS, Result, Setting, markdown, measure, table

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "build" / "train-step.json"
SHARDED = [PLAIN, "FSDP2", "bmtrain ZeRO-3"]


@dataclasses.dataclass(frozen=True)
class Section:
    """Settings that the page has under one heading, each with a table, and the systems in these tables."""

    title: str
    systems: list[str]
    settings: list[Setting]

    def names(self, setting: Setting) -> list[str]:
        """The candidates of a setting. A single rank sends nothing, so it has no transports to compare."""
        return candidates(self.systems, [GLOO, SHARED] if setting.ranks > 1 else [SHARED])


SMALL = Setting(batch=1, length=64, warm_up=2, steps=5)
LARGE = Setting(batch=4, length=256, warm_up=2, steps=3)


def cpu_sections() -> list[Section]:
    wide = GPTShape(layers=4, hidden=1024, heads=16)
    bf16, checkpointing, compiled = Options(bf16=True), Options(checkpointing=True), Options(compiled=True)
    fused_loss = Options(fused_loss=True)
    return [
        Section("Every candidate in fp32", SYSTEMS, [SMALL, LARGE]),
        Section(
            "In bf16",
            [PLAIN, "DDP", "FSDP2", "DeepSpeed ZeRO-3", "bmtrain ZeRO-3"],
            [dataclasses.replace(LARGE, options=bf16)],
        ),
        Section("With activation checkpointing", SHARDED, [dataclasses.replace(LARGE, options=checkpointing)]),
        Section("With compiled layers", SHARDED, [dataclasses.replace(SMALL, options=compiled)]),
        Section("With a loss that holds no logits", SHARDED, [dataclasses.replace(LARGE, options=fused_loss)]),
        Section("On other numbers of ranks", SHARDED, [dataclasses.replace(SMALL, ranks=n) for n in (1, 3, 4)]),
        Section("A wider model", SHARDED, [dataclasses.replace(SMALL, shape=wide)]),
    ]


def gpu_sections(gpus: int, memory: int) -> list[Section]:
    """For so many GPUs, each with so many bytes of memory."""
    bf16, checkpointing = Options(bf16=True), Options(bf16=True, checkpointing=True)
    compiled = Options(bf16=True, compiled=True)
    fp32 = Setting(batch=4, length=256, ranks=gpus, warm_up=5, steps=15)
    large = dataclasses.replace(fp32, batch=8, length=512, options=bf16)
    medium = dataclasses.replace(large, shape=GPTShape(24, 1024, 16))
    layers = layers_that_fit(dataclasses.replace(large, shape=GPTShape(1, 5120, 128)), memory)
    largest = dataclasses.replace(large, shape=GPTShape(layers, 5120, 128))
    return [
        Section("Every candidate in fp32", SYSTEMS, [fp32]),
        Section("In bf16", SYSTEMS, [medium]),
        Section("With activation checkpointing", SHARDED, [dataclasses.replace(medium, options=checkpointing)]),
        Section("With compiled layers", SHARDED, [dataclasses.replace(medium, options=compiled)]),
        Section("As many layers as fit", SHARDED[1:], [largest, dataclasses.replace(largest, options=compiled)]),
    ]


def layers_that_fit(setting: Setting, memory: int) -> int:
    """Of a GPT in bf16 whose parameters and optimizer states are fp32 and sharded, in 85 % of a GPU's ``memory``.

    A layer takes 16 bytes per parameter (itself, gradient, two moments) over all ranks, and 34 bytes per channel of a
    token for activations. Beside the layers there are the embedding, the head, the logits and their gradients, and two
    unsharded layers in bf16 and one layer's gradients in fp32.
    """
    shape, tokens = setting.shape, setting.batch * setting.length
    layer = 12 * shape.hidden**2
    beside = 2 * shape.vocab * shape.hidden * (16 / setting.ranks + 6) + 10 * tokens * shape.vocab + 8 * layer
    return max(1, int((0.85 * memory - beside) / (16 * layer / setting.ranks + 34 * tokens * shape.hidden)))


# Of dense products in bf16, by the makers' data sheets.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


class Results:
    """The file of results: the machine, and what each candidate of each setting measured in each round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machine: dict[str, Any] = {}
        self.date = ""
        self.starts: dict[str, dict[str, list[Result]]] = {}
        if path.exists():
            read = json.loads(path.read_text())
            self.machine, self.date = read["machine"], read["date"]
            for setting, rounds in read["starts"].items():
                self.starts[setting] = {name: [Result(**each) for each in starts] for name, starts in rounds.items()}

    def add(self, setting: Setting, name: str, result: Result) -> None:
        self.of(setting).setdefault(name, []).append(result)
        self.date = datetime.date.today().isoformat()
        rounds = {
            key: {name: [vars(result) for result in each] for name, each in of.items()}
            for key, of in self.starts.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps({"machine": self.machine, "date": self.date, "starts": rounds}, indent=1))
        written.replace(self.path)

    def of(self, setting: Setting) -> dict[str, list[Result]]:
        return self.starts.setdefault(setting.to_json(), {})


def this_machine() -> dict[str, Any]:
    gpus = torch.cuda.device_count()
    versions = {"torch": torch.__version__, "Python": platform.python_version()}
    try:
        versions["DeepSpeed"] = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        print("DeepSpeed is not installed, and takes no part", file=sys.stderr)
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0
    return {"device": device(), "gpus": gpus, "gpu_memory": memory, "versions": versions, "commit": commit()}


def sections_of(machine: dict[str, Any]) -> list[Section]:
    return gpu_sections(machine["gpus"], machine["gpu_memory"]) if machine["gpus"] else cpu_sections()


def measure_all(results: Results, rounds: int) -> list[str]:
    """Measure all starts that the results do not have yet. Returns messages about those that failed."""
    machine = this_machine()
    if (results.machine or machine) != machine:
        sys.exit(f"{results.path} is of another machine or commit: remove it, or name another file by --results")
    results.machine = machine
    missing = [
        (setting, name)
        for section in sections_of(machine)
        for round_ in range(rounds)
        for setting in section.settings
        for name in section.names(setting)
        if len(results.of(setting).get(name, ())) <= round_
    ]
    took: dict[Setting, list[float]] = {}
    failed: dict[tuple[Setting, str], str] = {}
    for number, (setting, name) in enumerate(missing):
        if (setting, name) in failed:
            continue
        print(f"[{number + 1} of {len(missing)}] {setting}: {name}; {time_left(missing[number:], took)}", flush=True)
        begun = time.monotonic()
        try:
            results.add(setting, name, measure(name, setting))
        except RuntimeError as error:  # it may need more memory than there is; the others go on
            failed[setting, name] = str(error)
        took.setdefault(setting, []).append(time.monotonic() - begun)
    return list(failed.values())


def time_left(missing: Sequence[tuple[Setting, str]], took: dict[Setting, list[float]]) -> str:
    """An estimate from the starts so far: those of the same setting, or else all."""
    every = [seconds for starts in took.values() for seconds in starts] or [12.0]
    left = sum(statistics.mean(took.get(setting, every)) for setting, _ in missing)
    return f"about {left / 60:.0f} min left"


def written(results: Results, picture: str) -> str:
    """The picture and the tables as Markdown."""
    machine, sections = results.machine, sections_of(results.machine)
    counts = [len(each) for section in sections for s in section.settings for each in results.of(s).values()] or [0]
    starts = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"Machine: {machine['device']}; {versions}; commit {machine['commit']}, {results.date}. Each candidate was"
        f" started {'once' if starts == '1' else f'{starts} times'}. Cells have the median over its starts"
        f" (least to greatest).",
        f"![Time of a training step, relative to a step without communication]({picture})",
    ]
    peak = max((flops for name, flops in PEAK_FLOPS.items() if name in machine["device"]), default=0)
    for section in sections:
        parts.append(f"### {section.title}")
        for setting in section.settings:
            if rounds := results.of(setting):
                parts.append(f"**{setting}**; {setting.shape}:")
                parts.append(
                    markdown(table(rounds, setting, bool(machine["gpus"]), peak if setting.options.bf16 else 0))
                )
    return "\n\n".join(parts)


def write(results: Results) -> None:
    """Write the tables between the page's markers, and draw the picture."""
    where = "train-step-gpu" if results.machine["gpus"] else "train-step"
    first = sections_of(results.machine)[0]
    shown = [setting for setting in first.settings if PLAIN in results.of(setting)]
    if not shown:
        sys.exit("there are no results to write")
    picture = f"images/{where}.png"
    draw({setting: results.of(setting) for setting in shown}, PAGE.parent / picture)
    begin, end = f"<!-- {where}: begin -->", f"<!-- {where}: end -->"
    before, begun, rest = PAGE.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        sys.exit(f"{PAGE} has no lines {begin} and {end}")
    PAGE.write_text(f"{before}{begin}\n\n{written(results, picture)}\n\n{end}{after}")
    print(f"wrote {PAGE} and {PAGE.parent / picture}; the README may quote them")


# Of Okabe and Ito's palette, which the colour-blind tell apart.
COLORS = {"DDP": "#999999", "FSDP2": "#E69F00", "DeepSpeed": "#009E73", "bmtrain": "#0072B2"}


def draw(tables: dict[Setting, dict[str, list[Result]]], path: Path) -> None:
    """Bars: the time of each candidate's step relative to a step without communication, with the spread of rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(tables), 4.2), dpi=120, layout="constrained")
    for axes, (setting, rounds) in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True):
        place, places, labels, previous = 0, [], [], None
        names = sorted((name for name in rounds if name != PLAIN), key=lambda name: split(name)[1])
        for name in names:
            system, transport = split(name)
            if transport != previous:  # a group of its own
                place += 1
                label = f"over {transport}" if transport else "over NCCL"
                axes.text(0.02, place + 0.2, label, transform=axes.get_yaxis_transform(), va="center", style="italic")
                previous = transport
            place += 1
            ratios = [ours.seconds / plain.seconds for ours, plain in zip(rounds[name], rounds[PLAIN], strict=False)]
            median = statistics.median(ratios)
            spread = [[median - min(ratios)], [max(ratios) - median]]
            axes.barh(place, median, 0.75, color=COLORS[system.split()[0]], xerr=spread, capsize=3)
            axes.text(max(ratios), place, f"  {median:.2f} ×", va="center", fontsize=9)
            places.append(place)
            labels.append(system)
        axes.set_yticks(places, labels)
        axes.set_ylim(place + 0.6, 0.7)
        axes.axvline(1, color="black", linewidth=1, linestyle="--")
        axes.margins(x=0.15)
        axes.set_title(str(setting), fontsize=10)
        axes.set_xlabel("time of a step; 1 = without communication")
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=2, help="starts of each candidate (default: 2, 20 to 25 minutes on two cores)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the file of results (default: build/train-step.json)"
    )
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing; write what this file of results has")
    arguments = parser.parse_args()
    results = Results(arguments.source or arguments.results)
    failed: list[str] = []
    if not arguments.source:
        failed = measure_all(results, arguments.rounds)
    elif not results.machine:
        parser.error(f"--from {arguments.source}: there is no such file")
    write(results)
    for message in failed:
        print(message, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
