"""A failure on one rank raises an error on all ranks without delay, and the next call works."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from call_helpers import Twins, hidden, random
from pipe_helpers import DTYPE, WIDTH, Layer, Model, batch_of, pipeline_model
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from bmt_comm import ParallelContext
from bmt_pipe import PipelineTransformerBlockList
from bmt_pipe.arguments import Leaf
from bmt_pipe.channels import Channels
from bmt_pipe.messages import Form, Forms, Message, StageFailedError, StageLostError, TensorForm


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
    """Fails on one stage: in forward, in recomputation, or in backward."""

    plan: str | None = None
    after = 0  # the number of calls that work

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if Fragile.plan in ("forward", "recompute") and (Fragile.plan == "recompute") == torch.is_grad_enabled():
            Fragile.after -= 1
            if Fragile.after < 0:
                raise Boom(f"in {Fragile.plan}")
        return _FailInBackward.apply(super().forward(x, *args, **kwargs))


def fails(ctx: ParallelContext, rank: int, own: type[BaseException], match: str, run: Callable[[], object]) -> None:
    """``run`` raises its own error on ``rank``, and an error that quotes it on all other ranks."""
    if ctx.rank == rank:
        with pytest.raises(own, match=match) as raised:
            run()
        assert not isinstance(raised.value, StageFailedError)
    else:
        with pytest.raises(StageFailedError, match=rf"stage {rank} .*\(rank {rank}\).*{own.__name__}.*{match}"):
            run()


@contextlib.contextmanager
def failing(ctx: ParallelContext, rank: int, plan: str, after: int) -> Iterator[None]:
    """Within, layers of ``rank`` fail after some good calls."""
    Fragile.plan, Fragile.after = plan if ctx.rank == rank else None, after
    try:
        yield
    finally:
        Fragile.plan = None


def check_failing_layers(ctx: ParallelContext, count: int, interleave: int) -> None:
    twins = Twins(ctx, Fragile, count, interleave=interleave, checkpoint=count != 9)
    x, bias = hidden(ctx, 4), random(ctx.rank, WIDTH, grad=True)

    def call(layers: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        return layers(x, None, bias)

    for grad in (True, False):
        for learned in (False, True):  # the first call of its kind learns the forms of messages
            if learned:
                twins.check("before it", [x, bias], call)
            for rank, after in ((0, 0), (1, 3), (2, 1)):
                with torch.set_grad_enabled(grad), failing(ctx, rank, "forward", after):
                    fails(ctx, rank, Boom, "in forward", lambda: call(twins.piped, x, bias))
    twins.check("after it", [x, bias], call)
    for plan in ("recompute", "backward"):
        for rank, after in ((0, 3), (1, 0), (2, 2)):
            total = call(twins.piped, x, bias).sum()
            with failing(ctx, rank, plan, after):
                fails(ctx, rank, Boom, f"in {plan}", total.backward)
            twins.piped.zero_grad()
    twins.check("after backward", [x, bias], call)
    twins.check("of another size", [hidden(ctx, 2, 2), bias], call)


@pytest.mark.ranks(3, pipe_size=3, num_micro_batches=6, timeout=90)
def test_a_layer_fails(ctx: ParallelContext) -> None:
    for interleave, count in ((1, 7), (2, 9), (1, 3)):
        check_failing_layers(ctx, count, interleave)


class Choosing(Fragile):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList([nn.Parameter(random(n, WIDTH, WIDTH)) for n in range(2)])

    def forward(self, x: Tensor, chosen: int) -> Tensor:  # type: ignore[override]
        return super().forward(x) @ self.experts[chosen]


@pytest.mark.ranks(4, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("place", ["another stage", "before the pipeline"])
def test_backward_fails_when_a_stage_is_done(ctx: ParallelContext, level: int, place: str) -> None:
    """That stage forgets its gradients, also of parameters that only other replicas have used."""
    twins = Twins(ctx, Choosing, 2, level=level)
    x = hidden(ctx, 4)

    def call(layers: nn.Module, x: Tensor) -> Tensor:
        return layers(x, ctx.data_rank % 2)

    def boom(_: Tensor) -> None:
        raise Boom("in a hook")

    given = x.clone()
    if place == "another stage":
        failure = failing(ctx, ctx.rank if ctx.pipe.rank == 0 else -1, "backward", 0)
    else:
        failure = contextlib.nullcontext()
        given.register_hook(boom)
    total = call(twins.piped, given).sum()
    with failure, pytest.raises((Boom, StageFailedError)):
        total.backward()
    twins.piped.zero_grad()
    twins.check("after it", [x], call)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_the_tail_fails(ctx: ParallelContext, schedule: str) -> None:
    interleave = 2 if schedule.startswith("interleaved") else None
    model = pipeline_model(5, tail_schedule=schedule, interleave=interleave)
    plain = Model(5)
    ids, mask = batch_of(ctx.rank, 3)
    calls = []

    def broken(x: Tensor, ids: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise Boom("in the tail")
        return model.loss(x, ids)

    def run(tail: Callable[..., Any]) -> Tensor:
        return model.layers(model.embedding(ids), mask, tail=tail, tail_args=(ids,), tail_modules=[model])

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

    last = 0 if schedule == "zero_bubble_v" else 1  # the stage of the last layer
    for learned in (False, True):
        calls.clear()
        if learned:
            check()
        fails(ctx, last, Boom, "in the tail", lambda: run(broken))
    check()
    fails(ctx, last, TypeError, "must return the loss", lambda: run(lambda x, ids: None))
    fails(ctx, last, ValueError, "a loss is one number", lambda: run(lambda x, ids: model.head(x)))
    check()


class Odd(Layer):
    """Returns something that cannot be passed on, or whose shape depends on the data."""

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


def check_bad_calls(ctx: ParallelContext, layers: nn.Module, rank: int) -> None:
    x, mask = hidden(ctx, 3), random(ctx.rank, 3, 3)

    def here(bad: Any, good: Any) -> Any:
        return bad if ctx.rank == rank else good

    def bad(error: type[BaseException], match: str, call: Callable[[], object]) -> None:
        fails(ctx, rank, error, match, call)

    # Errors of a layer are raised on stage 0 first.
    fails(ctx, 0, RuntimeError, "shape", lambda: layers(here(random(0, 3, 3, 5), x)))
    fails(ctx, 0, RuntimeError, "type", lambda: layers(here(x.detach().float(), x)))
    fails(ctx, 0, RuntimeError, "must match", lambda: layers(x, here(random(0, 3, 4), mask)))

    bad(ValueError, "must be a tensor", lambda: layers(here(None, x)))
    bad(ValueError, "batch", lambda: layers(here(x.sum(), x)))
    bad(ValueError, "dense", lambda: layers(x, here(mask.to_sparse(), mask)))
    bad(ValueError, "num_hidden", lambda: layers(*here((), (x,))))
    bad(TypeError, "cannot be sent", lambda: layers(x, here(_Local(1), None)))
    bad(ValueError, "combined", lambda: layers(x, return_hidden_states=here(True, False), tail=lambda x: x.sum()))
    bad(ValueError, "tail_args", lambda: layers(x, tail_args=here((1,), ())))

    def name(*names: Any) -> Tensor:
        return layers(x, mask, batch_related=here(names, ()))

    bad(TypeError, "batch_related", lambda: name(0.5))
    bad(TypeError, "batch_related", lambda: name(True))
    bad(TypeError, "batch_related", lambda: name([0]))
    bad(ValueError, "batch_related", lambda: name(7))
    bad(ValueError, "batch_related", lambda: name(0, -1))
    bad(ValueError, "batch_related", lambda: name("no"))
    bad(TypeError, "batch_related", lambda: layers(x, mask, batch_related=here(0, ())))
    bad(TypeError, "batch_related", lambda: layers(x, mask, batch_related=here("mask", ())))
    bad(ValueError, "batch_related", lambda: layers(x, mask, random(0, 7), batch_related=[here(1, 0)]))


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
def test_bad_calls(ctx: ParallelContext) -> None:
    r = ctx.rank
    twins = Twins(ctx, Layer, 5)
    layers, x = twins.piped, hidden(ctx, 3)
    mask, bias = random(r, 3, 3), random(r, WIDTH, grad=True)
    for rank in (0, 1):
        check_bad_calls(ctx, layers, rank)

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


def check_bad_calls_of_one_rank(ctx: ParallelContext) -> None:
    """No other rank of its stage computes without it, or waits for it."""
    layers = PipelineTransformerBlockList([Layer().to(DTYPE) for _ in range(3)])
    x = random(ctx.replica_rank, 3, 3, WIDTH)
    for _ in range(2):
        with pytest.raises((ValueError, StageFailedError), match=r"failed|must be a tensor"):
            layers(None if ctx.rank == 1 else x)
    layers(x).sum().backward()


@pytest.mark.ranks(4, pipe_size=2, timeout=60)
def test_a_bad_call_of_one_replica(ctx: ParallelContext) -> None:
    check_bad_calls_of_one_rank(ctx)


@pytest.mark.ranks(4, pipe_size=2, tp_size=2, timeout=60)
def test_a_bad_call_of_one_tensor_rank(ctx: ParallelContext) -> None:
    check_bad_calls_of_one_rank(ctx)


@pytest.mark.ranks(3, pipe_size=3, num_micro_batches=3, timeout=30)
def test_a_rank_has_no_memory_for_arguments_or_their_gradients(ctx: ParallelContext) -> None:
    """Other ranks wait neither for its sends nor for its receives."""
    twins = Twins(ctx, Layer, 3)
    inputs = [hidden(ctx, 3), random(ctx.rank, 3, 3), random(ctx.rank, WIDTH, grad=True)]

    def full(rank: int, owner: Any, name: str) -> contextlib.AbstractContextManager[object]:
        error = torch.OutOfMemoryError(f"no room for {name}")
        return mock.patch.object(owner, name, side_effect=error) if ctx.rank == rank else contextlib.nullcontext()

    for rank in (0, 2):
        with full(rank, Leaf, "empty"):
            fails(ctx, rank, torch.OutOfMemoryError, "no room for empty", lambda: twins.piped(*inputs))
        with full(rank, Leaf, "empty"):
            fails(ctx, rank, torch.OutOfMemoryError, "no room", lambda: twins.piped(*inputs, tail=Tensor.sum))
        loss = twins.piped(*inputs).sum()
        with full(rank, torch, "empty_like"):
            fails(ctx, rank, torch.OutOfMemoryError, "no room for empty_like", loss.backward)
        twins.piped.zero_grad()
        inputs[2].grad = None
    twins.check("after it", inputs, lambda layers, *tensors: layers(*tensors))


class _OnlyElsewhere:
    """Rank 1 cannot make one: from a pickle, or as a copy."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.how == "pickle" and torch.distributed.get_rank() == 1:
            raise Boom("not from a pickle")

    def __deepcopy__(self, memo: Any) -> _OnlyElsewhere:
        if self.how == "copy" and torch.distributed.get_rank() == 1:
            raise Boom("not as a copy")
        return self


class Ignoring(Layer):
    """Takes an argument that it does not use."""

    def forward(self, x: Tensor, argument: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Marked(NamedTuple):
    x: Tensor
    y: Tensor
    mark: Any


class Marking(Layer):
    """Returns an object beside tensors."""

    mark: Any = None

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        x = x.x if isinstance(x, Marked) else x
        return [Marked(super().forward(x), x.mean((1, 2)), Marking.mark)]


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=20)
@pytest.mark.parametrize("mark", ["cannot be sent", "cannot be received", "sparse", "without memory"])
def test_an_output_that_cannot_arrive(ctx: ParallelContext, mark: str) -> None:
    layers = PipelineTransformerBlockList([Marking().to(DTYPE) for _ in range(2)])
    x = hidden(ctx, 4)
    marks = {
        "cannot be sent": (lambda: None, 0, "lambda"),
        "cannot be received": (_OnlyElsewhere("pickle"), 1, "not from a pickle"),
        "sparse": (torch.eye(2).to_sparse(), 0, "sparse"),
        "without memory": (TwoTensor(torch.ones(2), torch.ones(2)), 0, "a tensor for the next stage is a TwoTensor"),
    }
    Marking.mark, rank, match = marks[mark]
    with pytest.raises(Exception, match=match) as raised:
        layers(x)
    assert isinstance(raised.value, StageFailedError) == (ctx.rank != rank)
    Marking.mark = "fine"
    for _ in range(2):
        assert layers(x).mark == "fine"


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=20)
@pytest.mark.parametrize("how", ["pickle", "copy"])
def test_an_argument_that_one_rank_cannot_make(ctx: ParallelContext, how: str) -> None:
    twins = Twins(ctx, Ignoring, 4)
    x = hidden(ctx, 4)
    for _ in range(2):
        fails(ctx, 1, Boom, f"not .* {how}", lambda: twins.piped(x, _OnlyElsewhere(how)))
    twins.check("after it", [x], lambda layers, x: layers(x, _OnlyElsewhere("fine")))


def test_a_lost_stage_is_named_also_by_those_that_have_failed() -> None:
    """The messages that a lost stage should have sent may be for any place in the chain of chunks."""
    lost = mock.Mock(**{"wait.side_effect": RuntimeError("closed")})
    channel = mock.Mock(ranks=(10, 20), **{"recv.return_value": lost})
    context = mock.Mock(pipe=mock.Mock(rank=0, ranks=(10, 20)), pipe_channels={(1, 0): channel}, device="cpu")
    message = Message("hidden", 0, 3)
    forms = Forms({message: Form.of([TensorForm((2,), DTYPE)])})
    with pytest.raises(StageLostError, match=r"stage 1 \(rank 20\) is lost: closed"):
        Channels(context, forms, False, {1: [message]}).drain()


SCRIPT = """
    import os, sys
    import torch
    from torch import nn
    import bmt_comm
    from bmt_pipe import PipelineTransformerBlockList
    from bmt_pipe.messages import StageLostError

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

    def run(rank, world, store, stage, moment):
        global dying
        url = f"file://{store}?rank={rank}&world_size={world}"
        bmt_comm.init_distributed(url, pipe_size=world, device="cpu", timeout=60)
        layers = PipelineTransformerBlockList([Layer(3, 3) for _ in range(2 * world)])
        x = torch.ones(4, 3)
        layers(x).sum().backward()
        if stage == rank:
            dying = moment
        if dying == "between":
            os._exit(7)
        try:
            for _ in range(2):
                layers(x).sum().backward()
        except StageLostError as error:
            os._exit(3 if "is lost" in str(error) else 4)

    # Children of one process, which has imported torch once for all of them.
    ranks = {}
    for number, case in enumerate(sys.argv[2:]):
        stage, moment = case.split("-")
        for rank in range(2):
            child = os.fork()
            if not child:
                torch.set_num_threads(1)
                try:
                    run(rank, 2, f"{sys.argv[1]}{number}", int(stage), moment)
                finally:
                    os._exit(1)
            ranks[child] = f"{case} {rank}"
    while ranks:
        child, status = os.wait()
        print(ranks.pop(child), os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_stage_dies(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    cases = ["1-forward", "0-backward", "1-backward", "0-between"]
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "store"), *cases],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=120)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    codes = {f"{case} {rank}": "7" if str(rank) == case[0] else "3" for case in cases for rank in range(2)}
    assert dict(line.rsplit(" ", 1) for line in output.splitlines()) == codes
