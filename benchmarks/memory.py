"""Peak memory of training steps on all ranks: bmtrain at level 3 and FSDP2, against what must be held.

Every candidate runs in processes of its own. The figure is what training steps take at most above what the processes
had before the model was built, summed over the ranks: on the CPU in proportional set sizes (see memory_peak.py), on
CUDA in allocated memory. The formula is what level 3 cannot do without: the shards (parameters, gradients, two
moments), and on each rank two gathered layers, one layer's gradients, and what one process without sharding has on top
of its parameters, gradients and moments: the activations.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from candidates import build
from launch import default_ranks, launched, machine, on_ranks
from memory_peak import MemoryPeak, memory_taken
from models import GPT, GPTShape

import bmt_comm

MB = 1e6


def peak_of(name: str, shape: GPTShape, size: str, steps: int) -> float:
    """Bytes this rank needs at most for the model and its training steps."""
    context = bmt_comm.init_distributed()
    batch, length = (int(n) for n in size.split("x"))
    # Collectives, allocator and thread pools take their share before the model is there.
    warm = torch.nn.Linear(64, 64).to(context.device)
    warm(torch.randn(8, 64, device=context.device)).sum().backward()
    context.world.all_reduce(torch.ones(1 << 18, device=context.device))
    before = memory_taken(context.device)
    step = build(name, shape, context)
    tokens = torch.randint(shape.vocab, (batch, length + 1)).to(context.device)
    with MemoryPeak(context.device) as peak:
        for _ in range(steps):
            step(tokens[:, :-1], tokens[:, 1:])
        context.synchronize()
    bmt_comm.shutdown()
    return float(peak.bytes - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=default_ranks())
    parser.add_argument("--size", default="4x256", help="batch x tokens per rank (default: 4x256)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--candidates", nargs="+", default=["FSDP2", "bmtrain ZeRO-2", "bmtrain ZeRO-3"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = GPTShape(arguments.layers, arguments.hidden, vocab=arguments.vocab)
    if launched():
        torch.set_num_threads(1)
        peak = peak_of(arguments.one, shape, arguments.size, arguments.steps)
        with open(Path(arguments.out) / "peaks", "a") as file:
            file.write(json.dumps(peak) + "\n")
        return 0
    peaks: dict[str, float] = {}
    for name in ["no communication", *arguments.candidates]:
        with tempfile.TemporaryDirectory() as out:
            flags = [f"--{k.replace('_', '-')}={v}" for k, v in vars(arguments).items() if k in _FORWARDED]
            code = on_ranks(__file__, arguments.ranks, [*flags, f"--one={name}", f"--out={out}"])
            if code:
                return code
            peaks[name] = sum(json.loads(line) for line in (Path(out) / "peaks").read_text().splitlines())
        print(f"{name}: done", file=sys.stderr)
    with torch.device("meta"):
        model = GPT(shape)
    ranks = arguments.ranks
    parameters = sum(p.numel() for p in model.parameters()) * 4
    layer = sum(p.numel() for p in model.layers[0].parameters()) * 4
    shards, layers, outside = 4 * parameters, 3 * ranks * layer, 2 * ranks * (parameters - layer * shape.layers)
    activations = peaks["no communication"] - 4 * ranks * parameters
    formula = shards + layers + activations
    print(f"{machine()}; {ranks} ranks; batch {arguments.size}; {shape}")
    print("peak MB of all ranks together:")
    for name, peak in peaks.items():
        print(f"  {name:18s} {peak / MB:8.0f}   {peak / peaks.get('FSDP2', peak):5.2f}x FSDP2")
    print(f"  {'formula, level 3':18s} {formula / MB:8.0f}   (shards {shards / MB:.0f}, two gathered")
    print(f"    layers and one layer's gradients {layers / MB:.0f}, activations {activations / MB:.0f};")
    print(f"    embedding and head outside the layers, gathered with gradients, add up to {outside / MB:.0f})")
    return 0


_FORWARDED = ("size", "layers", "hidden", "vocab", "steps")

if __name__ == "__main__":
    sys.exit(main())
