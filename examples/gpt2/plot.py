"""One picture of the losses of several runs.

python plot.py runs/a runs/b --out losses.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metrics import read_records

# Okabe and Ito's, which the colour-blind tell apart, without the yellow, which is too pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
MARKERS = "osD^vPX"


def plot_runs(runs: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Draw the losses over the steps: on held-out text with marks, and pale, in training.

    Args:
        runs: names, and records as in ``metrics.jsonl``.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, (name, records) in enumerate(runs.items()):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        label: str | None = name  # of the first line of the run
        for key, style in (
            ("eval_loss", {"marker": marker, "markersize": 5, "zorder": 3}),
            ("loss", {"alpha": 0.35, "linewidth": 1}),
        ):
            points = [(record["step"], record[key]) for record in records if key in record]
            if points:
                axes.plot(*zip(*points), color=colour, label=label, **style)
                label = None
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="held-out loss (marks) and training loss (pale)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the losses of several runs in one picture.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that train.py wrote (--out)")
    parser.add_argument("--out", type=Path, default=Path("losses.png"), help="the picture (default: losses.png)")
    args = parser.parse_args()
    try:
        runs = {folder.name: read_records(folder / "metrics.jsonl") for folder in args.runs}
    except (FileNotFoundError, NotADirectoryError) as error:
        parser.error(f"{error.filename} does not exist; name folders that train.py wrote")
    if len(runs) < len(args.runs):
        parser.error(f"two of the runs have the same name: {', '.join(folder.name for folder in args.runs)}")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    try:
        plot_runs(runs, args.out)
    except ValueError as error:  # matplotlib knows no such format
        parser.error(f"--out {args.out}: {error}")
    print(f"Wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
