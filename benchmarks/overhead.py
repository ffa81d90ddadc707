"""What the host pays per Block and step: many tiny layers on one rank, wrapped and not.

Training is host-bound when kernels are short; then all that a wrapper does in Python is time lost. Each
candidate's time above the unwrapped model (fused AdamW), divided by the number of layers, is its overhead.
Candidates take turns within a round; reported are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from candidates import build
from launch import machine
from models import GPTShape

import bmt_comm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16, help="sequence length; the batch is 1")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--candidates", nargs="+", default=["FSDP2", "bmtrain ZeRO-3"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    context = bmt_comm.init_distributed()
    shape = GPTShape(arguments.layers, arguments.hidden, 2, vocab=256)
    names = ["no communication", *arguments.candidates]
    steps = {name: build(name, shape, context) for name in names}
    tokens = torch.randint(shape.vocab, (1, arguments.tokens + 1)).to(context.device)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-3, arguments.rounds):
        for name in names:
            context.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                steps[name](tokens[:, :-1], tokens[:, 1:])
            context.synchronize()
            if round_ >= 0:
                times[name].append((time.perf_counter() - start) / 3)
    print(f"{machine()}; 1 rank; {shape}")
    for name in names:
        above = statistics.median(
            (t - plain) / shape.layers for t, plain in zip(times[name], times["no communication"], strict=True)
        )
        print(
            f"  {name:18s} {statistics.median(times[name]) * 1e3:8.1f} ms/step   {above * 1e3:6.3f} ms per layer above"
        )
    bmt_comm.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
