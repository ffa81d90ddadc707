"""A training step of a GPT over pipeline stages: bmt_pipe's schedules against torch's Schedule1F1B with activation
checkpointing, in one run.

All candidates live in the same processes, have the same weights, the same global batch and the same micro-batches, and
take turns. torch's first and last stage have the embedding and the head, and the layers are dealt out so that the most
expensive stage is as cheap as can be; bmt_pipe computes both on every rank, for its part of the batch. Every layer is
checkpointed. Reported are medians over rounds and the median of ratios within a round; the peak of what a step
allocates beside the gradients that it leaves, of each rank; and the share of the step that ranks are idle, as measured
and as the simulator has it, given the measured costs of the actions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from launch import default_ranks, launched, machine, on_ranks
from models import GPTShape, Layer
from timing import median_ratio
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bmt_comm
from bmt_pipe import (
    PipelineTransformerBlockList,
    idle_share,
    mean_costs,
    plot_timelines,
    simulate,
    split_layers,
)
from bmt_zero import BMTrainModelWrapper

MB = 1e6


class Ends(nn.Module):
    """What is before the layers and behind them."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Stage(nn.Module):
    """A stage of torch's pipeline."""

    def __init__(self, ends: Ends, layers: list[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.tokens = ends.tokens if first else None
        self.norm, self.head = (ends.norm, ends.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x if self.head is None else self.head(self.norm(x))


def make_parts(shape: GPTShape) -> tuple[Ends, list[nn.Module]]:
    torch.manual_seed(0)
    return Ends(shape), [Layer(shape) for _ in range(shape.layers)]


class Candidate:
    """A step to measure, and how its ranks spend it."""

    step: Callable[[], float]
    params: list[nn.Parameter]  # of this rank

    def idle(self) -> tuple[list[float], list[float]]:
        """Of each rank, the idle share as measured and as simulated."""
        raise NotImplementedError


class Torch(Candidate):
    def __init__(self, shape: GPTShape, context: bmt_comm.ParallelContext, tokens: Tensor, micro_batches: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stages, stage = context.pipe_size, context.pipe_rank
        ends, layers = make_parts(shape)
        # What the head costs, in layers: products with vocab × hidden weights, and with 12 × hidden² in a layer,
        # which is computed again in backward.
        head = shape.vocab / (12 * shape.hidden) * 3 / 4
        own = split_layers([*[1.0] * shape.layers, head], stages)[stage]
        mine = [layers[i] for i in own if i < shape.layers]
        module = Stage(ends, mine, stage == 0, stage == stages - 1).to(context.device)
        self.params = list(module.parameters())
        self.busy = 0.0
        self.first, self.last = stage == 0, stage == stages - 1
        self.tokens = tokens.to(context.device)
        self.context = context
        pipe = PipelineStage(module, stage, stages, context.device)
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(pipe, name, self._timed(getattr(pipe, name)))

        def loss(scores: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

        self.schedule = Schedule1F1B(pipe, micro_batches, loss)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.busy += time.perf_counter() - start
            return result

        return run

    def step(self) -> float:
        losses: list[Tensor] = []
        inputs = (self.tokens[:, :-1],) if self.first else ()
        self.schedule.step(*inputs, target=self.tokens[:, 1:] if self.last else None, losses=losses)
        return torch.stack(losses).mean().item() if self.last else 0.0

    def idle(self) -> tuple[list[float], list[float]]:
        self.context.synchronize()
        self.busy, start = 0.0, time.perf_counter()
        self.step()
        self.context.synchronize()
        share = 1 - self.busy / (time.perf_counter() - start)
        return self.context.pipe_host.all_gather_object(share), []


class Ours(Candidate):
    def __init__(
        self,
        shape: GPTShape,
        context: bmt_comm.ParallelContext,
        tokens: Tensor,
        interleave: int | None,
        tail: str | None,
    ) -> None:
        ends, layers = make_parts(shape)
        self.context = context
        self.layers = PipelineTransformerBlockList(layers, interleave=interleave, tail_schedule=tail)
        self.ends = BMTrainModelWrapper(ends, zero_level=0)
        self.tail = tail is not None
        self.params = [*self.layers.parameters(), *self.ends.parameters()]
        rows = len(tokens) // context.pipe_size
        self.tokens = tokens[context.pipe_rank * rows : (context.pipe_rank + 1) * rows].to(context.device)

    def step(self) -> float:
        x, targets = self.ends.tokens(self.tokens[:, :-1]), self.tokens[:, 1:]
        if self.tail:
            loss = self.layers(x, tail=self.ends.loss, tail_args=(targets,))
        else:
            loss = self.ends.loss(self.layers(x), targets)
        (loss / self.context.replicas).backward()
        return loss.item()

    def idle(self) -> tuple[list[float], list[float]]:
        with self.layers.record() as recorded:
            self.step()
        [(schedule, timeline)] = recorded
        self.recorded = schedule, timeline
        planned = simulate(schedule, mean_costs(schedule, timeline))
        return [float(s) for s in idle_share(timeline)], [float(s) for s in idle_share(planned)]


def peak_of(candidate: Candidate, device: torch.device) -> int:
    """Bytes that a step has allocated at most at a time, beside the gradients that it leaves."""
    step = candidate.step
    for param in candidate.params:
        param.grad = None
    peak = _peak(step, device)
    return peak - sum(param.grad.nbytes for param in candidate.params if param.grad is not None)


def _peak(step: Callable[[], object], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def measure(arguments: argparse.Namespace) -> None:
    micro_batches = arguments.micro_batches or 2 * arguments.ranks
    context = bmt_comm.init_distributed(pipe_size=arguments.ranks, num_micro_batches=micro_batches)
    shape = GPTShape(arguments.layers, arguments.hidden, vocab=arguments.vocab)
    rows, length = (int(n) for n in arguments.size.split("x"))
    tokens = torch.randint(shape.vocab, (rows * micro_batches, length + 1), generator=torch.Generator().manual_seed(0))
    candidates: dict[str, Candidate] = {"torch 1F1B + checkpoint": Torch(shape, context, tokens, micro_batches)}
    for interleave in arguments.interleave:
        candidates[f"recompute, v={interleave}"] = Ours(shape, context, tokens, interleave, None)
    for name in arguments.tail:
        interleave = 2 if name.startswith("interleaved") else None
        candidates[f"{name}, loss inside"] = Ours(shape, context, tokens, interleave, name)
    losses, peaks, shares = {}, {}, {}
    for name, candidate in candidates.items():
        found = context.pipe_host.all_gather_object(candidate.step())
        losses[name] = found[-1] if isinstance(candidate, Torch) else statistics.fmean(found)
        candidate.step()
        peaks[name] = context.pipe_host.all_gather_object(peak_of(candidate, context.device))
        shares[name] = candidate.idle()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(arguments.rounds):
        for name, candidate in candidates.items():
            for param in candidate.params:
                param.grad = None
            context.synchronize()
            start = time.perf_counter()
            candidate.step()
            context.synchronize()
            times[name].append(time.perf_counter() - start)
    if context.rank == 0:
        first = next(iter(candidates))
        print(f"{machine()}; {arguments.ranks} stages, {micro_batches} micro-batches of {arguments.size}; {shape}")
        print("  median seconds, speed relative to torch; peak MB and idle % of each rank (as simulated)")
        for name, taken in times.items():
            ratio = median_ratio(times[first], taken)
            measured, planned = (" ".join(f"{100 * s:.0f}" for s in some) for some in shares[name])
            print(
                f"  {name:28s} {statistics.median(taken):7.3f} {ratio:6.2f}x "
                f"{' '.join(f'{peak / MB:6.1f}' for peak in peaks[name])}"
                f"   {measured} ({planned or '-'})   loss {losses[name]:.6f}"
            )
        if arguments.plot:
            panels = []
            for name, candidate in candidates.items():
                if isinstance(candidate, Ours):
                    schedule, timeline = candidate.recorded
                    plan = simulate(schedule, mean_costs(schedule, timeline))
                    panels += [(f"{name}: planned", schedule, plan), (f"{name}: measured", schedule, timeline)]
            plot_timelines(panels, arguments.plot)
    bmt_comm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=default_ranks(), help="stages (default: GPUs, or 2)")
    parser.add_argument("--micro-batches", type=int, help="default: twice the stages")
    parser.add_argument("--size", default="1x256", help="rows x tokens of a micro-batch (default: 1x256)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--interleave", type=int, nargs="*", default=[1, 2, 4], help="of the default schedule")
    parser.add_argument(
        "--tail", nargs="*", default=["1f1b", "zero_bubble_h1", "zero_bubble_v"], help="schedules with the loss inside"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument("--plot", help="draw the timelines, planned and measured, into this file")
    arguments = parser.parse_args()
    if not launched():
        return on_ranks(__file__, arguments.ranks, sys.argv[1:])
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
