"""The speed of devices and of the links between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """Figures of one device, as large operations reach them in practice.

    Attributes:
        name: the name to print.
        flops: floating-point operations per second of matrix products in half precision.
        fp32_flops: the same in fp32, without TF32, as torch computes by default.
        peak, fp32_peak: of these, what the vendor names, to which model FLOPs utilization refers; or what was measured
            or given.
        memory: bytes per second to and from its memory.
        node_link: bytes per second that a device sends to the others of its node.
        host_link: bytes per second between the device and the host's memory.
    """

    name: str
    flops: float
    fp32_flops: float
    peak: float
    fp32_peak: float
    memory: float
    node_link: float
    host_link: float


DEVICES = {
    "v100": Device("V100", 0.65 * 125e12, 0.9 * 15.7e12, 125e12, 15.7e12, 0.8 * 900e9, 120e9, 12e9),
    "a100": Device("A100", 0.7 * 312e12, 0.9 * 19.5e12, 312e12, 19.5e12, 0.8 * 2.0e12, 230e9, 24e9),
    "h100": Device("H100", 0.6 * 989e12, 0.75 * 67e12, 989e12, 67e12, 0.8 * 3.35e12, 360e9, 50e9),
    "h200": Device("H200", 0.6 * 989e12, 0.75 * 67e12, 989e12, 67e12, 0.8 * 4.8e12, 360e9, 50e9),
    "cpu": Device("CPU", 0.1e12, 0.1e12, 0.1e12, 0.1e12, 10e9, 1e9, 10e9),
}
"""By their names on the command line. The shares of the vendors' figures are typical of large products."""


def measured() -> Device:
    """Measure the first GPU, or the CPU, of this machine. Matrix products and copies take about a second."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    base = DEVICES["h100" if is_gpu else "cpu"]
    size = 8192 if is_gpu else 1024

    def products(dtype: torch.dtype) -> float:
        x = torch.ones(size, size, dtype=dtype, device=device)
        return 2 * size**3 / _seconds(lambda: x @ x, device)

    block = torch.ones(1 << (28 if is_gpu else 24), device=device)
    copied = torch.empty_like(block)
    memory = 2 * block.nbytes / _seconds(lambda: copied.copy_(block), device)
    fp32 = products(torch.float32)
    name = torch.cuda.get_device_name() if is_gpu else "this CPU"
    half = products(torch.bfloat16) if is_gpu else fp32
    return Device(name, half, fp32, half, fp32, memory, base.node_link, base.host_link)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest time of a few runs."""
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < 0.3:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
