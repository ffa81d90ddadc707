"""LossSpikes: what counts as a spike, and that its state goes on."""

import math
import random

import pytest

from bmt_optim import LossSpikes


def losses(count, seed=0):
    generator = random.Random(seed)
    return [generator.gauss(3.0, 0.1) for _ in range(count)]


def test_a_loss_far_above_the_last_ones_is_a_spike_and_counts_for_nothing():
    spikes = LossSpikes(deviations=5, window=20)
    assert not any(spikes.found(loss) for loss in losses(200))
    assert not spikes.found(3.3)
    assert all(spikes.found(loss) for loss in [5.0] * 30)
    assert not spikes.found(3.0)
    assert not spikes.found(0.1)  # a fall is none


def test_after_losses_that_were_all_equal_a_small_change_is_no_spike():
    spikes = LossSpikes(window=3)
    assert not any(spikes.found(loss) for loss in (1.0, 1.0, 1.0, 1.0 + 2**-8))
    assert spikes.found(2.0)


def test_losses_that_are_not_finite_are_spikes_from_the_first_on():
    spikes = LossSpikes(window=2)
    assert all(spikes.found(loss) for loss in (math.nan, math.inf, -math.inf))
    assert not spikes.found(100.0)
    assert not spikes.found(1.0)


def test_the_state_goes_on():
    first, second = LossSpikes(window=10), LossSpikes(window=10)
    for loss in losses(25):
        first.found(loss)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.found(9.0)


@pytest.mark.parametrize(("settings", "name"), [({"deviations": 0}, "deviations"), ({"window": 1}, "window")])
def test_settings_out_of_range_are_named(settings, name):
    with pytest.raises(ValueError, match=name):
        LossSpikes(**settings)
