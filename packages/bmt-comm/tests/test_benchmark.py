"""The communication benchmark: its rows, its table and its command line."""

import sys
import time

import pytest

from bmt_comm import benchmark

ALL = [benchmark.all_gather, benchmark.reduce_scatter, benchmark.send_recv]


@pytest.mark.ranks(1, 3)
def test_rows_hold_sizes_times_and_bandwidths_the_same_on_every_rank(ctx):
    n = ctx.world_size
    for measure in ALL:
        rows = measure([1, 1000, 120_000])
        assert [row.size for row in rows] == [-(-size // (4 * n)) * 4 * n for size in (1, 1000, 120_000)]
        share = 1 if measure is benchmark.send_recv else (n - 1) / n
        for row in rows:
            assert row.time > 0
            assert row.algorithm_bandwidth == pytest.approx(row.size / row.time / 1e9)
            assert row.bus_bandwidth == pytest.approx(row.algorithm_bandwidth * share)
        assert all(reports == rows for reports in ctx.world.all_gather_object(rows))
    with pytest.raises(ValueError, match="sizes must be positive"):
        benchmark.all_gather([0])


def test_the_package_leads_to_it():
    import bmt_comm

    assert bmt_comm.benchmark is benchmark
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        bmt_comm.nothing  # noqa: B018


@pytest.mark.ranks(2)
def test_the_time_is_that_of_the_slowest_rank(ctx):
    median = benchmark._median_time(lambda: time.sleep(0.03 * ctx.rank), ctx.world)
    assert 0.03 <= median < 0.06


def test_alone_on_the_command_line(capsys):
    benchmark.main(["all-gather", "send-recv", "--device", "cpu", "--max-bytes", "4096"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "ranks on" in line] == [
        "all-gather, 1 ranks on cpu",
        "send/recv, 1 ranks on cpu",
    ]
    assert [line.split()[0] for line in lines] == [
        *("all-gather,", "bytes", "1024", "4096"),
        *("send/recv,", "bytes", "1024", "4096"),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "Measure the collectives"),
        (["gather"], 2, "'gather' is not a benchmark; choose from all-gather, reduce-scatter, send-recv"),
        (["--max-bytes", "5"], 2, "--max-bytes must be at least 1024"),
    ],
)
def test_help_and_wrong_arguments(arguments, code, text, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    with pytest.raises(SystemExit) as end:
        benchmark.main(arguments)
    shown = capsys.readouterr()
    assert end.value.code == code
    assert text in shown.out + shown.err
