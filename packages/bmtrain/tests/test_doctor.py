"""``bmtrain doctor``: what it reports on machines that are well and that are not."""

import json
import os
import subprocess
import sys

import pytest
import torch

import bmt_kernels
from bmt_comm import Communicator
from bmtrain import doctor, self_test
from bmtrain.command import main
from bmtrain.self_test import SelfTest, check_collectives, run_self_test

WELL = SelfTest(processes=2, problem=None, shared_memory=True, seconds=3.0)


def status_of(capsys, name):
    """The line of a check in the output, and the advice if there is one."""
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if f" {name}: " in line)
    advice = lines[at + 1].strip() if at + 1 < len(lines) and "what to do" in lines[at + 1] else ""
    return lines[at].split()[0], lines[at], advice


@pytest.mark.skipif(torch.cuda.is_available(), reason="its processes would take the GPUs of other tests")
def test_doctor_runs_as_a_command_and_reports_json():
    result = subprocess.run(
        [sys.executable, "-m", "bmtrain", "doctor", "--json"], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["packages"].keys() == set(doctor.PACKAGES)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks.keys() == {"packages", "CPU kernels", "GPUs", "CPU ranks"}
    assert all(check["status"] == "ok" or check["advice"] for check in checks.values())
    timed = {name.partition(" of ")[0] for name in checks["CPU ranks"]["figures"]}
    assert timed == {"all-reduce", "all-gather", "reduce-scatter", "broadcast"}


def test_doctor_prints_what_info_prints_and_succeeds_on_a_machine_that_is_well(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run_self_test", lambda device, processes: WELL)
    assert main(["info"]) == 0
    info = capsys.readouterr().out
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(info)
    assert out.splitlines()[-1].endswith(" 0 failed")


def test_doctor_fails_and_says_what_to_do_if_collectives_fail(monkeypatch, capsys):
    broken = SelfTest(2, "all-reduce of 4 KiB: 7 of 1024 elements are wrong on rank 1", True, 3.0)
    monkeypatch.setattr(doctor, "run_self_test", lambda device, processes: broken)
    assert main(["doctor"]) == 1
    status, line, advice = status_of(capsys, "CPU ranks")
    assert status == "failed"
    assert "7 of 1024 elements are wrong" in line
    assert advice


def test_a_check_that_raises_has_failed_and_the_others_run(monkeypatch, capsys):
    def fail(device, processes):
        raise OSError("no more processes")

    monkeypatch.setattr(doctor, "run_self_test", fail)
    monkeypatch.setattr(doctor, "check_packages", fail)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "failed   CPU ranks: the check raised OSError: no more processes" in out
    assert "failed   packages: " in out


def test_a_package_that_is_missing_or_upstreams_is_named(monkeypatch):
    versions = dict.fromkeys(doctor.PACKAGES, "2.0.0")
    monkeypatch.setattr(doctor, "_version", versions.get)
    assert doctor.check_packages().status == "ok"
    versions["bmtrain"] = "1.0.1"
    assert "not of version 2: bmtrain 1.0.1" in doctor.check_packages().detail
    del versions["bmt-tp"]
    assert "not installed: bmt-tp" in doctor.check_packages().detail


def test_missing_kernels_are_a_warning_that_says_how_to_build_them(monkeypatch):
    info = bmt_kernels.build_info()
    values = {**vars(info), "cpu_compiled": False, "cpu_note": "it was not built"}
    monkeypatch.setattr(bmt_kernels, "build_info", lambda: bmt_kernels.BuildInfo(**values))
    check = doctor.check_cpu_kernels()
    assert check.status == "warning"
    assert check.detail.startswith("it was not built; plain PyTorch functions serve")
    assert "pip install" in check.advice
    ranks = doctor.check_cpu_ranks(SelfTest(2, None, False, 3.0))
    assert ranks.status == "warning"
    assert ("by gloo messages, since the compiled CPU kernels are missing" in ranks.detail) == (sys.platform == "linux")


def test_a_gpu_that_pytorch_does_not_use_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver_gpus", lambda: ["NVIDIA H100"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check = doctor.check_gpus()
    assert check.status == "failed"
    assert "the driver shows NVIDIA H100" in check.detail
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor.check_gpus().status == "warning"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.check_gpus().status == "ok"


class WrongSum(Communicator):
    def all_reduce(self, tensor, op="sum", async_op=False):
        tensor += 1
        return super().all_reduce(tensor, op, async_op)


def test_a_wrong_result_is_noticed():
    stages = []
    assert check_collectives(Communicator(), stages.append)[1] is None
    times, problem = check_collectives(WrongSum(), stages.append)
    assert problem == "all-reduce of 4 KiB: 1024 of 1024 elements are wrong on rank 0"
    assert len(times) == 8
    assert set(stages) == {"all-reduce", "all-gather", "reduce-scatter", "broadcast"}


@pytest.fixture
def started(monkeypatch):
    """The processes that the self-test starts."""
    processes = []
    start = self_test._start
    monkeypatch.setattr(self_test, "_start", lambda *args: processes.append(start(*args)) or processes[-1])
    return processes


def assert_gone(processes):
    assert len(processes) == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_processes_that_hang_are_ended(started):
    test = run_self_test(timeout=0.2)
    assert test.problem is not None
    assert test.problem.startswith("no result after 0 s: process 0 in import, process 1 in import")
    assert test.shared_memory is None
    assert_gone(started)


def test_a_process_that_fails_is_reported_with_its_error(started, monkeypatch):
    monkeypatch.setenv("BMT_KERNELS_CPU", "sse9")
    test = run_self_test()
    assert test.problem is not None
    assert "failed during import: ValueError: BMT_KERNELS_CPU is 'sse9'" in test.problem
    assert_gone(started)
