"""Plans as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from .estimate import Estimate
from .live_memory import Memory
from .models import PlannedModel
from .settings import Job

_OWNERS = tuple(each.name for each in fields(Memory))


def facts(model: PlannedModel, job: Job, estimates: list[Estimate]) -> dict[str, Any]:
    """A plan as plain data, in bytes, seconds, and shares from 0 to 1."""
    return {
        "model": {"name": model.name, "parameters": model.parameters, "layers": model.depth},
        "gpus": job.world_size,
        "gpu_memory": job.device_memory,
        "batch_size": job.batch,
        "sequence": job.sequence,
        "dtype": str(job.dtype).removeprefix("torch."),
        "device": asdict(job.device),
        "settings": [_entry(model, job, each) for each in estimates],
    }


def _entry(model: PlannedModel, job: Job, each: Estimate) -> dict[str, Any]:
    return {
        **asdict(each.settings),
        "micro_batch_size": each.settings.micro_batch(job),
        "fits": each.fits(job),
        "memory": {**asdict(each.peak), "peak": each.peak.total, "at": each.phase, "host": each.host},
        "sent": each.sent,
        "bubble": each.bubble,
        "seconds": each.seconds,
        "tokens_per_second": each.tokens_per_second,
        "mfu": each.mfu,
        "code": model.lines(each.settings),
    }


def text(model: PlannedModel, job: Job, estimates: list[Estimate], count: int) -> str:
    """A table of the first ``count`` settings, and the details of the first one."""
    tokens = job.world_size * job.batch * job.sequence
    lines = [
        f"{model.name}: {model.parameters / 1e9:.3g} billion parameters, {model.depth} layers",
        f"{job.world_size} x {job.device.name} with {job.device_memory / 1e9:.3g} GB; a step has {job.batch} sequences "
        f"of {job.sequence} tokens per device, {tokens:,} tokens in all; {str(job.dtype).removeprefix('torch.')}",
        "",
        f"{'':4} {'zero':>4} {'tp':>3} {'pipe':>4} {'micro-batches':>13} {'recompute':>9} {'optimizer':>12} "
        f"{'peak GB':>8} {'s/step':>8} {'tokens/s/GPU':>12} {'MFU':>6} {'bubble':>6}",
    ]
    fitting = [each for each in estimates if each.fits(job)]
    shown = fitting[:count] + [each for each in estimates if not each.fits(job)][: max(0, count - len(fitting))]
    for each in shown:
        s = each.settings
        lines.append(
            f"{'fits' if each.fits(job) else '-':4} {s.zero:4} {s.tp:3} {s.pipe:4} "
            f"{f'{s.micro_batches} of {s.micro_batch(job)}':>13} {'yes' if s.checkpoint else 'no':>9} "
            f"{s.optimizer:>12} {each.peak.total / 1e9:8.2f} {each.seconds:8.3f} "
            f"{each.tokens_per_second / job.world_size:12.0f} {each.mfu:6.1%} {each.bubble:6.1%}"
        )
    best = shown[0]
    title = "The fastest that fits" if best.fits(job) else "Nothing fits. The smallest"
    lines += ["", f"{title}, per rank, at its peak ({best.phase}):"]
    for owner in _OWNERS:
        name = {"state": "optimizer state", "gathered": "unsharded parameters"}.get(owner, owner)
        lines.append(f"  {name:20} {getattr(best.peak, owner) / 1e9:9.3f} GB")
    lines.append(f"  {'peak':20} {best.peak.total / 1e9:9.3f} GB of {job.device_memory / 1e9:.3g}")
    if best.host:
        lines.append(f"  {'in host memory':20} {best.host / 1e9:9.3f} GB")
    for link, size in best.sent.items():
        if size:
            lines.append(f"  {'sent, ' + link:20} {size / 1e9:9.3f} GB per step")
    lines += ["", "Lines of code that select it:", *(f"  {line}" for line in model.lines(best.settings))]
    return "\n".join(lines)
