import contextlib
import importlib.metadata
import io
import json
import os
import subprocess
import sys

import pytest
import torch

import bmtrain
from bmt_pipe import make_schedule, simulate, timeline_of, write_timeline
from bmtrain.command import main
from bmtrain.doctor import PACKAGES

PLAN = ["pipeline-plot", "--schedule", "1f1b", "--stages", "4", "--micro-batches", "8"]


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "info" in out
    assert "doctor" in out
    assert "benchmark" in out
    assert "pipeline-plot" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["no-such-command"], "choose from"),
        (["info", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["doctor", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["benchmark", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["benchmark", "nonsense"], "'nonsense' is not a benchmark"),
        (["pipeline-plot"], "give --schedule, --stages and --micro-batches, or --measured without any of them"),
        (["pipeline-plot", "--nonsense"], "unrecognized arguments: --nonsense"),
        ([*PLAN[:2], "gpipe", *PLAN[3:]], "no schedule 'gpipe'; choose one of recompute, 1f1b"),
        ([*PLAN[:-1], "0"], "micro_batches=0 must be a positive integer"),
        ([*PLAN[:-1], "many"], "argument --micro-batches: invalid int value: 'many'"),
        ([*PLAN, "--interleave", "2"], "chunks=2 must be 1 for '1f1b'"),
        ([*PLAN, "--costs", "F=1,X=2"], "--costs: 'X=2' is not one of F, R, B, I, W with a positive number"),
        ([*PLAN, "--costs", "F=0"], "--costs: 'F=0' is not one of"),
        ([*PLAN, "--costs", "measured"], "--costs measured needs --measured"),
        ([*PLAN, "--measured", "no-such-file"], "No such file or directory: 'no-such-file'"),
        ([*PLAN, "--measured", __file__], "test_command.py is not a timeline: "),
        ([*PLAN, "--output", "picture.gif"], "path='picture.gif' must end in one of .png, .svg, .pdf"),
        ([*PLAN, "--output", "no-such-folder/picture.png"], "No such file or directory"),
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


def write_measurement(path, name="1f1b"):
    """A run in which everything took twice as many milliseconds as by the unit costs."""
    schedule = make_schedule(name, 2, 4)
    plan = simulate(schedule)
    starts, ends = ([[float(time) / 500 for time in row] for row in rows] for rows in (plan.starts, plan.ends))
    write_timeline(path, schedule, timeline_of(schedule, starts, ends))


def test_pipeline_plot_says_how_to_call_it(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["pipeline-plot", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: bmtrain pipeline-plot")
    assert "recompute, 1f1b, interleaved_1f1b, zero_bubble_h1, zero_bubble_v" in " ".join(out.split())


def test_pipeline_plot_prints_what_a_plan_comes_to(capsys):
    assert main(PLAN) == 0
    title, length, _, *ranks = capsys.readouterr().out.splitlines()
    assert title == "1f1b: 4 stages, 8 micro-batches, planned"
    assert length == "  length 33 units"
    assert [line.split() for line in ranks] == [[str(rank), "9", "27.3%", str(4 - rank), "0"] for rank in range(4)]


def test_pipeline_plot_takes_chunks_and_costs(capsys):
    arguments = ["--schedule", "recompute", "--stages", "4", "--micro-batches", "8", "--interleave", "2"]
    assert main(["pipeline-plot", *arguments, "--costs", "F=.5, B=1.5"]) == 0
    title, length, _, *ranks = capsys.readouterr().out.splitlines()
    assert title == "recompute: 4 stages, 8 micro-batches, 2 chunks per rank, planned"
    assert length == "  length 27 units"  # 8 (0.5 + 1 + 1.5) and 3 (0.5 + 1.5) / 2 of waiting
    assert [line.split() for line in ranks] == [[str(rank), "3", "11.1%", "1", "16"] for rank in range(4)]


def test_pipeline_plot_compares_a_measurement_with_its_plan(tmp_path, capsys):
    write_measurement(tmp_path / "run.json")
    output = tmp_path / "picture.png"
    assert main(["pipeline-plot", "--measured", str(tmp_path / "run.json"), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    plan, measured = capsys.readouterr().out.split("\n\n")
    assert plan.splitlines()[:2] == ["2 stages, 4 micro-batches, planned", "  length 15 units"]
    assert measured.splitlines()[:2] == ["run.json: 2 stages, 4 micro-batches, measured", "  length 30 ms"]
    assert [line.split()[1:3] for line in measured.splitlines()[3:]] == [["6", "20.0%"]] * 2


def test_pipeline_plot_plans_with_measured_costs(tmp_path, capsys):
    write_measurement(tmp_path / "run.json")
    arguments = ["--measured", str(tmp_path / "run.json"), "--costs", "measured"]
    assert main(["pipeline-plot", "--schedule", "1f1b", "--stages", "1", "--micro-batches", "3", *arguments]) == 0
    assert "  length 18 ms" in capsys.readouterr().out.splitlines()
    # Another schedule may do what was not measured.
    with pytest.raises(SystemExit) as ended:
        main(["pipeline-plot", "--schedule", "zero_bubble_h1", "--stages", "1", "--micro-batches", "3", *arguments])
    assert ended.value.code == 2
    assert "costs must say what each kind of action takes, and says nothing of I, W" in capsys.readouterr().err


@pytest.fixture
def checkpoints(tmp_path):
    """A directory with the checkpoints 1 and 2 of a plain model."""
    checkpointer = bmtrain.Checkpointer(tmp_path / "checkpoints")
    for step in (1, 2):
        torch.manual_seed(step)
        checkpointer.save(step, model=torch.nn.Linear(300, 300))
    checkpointer.close()
    return tmp_path / "checkpoints"


def test_checkpoints_are_listed_and_verified(checkpoints, capsys):
    assert main(["checkpoint", "ls", str(checkpoints)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(checkpoints / f"step-0000000{n}") for n in (1, 2)]
    assert "complete; saved with ranks 1" in lines[0]
    assert "complete, saved last; saved with ranks 1" in lines[1]
    assert main(["checkpoint", "verify", str(checkpoints / "step-00000001")]) == 0
    assert "every byte as it was written" in capsys.readouterr().out
    path = checkpoints / "step-00000002" / "model-00001-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["checkpoint", "ls", str(checkpoints)]) == 0  # which does not read all
    assert main(["checkpoint", "verify", "--json", str(checkpoints)]) == 1
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert facts[0]["problem"] is None
    assert [each["is_newest"] for each in facts] == [False, True]
    assert "model-00001-of-00001.safetensors has changed since it was written" in facts[1]["problem"]
    path.unlink()
    assert main(["checkpoint", "ls", str(checkpoints)]) == 1
    assert "DAMAGED: " in capsys.readouterr().out
    checkpointer = bmtrain.Checkpointer(checkpoints)
    model = torch.nn.Linear(300, 300)
    checkpointer.load(1, model=model)
    checkpointer.save(0, model=model)
    checkpointer.close()
    main(["checkpoint", "ls", str(checkpoints)])
    assert "complete, saved last" in capsys.readouterr().out.splitlines()[0]
    assert main(["checkpoint", "ls", str(checkpoints / "nothing")]) == 1
    assert "is no checkpoint, and holds none" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["trainer.json", "model-00001-of-00001.safetensors"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(checkpoints, capsys, monkeypatch, name):
    open_file, os_open = open, os.open

    def failing(opens):
        def call(path, *args, **options):
            if str(path).endswith(f"step-00000002/{name}"):
                raise OSError(5, "Input/output error", str(path))
            return opens(path, *args, **options)

        return call

    monkeypatch.setattr("builtins.open", failing(open_file))
    monkeypatch.setattr(os, "open", failing(os_open))
    assert main(["checkpoint", "verify", str(checkpoints)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" not in out
    assert "step-00000002  CANNOT BE READ NOW: [Errno 5] Input/output error" in out


def test_a_checkpoint_is_converted(checkpoints, tmp_path, capsys):
    assert main(["convert", str(checkpoints / "step-00000002"), str(tmp_path / "x.pt")]) == 0
    torch.manual_seed(2)
    wanted = torch.nn.Linear(300, 300).state_dict()
    converted = torch.load(tmp_path / "x.pt", weights_only=True)
    assert converted.keys() == wanted.keys()
    assert all(torch.equal(converted[name], wanted[name]) for name in wanted)
    assert main(["convert", str(checkpoints / "step-00000002"), str(tmp_path / "x.pt")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["convert", str(checkpoints), str(tmp_path / "y.pt")]) == 1
    assert "is a folder of checkpoints; give one of them, such as" in capsys.readouterr().err
