"""The job that is planned, and its settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .devices import Device

OPTIMIZERS = {
    "adam": (8, 4, 0),
    "adam_offload": (0, 0, 12),
    "adafactor": (0, 4, 0),
    "lion": (4, 4, 0),
}
"""Bytes per element of this rank's shards: moments; master weights, if parameters are in half precision; both in the
host's memory. The row and column sums of Adafactor are ignored: they are about a thousandth."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Job:
    """The given facts of a job.

    Attributes:
        world_size: the number of devices, G.
        device_memory: usable bytes of one device.
        batch: sequences per device and step, so that a step has G · batch.
        sequence: tokens of a sequence.
        dtype: of parameters and activations.
        device: the speed of a device.
        node_size: devices of a node.
        network: bytes per second that a device sends to other nodes.
    """

    world_size: int
    device_memory: float
    batch: int
    sequence: int
    dtype: torch.dtype
    device: Device
    node_size: int = 8
    network: float = 25e9

    def __post_init__(self) -> None:
        """Raises ValueError if a number is not positive."""
        for name in ("world_size", "device_memory", "batch", "sequence", "node_size", "network"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")

    @property
    def is_half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    def operation_seconds(self, flops: float, moved: float) -> float:
        """The time of an operation, which is bound by computation or by memory."""
        peak = self.device.flops if self.is_half else self.device.fp32_flops
        return max(flops / peak, moved / self.device.memory)

    def link(self, ranks: int, step: int = 1) -> float:
        """Bytes per second that a rank sends to ``ranks`` ranks, which are ``step`` ranks apart."""
        return self.device.node_link if ranks * step <= self.node_size else min(self.network, self.device.node_link)


@dataclass(frozen=True)
class Settings:
    """The settings that a script chooses.

    Attributes:
        zero: ZeRO level.
        tp: tensor-parallel ranks.
        pipe: pipeline stages.
        micro_batches: those of a pipeline, of all its stages; without a pipeline, the backward passes of a step.
        checkpoint: whether activations are recomputed in backward.
        optimizer: a name in ``OPTIMIZERS``.
    """

    zero: int = 3
    tp: int = 1
    pipe: int = 1
    micro_batches: int = 1
    checkpoint: bool = True
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        """Raises ValueError if there is no such optimizer or level, or a number is not positive."""
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r} is not planned; choose one of {', '.join(OPTIMIZERS)}")
        if self.zero not in range(4):
            raise ValueError(f"zero={self.zero!r} is not a ZeRO level; choose 0, 1, 2 or 3")
        for name in ("tp", "pipe"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")

    @property
    def accumulation(self) -> int:
        """The backward passes of a step, outside a pipeline."""
        return 1 if self.pipe > 1 else self.micro_batches

    def micro_batch(self, job: Job) -> int:
        """Sequences of one micro-batch, of all tensor-parallel ranks and stages together.

        Raises:
            ValueError: micro-batches do not divide the batch.
        """
        sequences = self.sequences(job)
        if self.micro_batches < 1 or sequences % self.micro_batches:
            raise ValueError(f"micro_batches={self.micro_batches} does not divide a batch of {sequences} sequences")
        return sequences // self.micro_batches

    def sequences(self, job: Job) -> int:
        """Sequences of all micro-batches of a step together."""
        return job.batch * self.tp * self.pipe

    def state_bytes(self, job: Job) -> tuple[float, float]:
        """Bytes of optimizer state per element of the shards: on the device and on the host."""
        moments, master, host = OPTIMIZERS[self.optimizer]
        return moments + (master if job.is_half else 0), host if job.is_half else max(0, host - 4)

    def lines(self, layers: str = "layers") -> list[str]:
        """The lines of a script that select this. ``layers``: the name of the model's list of layers."""
        sizes = [f"zero_level={self.zero}"]
        sizes += [f"tp_size={self.tp}"] if self.tp > 1 else []
        sizes += [f"pipe_size={self.pipe}, num_micro_batches={self.micro_batches}"] if self.pipe > 1 else []
        lines = [f"bmt.init_distributed({', '.join(sizes)})"]
        if self.tp > 1:
            lines.append("model = bmt_tp.parallelize(model, plan)  # by default the plan is model.tp_plan")
        if self.pipe > 1:
            lines.append(f"layers = [bmt.Block(layer, use_checkpoint={self.checkpoint}) for layer in model.{layers}]")
            lines.append(f"model.{layers} = bmt.PipelineTransformerBlockList(layers)")
            lines.append("model = bmt.BMTrainModelWrapper(model)")
        else:
            lines.append(f"model = bmt.BMTrainModelWrapper(model, use_checkpoint={self.checkpoint})")
        if self.accumulation > 1:
            lines.append(f"# {self.accumulation} backward passes per step, all but the last under bmt.no_sync(model)")
        classes = {
            "adam": "bmt.optim.AdamOptimizer",
            "adam_offload": "bmt.optim.AdamOffloadOptimizer",
            "adafactor": "bmt_optim.Adafactor",
            "lion": "bmt_optim.Lion",
        }
        own = ", relative_step=False" if self.optimizer == "adafactor" else ""
        return [*lines, f"optimizer = {classes[self.optimizer]}(model.parameters(), lr=lr{own})"]
