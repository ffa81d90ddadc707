"""Adafactor over shards is transformers.Adafactor on one device."""

import math

import factored_checks as checks
import pytest
import torch
from factored_checks import FAULTS, Case
from layouts import shard_slice, shards, tensors, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from bmt_optim import Adafactor, DistributedAdafactor

optimization = pytest.importorskip("transformers.optimization")

EXTERNAL = {"lr": 0.1, "relative_step": False}
PLAIN = Case(DistributedAdafactor, optimization.Adafactor, 2, names=("exp_avg_sq",))
MOMENTUM = Case(Adafactor, optimization.Adafactor, 2, {**EXTERNAL, "beta1": 0.8, "weight_decay": 0.1}, PLAIN.names)


@pytest.mark.ranks(1, 2, 3, 4)
def test_over_row_shards_it_is_the_reference(ctx):
    checks.check(MOMENTUM, ctx)


@pytest.mark.ranks(2, 4, tp_size=2)
def test_over_tensor_parallel_shards_it_is_the_reference(ctx):
    checks.check(MOMENTUM, ctx)
    checks.check(PLAIN, ctx)


@pytest.mark.ranks(2)
def test_options_are_those_of_the_reference(ctx):
    for options in (
        {},
        {"warmup_init": True, "eps": (1e-30, 1e4)},  # for steps above the rounding of the weights
        {**EXTERNAL, "scale_parameter": False},
        {**EXTERNAL, "clip_threshold": 0.3, "weight_decay": 0.2, "decay_rate": -0.4},
        {"eps": (0.5, 3.0), "beta1": 0.0},
    ):
        checks.check(PLAIN, ctx, **options)


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(ctx, fault):
    checks.check_faults(MOMENTUM, ctx, fault)


@pytest.mark.ranks(3)
def test_what_one_rank_holds_is_stepped_there(ctx):
    checks.check_undivided(MOMENTUM, ctx)


@pytest.mark.ranks(2)
def test_copies_do_not_communicate(ctx):
    checks.check_copies(MOMENTUM, ctx)


@pytest.mark.ranks(2)
def test_large_matrices_and_neighbours_without_gradient(ctx):
    checks.check_missing_gradients(MOMENTUM, ctx)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_and_without_masters(ctx, dtype):
    checks.check_half(MOMENTUM, ctx, dtype)


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_gathered_at_one_layout_is_loaded_at_another_and_goes_on_exactly(ctx, dtype):
    checks.check_state(MOMENTUM, ctx, dtype)


@pytest.mark.ranks(4, tp_size=2)
def test_state_goes_to_the_reference_and_comes_from_it(ctx):
    for case in (MOMENTUM, PLAIN):
        checks.check_interchange(case, ctx)


@pytest.mark.ranks(3)
def test_a_skipped_step_changes_nothing(ctx):
    checks.check_overflow(MOMENTUM, ctx)


@pytest.mark.ranks(2, 3, init=False)
def test_dtensors_of_fsdp2_are_trained_as_unsharded_parameters():
    checks.check_fsdp(MOMENTUM)


@pytest.mark.ranks(2)
def test_what_travels_is_columns_and_a_few_numbers(ctx):
    shapes = [(300, 20), (50, 70), (9,)]
    params = shards(tensors(shapes), [shard_slice(s, ctx.world) for s in shapes])
    optimizer = Adafactor(params)
    train(optimizer, params, range(1), lambda step: tensors(shapes, step))
    # The columns; of matrices the sums of squares and of the averages before; of all their sizes and the updates'.
    assert optimizer.communication.bytes == 4 * (20 + 70 + 2 * 2 + 3 + 3)


def test_state_has_next_to_no_bytes():
    assert checks.state_bytes_per_parameter(PLAIN) < 0.05
    assert 4 < checks.state_bytes_per_parameter(MOMENTUM) < 4.05


def test_options_out_of_range_are_refused_and_nothing_changes():
    p = nn.Parameter(torch.ones(2, 3))
    for options, message in (
        ({"lr": 0.1}, "lr=0.1 is of no effect"),
        ({"relative_step": False}, "lr=None"),
        ({**EXTERNAL, "lr": -1.0}, "lr=-1.0"),
        ({**EXTERNAL, "warmup_init": True}, "warmup_init"),
        ({"eps": 1e-3}, "eps=0.001"),
        ({"eps": (1e-30, -1.0)}, "eps"),
        ({"clip_threshold": 0.0}, "clip_threshold"),
        ({"decay_rate": 0.8}, "decay_rate=0.8"),
        ({"beta1": 1.0}, "beta1"),
        ({"weight_decay": math.inf}, "weight_decay"),
    ):
        with pytest.raises(ValueError, match=message):
            Adafactor([p], **options)
    optimizer = Adafactor([p], **EXTERNAL, scale_parameter=False)
    p.grad = torch.ones(2, 3)
    optimizer.state_dict()
    for change, message in ({"beta1": 0.9}, "beta1=0.9"), ({"scale_parameter": True}, "scale_parameter=True"):
        before = dict(optimizer.param_groups[0])
        optimizer.param_groups[0].update(change)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        optimizer.param_groups[0] = before
    assert torch.equal(p, torch.ones(2, 3))
    assert not optimizer.state[p]["exp_avg_sq_row"].any()


def test_initial_states_that_torch_makes_by_a_step_leave_the_weights():
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Adafactor(model.parameters(), weight_decay=0.1)
    get_optimizer_state_dict(model, optimizer)
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [1, 1]
    assert all(map(torch.equal, model.parameters(), before))
