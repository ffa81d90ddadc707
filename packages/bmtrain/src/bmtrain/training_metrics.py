"""Metrics of a training loop: loss, speed, memory and communication; and the sinks that they are written to."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bmt_comm import Communicator, ParallelContext, current_context, errors_on_all

Record = dict[str, float]


class Sink(Protocol):
    """Where records go; called on rank 0 only."""

    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


class TrainingMetrics:
    """Measures a training loop. Every ``every`` steps, the sinks of rank 0 get a record.

    ::

        with bmt.TrainingMetrics([bmt.JsonLines("metrics.jsonl")], flops_per_token=6 * parameters) as metrics:
            for batch in loader:
                ...
                metrics.step(loss, tokens=batch.numel(), skipped=not manager.step())

    A record has

    - ``loss``: the mean over ranks and steps that were not skipped; NaN if all were;
    - ``tokens_per_second``: of all ranks; ``seconds``: per step;
    - ``memory``: the largest peak of all ranks, in bytes;
    - ``sent``: bytes per step, of the rank that sends most;
    - ``waited``: seconds per step that the host waits for communication, of the rank that waits longest. On CUDA, hosts
      seldom wait, and a profile is more useful;
    - ``overflows``: the number of skipped steps since the start;
    - ``mfu``: model FLOPs utilization, from 0 to 1, if ``flops_per_token`` and ``peak_flops`` are given.

    Between records, nothing synchronizes with the device and nothing is communicated. All ranks must make one, and call
    :meth:`step` equally often. If a sink of this module cannot be opened, all ranks raise. Save it with a checkpoint
    (``checkpointer.save(step, metrics=metrics, ...)``), or the steps of a resumed run begin at 1 again.

    Args:
        sinks: where records go.
        every: steps between records.
        flops_per_token: floating-point operations of the model per token: about 6 × parameters.
        peak_flops: the largest number of floating-point operations per second of one device.
        context: the ranks; by default the process-wide ones.

    Raises:
        ValueError: ``every`` is not positive.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        every: int = 10,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        context: ParallelContext | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every!r} must be positive")
        self.context = context or current_context()
        self.sinks = list(sinks) if self.context.rank == 0 else []
        with errors_on_all(self.context.world):
            for sink in self.sinks:
                if isinstance(sink, OpenedSink):
                    sink.open()
        self.every = every
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.steps = 0
        self.overflows = 0
        self._begin()

    def __enter__(self) -> TrainingMetrics:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, loss: Tensor | float, tokens: int, skipped: bool = False, **more: float | Tensor) -> Record | None:
        """Count a training step. Call it after each step.

        Args:
            loss: this rank's mean loss, unscaled.
            tokens: the number of tokens of this rank in the step.
            skipped: whether the step was skipped because a gradient was not finite. Its loss does not count.
            more: further numbers of this step, or tensors of one element, for the record.

        Returns:
            The record, on every rank, if this step completes one; else None.
        """
        self.steps += 1
        self.overflows += skipped
        self._tokens += tokens
        self._steps += 1
        if not skipped:
            if not isinstance(loss, Tensor):
                loss = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
            self._losses.append(loss.detach().clone())  # the script may add the next losses to it
        if self.steps % self.every:
            return None
        record = self._record()
        record.update({name: float(value) if isinstance(value, Tensor) else value for name, value in more.items()})
        for sink in self.sinks:
            sink.write(self.steps, record)
        self._begin()
        return record

    def state_dict(self) -> dict[str, int]:
        """The numbers of steps and of skipped steps, the same on every rank: a run that is resumed counts on."""
        return {"steps": self.steps, "overflows": self.overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. Steps that no record has do not count any more."""
        self.steps, self.overflows = int(state["steps"]), int(state["overflows"])
        self._begin()

    def close(self) -> None:
        """Close the sinks."""
        for sink in self.sinks:
            sink.close()

    def _begin(self) -> None:
        self._losses: list[Tensor] = []
        self._tokens = self._steps = 0
        self._sent, self._waited = self._bytes_sent(), self._seconds_waited()
        self._started = time.perf_counter()
        if self.context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.context.device)

    def _communicators(self) -> set[Communicator]:
        context = self.context
        names = ("world", "zero", "tp_zero", "tp", "pipe", "outer_zero", "outer_tp_zero")
        return {*(getattr(context, name) for name in names), *context.pipe_channels.values()}

    def _bytes_sent(self) -> int:
        return sum(traffic.bytes for comm in self._communicators() for traffic in comm.traffic.values())

    def _seconds_waited(self) -> float:
        # Communicators of one process group share the count of the group.
        return sum({comm.ranks: comm.waited for comm in self._communicators()}.values())

    def _record(self) -> Record:
        context, count = self.context, self._steps
        losses = [each.to(context.device, torch.float64).reshape(()) for each in self._losses]
        loss = torch.stack(losses).mean() if losses else math.nan
        value = float(loss)  # synchronizes with the device
        seconds = (time.perf_counter() - self._started) / count
        sent = (self._bytes_sent() - self._sent) / count
        waited = (self._seconds_waited() - self._waited) / count
        sums = torch.tensor([value, self._tokens / context.tp_size], dtype=torch.float64, device="cpu")
        most = torch.tensor([seconds, peak_memory(context.device), sent, waited], dtype=torch.float64, device="cpu")
        sums, most = sums.to(context.device), most.to(context.device)
        context.world.all_reduce(sums, label="the metrics of a step")
        context.world.all_reduce(most, "max", label="the metrics of a step")
        (total, tokens), (slowest, memory, largest, longest) = sums.tolist(), most.tolist()
        record = {
            "loss": total / context.world_size,
            "tokens_per_second": tokens / count / slowest,
            "seconds": slowest,
            "memory": memory,
            "sent": largest,
            "waited": longest,
            "overflows": float(self.overflows),
        }
        if self.flops_per_token is not None and self.peak_flops is not None:
            needed = record["tokens_per_second"] * self.flops_per_token
            record["mfu"] = needed / (self.peak_flops * context.world_size)
        return record


def peak_memory(device: torch.device) -> int:
    """The peak memory of this rank in bytes: of its GPU, or of the host if it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class OpenedSink:
    """A sink that opens nothing until it is used, because all ranks make it and only rank 0 uses it."""

    _opened: Any = None

    def open(self) -> None:
        """Open it if it is not open."""
        if self._opened is None:
            self._opened = self._open()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _open(self) -> Any:
        raise NotImplementedError


class JsonLines(OpenedSink):
    """Appends a line of JSON per record to a file. A number that is not finite, which JSON has not, is null."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def _open(self) -> Any:
        return self._path.open("a")

    def write(self, step: int, record: Record) -> None:
        self.open()
        numbers = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._opened.write(json.dumps({"step": step, **numbers}) + "\n")
        self._opened.flush()


class ProgressBar(OpenedSink):
    """A bar of ``tqdm``. If stderr is no terminal, or tqdm is not installed: a line per record.

    Args:
        steps: the total number of steps.
    """

    def __init__(self, steps: int | None = None) -> None:
        self._steps, self._last = steps, 0

    def _open(self) -> Any:
        if not sys.stderr.isatty():
            return None
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        return tqdm(total=self._steps, unit="step")

    def write(self, step: int, record: Record) -> None:
        self.open()
        speed, memory = f"{record['tokens_per_second']:,.0f} tokens/s", f"{record['memory'] / 1e9:.2f} GB"
        shown = f"loss {record['loss']:.4f}  {speed}  {memory}"
        if self._opened is None:
            print(f"step {step}  {shown}", file=sys.stderr, flush=True)
            return
        self._opened.update(step - self._last)
        self._opened.set_postfix_str(shown)
        self._last = step


class TensorBoard(OpenedSink):
    """Scalars for TensorBoard; needs ``tensorboard``."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = SummaryWriter
        self._directory = os.fspath(directory)

    def _open(self) -> Any:
        return self._make(self._directory)

    def write(self, step: int, record: Record) -> None:
        self.open()
        for name, value in record.items():
            self._opened.add_scalar(name, value, step)


class WeightsAndBiases(OpenedSink):
    """A run of Weights & Biases; needs ``wandb``.

    Args:
        options: those of ``wandb.init``.
    """

    def __init__(self, **options: Any) -> None:
        import wandb

        self._init: Any = wandb.init
        self._options = options

    def _open(self) -> Any:
        return self._init(**self._options)

    def write(self, step: int, record: Record) -> None:
        self.open()
        self._opened.log(record, step=step)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.finish()
