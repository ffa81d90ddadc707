"""Forward and backward of a GPT on tensor-parallel ranks: bmt_tp against torch's parallelize_module, in one run.

The candidates live in the same processes, have the same weights and take turns. Reported are medians over rounds, the
median of the ratios within a round, and the activations that a rank keeps for backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from launch import default_ranks, launched, machine, on_ranks
from torch import Tensor, nn

import bmt_comm
from bmt_tp import parallelize


class Layer(nn.Module):
    """A transformer layer whose query, key and value are separate, so that torch can cut them by columns."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Layers only; what is around them is the same for all candidates."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def with_torch(model: Model, context: bmt_comm.ParallelContext, sequence: bool) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = context.mesh["tensor"]
    for layer in model.layers:
        row = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
        column = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
        plan = dict.fromkeys(("q", "k", "v", "up"), column) | {"out": row, "down": row}
        if sequence:
            plan |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
        parallelize_module(layer, mesh, plan)
    if sequence:
        split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        parallelize_module(model.layers[0], mesh, split)
        parallelize_module(model, mesh, {"norm": SequenceParallel(use_local_output=False)})
    return model


def with_bmt(model: Model, sequence: bool) -> nn.Module:
    suffix = "+sequence" if sequence else ""
    plan = {f"layers.*.{name}": "colwise" + suffix for name in ("q", "k", "v", "up")}
    plan |= {f"layers.*.{name}": "rowwise" + suffix for name in ("out", "down")}
    if sequence:
        plan |= {"layers.0": "sequence_start", "norm": "sequence_end"}
        plan |= {"layers.*.norm_1": "sequence", "layers.*.norm_2": "sequence"}
    return parallelize(model, plan)


CANDIDATES = ("torch", "bmt_tp", "torch, sequence", "bmt_tp, sequence")


def build(name: str, arguments: argparse.Namespace, context: bmt_comm.ParallelContext) -> nn.Module:
    torch.manual_seed(0)
    model = Model(arguments.layers, arguments.hidden, arguments.heads).to(context.device)
    sequence = name.endswith("sequence")
    return with_torch(model, context, sequence) if name.startswith("torch") else with_bmt(model, sequence)


def kept_bytes(step: Callable[[], None], model: nn.Module) -> int:
    """Bytes of the storages that one step keeps for backward, parameters left aside."""
    parameters = {p.untyped_storage().data_ptr() for p in map(bmt_comm.local_tensor, model.parameters())}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = bmt_comm.local_tensor(tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step()
    return sum(sizes.values())


def measure(arguments: argparse.Namespace) -> None:
    ranks = arguments.ranks
    context = bmt_comm.init_distributed(tp_size=ranks)
    batch, length = (int(n) for n in arguments.size.split("x"))
    x = torch.randn(batch, length, arguments.hidden, generator=torch.Generator().manual_seed(0)).to(context.device)
    steps: dict[str, Callable[[], None]] = {}
    kept: dict[str, int] = {}
    for name in arguments.candidates:
        model = build(name, arguments, context)

        def step(model: nn.Module = model) -> None:
            y = model(x)
            y = y.full_tensor() if hasattr(y, "full_tensor") else y
            y.square().mean().backward()
            for param in model.parameters():
                param.grad = None

        kept[name] = kept_bytes(step, model)
        steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(-2, arguments.rounds):
        for name, step in steps.items():
            context.synchronize()
            start = time.perf_counter()
            step()
            context.synchronize()
            if round_ >= 0:
                times[name].append(time.perf_counter() - start)
    if context.rank == 0:
        print(
            f"{machine()}; {ranks} ranks; {arguments.layers} layers, hidden {arguments.hidden}, batch {arguments.size}"
        )
        print("  median seconds per step, speed relative to torch's (median of ratios), activations kept per rank")
        for name, taken in times.items():
            peer = times.get(name.replace("bmt_tp", "torch"), taken)
            ratio = statistics.median(y / t for t, y in zip(taken, peer, strict=True))
            print(f"  {name:18s} {statistics.median(taken):8.4f}   {ratio:5.2f}x   {kept[name] / 2**20:8.1f} MB")
    bmt_comm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=default_ranks(), help="processes (default: GPUs, or 2)")
    parser.add_argument("--size", default="4x256", help="batch x tokens (default: 4x256)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: 9)")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    arguments = parser.parse_args()
    if not launched():
        return on_ranks(__file__, arguments.ranks, sys.argv[1:])
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
