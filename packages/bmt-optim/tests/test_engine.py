"""Rules over the engine: requests are answered as on one device, in one collective each, and nothing goes astray."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from layouts import layout, shard_slice, shards, tensors, undivided_layout
from torch import nn

from bmt_comm import Slice, shard_of, slice_of
from bmt_optim import AdamOptimizer, AdamW, DistributedLamb, DistributedOptimizer, Muon, engine, step_plan
from bmt_optim.engine import run
from bmt_optim.experts import sum_by_expert
from bmt_optim.logical_params import assign_owners
from bmt_optim.requests import Broadcast, GatherToOwner, Max, Scatter, Sum
from bmt_optim.rounding import round_stochastically
from bmt_optim.state_layout import Size, StateTensor, column_statistic, replicated, row_statistic

SHAPES = [(12, 5), (7, 4), (3, 9), (5,), (2, 6), (4, 6, 3, 2), (2,), (6, 2), (12, 8), (3, 6, 5), (2, 4, 6)]


class Probe(DistributedOptimizer):
    """Asks for everything and keeps the answers; changes no weight."""

    def __init__(self, params, dtype=torch.float32):
        self.dtype = dtype
        super().__init__(params, {"cost": 1.0})

    def state_layout(self, shape, options):
        return {}

    def cost(self, shape, options):
        return options["cost"]

    def rule(self, batch):
        two = [i for i, p in enumerate(batch.logical_params) if len(p.where.shape) > 1]
        matrices = [batch.logical_params[i] for i in two]
        grads = [batch.grads[i].to(self.dtype) for i in two]
        total = Sum([g.square().sum() for g in batch.grads], batch.logical_params)
        largest = Max([g.max() if g.numel() else torch.tensor(-1e9) for g in batch.grads], batch.logical_params)
        rows = Sum([g.float().sum(-1) for g in grads], matrices, (-1,))
        columns = Sum([sum_of_rows(g.float(), m.where) for g, m in zip(grads, matrices)], matrices, (-2,))
        sizes = [c.numel() for c in columns.values]
        flat = Sum(torch.cat([c.reshape(-1) for c in columns.values]), matrices, (-2,), sizes)
        both = Sum(torch.stack([torch.stack([g.sum(), g.square().sum()]) for g in batch.grads]), batch.logical_params)
        none = Max(torch.empty(0, 2), [])
        self.first = yield [total, largest, rows, columns, flat, both, none, GatherToOwner(grads, matrices)]
        gathered = self.first[-1]
        back = Scatter([None if w is None else w * 2 for w in gathered], matrices, self.dtype)
        shapes = [(m.where.shape[0], 2) for m in matrices]
        some = [None if w is None else w.reshape(len(w), -1)[:, :2].contiguous() for w in gathered]
        self.second = yield [back, Broadcast(some, matrices, shapes, self.dtype)]
        self.owned = [m.owned for m in matrices]


def sum_of_rows(values, where):
    """Of packed experts, of which a rank has some rows, for all experts."""
    return sum_by_expert(values, where) if where.row_dims == 2 else values.sum(-2)


def probe(slices, dtype=torch.float32):
    full_grads = tensors([w.shape for w in slices], seed=1)
    params = shards(tensors([w.shape for w in slices]), slices)
    for p, g in zip(params, full_grads):
        p.grad = shard_of(g, slice_of(p)).clone()
    return full_grads, params, Probe(params, dtype)


def check_answers(ctx):
    slices = layout(ctx, SHAPES)
    for dtype in (torch.float32, torch.bfloat16):
        grads, _, optimizer = probe(slices, dtype)
        optimizer.step()
        total, largest, rows, columns, flat, both, none, unsharded_params = optimizer.first
        assert torch.equal(flat, torch.cat([c.reshape(-1) for c in columns]))
        torch.testing.assert_close(both, torch.stack([torch.stack([g.sum(), g.square().sum()]) for g in grads]))
        assert none.shape == (0, 2)
        back, shared = optimizer.second
        for g, t, m in zip(grads, total, largest):
            torch.testing.assert_close(t, g.square().sum())
            torch.testing.assert_close(m, g.max())
        two = [i for i, g in enumerate(grads) if g.dim() > 1]
        for n, i in enumerate(two):
            where, g = slices[i], grads[i].to(dtype)
            torch.testing.assert_close(rows[n], shard_of(g.float().sum(-1), row_statistic(g.shape).part(where)))
            every_column = column_statistic(g.shape).part(replace(where, row_start=0, row_stop=where.tp_shard_rows))
            expected = every_column if where.row_dims == 2 else column_statistic(g.shape).part(where)
            torch.testing.assert_close(columns[n], shard_of(g.float().sum(-2), expected))
            assert (unsharded_params[n] is None) == (not optimizer.owned[n])
            assert unsharded_params[n] is None or torch.equal(unsharded_params[n], g)
            assert torch.equal(back[n], shard_of(g * 2, where))
            assert torch.equal(shared[n], g.reshape(len(g), -1)[:, :2])
        owners = torch.tensor(optimizer.owned).float()
        ctx.world.all_reduce(owners)
        assert owners.eq(1).all()
        # A reduction over each communicator and operation, an exchange for each kind of transfer.
        groups = 0 if ctx.world_size == 1 else 1 if ctx.tp_size == 1 else 3  # zero, tp_zero and tp
        made = optimizer.communication
        assert made.rounds == (2 if groups else 0)
        assert made.collectives <= 5 * groups
        assert made.collectives >= (5 if groups else 0)
        assert (made.bytes > 0) == (groups > 0)


@pytest.mark.ranks(1, 2, 3)
def test_requests_are_answered_over_rows(ctx):
    check_answers(ctx)


@pytest.mark.ranks(2, 4, tp_size=2)
def test_requests_are_answered_over_rows_and_tensor_parallel_ranks(ctx):
    check_answers(ctx)


@pytest.mark.ranks(2, 4, tp_size=2)
@pytest.mark.parametrize("fault", ["drop", "wrong group", "one phase"])
def test_a_dropped_reduction_or_a_wrong_group_is_noticed(ctx, fault):

    reduce_packed = engine.reduce_packed

    def broken(reductions, record, *overlap):
        if fault == "drop":
            return
        if fault == "one phase":
            reductions = [r for r in reductions if r.comm is not ctx.tp]
        if fault == "wrong group":
            for r in reductions:  # of statistics of logical parameters: all ranks have as many
                if r.value.dim() == 0 and r.comm in (ctx.tp, ctx.tp_zero):
                    r.comm = ctx.tp if r.comm is ctx.tp_zero else ctx.tp_zero
            reductions = [r for r in reductions if r.comm.size > 1]
        reduce_packed(reductions, record, *overlap)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "reduce_packed", broken)
        with pytest.raises(AssertionError):
            check_answers(ctx)


@pytest.mark.ranks(1, 2)
def test_parameters_of_one_rank_are_stepped_there_in_small_batches_and_not_before_the_flag_is_known(ctx, monkeypatch):
    monkeypatch.setattr(step_plan, "CACHED", 20)
    stepped = []

    class Watched(AdamW):
        def rule(self, batch):
            shapes = [m.where.shape for m in batch.logical_params]
            stepped.append(shapes)
            sums = [torch.ones(2) for _ in batch.logical_params]
            (sums,) = yield [Sum(sums, batch.logical_params)]
            ranks = 1 if all(m.row_comm is None for m in batch.logical_params) else ctx.world_size
            assert all(torch.equal(x, torch.full((2,), float(ranks))) for x in sums)
            (gathered,) = yield [GatherToOwner(batch.grads, batch.logical_params)]
            assert all(
                full is None or torch.equal(full, torch.ones(p.where.shape))
                for full, p in zip(gathered, batch.logical_params)
            )
            yield [Scatter([None if w is None else w * 2 for w in gathered], batch.logical_params)]

    alone = [(3, 4), (2, 2), (30, 2), (4, 4), (2,)]
    slices = [Slice(s, 0, s[0] if ctx.rank == 0 else 0, ctx.world) for s in alone]
    params = shards(tensors([*alone, (5, 3)]), [*slices, shard_slice((5, 3), ctx.world)])
    optimizer = Watched(params)
    for p in params:
        p.grad = torch.ones_like(p)
    run([optimizer.begin_step()], torch.ones(()), ctx.world)
    cut_by_all = [] if ctx.world_size == 1 else [[(5, 3)]]
    assert stepped == cut_by_all
    assert all(optimizer.state[p]["step"] == 0 for p in params)
    stepped.clear()
    assert run([optimizer.begin_step()], torch.zeros(()), ctx.world)
    portions = [[(3, 4), (2, 2)], [(30, 2)], [(4, 4), (2,)]]
    if ctx.device.type == "cuda":  # which has no cache to fit into
        here = [alone] if cut_by_all else [[*alone, (5, 3)]]
    else:
        here = portions if cut_by_all else [*portions, [(5, 3)]]
    assert sorted(stepped) == sorted([*cut_by_all, *(here if ctx.rank == 0 else [])])
    assert all(optimizer.state[p]["step"] == 1 for p in params)
    assert optimizer.communication.rounds == (3 if cut_by_all else 0)


class TwoRounds(AdamW):
    def rule(self, batch):
        (sums,) = yield [Sum([g.sum() for g in batch.grads], batch.logical_params)]
        yield [Sum(sums, batch.logical_params)]
        yield from super().rule(batch)


@pytest.mark.ranks(4, pipe_size=2)
def test_stages_share_parameters_outside_the_pipeline_and_have_their_own(ctx):
    # Other numbers of parameters on each stage, and a parameter that all ranks share.
    outer = shard_slice((9, 2), ctx.outer_zero)
    own = [shard_slice((3 + n, 2), ctx.zero) for n in range(1 + 2 * ctx.pipe_rank)]
    _, params, first = probe([own[0], outer, *own[1:]])
    second = TwoRounds(params)
    assert run([first.begin_step(), second.begin_step()])
    assert first.communication is second.communication
    assert first.communication.rounds == 2
    assert second.state[params[0]]["step"] == 1


@pytest.mark.ranks(1, 3)
def test_an_overflow_on_one_rank_abandons_all_steps_and_the_flag_rides_along(ctx):
    slices = layout(ctx, SHAPES)
    _, params, first = probe(slices, torch.float32)
    matrices = [p for p in params if len(p.bmt_slice.shape) == 2]
    others = [AdamW(params), DistributedLamb(params, weight_decay=0.1), Muon(matrices)]
    before = [p.detach().clone() for p in params]
    for flagged in (True, False):
        flag = torch.tensor(float(flagged and ctx.rank == ctx.world_size - 1))
        steps = [o.begin_step() for o in (first, *others)]
        ctx.world.traffic.clear()
        assert run(steps, flag, ctx.world) is not flagged
        if ctx.world_size > 1:
            # Sums with the flag among them, and Max; then the norms of LAMB.
            assert ctx.world.traffic["all_reduce"].calls == (2 if flagged else 3)
        assert all(torch.equal(p, b) for p, b in zip(params, before)) is flagged
        assert all(o.state[matrices[0]]["step"] == (0 if flagged else 1) for o in others)
        if flagged:
            assert all(not t.any() for o in others for s in o.state.values() for k, t in s.items() if k != "step")


@pytest.mark.ranks(3)
def test_a_missing_gradient_skips_its_parameter_everywhere_or_is_an_error(ctx):
    slices = layout(ctx, [(7, 2), (2, 3), (4,)])
    _, params, _ = probe(slices)
    optimizer = DistributedLamb(params)
    if params[1].numel() == 0:  # rank 0 holds none of its two rows
        params[1].grad = None
    params[2].grad = None
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in params] == [1, 1, 0]
    assert torch.equal(params[2], before[2])
    params[2].grad = torch.ones_like(params[2])
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in params] == [2, 2, 1]
    # Frozen on all of them, of which one cannot tell by its gradient.
    params[1].requires_grad_(False)
    params[1].grad = None
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in params] == [3, 2, 2]
    # Missing on one of those who hold elements, and changed on the others.
    params[0].grad = None if ctx.rank == 2 else params[0].grad
    params[2].grad = None
    with pytest.raises(RuntimeError, match=r"gradient of parameter 0, of shape \(7, 2\), is there on some"):
        optimizer.step()
    assert [optimizer.state[p]["step"] for p in params] == [3, 2, 2]


@pytest.mark.ranks(2)
def test_ranks_with_different_parameters_are_told(ctx):
    shape = (4, 2) if ctx.rank == 0 else (4, 3)
    params = shards(tensors([shape]), [shard_slice(shape, ctx.world)])
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match=r"\(4, 2\).*on rank 0 and one of shape \(4, 3\)"):
        DistributedLamb(params).step()


def test_a_rule_must_not_end_before_its_step_can_be_abandoned():
    class Hasty(AdamW):
        def rule(self, batch):
            return
            yield

    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="without a yield"):
        Hasty([p]).step()


def test_owners_are_chosen_alike_by_all_who_know_of_them():
    # 0 and 1 share items of their own and know nothing of those of 2 and 3.
    everyone, low, high = (0, 1, 2, 3), (0, 1), (2, 3)
    both = assign_owners([5, 4, 3, 9, 9, 2], [everyone, everyone, everyone, low, low, low])
    other = assign_owners([5, 4, 3, 1], [everyone, everyone, everyone, high])
    assert both[:3] == other[:3] == [0, 1, 2]
    assert sorted(both[3:5]) == [0, 1]
    assert both[5] == 1  # 0 has 14, 1 has 13
    assert other[3] == 3
    # What one rank holds is its own, and counts.
    assert assign_owners([1, 5, 4], [low, low, low], [{}, {1: 1.0}, {}]) == [0, 1, 0]
    # Of what several hold parts of, the one with most has it, unless it has more to do than its share.
    parts = {0: 0.25, 1: 0.75}
    assert assign_owners([1, 1, 1, 1], [low] * 4, [parts] * 4) == [1, 1, 0, 0]
    # The order in which the candidates are named does not matter.
    assert assign_owners([1, 1], [(1, 0), (0, 1)]) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_unbiased_and_keeps_what_is_exact(dtype):
    value = {torch.bfloat16: 1 + 2.0**-9, torch.float16: 3 * 2.0**-26}[dtype]
    p = torch.full((1000, 100), value)
    where = slice_of(p)
    rounded = round_stochastically(p, where, dtype, seed=3)
    assert len(rounded.unique()) == 2
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-24}[dtype]
    assert abs(rounded.double().mean().item() - value) < 0.01 * step
    assert not torch.equal(rounded, round_stochastically(p, where, dtype, seed=4))
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-24, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically(exact, slice_of(exact), dtype, 1).float(), exact)
    assert round_stochastically(torch.tensor([float("nan")]), slice_of(exact[:1]), dtype, 1).isnan().all()


@pytest.mark.ranks(4, tp_size=2)
def test_stochastic_rounding_does_not_depend_on_the_layout(ctx):
    shapes = [*SHAPES, ()]
    for full, where in zip(tensors(shapes), layout(ctx, shapes)):
        mine = round_stochastically(shard_of(full, where), where, torch.bfloat16, 7)
        assert torch.equal(mine, shard_of(round_stochastically(full, slice_of(full), torch.bfloat16, 7), where))


@pytest.mark.ranks(4, tp_size=2)
def test_state_tensors_are_sharded_as_the_dimensions_they_have(ctx):
    for shape in [(12, 5), (7, 4)]:
        for tp_dim in (0, 1):
            where = shard_slice(shape, ctx.tp_zero, tp_dim, ctx.tp)
            full = tensors([shape])[0]
            mine = shard_of(full, where)
            assert row_statistic(shape).part(where).local_shape == mine.shape[:1]
            assert column_statistic(shape).part(where).local_shape == mine.shape[1:]
            assert StateTensor((Size(3), 1)).part(where).local_shape == (3, mine.shape[1])
            assert StateTensor((0, Size(3))).part(where).local_shape == (len(mine), 3)
            assert replicated((2, 3)).part(where).communicators == ()
            with pytest.raises(ValueError, match="not in front"):
                StateTensor((1, 0)).part(where)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_on_the_engine_is_adam_and_takes_its_state(ctx, dtype):
    slices = layout(ctx, SHAPES)
    options = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    mine, theirs = (shards(tensors(SHAPES), slices, dtype) for _ in range(2))
    ours, reference = AdamW(mine, **options), AdamOptimizer(theirs, **options)
    for step in range(4):
        for p, q, g in zip(mine, theirs, tensors(SHAPES, 1 + step)):
            p.grad = q.grad = shard_of(g, slice_of(p)).to(dtype).clone()
        if step == 2:
            ours = AdamW(mine)
            ours.load_state_dict(reference.state_dict())
        ours.step()
        reference.step()
    assert ours.communication.rounds == ours.communication.collectives == 0
    for p, q in zip(mine, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-7)


@pytest.mark.ranks(2)
def test_adam_counts_the_steps_of_an_empty_part_without_a_gradient(ctx):
    start = tensors([(3, 2), (4,)])
    params = shards(start, undivided_layout(ctx, [(3, 2), (4,)]), torch.bfloat16)
    optimizer = AdamW(params)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p) if p.numel() else None
        optimizer.step()
    assert [optimizer.state[p]["step"] for p in params] == [3, 3]


@pytest.mark.ranks(2)
def test_without_masters_small_updates_are_not_lost(ctx):
    start = [torch.ones(40, 50)]
    params = shards(start, layout(ctx, [(40, 50)]), torch.bfloat16)
    optimizer = AdamW(params, lr=1e-4, stochastic_rounding=True)
    for _ in range(20):  # 1e-4 is a fortieth of the step of bf16 below 1
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    assert sorted(optimizer.state[params[0]]) == ["exp_avg", "exp_avg_sq", "step"]
    total = params[0].detach().double().sum().view(1)
    ctx.world.all_reduce(total)
    assert total.item() / 2000 == pytest.approx(1 - 20e-4, abs=2e-4)


@pytest.mark.ranks(1, init=False)
def test_parameters_that_are_not_contiguous_are_stepped():
    p, q = nn.Parameter(torch.randn(4, 3).t()), None
    q = nn.Parameter(p.detach().contiguous())
    p.grad = torch.randn(3, 4)
    q.grad = p.grad.clone()
    for optimizer in (DistributedLamb([p]), DistributedLamb([q])):
        optimizer.step()
    assert torch.equal(p, q)
    assert not p.is_contiguous()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("values", "sizes", "message"),
    [
        (torch.ones(5), [2, 2], "sizes for 4 elements, and values are no such vector"),
        (torch.ones(2, 2), [2, 2], "sizes for 4 elements, and values are no such vector"),
        ([torch.ones(2)], [2], "sizes for 2 elements, and values are no such vector"),
        (torch.ones(3), [-1, 4], "sizes for 3 elements, and values are no such vector"),
        (torch.ones(4), [2, 1, 1], r"lists of \[3, 2\] entries"),
        (torch.ones(3), None, r"lists of \[3, 2\] entries"),
    ],
)
def test_a_request_whose_lists_do_not_fit_is_refused(values, sizes, message):
    class Asks(DistributedLamb):
        def rule(self, batch):
            yield [Sum(values, batch.logical_params, None, sizes)]

    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=message):
        Asks(params).step()
