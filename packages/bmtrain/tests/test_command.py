import contextlib
import importlib.metadata
import io
import json
import os
import subprocess
import sys

import pytest
import torch

from bmtrain.command import PACKAGES, main


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "info" in out
    assert "benchmark" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["no-such-command"], "choose from"),
        (["info", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["benchmark", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["benchmark", "nonsense"], "'nonsense' is not a benchmark"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_info_names_every_package_torch_and_the_kernels(capsys):
    assert main(["info"]) == 0
    table = capsys.readouterr().out
    for name in PACKAGES:
        assert any(line.split() == [name, importlib.metadata.version(name)] for line in table.splitlines())
    assert torch.__version__ in table
    assert "cpu variant" in table


def test_info_as_json_is_json(capsys):
    assert main(["info", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)
    assert sections["packages"].keys() == set(PACKAGES)
    assert sections["platform"]["torch"] == torch.__version__
    assert isinstance(sections["kernels"]["cpu_compiled"], bool)


def test_the_module_runs_as_the_command():
    result = subprocess.run([sys.executable, "-m", "bmtrain", "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: bmtrain")


def test_the_command_is_installed():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="bmtrain")
    assert script.load() is main


@pytest.mark.ranks(2, init=False)
def test_benchmark_prints_the_tables_on_one_rank():
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["benchmark", "--device", "cpu", "--max-bytes", "4096", "all-gather", "send-recv"]) == 0
    lines = output.getvalue().splitlines()
    if os.environ["RANK"] != "0":
        assert lines == []
        return
    titles = [line for line in lines if "ranks on cpu" in line]
    assert titles == ["all-gather, 2 ranks on cpu", "send/recv, 2 ranks on cpu"]
    assert sum(line.split()[0] in ("1024", "4096") for line in lines) == 4


def test_benchmark_runs_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "bmtrain", "benchmark", "--device", "cpu", "--max-bytes", "1024", "all-gather"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "all-gather, 2 ranks on cpu" in result.stdout
