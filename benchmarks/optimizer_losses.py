"""Losses of the example with every optimizer, against steps and against time, with tuned learning rates.

One process for each training. The learning rate of each optimizer is the best of a grid in steps of ×√10, at seed 0,
that goes on as long as its end is the best; with it come two more seeds. Trainings that are in the folder are not done
again.

The mean of seeds is drawn, and a band from the least to the most. Time is that of the optimizer's median step
(forward, backward, clipping and the optimizer) times the number of steps. It is measured afterwards, in further short
trainings in which the optimizers take turns.

The picture goes into --plot, and a table is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch import machine

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2"
FLAGS = ["--layers", "3", "--heads", "3", "--hidden", "96", "--seq-len", "128", "--vocab-size", "2048"]
FLAGS += ["--batch-size", "8", "--warmup", "20", "--sample-tokens", "0", "--eval-sequences", "64"]
EVERY = 25  # steps between held-out losses
SEEDS = 3
TIMED = 12  # steps, of which the median is taken
FACTOR = 10**0.5

Groups = list[dict[str, Any]]


def decayed(model: Any) -> Groups:
    """Matrices with weight decay, and vectors without."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def of_matrices(model: Any) -> Groups:
    """The layers' matrices, and AdamW for the rest."""
    import bmtrain as bmt

    hidden, *rest = bmt.optim.get_muon_param_groups(model, adam={"betas": (0.9, 0.95), "weight_decay": 0.1})
    return [{**hidden, "weight_decay": 0.1}, *rest]


def factories() -> dict[str, tuple[float, Callable[[Any, float], Any]]]:
    """By name the learning rate in the middle of the first grid, and what makes the optimizer of a model."""
    import bmtrain as bmt

    o, betas = bmt.optim, (0.9, 0.95)
    shampoo = {"grafting": "adam", "betas": (0.9, 0.95), "epsilon": 1e-10, "precondition_frequency": 10}
    return {
        "AdamW": (3e-3, lambda m, lr: o.AdamW(decayed(m), lr=lr, betas=betas)),
        "AdamW, 8 bits": (3e-3, lambda m, lr: o.AdamW8bit(decayed(m), lr=lr, betas=betas)),
        "AdEMAMix": (1e-3, lambda m, lr: o.AdEMAMix(decayed(m), lr=lr, betas=(0.9, 0.95, 0.999), warm_up=200)),
        "Adam-mini": (3e-3, lambda m, lr: o.AdamMini(decayed(m), lr=lr, betas=betas)),
        "Lion": (3e-4, lambda m, lr: o.Lion(decayed(m), lr=lr, betas=(0.9, 0.95))),
        "Schedule-free AdamW": (3e-3, lambda m, lr: o.ScheduleFreeAdamW(decayed(m), lr=lr, betas=betas, warm_up=20)),
        "Adafactor": (3e-3, lambda m, lr: o.Adafactor(decayed(m), lr, scale_parameter=False, relative_step=False)),
        "CAME": (1e-3, lambda m, lr: o.CAME(decayed(m), lr)),
        "LAMB": (1e-2, lambda m, lr: o.Lamb(decayed(m), lr=lr, betas=betas)),
        "GaLore": (1e-2, lambda m, lr: o.DistGaloreAdamW(galore(m), lr=lr, betas=betas, svd="gram")),
        "APOLLO": (1e-2, lambda m, lr: o.APOLLO(galore(m), lr=lr, betas=betas)),
        "Muon": (1e-2, lambda m, lr: o.Muon(of_matrices(m), lr=lr, adjust_lr_fn="match_rms_adamw")),
        "Dion": (1e-2, lambda m, lr: o.Dion(of_matrices(m), lr=lr, rank_fraction=0.5)),
        "SOAP": (3e-3, lambda m, lr: o.SOAP(decayed(m), lr=lr, max_precond_dim=1024)),
        "Shampoo": (3e-3, lambda m, lr: o.DistributedShampoo(decayed(m), lr=lr, **shampoo)),
    }


def galore(model: Any) -> Groups:
    """The layers' matrices projected to a quarter of the width."""
    import bmtrain as bmt

    return bmt.optim.get_galore_param_groups(model, 0.1, rank=32, update_proj_gap=50)


def train_once(name: str, lr: float, seed: int, steps: int, out: Path) -> None:
    """One training in this process; its held-out losses and the median step's seconds go into a file."""
    sys.path.insert(0, str(EXAMPLE))
    import train
    from flags import parse_flags

    import bmtrain as bmt

    free = name.startswith("Schedule-free")
    args = parse_flags([*FLAGS, "--steps", str(steps), "--seed", str(seed), "--lr", str(lr)])
    args.cache = out.parent / "cache"
    if free:
        args.schedule, args.warmup = "constant", 0
    bmt.init_distributed(seed=seed, device="cpu")
    made = factories()[name][1]
    train.make_optimizers = lambda model, _: [made(model, lr)]
    trainer = train.Trainer(args)
    losses, seconds = [], []

    def evaluate() -> None:
        with trainer.optimizers[0].evaluating() if free and trainer.step else contextlib.nullcontext():
            losses.append((trainer.step, trainer.evaluate()["eval_loss"]))

    evaluate()
    while trainer.step < steps:
        start = time.perf_counter()
        trainer.train_step()
        seconds.append(time.perf_counter() - start)
        if trainer.step % EVERY == 0 or trainer.step == steps:
            evaluate()
    result = {"losses": losses, "seconds": statistics.median(seconds)}
    out.write_text(json.dumps(result))
    bmt.shutdown()


def trained(name: str, lr: float, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """The result of a training in a process of its own, now or earlier."""
    out = folder / f"{name.replace(' ', '-').replace(',', '')}-{lr:.2e}-{seed}-{steps}.json"
    if not out.exists():
        one = ["--one", name, "--lr", str(lr), "--seed", str(seed), "--out", str(out), "--steps", str(steps)]
        run = subprocess.run([sys.executable, __file__, *one], capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(f"{name} at lr {lr:.2e} has failed:\n{run.stderr}")
    result = json.loads(out.read_text())
    print(f"{name}, lr {lr:.2e}, seed {seed}: {last(result):.3f}, {1e3 * result['seconds']:.0f} ms", flush=True)
    return result


def last(result: dict[str, Any]) -> float:
    """The held-out loss at the end; infinite if it is not a number."""
    loss = result["losses"][-1][1]
    return loss if loss == loss else float("inf")


def tuned(name: str, middle: float, arguments: argparse.Namespace) -> float:
    """The best learning rate of the grid."""
    losses: dict[int, float] = {}
    places = [-1, 0, 1]
    while places:
        for place in places:
            losses[place] = last(trained(name, middle * FACTOR**place, 0, arguments.folder, arguments.steps))
        best = min(losses, key=lambda place: losses[place])
        places = [place for place in (best - 1, best + 1) if place not in losses]
    return middle * FACTOR**best


def draw(results: dict[str, tuple[float, list[dict[str, Any]]]], path: str) -> None:
    """Two pictures side by side: losses over steps and over time."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    for axes, against in zip(figure.subplots(1, 2, sharey=True), ("steps", "seconds")):
        for number, (name, (lr, runs)) in enumerate(results.items()):
            scale = 1.0 if against == "steps" else statistics.median(run["seconds"] for run in runs)
            x = [step * scale for step, _ in runs[0]["losses"]]
            losses = [[run["losses"][i][1] for run in runs] for i in range(len(x))]
            style = {"color": colormaps["tab20"](number), "linestyle": ["-", "--", ":"][number % 3]}
            axes.plot(x, [statistics.mean(each) for each in losses], label=f"{name}, {lr:.1e}", **style)
            axes.fill_between(x, [min(e) for e in losses], [max(e) for e in losses], color=style["color"], alpha=0.15)
        ends = sorted(run["losses"][-1][1] for _, runs in results.values() for run in runs)
        axes.set(xlabel=against, ylim=(ends[0] - 0.1, ends[-1] + 1.5))
        axes.grid(alpha=0.3)
        if against == "steps":
            axes.set_ylabel("held-out loss (nats per token)")
        else:
            axes.legend(fontsize=8, ncols=2, title="optimizer, learning rate")
    figure.savefig(path, dpi=120)


def table(results: dict[str, tuple[float, list[dict[str, Any]]]]) -> list[str]:
    """Rows from the least loss to the largest."""
    rows = []
    plain = statistics.median(run["seconds"] for run in results["AdamW"][1]) if "AdamW" in results else None
    for name, (lr, runs) in sorted(results.items(), key=lambda item: statistics.mean(map(last, item[1][1]))):
        losses, seconds = sorted(map(last, runs)), statistics.median(run["seconds"] for run in runs)
        ratio = f"{seconds / plain:.2f}" if plain else ""
        rows.append(
            f"| {name} | {lr:.1e} | {statistics.mean(losses):.3f} | {losses[0]:.3f} to {losses[-1]:.3f} "
            f"| {1e3 * seconds:.0f} | {ratio} |"
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each training (default: 200)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="optimizers; all of them by default")
    parser.add_argument("--folder", type=Path, default=Path("runs/optimizer-losses"), help="where trainings are kept")
    parser.add_argument("--plot", metavar="FILE", help="draw the picture into this file")
    for name, kind in (("--one", str), ("--lr", float), ("--seed", int), ("--out", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        train_once(arguments.one, arguments.lr, arguments.seed, arguments.steps, arguments.out)
        return
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    known = factories()
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose of {', '.join(known)}")
    results = {}
    for name in arguments.only or known:
        lr = tuned(name, known[name][0], arguments)
        results[name] = lr, [trained(name, lr, seed, arguments.folder, arguments.steps) for seed in range(SEEDS)]
    for seed in range(SEEDS):
        for name, (lr, runs) in results.items():
            runs[seed]["seconds"] = trained(name, lr, seed, arguments.folder, TIMED)["seconds"]
    print(f"\n{machine()}; {arguments.steps} steps of 1024 tokens\n")
    print("| optimizer | learning rate | held-out loss | of three seeds | ms per step | times AdamW's |")
    print("|---|---|---|---|---|---|")
    print("\n".join(table(results)))
    if arguments.plot:
        draw(results, arguments.plot)


if __name__ == "__main__":
    main()
