"""What goes wrong on one rank is an error on all of them, soon, and the next call works."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from call_helpers import Twins, hidden, random
from pipe_helpers import DTYPE, WIDTH, Layer, Model, batch_of, pipeline_model
from torch import Tensor, nn

from bmt_comm import ParallelContext
from bmt_pipe import PipelineTransformerBlockList
from bmt_pipe.messages import StageFailedError


class Boom(Exception):
    pass


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fragile.plan == "backward":
            raise Boom("in backward")
        return grad


class Fragile(Layer):
    """Fails on one stage: in forward, when it is computed again, or in backward."""

    plan: str | None = None
    after = 0  # so many calls are fine

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if Fragile.plan in ("forward", "recompute") and (Fragile.plan == "recompute") == torch.is_grad_enabled():
            Fragile.after -= 1
            if Fragile.after < 0:
                raise Boom(f"in {Fragile.plan}")
        return _FailInBackward.apply(super().forward(x, *args, **kwargs))


def fails(ctx: ParallelContext, rank: int, own: type[BaseException], match: str, run: Callable[[], object]) -> None:
    """``run`` raises its own error on ``rank``, and on all others one that tells of it; soon."""
    start = time.monotonic()
    if ctx.rank == rank:
        with pytest.raises(own, match=match) as raised:
            run()
        assert not isinstance(raised.value, StageFailedError)
    else:
        with pytest.raises(StageFailedError, match=rf"stage {rank} .*\(rank {rank}\).*{own.__name__}.*{match}"):
            run()
    assert time.monotonic() - start < 30


@pytest.mark.ranks(3, pipe_size=3, num_micro_batches=6, timeout=90)
def test_a_layer_fails(ctx: ParallelContext) -> None:
    bias = random(ctx.rank, WIDTH, grad=True)
    for interleave, count in ((1, 7), (2, 9), (1, 3)):
        twins = Twins(ctx, Fragile, count, interleave=interleave, checkpoint=count != 9)
        x, call = hidden(ctx, 4), lambda f, x, bias: f(x, None, bias)  # noqa: E731
        for grad in (True, False):  # the first call of its kind finds out what messages consist of
            for learned in (False, True):
                if learned:
                    twins.check("before it", [x, bias], call)
                for rank, after in ((0, 0), (1, 3), (2, 1)):
                    Fragile.plan = "forward" if ctx.rank == rank and grad is False else None
                    if grad and ctx.rank == rank:
                        Fragile.plan = "forward" if count != 3 else "recompute"  # then forward has gradients
                    Fragile.after = after
                    with torch.set_grad_enabled(grad):
                        fails(ctx, rank, Boom, "in ", lambda: call(twins.piped, x, bias))
                    Fragile.plan = None
        twins.check("after it", [x, bias], call)

        for plan in ("recompute", "backward"):
            for rank, after in ((0, 3), (1, 0), (2, 2)):
                if plan == "recompute" and count == 3:
                    continue  # is not computed again as a whole
                found = call(twins.piped, x, bias)
                Fragile.plan, Fragile.after = plan if ctx.rank == rank else None, after
                fails(ctx, rank, Boom, f"in {plan}", lambda found=found: found.sum().backward())
                Fragile.plan = None
                twins.piped.zero_grad()
                bias.grad = x.grad = None
        twins.check("after backward", [x, bias], call)
        twins.check("of another size", [hidden(ctx, 2, 2), bias], call)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1"])
def test_the_tail_fails(ctx: ParallelContext, schedule: str) -> None:
    interleave = 2 if schedule.startswith("interleaved") else 1
    model = pipeline_model(5, tail_schedule=schedule, interleave=interleave)
    plain = Model(5)
    ids, mask = batch_of(ctx.rank, 3)
    last, calls = ctx.rank == 1, []

    def failing(x: Tensor, ids: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise Boom("in the tail")
        return model.loss(x, ids)

    def run(tail: Callable[..., Any]) -> Tensor:
        return model.layers(model.embedding(ids), mask, tail=tail, tail_args=(ids,))

    def check() -> None:
        model.zero_grad()
        loss = model(ids, mask, tail=True)
        torch.testing.assert_close(loss, plain(ids, mask))
        loss.backward()
        wanted = torch.autograd.grad(plain(ids, mask), plain.layers.parameters())
        for grad in wanted:
            ctx.world.all_reduce(grad)
        for (name, _), grad in zip(plain.layers.named_parameters(), wanted, strict=True):
            own = dict(model.layers.named_parameters()).get(name)
            if own is not None:
                torch.testing.assert_close(own.grad, grad)

    for learned in (False, True):
        calls.clear()
        if learned:
            check()
        fails(ctx, 1, Boom, "in the tail", lambda: run(failing))
    check()
    fails(ctx, 1, TypeError, "must return the loss", lambda: run(lambda x, ids: None))
    fails(ctx, 1, ValueError, "a loss is one number", lambda: run(lambda x, ids: model.head(x)))
    check()
    assert last == bool(calls)


class Odd(Layer):
    """Returns something that cannot be handed on, or whose shape depends on the data."""

    def forward(self, x: Tensor, mode: str = "") -> Any:  # type: ignore[override]
        if mode == "mean":
            return x.mean(0)
        if mode == "scalar":
            return x.sum()
        if mode == "longer":
            return torch.cat([x, x], 1) if x[0, 0, 0] > 100 else x
        return super().forward(x)


_Local = namedtuple("_Local", "value")
_Local.__qualname__ = "nowhere"


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
def test_bad_calls(ctx: ParallelContext) -> None:
    r = ctx.rank
    bias = random(r, WIDTH, grad=True)
    twins = Twins(ctx, Layer, 5)
    layers, x = twins.piped, hidden(ctx, 3)
    mask = random(r, 3, 3)

    def on_rank(rank: int, bad: Any, good: Any) -> Any:
        return bad if r == rank else good

    for rank in (0, 1):
        # The width of one rank's input is wrong: stage 0 finds it out.
        fails(ctx, 0, RuntimeError, "shape", lambda rank=rank: layers(on_rank(rank, random(0, 3, 3, 5), x)))
        fails(ctx, 0, RuntimeError, "type", lambda rank=rank: layers(on_rank(rank, x.detach().float(), x)))
        # A mask of the wrong length is found out by the first layer that uses it.
        fails(ctx, 0, RuntimeError, "must match", lambda rank=rank: layers(x, on_rank(rank, random(0, 3, 4), mask)))

        def bad(error: type[BaseException], match: str, call: Callable[[], object], rank: int = rank) -> None:
            fails(ctx, rank, error, match, call)

        bad(ValueError, "must be a tensor", lambda rank=rank: layers(on_rank(rank, None, x)))
        bad(ValueError, "batch", lambda rank=rank: layers(on_rank(rank, x.sum(), x)))
        bad(ValueError, "dense", lambda rank=rank: layers(x, on_rank(rank, mask.to_sparse(), mask)))
        for wrong, error in ((0.5, TypeError), (True, TypeError), (7, ValueError), ("no", ValueError), (-1, ValueError)):
            bad(error, "batch_related", lambda rank=rank, w=wrong: layers(x, mask, batch_related=[on_rank(rank, w, 0)]))
        bad(TypeError, "batch_related", lambda rank=rank: layers(x, mask, batch_related=on_rank(rank, None, ())))
        bad(TypeError, "batch_related", lambda rank=rank: layers(x, mask, batch_related=on_rank(rank, "mask", ())))
        bad(ValueError, "batch_related", lambda: layers(x, None, bias, batch_related=[on_rank(rank, 1, 0)]))  # noqa: B023
        container = _Local(1)
        bad(TypeError, "cannot be sent", lambda rank=rank: layers(x, on_rank(rank, container, None)))
        bad(ValueError, "num_hidden", lambda rank=rank: layers(*on_rank(rank, (), (x,))))
        bad(ValueError, "combined", lambda rank=rank: layers(x, return_hidden_states=rank == r, tail=lambda x: x.sum()))
        bad(ValueError, "tail_args", lambda rank=rank: layers(x, tail_args=on_rank(rank, (1,), ())))

    # Calls that do not fit together are an error everywhere.
    for call in (
        lambda: layers(x, *([mask] if r else [])),
        lambda: layers(x, **({"mask": mask} if r else {"bias": bias})),
        lambda: layers(x, return_hidden_states=r == 0),
        lambda: layers(x, {"a": mask} if r else [mask]),
        lambda: layers((x, x) if r else x),
    ):
        with pytest.raises(RuntimeError, match="different ways"):
            call()
    with torch.set_grad_enabled(r == 0), pytest.raises(RuntimeError, match="different ways"):
        layers(x)
    twins.check("after it", [x, mask, bias], lambda f, x, m, b: f(x, m, b))

    odd = PipelineTransformerBlockList([Odd().to(DTYPE) for _ in range(4)])
    for mode in ("mean", "scalar"):
        with pytest.raises((ValueError, StageFailedError), match="its first dimension must be the batch"):
            odd(x, mode)
    assert odd(x, "longer").shape == x.shape
    with pytest.raises(RuntimeError, match="shapes must follow from those of the arguments"):
        odd(x + 1000, "longer")
    assert odd(x, "longer").shape == x.shape
    assert odd(torch.cat([x, x], 1) + 1000, "longer").shape == (3, 6 * 16, WIDTH)


@pytest.mark.ranks(4, pipe_size=2, timeout=60)
def test_a_bad_call_of_one_replica(ctx: ParallelContext) -> None:
    """The other replica does not wait for it."""
    layers = PipelineTransformerBlockList([Layer().to(DTYPE) for _ in range(3)])
    x = hidden(ctx, 3)
    for _ in range(2):
        with pytest.raises((ValueError, StageFailedError), match="failed|must be a tensor"):
            layers(None if ctx.rank == 1 else x)
    layers(x).sum().backward()


SCRIPT = """
    import os, sys, time
    import torch
    from torch import nn
    import bmt_comm
    from bmt_pipe import PipelineTransformerBlockList
    from bmt_pipe.messages import StageLostError

    rank, world, store, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    url = f"file://{store}?rank={rank}&world_size={world}"
    bmt_comm.init_distributed(url, pipe_size=world, device="cpu", timeout=60)
    dying = ""

    class Fatal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if dying == "backward":
                os._exit(7)
            return grad

    class Layer(nn.Linear):
        def forward(self, x):
            if dying == "forward":
                os._exit(7)
            return Fatal.apply(super().forward(x))

    layers = PipelineTransformerBlockList([Layer(3, 3) for _ in range(2 * world)])
    x = torch.ones(4, 3)
    layers(x).sum().backward()
    stage, _, moment = where.partition("-")
    if int(stage) == rank:
        dying = moment
    if dying == "between":
        os._exit(7)
    try:
        for _ in range(2):
            layers(x).sum().backward()
    except StageLostError as error:
        print("lost", error, flush=True)
        os._exit(3)
"""


@pytest.mark.parametrize("where", ["1-forward", "0-backward", "1-backward", "0-between"])
def test_a_stage_dies(tmp_path: Path, where: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), where],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        found = [process.communicate(timeout=60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    dead = int(where[0])
    assert ranks[dead].returncode == 7, found[dead]
    assert ranks[1 - dead].returncode == 3, found[1 - dead]
    assert "lost" in found[1 - dead]
