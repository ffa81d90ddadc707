"""Peak memory of training steps per rank: bmtrain at level 3 and FSDP2, against what must be held.

Every candidate runs in processes of its own. On CPU the figure is the peak resident set above what the
process had before the model was built, on CUDA the peak of allocated memory. The formula is what level 3
cannot do without: the shards (parameters, gradients, two moments), two gathered layers, one layer's
gradients, and what one process without sharding has on top of its parameters, gradients and moments: the
activations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from candidates import build
from launch import default_ranks, launched, machine, on_ranks
from models import GPT, GPTShape

import bmt_comm

MB = 1e6


def _resident() -> dict[str, int]:
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


def peak_of(name: str, shape: GPTShape, size: str, steps: int) -> float:
    """Bytes this rank needs at most for the model and its training steps."""
    context = bmt_comm.init_distributed()
    batch, length = (int(n) for n in size.split("x"))
    # Collectives, allocator and thread pools take their share before the model is there.
    warm = torch.nn.Linear(64, 64).to(context.device)
    warm(torch.randn(8, 64, device=context.device)).sum().backward()
    context.world.all_reduce(torch.ones(1 << 18, device=context.device))
    cuda = context.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else _resident()["VmRSS"]
    step = build(name, shape, context)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:  # the model was whole for a moment: peaks count from here
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    tokens = torch.randint(shape.vocab, (batch, length + 1)).to(context.device)
    for _ in range(steps):
        step(tokens[:, :-1], tokens[:, 1:])
    context.synchronize()
    peak = torch.cuda.max_memory_allocated() if cuda else _resident()["VmHWM"]
    bmt_comm.shutdown()
    return float(peak - before)


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
            peaks[name] = max(json.loads(line) for line in (Path(out) / "peaks").read_text().splitlines())
        print(f"{name}: done", file=sys.stderr)
    with torch.device("meta"):
        model = GPT(shape)
    total = sum(p.numel() for p in model.parameters()) * 4
    layer = sum(p.numel() for p in model.layers[0].parameters()) * 4
    outside = total - layer * shape.layers
    activations = peaks["no communication"] - 4 * total
    formula = 4 * total / arguments.ranks + 3 * layer + activations
    print(f"{machine()}; {arguments.ranks} ranks; {shape}; batch {arguments.size}; {total / 4e6:.1f} M parameters")
    print("peak MB per rank (the largest of the ranks):")
    for name, peak in peaks.items():
        print(f"  {name:18s} {peak / MB:8.0f}   {peak / peaks.get('FSDP2', peak):5.2f}x FSDP2")
    print(
        f"  {'formula, level 3':18s} {formula / MB:8.0f}   (shards {4 * total / arguments.ranks / MB:.0f}, two gathered"
    )
    print(f"    layers and one layer's gradients {3 * layer / MB:.0f}, activations {activations / MB:.0f};")
    print(f"    embedding and head outside the layers, gathered with gradients, add up to {2 * outside / MB:.0f})")
    return 0


_FORWARDED = ("size", "layers", "hidden", "vocab", "steps")

if __name__ == "__main__":
    sys.exit(main())
