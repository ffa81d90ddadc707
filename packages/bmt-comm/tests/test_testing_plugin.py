"""The plugin, seen from a pytest run that uses it: each test here runs pytest on a small file of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bmt_comm.testing import pool

PREAMBLE = """
import os, time, warnings
import pytest
import torch
import torch.distributed as dist
"""


@dataclass
class Run:
    """Collects what an inner pytest run reports."""

    reports: dict[str, pytest.TestReport] = field(default_factory=dict)
    collection: list[pytest.CollectReport] = field(default_factory=list)
    exit_code: int = -1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.reports[report.nodeid.partition("::")[2]] = report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.collection.append(report)

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: report.outcome for name, report in self.reports.items()}

    def text(self, name: str) -> str:
        return self.reports[name].longreprtext


@pytest.fixture
def pytest_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Run]:
    """Run pytest in this process (so that it finds the rank processes warm) on a file with the given text."""
    monkeypatch.setattr(pool, "GRACE", 1.0)

    def run(text: str, *args: str) -> Run:
        path = tmp_path / f"test_inner_{tmp_path.name}.py"
        path.write_text(PREAMBLE + textwrap.dedent(text))
        ini = tmp_path / "pytest.ini"
        ini.write_text("[pytest]\nfilterwarnings = error\n")
        result = Run()
        options = ["-c", str(ini), "--import-mode=importlib", "-p", "no:cacheprovider", "--tb=long"]
        result.exit_code = pytest.main([*options, *args, str(path)], plugins=[result])
        capfd.readouterr()
        return result

    return run


def test_one_item_per_number_of_ranks_stacked_with_parametrize(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        @pytest.mark.parametrize("factor", [2, 5])
        @pytest.mark.ranks(1, 2)
        def test_sum(ctx, factor, tmp_path, device_type):
            x = torch.full((3,), float(factor), device=device_type)
            dist.all_reduce(x)
            assert x.tolist() == [factor * ctx.world_size] * 3
            assert ctx.world_size == int(os.environ["WORLD_SIZE"])
            (tmp_path / os.environ["RANK"]).touch()
            dist.barrier()
            assert len(list(tmp_path.iterdir())) == ctx.world_size
        """
    )
    names = {f"test_sum[ranks={n}-{f}]" for n in (1, 2) for f in (2, 5)}
    assert run.outcomes == dict.fromkeys(names, "passed")


def test_only_some_numbers_of_ranks(pytest_run: Callable[..., Run]) -> None:
    body = """
        import pytest

        @pytest.mark.ranks(1, 2, init=False)
        def test_on_ranks():
            pass

        def test_alone():
            pass
        """
    run = pytest_run(body, "--bmt-ranks=1")
    assert run.outcomes == {"test_on_ranks[ranks=1]": "passed", "test_alone": "passed"}


def test_one_number_of_ranks_for_each_set_of_parameters(pytest_run: Callable[..., Run]) -> None:
    body = """
        import pytest

        @pytest.mark.ranks(1, 2, init=False)
        @pytest.mark.parametrize("value", [5, 6])
        def test_on_ranks(value):
            pass

        def test_alone():
            pass
        """
    run = pytest_run(body, "--bmt-one-size")
    first = {"test_on_ranks[ranks=1-5]", "test_on_ranks[ranks=2-6]", "test_alone"}
    second = {"test_on_ranks[ranks=2-5]", "test_on_ranks[ranks=1-6]", "test_alone"}
    assert set(run.outcomes) in (first, second)
    assert set(pytest_run(body, "--bmt-one-size").outcomes) == set(run.outcomes)


def test_each_number_of_ranks_and_each_set_of_parameters(pytest_run: Callable[..., Run]) -> None:
    body = """
        import pytest

        @pytest.mark.ranks(1, 2, 3, init=False)
        def test_without_parameters():
            pass

        @pytest.mark.ranks(1, 2, init=False)
        @pytest.mark.parametrize("value", [5, 6, 7])
        def test_on_ranks(value):
            pass

        @pytest.mark.ranks(1, 2, 3, init=False)
        @pytest.mark.parametrize("value", [5, 6])
        def test_on_more_ranks(value):
            pass
        """
    chosen: dict[str, set[tuple[str, ...]]]
    chosen = {"test_without_parameters": set(), "test_on_ranks": set(), "test_on_more_ranks": set()}
    for name in pytest_run(body, "--bmt-each-size").outcomes:
        test, _, case = name.rstrip("]").partition("[ranks=")
        chosen[test].add(tuple(case.split("-")))
    assert chosen["test_without_parameters"] == {("1",), ("2",), ("3",)}
    for test, sizes, values in (("test_on_ranks", "12", "567"), ("test_on_more_ranks", "123", "56")):
        assert len(chosen[test]) == 3
        assert [set(each) for each in zip(*chosen[test])] == [set(sizes), set(values)]


def test_keyword_arguments_reach_init_distributed(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        @pytest.mark.ranks(2, tp_size=2)
        def test_layout(ctx):
            assert ctx.tp.size == 2

        @pytest.mark.ranks(2, tp_size=3)
        def test_bad_layout(ctx):
            pass
        """
    )
    assert run.outcomes == {"test_layout[ranks=2]": "passed", "test_bad_layout[ranks=2]": "failed"}
    assert "tp_size=3" in run.text("test_bad_layout[ranks=2]")


def test_classes_helper_values_and_monkeypatched_environment(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        class Pair:
            def __init__(self, a):
                self.a = a

        @pytest.fixture
        def flag(monkeypatch):
            monkeypatch.setenv("MY_FLAG", "on")

        @pytest.mark.usefixtures("flag")
        class TestGroup:
            @pytest.mark.ranks(1, init=False)
            @pytest.mark.parametrize("pair", [Pair(3)], ids=["three"])
            def test_value(self, pair):
                assert isinstance(pair, Pair) and pair.a == 3
                assert os.environ["MY_FLAG"] == "on"
        """
    )
    assert run.outcomes == {"TestGroup::test_value[ranks=1-three]": "passed"}


def test_failure_on_one_rank_is_reported_soon_and_the_next_test_works(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        @pytest.mark.ranks(2)
        def test_fails(ctx):
            print("printed by", ctx.rank)
            numbers = [1, 2, ctx.rank]
            if ctx.rank == 1:
                assert numbers == [1, 2, 7]
            dist.barrier()  # rank 0 waits here for ever

        @pytest.mark.ranks(2)
        def test_next(ctx):
            dist.barrier()
        """
    )
    assert run.outcomes == {"test_fails[ranks=2]": "failed", "test_next[ranks=2]": "passed"}
    report = run.reports["test_fails[ranks=2]"]
    text = report.longreprtext
    assert "rank 1 of 2 raised an exception" in text
    assert "assert [1, 2, 1] == [1, 2, 7]" in text
    assert "At index 2 diff: 1 != 7" in text
    assert "rank 0 of 2 was still running when another rank had failed" in text
    assert "in test_fails" in text.partition("rank 0 of 2")[2], "the stack of the waiting rank"
    assert text.index("rank 1 of 2") < text.index("rank 0 of 2"), "the cause comes first"
    sections = dict(report.sections)
    assert sections["Captured stdout of rank 0 call"] == "printed by 0\n"
    assert sections["Captured stdout of rank 1 call"] == "printed by 1\n"
    assert report.duration < 20


def test_a_rank_that_dies_fails_the_test_at_once(pytest_run: Callable[..., Run]) -> None:
    start = time.monotonic()
    run = pytest_run(
        """
        import signal

        @pytest.mark.ranks(2)
        def test_exits(ctx):
            if ctx.rank == 1:
                os._exit(7)
            dist.barrier()

        @pytest.mark.ranks(1, init=False)
        def test_is_killed():
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert run.outcomes == {"test_exits[ranks=2]": "failed", "test_is_killed[ranks=1]": "failed"}
    assert "rank 1 of 2 died" in run.text("test_exits[ranks=2]")
    assert "exit code 7" in run.text("test_exits[ranks=2]")
    assert "rank 0 of 2" in run.text("test_exits[ranks=2]")
    assert "killed by SIGKILL" in run.text("test_is_killed[ranks=1]")
    assert time.monotonic() - start < 30


def test_a_hang_is_ended_and_shows_every_stack(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        def wait_for_nothing():
            time.sleep(1000)

        @pytest.mark.ranks(2, init=False, timeout=4)
        def test_hangs():
            wait_for_nothing()
        """
    )
    text = run.text("test_hangs[ranks=2]")
    for rank in (0, 1):
        assert f"rank {rank} of 2 was still running at the timeout" in text
    assert text.count("in wait_for_nothing") == 2
    assert "_read_messages" not in text


def test_warnings_are_errors_where_the_run_says_so(pytest_run: Callable[..., Run]) -> None:
    text = """
        @pytest.mark.ranks(1, init=False)
        def test_warns():
            warnings.warn("careful", UserWarning)

        @pytest.mark.filterwarnings("ignore:careful")
        @pytest.mark.ranks(1, init=False)
        def test_mark():
            warnings.warn("careful", UserWarning)
        """
    run = pytest_run(text)
    assert run.outcomes == {"test_warns[ranks=1]": "failed", "test_mark[ranks=1]": "passed"}
    assert "UserWarning: careful" in run.text("test_warns[ranks=1]")
    run = pytest_run(text, "-W", "ignore::UserWarning")
    assert run.outcomes == {"test_warns[ranks=1]": "passed", "test_mark[ranks=1]": "passed"}


def test_what_a_test_has_patched_is_as_before_in_the_next(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        @pytest.mark.ranks(2, init=False)
        @pytest.mark.parametrize("fails", [False, True])
        def test_patches(monkeypatch, fails):
            assert os.sep == "/"
            monkeypatch.setattr(os, "sep", "patched")
            assert not fails

        @pytest.mark.ranks(2, init=False)
        def test_the_next():
            assert os.sep == "/"
        """
    )
    assert run.outcomes == {
        "test_patches[ranks=2-False]": "passed",
        "test_patches[ranks=2-True]": "failed",
        "test_the_next[ranks=2]": "passed",
    }
    assert "assert not True" in run.text("test_patches[ranks=2-True]")


def test_an_argument_that_cannot_be_pickled_is_named(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        @pytest.mark.ranks(1, init=False)
        @pytest.mark.parametrize("function", [lambda: 1])
        def test_lambda(function):
            pass
        """
    )
    (text,) = (report.longreprtext for report in run.reports.values())
    assert "argument 'function', a function, cannot be pickled" in text


def test_skip_and_xfail_count_when_all_ranks_agree(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        @pytest.mark.ranks(2, init=False)
        def test_skips():
            pytest.skip("not today")

        @pytest.mark.ranks(2, init=False)
        def test_xfails():
            pytest.xfail("known")

        @pytest.mark.ranks(2, init=False)
        def test_disagrees():
            if os.environ["RANK"] == "0":
                pytest.skip("only here")
        """
    )
    assert run.outcomes == {
        "test_skips[ranks=2]": "skipped",
        "test_xfails[ranks=2]": "skipped",
        "test_disagrees[ranks=2]": "failed",
    }
    assert "not today" in run.text("test_skips[ranks=2]")
    assert run.reports["test_xfails[ranks=2]"].wasxfail.endswith("known")
    assert "rank 0: skipped only here" in run.text("test_disagrees[ranks=2]")


def test_each_test_finds_its_process_as_new(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        @pytest.mark.ranks(2, init=False)
        def test_disturbs(tmp_path):
            for _ in range(2):
                dist.init_process_group("gloo")
                dist.barrier()
                dist.destroy_process_group()
            dist.init_process_group("gloo")
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            torch.set_grad_enabled(False)
            torch.set_num_threads(2)
            torch.manual_seed(99)
            os.environ["LEFT_BEHIND"] = "1"
            os.chdir(tmp_path)

        @pytest.mark.ranks(2, init=False)
        @pytest.mark.parametrize("directory", [os.getcwd()], ids=["cwd"])
        def test_after(directory):
            assert not dist.is_initialized()
            assert torch.get_default_dtype() == torch.float32
            assert torch.empty(1).device.type == "cpu"
            assert torch.is_grad_enabled()
            assert torch.get_num_threads() == 1
            assert torch.initial_seed() == 0
            assert "LEFT_BEHIND" not in os.environ
            assert os.getcwd() == directory
            dist.init_process_group("gloo")
        """
    )
    assert run.outcomes == {"test_disturbs[ranks=2]": "passed", "test_after[ranks=2-cwd]": "passed"}


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("ranks()", "at least one"),
        ("ranks('2')", "each an int above 0"),
        ("ranks(0)", "each an int above 0"),
    ],
)
def test_wrong_marks_are_refused(pytest_run: Callable[..., Run], mark: str, message: str) -> None:
    run = pytest_run(f"@pytest.mark.{mark}\ndef test_x(): pass\n")
    assert any(message in report.longreprtext for report in run.collection if report.failed)


def test_numbers_of_a_generator_of_the_cpu_are_moved_to_the_default_device() -> None:
    """In a process of its own: the first call decides which functions of torch have a default device."""
    script = """
        import torch
        from bmt_comm.testing.body import drawing_on

        def made():
            drawn = torch.randn(3, generator=torch.Generator().manual_seed(1), requires_grad=True)
            return [drawn, torch.randn(3), torch.randint(0, 5, (3,)), torch.ones(2), torch.rand(2, device="cpu")]

        with drawing_on(torch.device("meta")):
            first, *others = made()
        assert [each.device.type for each in [first, *others]] == ["meta"] * 4 + ["cpu"]
        assert first.requires_grad and first.is_leaf
        assert {each.device.type for each in made()} == {"cpu"}
        with torch.device("meta"):
            assert torch.randn(3).device.type == "meta"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=100)


def test_wrong_combinations_are_refused(pytest_run: Callable[..., Run]) -> None:
    run = pytest_run(
        """
        @pytest.mark.ranks(1, init=False, tp_size=1)
        def test_arguments_without_init():
            pass

        @pytest.mark.ranks(1, init=False)
        def test_ctx_without_init(ctx):
            pass
        """
    )
    assert set(run.outcomes.values()) == {"failed"}
    assert "tp_size" in run.text("test_arguments_without_init[ranks=1]")
    assert "without init=False" in run.text("test_ctx_without_init[ranks=1]")
