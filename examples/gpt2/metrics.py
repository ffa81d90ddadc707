"""What a run tells: a progress bar, a line per measurement in a file, and a picture of the loss."""

from __future__ import annotations

import json
import resource
import sys
import time
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
        self.first_step, self.steps = step, steps
        self.start = time.perf_counter()
        self.records: list[Record] = []
        self.active = bmt.rank() == 0
        if not self.active:
            return
        if step > 0 and path.exists():
            self.records = [record for record in read_records(path) if record["step"] <= step]
        self.path = path
        self._open()
        self.bar = tqdm(initial=step, total=steps, unit="step") if sys.stderr.isatty() else None

    def _open(self) -> None:
        """Write all records anew, to a file that takes further ones."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        self.file = self.path.open("a")

    def advance(self) -> None:
        """A step has been taken."""
        if self.active and self.bar is not None:
            self.bar.update()

    def write(self, record: Record) -> None:
        """Keep and show what was measured at a step."""
        if not self.active:
            return
        if not self.path.exists():  # somebody has deleted it
            self.file.close()
            self._open()
        self.records.append(record)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.bar is None:
            print(
                f"step {record['step']}/{self.steps}  {describe(record)}  {self.time_left(record['step'])}", flush=True
            )
        elif "loss" in record:
            self.bar.set_postfix_str(describe(record))
        else:
            self.bar.write(f"step {record['step']}  {describe(record)}", file=sys.stderr)

    def time_left(self, step: int) -> str:
        """How long the remaining steps take if they are as fast as those since the start."""
        if step in (self.first_step, self.steps):
            return ""
        seconds = (time.perf_counter() - self.start) * (self.steps - step) / (step - self.first_step)
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} left"

    def close(self) -> None:
        if self.active:
            self.file.close()
            if self.bar is not None:
                self.bar.close()


def read_records(path: Path) -> list[Record]:
    """The records in a file; a last line that was cut is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def describe(record: Record) -> str:
    """A record in words."""
    if "loss" in record:
        return (
            f"loss {record['loss']:.3f}  {record['bits_per_byte']:.3f} bits/byte  lr {record['lr']:.1e}  "
            f"gradient {record['grad_norm']:.2f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{record['memory'] / 2**30:.2f} GiB"
        )
    if "skipped" in record:
        bad = f"; of sequences {record['bad']}, the loss, too" if record["bad"] else ""
        return f"skipped: a gradient is not finite{bad}"
    text = f"held-out loss {record['eval_loss']:.3f}  {record['eval_bits_per_byte']:.3f} bits/byte"
    if "baselines" in record:
        text += "; in comparison: " + ", ".join(f"{name} {bits:.3f}" for name, bits in record["baselines"].items())
    return text


def peak_memory(device: torch.device) -> int:
    """The most bytes this rank has used: of the GPU if it computes on one, else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def plot(records: list[Record], path: Path) -> None:
    """Draw bits per byte over the steps, and what simpler models reach.

    The right axis shows the held-out loss, which is in a fixed proportion to the held-out bits per byte.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    measured = [record for record in records if "eval_loss" in record]
    trained = [record for record in records if "loss" in record]
    for name, bits in measured[0].get("baselines", {}).items():
        axes.axhline(bits, color="grey", linestyle="--", linewidth=1)
        axes.annotate(
            f"{name} {bits:.2f}", (0.99, bits), xycoords=("axes fraction", "data"), ha="right", va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
        )  # fmt: skip
    axes.plot(
        [record["step"] for record in trained], [record["bits_per_byte"] for record in trained],
        color="#56B4E9", linewidth=1, label="training",
    )  # fmt: skip
    axes.plot(
        [record["step"] for record in measured], [record["eval_bits_per_byte"] for record in measured],
        "o-", color="#D55E00", markersize=4, label=f"held-out, at last {measured[-1]['eval_bits_per_byte']:.2f}",
    )  # fmt: skip
    ratio = measured[-1]["eval_loss"] / measured[-1]["eval_bits_per_byte"]
    right = axes.secondary_yaxis("right", functions=(lambda bits: bits * ratio, lambda loss: loss / ratio))
    right.set_ylabel("held-out loss (nats per token)")
    axes.set(xlabel="step", ylabel="bits per byte of text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
