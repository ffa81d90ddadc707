"""What a run tells: a progress bar, a line per measurement in a file, and a picture of the loss."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import bmtrain as bmt

Record = dict[str, Any]


class Metrics:
    """Writes records to ``path`` and shows them, on rank 0; on other ranks nothing happens.

    A terminal gets a progress bar, anything else a line per record.

    Args:
        path: a file of JSON lines. Records of steps after ``step``, which will be taken again, are removed.
        step: the steps taken already.
        steps: the steps to take in all.
    """

    def __init__(self, path: Path, step: int, steps: int):
        self.steps = steps
        self.records: list[Record] = []
        self.active = bmt.rank() == 0
        if not self.active:
            return
        if step > 0 and path.exists():
            lines = (json.loads(line) for line in path.read_text().splitlines())
            self.records = [record for record in lines if record["step"] <= step]
        path.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        self.file = path.open("a")
        self.bar = tqdm(initial=step, total=steps, unit="step") if sys.stderr.isatty() else None

    def advance(self) -> None:
        """A step has been taken."""
        if self.active and self.bar is not None:
            self.bar.update()

    def write(self, record: Record) -> None:
        """Keep and show what was measured at a step."""
        if not self.active:
            return
        self.records.append(record)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.bar is None:
            print(f"step {record['step']}/{self.steps}  {describe(record)}", flush=True)
        elif "loss" in record:
            self.bar.set_postfix_str(describe(record))
        else:
            self.bar.write(f"step {record['step']}  {describe(record)}", file=sys.stderr)

    def close(self) -> None:
        if self.active:
            self.file.close()
            if self.bar is not None:
                self.bar.close()


def describe(record: Record) -> str:
    """A record in words."""
    if "loss" not in record:
        return f"held-out loss {record['eval_loss']:.3f}"
    return (
        f"loss {record['loss']:.3f}  lr {record['lr']:.2e}  gradient {record['grad_norm']:.2f}  "
        f"{record['tokens_per_second']:,.0f} tokens/s  {record['memory'] / 2**30:.2f} GiB"
    )


def peak_memory(device: torch.device) -> int:
    """The most bytes this rank has used: of the GPU if it computes on one, else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def plot(records: list[Record], path: Path) -> None:
    """A picture of the loss over the steps, in training and on held-out text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held-out", "o-")):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points), style, label=label, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
