"""What Adafactor and CAME are held to alike: their reference packages, on unsharded tensors in fp64."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from layouts import layout, shard_slice, shards, tensors, train, undivided_layout, update_error
from torch import nn
from torch.distributed.fsdp import fully_shard

from bmt_comm import shard_of, slice_of
from bmt_optim import engine
from bmt_optim.engine import run
from bmt_optim.factored import FactoredAverage
from bmt_optim.slices import unshard

# With tensor parallelism they are sharded, in turn, along dimension 0 (the first as a fused weight), 1, and not at all;
# vectors along 0, or not.
SHAPES = [(12, 5), (7, 4), (3, 9), (4, 6, 3, 2), (3, 8, 5), (2, 3, 3, 3), (6,), (5,), (), (7, 6), (1, 6)]
FACTORED = [shape for shape in SHAPES if len(shape) > 1]


def gradients(step):
    """They have a direction, for a sum of steps that is well above the rounding of the weights."""
    return [g + 0.5 for g in tensors(SHAPES, 100 + step)]


@dataclass
class Case:
    """An optimizer, the reference that it follows, and how many rounds its step has."""

    ours: type
    theirs: type
    rounds: int
    options: dict = field(default_factory=dict)
    names: tuple = ()
    """The averages that a matrix has a row and a column statistic of."""

    def reference(self, steps, start=None, gradients=gradients, **options):
        """The reference's parameters and the reference, in fp64."""
        params = [nn.Parameter(t.double()) for t in start or tensors(SHAPES)]
        optimizer = self.theirs(params, **{**self.options, **options})
        self.go_on(params, optimizer, steps, gradients)
        return params, optimizer

    @staticmethod
    def go_on(params, optimizer, steps, gradients=gradients):
        for step in steps:
            for p, g in zip(params, gradients(step)):
                p.grad = g.to(p.dtype)
            optimizer.step()

    def optimizer(self, params, **options):
        return self.ours(params, **{**self.options, **options})


def check(case, ctx, **options):
    """Ten steps are the reference's, with a collective per round and communicator."""
    start = tensors(SHAPES)
    params = shards(start, layout(ctx, SHAPES))
    optimizer = case.optimizer(params, **options)
    train(optimizer, params, range(10), gradients)
    error = update_error(params, case.reference(range(10), **options)[0], start)
    assert error <= 1e-5, (options, error)
    made = optimizer.communication
    assert made.rounds == case.rounds * (ctx.world_size > 1)
    # Over zero; with tensor parallelism over tp_zero, where there are several ranks in it, and over tp.
    groups = 0 if ctx.world_size == 1 else 1 if ctx.tp_size == 1 else 2 + (ctx.data_size > 1)
    assert (groups > 0) * case.rounds <= made.collectives <= groups * case.rounds
    assert (made.bytes > 0) == (groups > 0)


def check_faults(case, ctx, fault):
    """On 4 ranks, 2 of them tensor-parallel: a comparison with the reference notices the fault."""
    reduce_packed, update = engine.reduce_packed, FactoredAverage.update
    shapes = [(12, 5), (7, 4), (3, 9), (4, 6, 3, 2), (3, 8, 5)]  # sharded evenly, for messages of the same sizes

    def broken(reductions, record, *overlap):
        if fault == "no reduction":
            return
        if fault == "none over data":
            reductions = [r for r in reductions if r.comm is ctx.tp]
        if fault == "none over tp":
            reductions = [r for r in reductions if r.comm is not ctx.tp]
        if fault == "column sums over tp instead of data":
            for r in reductions:
                if r.comm is ctx.tp_zero and r.value.numel() > 1:
                    r.comm = ctx.tp
        reduce_packed(reductions, record, *overlap)

    def local_mean(self, results, decay):
        update(self, results, decay)
        for rows, factors in zip(self._row_averages, self.rows):
            factors.copy_((rows / rows.mean(-1, keepdim=True)).rsqrt())

    def compare():
        start = tensors(shapes)
        params = shards(start, layout(ctx, shapes))
        optimizer = case.optimizer(params)
        train(optimizer, params, range(3), lambda step: tensors(shapes, step))
        expected, _ = case.reference(range(3), start, lambda step: tensors(shapes, step))
        return update_error(params, expected, start)

    assert compare() <= 1e-5
    with pytest.MonkeyPatch.context() as patch:
        if fault == "mean of this rank's rows":
            patch.setattr(FactoredAverage, "update", local_mean)
        else:
            patch.setattr(engine, "reduce_packed", broken)
        error = compare()
        assert error > 1e-2, error


FAULTS = [
    "no reduction",
    "none over data",
    "none over tp",
    "column sums over tp instead of data",
    "mean of this rank's rows",
]


def check_copies(case, ctx):
    """Whole parameters on every rank, as under DDP, cost no communication."""
    start = tensors(SHAPES)
    params = [nn.Parameter(t.clone()) for t in start]
    optimizer = case.optimizer(params)
    train(optimizer, params, range(10), gradients)
    assert update_error(params, case.reference(range(10))[0], start) <= 1e-5
    assert optimizer.communication.rounds == 0
    assert optimizer.communication.collectives == 0
    for p in params:
        largest = p.detach().clone()
        ctx.world.all_reduce(largest, "max")
        assert torch.equal(largest, p)


def check_undivided(case, ctx):
    """Matrices that one rank holds are stepped there alone; the state is gathered from there and goes on elsewhere."""
    start = tensors(SHAPES)
    params = shards(start, undivided_layout(ctx, SHAPES))
    optimizer = case.optimizer(params)
    train(optimizer, params, range(5), gradients)
    assert optimizer.communication.rounds == optimizer.communication.collectives == 0
    assert update_error(params, case.reference(range(5))[0], start) <= 1e-5
    saved = [optimizer.state_dict(gather=True)]
    dist.broadcast_object_list(saved)
    check_statistics(case, saved[0]["state"])
    weights = [unshard(p.detach(), slice_of(p)) for p in params]
    moved = shards(weights, [shard_slice(s, ctx.world) for s in SHAPES])
    resharded = case.optimizer(moved)
    resharded.load_state_dict(saved[0])
    back = case.optimizer(shards(weights, undivided_layout(ctx, SHAPES)))
    back.load_state_dict(saved[0])
    for o in (optimizer, resharded, back):
        train(o, o.param_groups[0]["params"], range(5, 10), gradients)
    assert update_error(moved, case.reference(range(10))[0], start) <= 1e-5
    assert all(torch.equal(p, q) for p, q in zip(params, back.param_groups[0]["params"]))


def check_missing_gradients(case, ctx):
    """Matrices larger than a kernel's tile, groups with options of their own, and a neighbour without gradient."""
    shapes = [(300, 517), (3,), (40, 2)]
    start = tensors(shapes)

    def make(params, kind):
        groups = [{"params": params[:1], "weight_decay": 0.2}, {"params": params[1:]}]
        return kind(groups, **case.options)

    params, unsharded = shards(start, layout(ctx, shapes)), [nn.Parameter(t.double()) for t in start]
    ours, theirs = make(params, case.ours), make(unsharded, case.theirs)
    for step in range(3):
        for p, q, g in zip(params[:2], unsharded, tensors(shapes, step)):
            p.grad, q.grad = shard_of(g, slice_of(p)), g.double()
        ours.step()
        theirs.step()
    assert update_error(params, unsharded, start) <= 1e-5
    assert ours.communication.collectives == case.rounds * (ctx.world_size > 1)  # for both groups


def check_half(case, ctx, dtype):
    """Masters follow the reference in fp32, whatever the loss scale; without them parameters stay near it."""
    start = [t.to(dtype).float() for t in tensors(SHAPES)]

    def rounded(step):
        return [g.to(dtype).float() for g in gradients(step)]

    expected, _ = case.reference(range(10), start, rounded)
    params = shards(start, layout(ctx, SHAPES), dtype)
    optimizer = case.optimizer(params)
    train(optimizer, params, range(10), rounded, scale=64.0)
    masters = [optimizer.state[p]["master"] for p in params]
    for m, p in zip(masters, params):
        assert torch.equal(m.to(dtype), p)
        m.bmt_slice = p.bmt_slice
    assert update_error(masters, expected, start) <= 1e-5
    params = shards(start, layout(ctx, SHAPES), dtype)
    optimizer = case.optimizer(params, stochastic_rounding=True)
    train(optimizer, params, range(10), rounded)
    assert not any("master" in entry for entry in optimizer.state.values())
    # Ten roundings, each by less than a unit in the last place.
    for p, q, s in zip(params, expected, start):
        unsharded, largest = unshard(p.detach(), slice_of(p)).double(), torch.maximum(q.abs(), s.abs()).max()
        assert ((unsharded - q).abs() <= 10 * torch.finfo(dtype).eps * largest).all()


def check_state(case, ctx, dtype):
    """State gathered at one layout goes on at others, and local state goes on exactly."""
    start = [t.to(dtype).float() for t in tensors(SHAPES)]
    params = shards(start, layout(ctx, SHAPES), dtype)
    optimizer = case.optimizer(params)
    train(optimizer, params, range(5), gradients)
    saved = [optimizer.state_dict(gather=True)]
    assert sorted(saved[0]["state"]) == (list(range(len(SHAPES))) if ctx.rank == 0 else [])
    dist.broadcast_object_list(saved)
    if dtype is torch.float32:
        check_statistics(case, saved[0]["state"])
    weights = [unshard(p.detach(), slice_of(p)) for p in params]
    # By rows only, and at the same layout with the local state.
    others = [shard_slice(s, ctx.world) for s in SHAPES]
    moved, same = shards(weights, others, dtype), shards(weights, layout(ctx, SHAPES), dtype)
    resharded, resumed = case.optimizer(moved), case.optimizer(same)
    resharded.load_state_dict(saved[0])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for o, ps in ((optimizer, params), (resumed, same), (resharded, moved)):
        train(o, ps, range(5, 10), gradients)
    assert all(torch.equal(p, q) for p, q in zip(params, same))
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    if dtype is torch.float32:
        assert update_error(moved, case.reference(range(10))[0], start) <= 1e-5


def check_statistics(case, state):
    """Whole statistics, each once, are the reference's."""
    _, reference = case.reference(range(5))
    for index, theirs in reference.state_dict()["state"].items():
        ours = state[index]
        assert int(ours["step"]) == int(theirs["step"]) == 5
        is_matrix = len(SHAPES[index]) > 1
        keys = {f"{name}_{side}" for name in case.names for side in ("row", "col")} if is_matrix else {"exp_avg_sq"}
        assert keys <= set(ours) <= set(theirs)
        for key in set(ours) - {"step"}:
            torch.testing.assert_close(ours[key], theirs[key].float(), rtol=1e-5, atol=1e-6)


def check_interchange(case, ctx):
    """The reference goes on with our gathered state, and we go on with the reference's."""
    start = tensors(SHAPES)
    expected, reference = case.reference(range(5))
    params = shards([q.detach().float() for q in expected], layout(ctx, SHAPES))
    ours = case.optimizer(params)
    theirs = copy.deepcopy(reference.state_dict())
    ours.load_state_dict(theirs)
    train(ours, params, range(5, 8), gradients)
    saved = [ours.state_dict(gather=True)]
    dist.broadcast_object_list(saved)
    unsharded = [nn.Parameter(unshard(p.detach(), slice_of(p)).double()) for p in params]
    other = case.theirs(unsharded, **case.options)
    other.load_state_dict(saved[0])
    case.go_on(unsharded, other, range(8, 10))
    assert update_error(unsharded, case.reference(range(10))[0], start) <= 1e-5


def check_overflow(case, ctx):
    """A skipped step changes nothing, the flag rides along, and a clip coefficient multiplies gradients."""
    params = shards(tensors(SHAPES), layout(ctx, SHAPES))
    optimizer = case.optimizer(params)
    train(optimizer, params, range(2), gradients)
    before, state = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    for p, g in zip(params, gradients(2)):
        p.grad = shard_of(g, slice_of(p)) * 2
    for flagged in (True, False):
        flag = torch.tensor(float(flagged and ctx.rank == ctx.world_size - 1))
        step = optimizer.begin_step(scale=4, grad_factor=torch.tensor(2.0))
        ctx.world.traffic.clear()
        assert run([step], flag, ctx.world) is not flagged
        assert ctx.world.traffic["all_reduce"].calls == (1 if flagged else case.rounds)
        if flagged:
            assert all(torch.equal(p, b) for p, b in zip(params, before))
            for index, entry in optimizer.state_dict()["state"].items():
                assert all(torch.equal(value, state["state"][index][key]) for key, value in entry.items())
    assert update_error(params, case.reference(range(3))[0], tensors(SHAPES)) <= 1e-5


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x):
        return self.layers(x)


def check_fsdp(case):
    """DTensors of FSDP2 are trained as unsharded parameters, and gathered as the reference's state."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, start, model = Mlp().double(), [p.detach().clone() for p in Mlp().parameters()], Mlp()
    fully_shard(model.layers[0])
    fully_shard(model)
    params, unsharded = list(model.parameters()), list(plain.parameters())
    ours, theirs = case.optimizer(params), case.theirs(unsharded, **case.options)
    for step in range(10):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        # Gradients come from the unsharded model: Adafactor turns the sign of one that is nearly 0 into an update.
        plain.zero_grad()
        ours.zero_grad()
        plain(x.double()).pow(2).sum().backward()
        model(x[rank * 6 // size : (rank + 1) * 6 // size]).pow(2).sum().backward()
        for p, q in zip(params, unsharded):
            local = p.grad.to_local()
            local.copy_(shard_of(q.grad.float(), slice_of(p)))
        ours.step()
        theirs.step()
    assert update_error(params, unsharded, start) <= 1e-5
    assert ours.communication.collectives == case.rounds
    state = ours.state_dict(gather=True)["state"]
    assert len(state) == (4 if rank == 0 else 0)
    for index, entry in state.items():
        for key in set(entry) - {"step"}:
            theirs_there = theirs.state_dict()["state"][index][key].float()
            torch.testing.assert_close(entry[key], theirs_there, rtol=1e-5, atol=1e-6)


def state_bytes_per_parameter(case):
    """Of a GPT with 50 million parameters."""
    hidden, layers, vocab = 512, 12, 25600
    block = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    vectors = [(hidden,)] * 4 + [(3 * hidden,), (hidden,), (4 * hidden,), (hidden,)]
    shapes = [(vocab, hidden), (1024, hidden), *(block + vectors) * layers]
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    count = sum(p.numel() for p in params)
    assert 49e6 < count < 54e6
    state = case.optimizer(params).state_dict()["state"]
    return sum(t.nbytes for entry in state.values() for key, t in entry.items() if key != "step") / count
