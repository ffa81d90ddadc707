"""Schedules against the formulas they promise."""

import math

import pytest
import torch
from torch import nn

from bmt_optim.lr_scheduler import Cosine, Exponential, Linear, Noam, NoDecay, WarmupLRScheduler

S, W, E = 0.3, 4, 12
ALL = (NoDecay, Noam, Linear, Cosine, Exponential)


def sgd(groups=1):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=9.0)


def expected(cls, n, s=S, w=W, e=E):
    if n < w:
        return s * n / w**1.5 if cls is Noam else s * n / w
    return {
        NoDecay: lambda: s,
        Noam: lambda: s / math.sqrt(n),
        Linear: lambda: max(0.0, s * (e - n) / (e - w)),
        Cosine: lambda: s * (1 + math.cos(math.pi * (n - w) / (e - w))) / 2 if n < e else 0.0,
        Exponential: lambda: s * 0.95 ** (n - w),
    }[cls]()


@pytest.mark.parametrize("cls", ALL)
def test_every_iteration_has_the_rate_of_the_formula(cls):
    optimizer = sgd(groups=2)
    scheduler = cls(optimizer, S, W, E)
    for n in range(3 * E):
        assert scheduler.num_iter == n
        assert scheduler.current_lr == pytest.approx(expected(cls, n), abs=1e-15)
        assert scheduler.get_lr() == scheduler.current_lr
        assert [group["lr"] for group in optimizer.param_groups] == [scheduler.current_lr] * 2
        scheduler.step()


@pytest.mark.parametrize("cls", [Linear, Cosine])
def test_a_decay_that_has_ended_stays_at_zero(cls):
    scheduler = cls(sgd(), S, W, E)
    for n in (E, E + 1, 2 * E - W, 10 * E):
        scheduler.step(n)
        assert scheduler.current_lr == 0.0


@pytest.mark.parametrize("cls", ALL)
def test_no_warm_up_starts_at_the_peak_and_divides_by_nothing(cls):
    scheduler = cls(sgd(), S, 0, E)
    assert scheduler.current_lr == pytest.approx(S)
    scheduler.step()
    assert scheduler.current_lr == pytest.approx(expected(cls, 1, w=0))


def test_a_rate_that_is_a_tensor_is_written_in_place():
    rates = [torch.tensor(9.0), torch.tensor(9.0, dtype=torch.float64)]
    params = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    optimizer = torch.optim.Adam(params)
    scheduler = Linear(optimizer, S, W, E)
    scheduler.step()
    for group, rate in zip(optimizer.param_groups, rates):
        assert group["lr"] is rate
        assert float(rate) == pytest.approx(expected(Linear, 1))


@pytest.mark.parametrize("cls", ALL)
def test_the_first_step_is_that_of_iteration_zero(cls):
    assert cls(sgd(), S, W, E).current_lr == 0.0
    assert cls(sgd(), S, W, E, num_iter=6).current_lr == pytest.approx(expected(cls, 6))


@pytest.mark.parametrize("cls", [Linear, Cosine])
def test_a_decay_of_no_length(cls):
    scheduler = cls(sgd(), S, W, W)
    assert scheduler.current_lr == 0.0
    scheduler.step(W - 1)
    assert scheduler.current_lr == pytest.approx(S * (W - 1) / W)
    for n in (W, W + 1):
        scheduler.step(n)
        assert scheduler.current_lr == 0.0


def test_gamma_is_a_setting_that_travels():
    scheduler = Exponential(sgd(), S, W, E, gamma=0.5)
    scheduler.step(W + 2)
    assert scheduler.current_lr == pytest.approx(S / 4)
    other = Exponential(sgd(), 1.0, 0, 1)
    other.load_state_dict(scheduler.state_dict())
    assert other.current_lr == pytest.approx(S / 4)
    assert other.optimizer.param_groups[0]["lr"] == other.current_lr


@pytest.mark.parametrize("cls", ALL)
def test_a_state_dict_restores_the_schedule_and_the_rate(cls):
    scheduler = cls(sgd(), S, W, E)
    scheduler.step(7)
    other = cls(sgd(), 1.0, 1, 2)
    other.load_state_dict(scheduler.state_dict())
    for _ in range(6):
        assert other.current_lr == scheduler.current_lr
        scheduler.step()
        other.step()


def test_a_state_dict_that_lacks_something_changes_nothing():
    scheduler = Linear(sgd(), S, W, E, num_iter=6)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match="lacks end_iter"):
        scheduler.load_state_dict({"start_lr": 1.0, "warmup_iter": 2, "num_iter": 3})
    assert scheduler.state_dict() == before


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"num_iter": -1}, "num_iter=-1"),
        ({"end_iter": None}, "end_iter=None"),
        ({"end_iter": "12"}, "end_iter='12'"),
        ({"start_lr": math.nan}, "start_lr=nan"),
        ({"warmup_iter": None}, "warmup_iter=None"),
    ],
)
def test_a_state_dict_out_of_range_changes_nothing(changed, name):
    scheduler = Linear(sgd(), S, W, E, num_iter=6)
    before = scheduler.state_dict()
    for refuses in (scheduler.check_state_dict, scheduler.load_state_dict):
        with pytest.raises(ValueError, match=name):
            refuses({"start_lr": 9.0, "warmup_iter": 2, "end_iter": 20, "num_iter": 3, **changed})
    assert scheduler.state_dict() == before
    assert scheduler.optimizer.param_groups[0]["lr"] == scheduler.current_lr


@pytest.mark.parametrize("cls", [Linear, Cosine])
def test_a_decay_whose_end_is_infinite_stays_at_the_peak(cls):
    scheduler = cls(sgd(), S, W, math.inf)
    for n in (W, W + 1, 1000):
        scheduler.step(n)
        assert scheduler.current_lr == S


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((-1.0, W, E), "start_lr"),
        ((math.inf, W, E), "start_lr"),
        ((S, -1, E), "warmup_iter"),
        ((S, W, math.nan), "end_iter"),
        ((S, W, E, -3), "num_iter"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, name):
    optimizer = sgd()
    with pytest.raises(ValueError, match=name):
        Linear(optimizer, *arguments)
    assert optimizer.param_groups[0]["lr"] == 9.0


def test_other_arguments_out_of_range():
    with pytest.raises(ValueError, match="gamma"):
        Exponential(sgd(), S, W, E, gamma=-0.1)
    with pytest.raises(ValueError, match="num_iter"):
        NoDecay(sgd(), S, W, E).step(-1)
    with pytest.raises(TypeError):
        WarmupLRScheduler(sgd(), S, W, E)


@pytest.mark.parametrize("kind", [NoDecay, Noam, Exponential])
def test_a_decay_without_an_end_takes_none(kind):
    with_end, without = (kind(sgd(), 0.5, 3, end) for end in (100, None))
    for _ in range(10):
        with_end.step()
        without.step()
        assert without.current_lr == with_end.current_lr
    other = kind(sgd(), 0.1, 1, 7)
    other.load_state_dict(without.state_dict())
    assert (other.end_iter, other.current_lr) == (None, without.current_lr)


@pytest.mark.parametrize("kind", [Linear, Cosine])
def test_a_decay_with_an_end_refuses_none(kind):
    with pytest.raises(ValueError, match="end_iter=None is not a number of iterations"):
        kind(sgd(), 0.5, 3, None)
