"""What the host pays per Block and step: many tiny layers on one rank, wrapped and not.

Training is host-bound when kernels are short; then all that a wrapper does in Python is time lost. Each candidate's
time above the unwrapped model (fused AdamW), divided by the number of layers, is its overhead. Candidates run in fresh
processes of their own, by turns. A time is the median over steps; reported are medians over starts, and the least and
the greatest overhead of a start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from candidates import PLAIN, build, candidate, start
from launch import launched, machine, on_ranks
from models import GPTShape

import bmt_comm


def run_alone(arguments: argparse.Namespace, shape: GPTShape) -> None:
    """Measure one candidate, in this process."""
    torch.set_num_threads(1)
    context = start(arguments.alone)
    if arguments.backward:
        torch.autograd.set_multithreading_enabled(arguments.backward == "own")
    step = build(arguments.alone, shape, context)
    tokens = torch.randint(shape.vocab, (1, arguments.tokens + 1)).to(context.device)
    times = []
    for number in range(-5, arguments.steps):
        context.synchronize()
        begun = time.perf_counter()
        step(tokens[:, :-1], tokens[:, 1:])
        context.synchronize()
        if number >= 0:
            times.append(time.perf_counter() - begun)
    Path(arguments.into).write_text(json.dumps(statistics.median(times)))
    bmt_comm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16, help="sequence length; the batch is 1")
    parser.add_argument("--rounds", type=int, default=7, help="starts of each candidate")
    parser.add_argument("--steps", type=int, default=40, help="timed steps in each start")
    parser.add_argument("--candidates", nargs="+", type=candidate, default=["FSDP2", "bmtrain ZeRO-3"])
    parser.add_argument(
        "--backward",
        choices=("calling", "own"),
        help="on a GPU, the thread of backward passes (default: torch's own for others, the calling one for bmtrain)",
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = GPTShape(arguments.layers, arguments.hidden, 2, vocab=256)
    if launched():
        run_alone(arguments, shape)
        return 0
    given = [f"--{name}={getattr(arguments, name)}" for name in ("layers", "hidden", "tokens", "steps")]
    given += [f"--backward={arguments.backward}"] if arguments.backward else []
    times: dict[str, list[float]] = {name: [] for name in (PLAIN, *arguments.candidates)}
    for _ in range(arguments.rounds):
        for name, starts in times.items():
            with tempfile.TemporaryDirectory() as folder:
                into = Path(folder, "seconds.json")
                if code := on_ranks(__file__, 1, [*given, "--alone", name, "--into", str(into)]):
                    return code
                starts.append(json.loads(into.read_text()))
    print(f"{machine()}; 1 rank; {shape}; {arguments.rounds} rounds")
    plain = statistics.median(times[PLAIN])
    for name, starts in times.items():
        above = [(seconds - plain) / shape.layers * 1e3 for seconds in starts]
        step, spread = statistics.median(starts) * 1e3, f"{min(above):.3f} to {max(above):.3f}"
        print(f"  {name:18s} {step:8.1f} ms/step {statistics.median(above):8.3f} ms per layer above ({spread})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
