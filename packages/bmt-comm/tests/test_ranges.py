import torch
from torch.profiler import profile

from bmt_comm import named_range


def test_a_range_is_in_the_profile_and_nothing_is_made_without_one():
    assert named_range("unshard", "layer 0") is named_range("reduce")
    with profile() as profiler, named_range("unshard", "layer 0"):
        torch.ones(1)
    assert "unshard layer 0" in {event.name for event in profiler.events()}
