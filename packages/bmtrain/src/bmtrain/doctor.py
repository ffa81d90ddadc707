"""``bmtrain info`` and ``bmtrain doctor``: what is installed on this machine, and whether it works."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

from .self_test import SelfTest, run_self_test

PACKAGES = ("bmtrain", "bmt-comm", "bmt-kernels", "bmt-optim", "bmt-pipe", "bmt-tp", "bmt-zero")

BUILD = "from a checkout: pip install --force-reinstall --no-deps ./packages/bmt-kernels"
"""The command that builds the kernels."""


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        status: ``warning`` if training works, but slower than it could; ``failed`` if it does not work.
        detail: what the check saw.
        advice: what to do; empty if the status is ``ok``.
        figures: measured times in microseconds, if there are any.
    """

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    advice: str = ""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


def collect_info() -> dict[str, dict[str, Any]]:
    """What ``bmtrain info`` prints: sections of names and values."""
    import torch

    import bmt_kernels

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "torch": torch.__version__,
            "torch built for CUDA": torch.version.cuda,
            "NCCL": nccl,
            "GPUs": torch.cuda.device_count(),
            "CPU threads": torch.get_num_threads(),
        },
        "kernels": dataclasses.asdict(bmt_kernels.build_info()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def print_info(as_json: bool) -> None:
    """Print the sections of :func:`collect_info`."""
    sections = collect_info()
    print(json.dumps(sections, indent=2) if as_json else _table(sections))


def diagnose(as_json: bool) -> int:
    """Print versions, devices and kernels, run the checks, and print their results.

    Returns:
        The exit status: 1 if a check failed, else 0.
    """
    return report(run_checks(), as_json)


def report(results: Iterable[Check], as_json: bool) -> int:
    """Print versions, devices and kernels, and the results of checks; returns the exit status."""
    sections = collect_info()
    if not as_json:
        print(_table(sections), end="\n\n", flush=True)
        print("checks")
    checks = []
    for check in results:
        checks.append(check)
        if not as_json:
            print(lines_of(check), flush=True)
    failed = [check.name for check in checks if check.status == "failed"]
    if as_json:
        print(json.dumps({**sections, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    else:
        warnings = sum(check.status == "warning" for check in checks)
        print(f"\n{len(checks) - len(failed) - warnings} ok, {warnings} warnings, {len(failed)} failed")
    return 1 if failed else 0


def run_checks() -> Iterable[Check]:
    """Run every check. A check that raises has failed."""
    import torch

    checks: list[tuple[str, Callable[[], Check]]] = [("packages", check_packages), ("CPU kernels", check_cpu_kernels)]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    checks += [("GPUs", check_gpus)]
    if gpus:
        checks += [("CUDA kernels", check_cuda_kernels)]
    checks += [("CPU ranks", lambda: check_cpu_ranks(run_self_test("cpu", 2)))]
    if gpus:
        checks += [("GPU ranks", lambda: check_gpu_ranks(run_self_test("cuda", min(gpus, 2))))]
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # of any kind: the report continues
            advice = "send this report with a bug report"
            yield Check(name, "failed", f"the check raised {type(error).__name__}: {error}", advice)


def check_packages() -> Check:
    """All packages are installed, and they are those of this project, not upstream's."""
    versions = {name: _version(name) for name in PACKAGES}
    install = "from a checkout: cd packages && pip install " + " ".join(f"./{name}" for name in sorted(PACKAGES))
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check("packages", "failed", f"not installed: {', '.join(missing)}", install)
    others = [f"{name} {version}" for name, version in versions.items() if not str(version).startswith("2.")]
    if others:
        return Check("packages", "failed", f"not of version 2: {', '.join(others)}", install)
    return Check("packages", "ok", f"{len(PACKAGES)} packages of version 2")


def check_cpu_kernels() -> Check:
    """The compiled CPU kernels are installed and in use."""
    import bmt_kernels

    info = bmt_kernels.build_info()
    name = "CPU kernels"
    if not info.cpu_compiled:
        return Check(name, "warning", f"{info.cpu_note}; plain PyTorch functions serve, several times slower", BUILD)
    if info.cpu_variant == "reference":
        detail = "BMT_KERNELS_CPU=reference: plain PyTorch functions serve, several times slower"
        return Check(name, "warning", detail, "unset BMT_KERNELS_CPU")
    return Check(name, "ok", f"variant {info.cpu_variant}, threads of {info.threading}, built by {info.compiler}")


def check_gpus() -> Check:
    """PyTorch sees the GPUs that the driver sees, and they compute."""
    import torch

    name = "GPUs"
    driver = _driver_gpus()
    if not torch.cuda.is_available():
        if not driver:
            return Check(name, "ok", "none; training runs on the CPU")
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return Check(name, "ok", "hidden by CUDA_VISIBLE_DEVICES; training runs on the CPU")
        seen = f"the driver shows {', '.join(driver)}, and PyTorch {torch.__version__} uses none"
        if torch.version.cuda is None:
            return Check(name, "warning", seen, "install a PyTorch that is built for CUDA: https://pytorch.org")
        advice = f"check CUDA_VISIBLE_DEVICES, and that the driver supports CUDA {torch.version.cuda}"
        return Check(name, "failed", seen, advice)
    for index in range(torch.cuda.device_count()):
        label = f"GPU {index} ({torch.cuda.get_device_name(index)})"
        try:
            right = torch.ones(1024, device=f"cuda:{index}").sum().item() == 1024
        except RuntimeError as error:
            advice = f"install a PyTorch that is built for this GPU; look for other jobs on it: nvidia-smi -i {index}"
            return Check(name, "failed", f"{label}: {str(error).splitlines()[0]}", advice)
        if not right:
            return Check(name, "failed", f"{label} adds wrongly", "take it out of service: CUDA_VISIBLE_DEVICES")
    return Check(name, "ok", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))


def _driver_gpus() -> list[str]:
    """Names of the GPUs, from ``nvidia-smi``; none if it fails or does not exist."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def check_cuda_kernels() -> Check:
    """The compiled CUDA kernels serve every GPU."""
    import bmt_kernels

    info = bmt_kernels.build_info()
    unserved = [gpu for gpu in info.gpus if "CUDA kernels" not in gpu]
    if not unserved:
        return Check("CUDA kernels", "ok", info.cuda_note)
    detail = f"plain PyTorch functions serve {', '.join(unserved)}; {info.cuda_note}"
    return Check("CUDA kernels", "warning", detail, f"build on this machine, with nvcc on PATH; {BUILD}")


def check_cpu_ranks(test: SelfTest) -> Check:
    """Two processes of this machine communicate on the CPU. The detail tells the transport, and why it is used."""
    name = "CPU ranks"
    if test.problem is not None:
        advice = "set GLOO_SOCKET_IFNAME=lo if the host name does not resolve; else send this with a bug report"
        return Check(name, "failed", test.problem, advice, test.microseconds)
    done = f"{test.processes} processes, right results ({test.seconds:.1f} s with their start)"
    if test.shared_memory:
        detail = f"through shared memory, since they are processes of one Linux host with the compiled kernels; {done}"
        return Check(name, "ok", detail, figures=test.microseconds)
    reason, advice = _why_no_shared_memory()
    return Check(name, "warning", f"by gloo messages, since {reason}; {done}", advice, test.microseconds)


def _why_no_shared_memory() -> tuple[str, str]:
    import bmt_kernels

    if sys.platform != "linux":
        return f"shared memory needs Linux and this is {platform.system()}", "nothing; messages are slower and work"
    if not bmt_kernels.build_info().cpu_compiled:
        return "the compiled CPU kernels are missing", BUILD
    if not bmt_kernels.SharedMemoryExchange.available():
        return "this kernel or this Python has no memfd_create or pidfd_open", "use Linux 5.3 or newer"
    return (
        "the processes cannot open each other's /proc/<process>/fd",
        "let processes of one user trace each other: in a container, add the capability SYS_PTRACE",
    )


def check_gpu_ranks(test: SelfTest) -> Check:
    """Processes of this machine communicate over NCCL, each with a GPU of its own."""
    if test.problem is not None:
        advice = "run again with NCCL_DEBUG=WARN; NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 show which path fails"
        return Check("GPU ranks", "failed", test.problem, advice, test.microseconds)
    done = f"{test.processes} processes, right results ({test.seconds:.1f} s with their start)"
    return Check("GPU ranks", "ok", f"over NCCL, since their tensors are on GPUs; {done}", figures=test.microseconds)


def _table(sections: dict[str, dict[str, Any]]) -> str:
    parts = []
    for title, values in sections.items():
        lines = [f"  {name.replace('_', ' '):22} {_text(value)}" for name, value in values.items()]
        parts.append("\n".join([title, *lines]))
    return "\n\n".join(parts)


def lines_of(check: Check) -> str:
    lines = [f"  {check.status:8} {check.name}: {check.detail}"]
    if check.advice:
        lines.append(f"           what to do: {check.advice}")
    lines += [f"           {name:25} {time:10.1f} µs" for name, time in check.figures.items()]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value in (None, "") else str(value)
