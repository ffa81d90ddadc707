"""Profiles of all ranks in one file, and what training loops measure."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import bmtrain as bmt
from bmt_comm import Communicator


def train(steps: int = 1, sinks: list = [], **options) -> list:  # noqa: B006
    torch.manual_seed(0)
    layers = [bmt.Block(torch.nn.Linear(16, 16), zero_level=3) for _ in range(3)]
    model = bmt.TransformerBlockList(layers)
    manager = bmt.optim.OptimManager(skip_non_finite=True)
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
    records = []
    with bmt.TrainingMetrics(sinks, **options) as metrics:
        for step in range(steps):
            manager.zero_grad()
            loss = model(torch.full((4, 16), 1.0 + bmt.rank())).square().mean()
            manager.backward(loss * (float("nan") if step == 1 else 1.0))
            records.append(metrics.step(loss, tokens=64, skipped=not manager.step(), step_size=0.5))
    return records


@pytest.mark.ranks(2)
@mock.patch.object(Communicator, "shares_memory", False)  # which have one buffer
def test_one_trace_has_the_named_ranges_of_all_ranks(ctx, tmp_path):
    with bmt.profile(tmp_path / "trace.json.gz"):
        train()
        ctx.world.barrier()
        with torch.autograd.profiler.record_function("all ranks are here"):
            ctx.world.barrier()
    ctx.world.barrier()
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"rank 0", "rank 1"} <= set(names.values())
    for rank in range(2):
        own = {event["name"].split(" layer ")[0] for event in events if names.get(event["pid"]) == f"rank {rank}"}
        assert {"unshard", "wait for unshard", "reshard", "reduce", "wait for reduce", "optimizer round"} <= {
            name.rstrip("0123456789 ") for name in own
        }
    here = [event["ts"] for event in events if event["name"] == "all ranks are here"]
    assert len(here) == 2
    assert abs(here[0] - here[1]) < 5e5  # microseconds; unaligned clocks count from elsewhere
    assert min(event["ts"] for event in events if "ts" in event) >= 0


def profile_one_rank(ctx):
    if ctx.rank == 1:
        with torch.profiler.profile():
            pass


@pytest.mark.ranks(2)
def test_what_a_profile_cannot_do_is_said_on_all_ranks(ctx, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"), bmt.profile(tmp_path / "no" / "trace.json"):
        pytest.fail("not reached")
    outer = torch.profiler.profile() if ctx.rank == 1 else contextlib.nullcontext()
    with pytest.raises(RuntimeError, match="a profiler runs already"), outer, bmt.profile(tmp_path / "trace.json"):
        pytest.fail("not reached")
    with pytest.raises(RuntimeError, match="another profiler ran within it"), bmt.profile(tmp_path / "trace.json"):
        profile_one_rank(ctx)
    with bmt.profile(tmp_path / "trace.json"):
        ctx.world.barrier()
    ctx.world.barrier()
    assert (tmp_path / "trace.json").exists()


@pytest.mark.ranks(2)
def test_a_file_that_cannot_be_opened_is_an_error_on_all_ranks(ctx, tmp_path):
    with pytest.raises(FileNotFoundError):
        bmt.TrainingMetrics([bmt.JsonLines(tmp_path / "no" / "metrics.jsonl")])


@pytest.mark.ranks(2)
def test_further_numbers_may_be_tensors(ctx, tmp_path):
    with bmt.TrainingMetrics([bmt.JsonLines(tmp_path / "metrics.jsonl")], every=1) as metrics:
        record = metrics.step(1.0, tokens=1, grad_norm=torch.tensor(2.5))
    assert record["grad_norm"] == 2.5
    if ctx.rank == 0:
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["grad_norm"] == 2.5


@pytest.mark.ranks(2)
def test_a_run_that_goes_on_counts_its_steps_from_where_it_was(ctx, tmp_path):
    path, checkpointer = tmp_path / "metrics.jsonl", bmt.Checkpointer(tmp_path / "checkpoints")
    for _ in range(2):
        with bmt.TrainingMetrics([bmt.JsonLines(path)], every=2) as metrics:
            checkpointer.load_latest(metrics=metrics)
            for _ in range(3):
                metrics.step(1.0, tokens=8, skipped=metrics.steps == 1)
            checkpointer.save(metrics.steps, metrics=metrics)
    checkpointer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["overflows"]) for line in lines] == [(2, 1), (4, 1), (6, 1)]


@pytest.mark.ranks(1)
def test_steps_that_are_undone_do_not_count(ctx, tmp_path):
    path = tmp_path / "metrics.jsonl"
    with bmt.TrainingMetrics([bmt.JsonLines(path)], every=3) as metrics:
        for _ in range(3):
            metrics.step(1.0, tokens=8)
        state = metrics.state_dict()
        metrics.step(math.nan, tokens=8)
        metrics.load_state_dict(state)
        for _ in range(3):
            metrics.step(2.0, tokens=8)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(3, 1.0), (6, 2.0)]


@pytest.mark.ranks(1)
def test_the_loss_of_a_skipped_step_does_not_count(ctx, tmp_path):
    with bmt.TrainingMetrics([bmt.JsonLines(tmp_path / "metrics.jsonl")], every=2) as metrics:
        for loss in (1.0, math.nan, math.nan, math.inf):
            record = metrics.step(loss, tokens=8, skipped=not math.isfinite(loss))
            if record is not None and metrics.steps == 2:
                assert record["loss"] == 1.0
                assert record["tokens_per_second"] == pytest.approx(8 / record["seconds"])

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["loss"] for line in lines] == [1.0, None]


@pytest.mark.ranks(1)
def test_a_script_may_add_up_losses_in_the_same_tensor(ctx):
    loss = torch.zeros(())
    with bmt.TrainingMetrics(every=2) as metrics:
        for value in (2.0, 4.0):
            loss.zero_().add_(value)
            record = metrics.step(loss, tokens=1)
    assert record is not None
    assert record["loss"] == 3.0


@pytest.mark.ranks(2)
def test_metrics_are_of_all_ranks_and_go_to_rank_0_sinks(ctx, tmp_path):
    seen = []
    sink = SimpleNamespace(write=lambda step, record: seen.append(step), close=lambda: seen.append("closed"))
    file = bmt.JsonLines(tmp_path / f"metrics-{ctx.rank}.jsonl")
    records = train(4, [sink, file, bmt.ProgressBar()], every=2, flops_per_token=6 * 816, peak_flops=1e9)
    assert [record is None for record in records] == [True, False, True, False]
    first, last = records[1], records[3]
    assert first["overflows"] == last["overflows"] == 1
    assert first["step_size"] == 0.5
    assert last["mfu"] == pytest.approx(last["tokens_per_second"] * 6 * 816 / 2e9)
    assert last["tokens_per_second"] == pytest.approx(2 * 64 / last["seconds"])
    assert last["sent"] > 0
    assert 0 <= last["waited"] <= last["seconds"]
    assert last["memory"] > 1e7
    assert ctx.world.all_gather_object(records) == [records] * 2
    assert seen == ([2, 4, "closed"] if ctx.rank == 0 else [])
    path = tmp_path / f"metrics-{ctx.rank}.jsonl"
    assert path.exists() == (ctx.rank == 0)  # nothing is opened elsewhere
    if ctx.rank == 0:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["loss"] for line in lines] == [first["loss"], last["loss"]]


def test_sinks_of_other_libraries_get_scalars(monkeypatch, tmp_path):
    logged = []
    run = SimpleNamespace(log=lambda record, step: logged.append((record, step)), finish=lambda: logged.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: run))
    sink = bmt.WeightsAndBiases(project="p")
    sink.close()
    assert not logged  # nothing was opened
    sink.write(3, {"loss": 1.0})
    sink.close()
    assert logged == [({"loss": 1.0}, 3), "end"]
