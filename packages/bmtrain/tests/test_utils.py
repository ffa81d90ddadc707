import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bmtrain.utils import AverageRecorder, round_up, tp_split_tensor

finite = st.floats(-1e6, 1e6)


@given(st.integers(-(10**20), 10**20), st.integers(1, 10**6))
def test_round_up_is_the_next_multiple(x, d):
    rounded = round_up(x, d)
    assert rounded % d == 0
    assert 0 <= rounded - x < d


@pytest.mark.parametrize("d", [0, -2])
def test_round_up_to_nothing_is_refused(d):
    with pytest.raises(ValueError, match=f"d={d} must be positive"):
        round_up(3, d)


@given(st.floats(0, 0.99), finite, st.lists(finite, min_size=1, max_size=50))
def test_the_average_weighs_values_by_their_age_and_nothing_else(alpha, start, values):
    recorder = AverageRecorder(alpha, start)
    assert recorder.value == start
    for value in values:
        recorder.record(value)
    weights = [alpha ** (len(values) - 1 - i) for i in range(len(values))]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert recorder.value == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_the_first_value_is_the_average_whatever_the_start():
    recorder = AverageRecorder(start_value=100)
    recorder.record(2.0)
    assert recorder.value == pytest.approx(2.0)


@pytest.mark.parametrize("alpha", [1, -0.1, float("nan")])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha="):
        AverageRecorder(alpha)


@pytest.mark.ranks(1)
def test_one_tensor_parallel_rank_has_the_logical_tensor(ctx):
    x = torch.arange(6).view(2, 3)
    assert torch.equal(tp_split_tensor(x, 1), x)


@pytest.mark.ranks(4, tp_size=2)
def test_ranks_have_the_shards_of_a_tensor(ctx):
    x = torch.arange(24).view(2, 4, 3)
    for dim in (0, 1, -2):
        shard = tp_split_tensor(x, dim)
        assert shard.is_contiguous()
        assert torch.equal(shard, x.chunk(2, dim)[ctx.tp_rank])
    with pytest.raises(ValueError, match=r"dimension 2 .* cannot be sharded evenly over 2 .* pad it to 4"):
        tp_split_tensor(x, 2)
    with pytest.raises(ValueError, match="split_dim=3 is not a dimension"):
        tp_split_tensor(x, 3)


def test_storage_classes_of_the_gpu():
    from bmtrain.block_layer import round_up, storage_type_cuda

    assert round_up(5, 4) == 8
    for storage in (torch.HalfStorage, torch.cuda.HalfStorage):
        assert storage_type_cuda(storage) is torch.cuda.HalfStorage
    for other in (int, torch.ComplexFloatStorage, torch.UntypedStorage):
        with pytest.raises(ValueError, match="is no storage class"):
            storage_type_cuda(other)
