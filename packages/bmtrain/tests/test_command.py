import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch

from bmtrain.command import PACKAGES, main


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "info" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["no-such-command"]])
def test_a_wrong_call_says_what_is_there(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "info" in capsys.readouterr().err or not arguments


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
