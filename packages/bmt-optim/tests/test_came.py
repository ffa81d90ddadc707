"""CAME over shards is came_pytorch.CAME on one device."""

import factored_checks as checks
import pytest
import torch
from factored_checks import FAULTS, SHAPES, Case
from layouts import layout, shards, tensors, train, update_error
from torch import nn

from bmt_optim import CAME, DistributedCAME

came_pytorch = pytest.importorskip("came_pytorch")

OPTIONS = {"lr": 0.3, "betas": (0.8, 0.95, 0.98), "weight_decay": 0.1}
CASE = Case(DistributedCAME, came_pytorch.CAME, 3, OPTIONS, ("exp_avg_sq", "exp_avg_res"))


@pytest.mark.ranks(1, 2, 3, 4)
def test_over_row_shards_it_is_the_reference(ctx):
    checks.check(CASE, ctx)


@pytest.mark.ranks(2, 4, tp_size=2)
def test_over_tensor_parallel_shards_it_is_the_reference(ctx):
    checks.check(CASE, ctx)


@pytest.mark.ranks(2)
def test_options_are_those_of_the_reference(ctx):
    plain = Case(CAME, came_pytorch.CAME, 3, {"lr": 0.3})
    for options in ({}, {"eps": (0.5, 0.3)}, {"clip_threshold": 0.3}, {"weight_decay": 0.5}):
        checks.check(plain, ctx, **options)


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(ctx, fault):
    checks.check_faults(CASE, ctx, fault)


@pytest.mark.ranks(2)
def test_a_confidence_that_is_the_second_moment_is_noticed(ctx):
    start = tensors(SHAPES)
    expected, _ = CASE.reference(range(10))
    for aliased in (False, True):
        params = shards(start, layout(ctx, SHAPES))
        optimizer = CASE.optimizer(params)
        optimizer.state_dict()
        for p, entry in optimizer.state.items() if aliased else ():
            if "exp_avg_res_row" in entry and p.bmt_slice.shape[0] > 1:  # what is not sharded raises
                entry["exp_avg_res_row"], entry["exp_avg_res_col"] = entry["exp_avg_sq_row"], entry["exp_avg_sq_col"]
        train(optimizer, params, range(10), checks.gradients)
        assert (update_error(params, expected, start) > 0.1) is aliased


@pytest.mark.ranks(3)
def test_what_one_rank_holds_is_stepped_there(ctx):
    checks.check_undivided(CASE, ctx)


@pytest.mark.ranks(2)
def test_copies_do_not_communicate(ctx):
    checks.check_copies(CASE, ctx)


@pytest.mark.ranks(2)
def test_large_matrices_and_neighbours_without_gradient(ctx):
    checks.check_missing_gradients(CASE, ctx)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_and_without_masters(ctx, dtype):
    checks.check_half(CASE, ctx, dtype)


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_gathered_at_one_layout_is_loaded_at_another_and_goes_on_exactly(ctx, dtype):
    checks.check_state(CASE, ctx, dtype)


@pytest.mark.ranks(4, tp_size=2)
def test_state_goes_to_the_reference_and_comes_from_it(ctx):
    checks.check_interchange(CASE, ctx)


@pytest.mark.ranks(3)
def test_a_skipped_step_changes_nothing(ctx):
    checks.check_overflow(CASE, ctx)


@pytest.mark.ranks(2, 3, init=False)
def test_dtensors_of_fsdp2_are_trained_as_unsharded_parameters():
    checks.check_fsdp(CASE)


def test_state_is_the_momentum_and_little_more():
    assert 4 < checks.state_bytes_per_parameter(CASE) < 4.1


def test_options_out_of_range_are_refused():
    p = nn.Parameter(torch.ones(2, 3))
    for options in ({"lr": -1.0}, {"betas": (0.9, 0.999)}, {"eps": (1e-30,)}, {"clip_threshold": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            CAME([p], **{"lr": 0.1, **options})
