"""The example and the doctor on two hosts of two ranks each: namespaces with addresses and processes of their own.

torchrun's rendezvous goes between the hosts. The ranks of a host share memory, those of different hosts send messages.
One host is lost in the middle, and the other one goes on alone from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2" / "train.py"
FLAGS = [
    *("--data", "text", "--vocab-size", "300", "--seq-len", "32", "--layers", "2", "--heads", "2", "--hidden", "32"),
    *("--dropout", "0", "--schedule", "constant", "--lr", "3e-3", "--warmup", "0", "--optimizer", "adam"),
    *("--batch-size", "2", "--step-size", "8", "--tp", "2", "--steps", "40", "--save-interval", "5", "--keep", "99"),
    *("--eval-interval", "0", "--log-interval", "1", "--sample-tokens", "0", "--timeout", "20", "--resume"),
]
PORT = 29400  # in a namespace of its own


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@contextlib.contextmanager
def two_networks() -> Iterator[list[str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, with a cable between them."""
    names = [f"bmt-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names):
            run("ip", "-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


def why_not() -> str:
    """Why there can be no hosts on this machine; empty if there can."""
    if sys.platform != "linux" or torch.cuda.is_available():
        return "ranks are on the CPU of Linux"
    if missing := [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    try:
        with two_networks():
            subprocess.run(["unshare", "--uts", "--pid", "--mount", "--fork", "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"namespaces may not be made here: {error.stderr.decode(errors='replace').strip()}"
    return ""


class Host:
    """torchrun with two ranks in a network; other hosts' processes cannot be seen from it."""

    def __init__(self, network: str, number: int, folder: Path, *command: str) -> None:
        self.output = folder / f"host{number}.log"
        name, names = folder / f"name{number}", folder / "names"
        name.write_text(f"host{number}\n")
        names.write_text("127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"]
        torchrun += ["--max-restarts", "3", "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
        torchrun += ["--rdzv-endpoint", f"10.77.0.1:{PORT}", "--rdzv-conf", "last_call_timeout=4,join_timeout=120"]
        torchrun += ["--local-addr", f"10.77.0.{number + 1}", *command]
        setup = f"mount --bind {name} /etc/hostname && mount --bind {names} /etc/hosts && hostname host{number} "
        setup += '&& exec "$@"'
        enter = ["ip", "netns", "exec", network, "unshare", "--uts", "--pid", "--mount", "--fork", "--mount-proc"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [*enter, "sh", "-c", setup, "sh", *torchrun],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lose(self) -> None:
        """End all of its processes at once: they are in the process namespace of the first one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def losses(folder: Path) -> dict[int, float]:
    """The training loss of each step, as it was measured last."""
    records = [json.loads(line) for line in (folder / "runs/gpt2/metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_run_on_two_hosts_survives_the_loss_of_one(tmp_path: Path) -> None:
    folders = [tmp_path / "two", tmp_path / "one"]
    for folder in folders:
        (folder / "text").mkdir(parents=True)
        (folder / "text" / "a.txt").write_text("".join(f"line {i}: {i * i} and so on\n" for i in range(3000)))
    checkpoints = folders[0] / "runs/gpt2/checkpoints"
    with two_networks() as networks:
        command = [str(EXAMPLE), *FLAGS]
        hosts = [Host(network, number, folders[0], *command) for number, network in enumerate(networks)]
        try:
            deadline = time.monotonic() + 180
            while not (checkpoints / "step-00000010").exists():
                assert time.monotonic() < deadline, hosts[0].output.read_text()
                assert all(host.process.poll() is None for host in hosts), hosts[0].output.read_text()
                time.sleep(0.1)
            hosts[1].lose()
            assert hosts[0].process.wait(240) == 0, hosts[0].output.read_text()
        finally:
            for host in hosts:
                host.lose()
    output = hosts[0].output.read_text()
    assert (checkpoints / "step-00000040").exists(), output
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(EXAMPLE), *FLAGS], cwd=folders[1], env=environment, check=True, timeout=240)
    interrupted, plain = losses(folders[0]), losses(folders[1])
    assert interrupted.keys() == plain.keys()
    for step, loss in plain.items():
        assert interrupted[step] == pytest.approx(loss, rel=1e-4), step


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_doctor_looks_at_what_is_between_hosts(tmp_path: Path) -> None:
    with two_networks() as networks:
        command = ["-m", "bmtrain", "doctor", "--json"]
        hosts = [Host(network, number, tmp_path, *command) for number, network in enumerate(networks)]
        try:
            assert [host.process.wait(120) for host in hosts] == [0, 0], hosts[0].output.read_text()
        finally:
            for host in hosts:
                host.lose()
    outputs = [host.output.read_text() for host in hosts]
    report = next(output[output.index("{\n") : output.rindex("}") + 1] for output in outputs if "{\n" in output)
    checks = {check["name"]: check for check in json.loads(report)["checks"]}
    assert all(check["status"] == "ok" for check in checks.values()), checks
    assert checks["rendezvous"]["detail"].startswith("4 processes")
    assert {f"host{n} has ranks {2 * m} to {2 * m + 1}" for n in (0, 1) for m in (0, 1)} > set(
        checks["hosts"]["detail"].split("; ")
    )
    assert checks["transport"]["detail"] == "shared memory within hosts, gloo messages between them, interface: eth0"
    assert checks["links"]["detail"].startswith("1 between 2 hosts, ")
    assert len(checks["links"]["figures"]) == 4
    assert len(checks["collectives"]["figures"]) == 8
