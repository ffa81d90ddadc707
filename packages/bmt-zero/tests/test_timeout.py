"""A rank that waits in vain waits the time-out once, not again while it recovers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import traceback

import pytest
import torch
from torch import nn

from bmt_comm import RankFailureError, init_distributed, watch
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList


def elsewhere(until):
    """Until there is this file. A rank that is elsewhere is ended soon after the time-out; here it has longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_WAKE", 2.5)
        while not until.exists():
            time.sleep(0.02)


@pytest.mark.ranks(2, init=False, timeout=60)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_timeout_is_served_once(when, tmp_path):
    init_distributed(device="cpu", timeout=2.0)
    blocks = TransformerBlockList([Block(nn.Linear(4, 4), zero_level=3) for _ in range(4)])
    x = torch.ones(2, 4)
    blocks(x).sum().backward()
    loss = blocks(x).sum() if when == "backward" else None
    if os.environ["RANK"] == "1":
        elsewhere(tmp_path / "over")
        return
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        blocks(x) if loss is None else loss.backward()
    (tmp_path / "over").touch()
    with contextlib.suppress(RuntimeError):
        blocks(x)
    assert time.monotonic() - start < 3.5


@pytest.mark.ranks(2, init=False, timeout=60)
@pytest.mark.parametrize("layers", [1, 4])
def test_a_report_is_printed_once(layers, tmp_path):
    init_distributed(device="cpu", timeout=1.0)
    blocks = TransformerBlockList([Block(nn.Linear(4, 4), zero_level=3) for _ in range(layers)])
    x = torch.ones(2, 4)
    blocks(x).sum().backward()
    if os.environ["RANK"] == "1":
        elsewhere(tmp_path / "over")
        return
    with pytest.raises(RankFailureError, match="for layer 0") as caught:
        blocks(x)
    (tmp_path / "over").touch()
    assert "".join(traceback.format_exception(caught.value)).count("and waits for no operation") == 1


@pytest.mark.ranks(2, init=False, timeout=60)
def test_an_interrupt_of_a_rank_that_waits_stays_an_interrupt(tmp_path):
    init_distributed(device="cpu", timeout=20.0)
    blocks = TransformerBlockList([Block(nn.Linear(4, 4), zero_level=3) for _ in range(4)])
    x = torch.ones(2, 4)
    blocks(x).sum().backward()
    if os.environ["RANK"] == "1":
        elsewhere(tmp_path / "over")
        return
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        blocks(x)
    signal.signal(signal.SIGALRM, handler)
    (tmp_path / "over").touch()


class Layers(nn.Module):
    """Layers and a parameter outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


@pytest.mark.ranks(2, init=False, timeout=60)
@pytest.mark.parametrize(
    ("layer", "where"), [(0, "the forward of layers.2"), (3, "the backward of the small parameters")]
)
def test_a_rank_that_stays_away_after_an_exception_in_forward_is_named(layer, where, tmp_path):
    init_distributed(device="cpu", timeout=2.0)
    model = BMTrainModelWrapper(Layers(), use_checkpoint=False)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    if os.environ["RANK"] == "1":
        model.layers[layer].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        elsewhere(tmp_path / "over")
        return
    with pytest.raises(RuntimeError, match="rank 1: is at") as error:
        model(x).sum().backward()
    (tmp_path / "over").touch()
    assert re.search(f"rank 0: waits .* in {where}", str(error.value))
    assert "different operations" not in str(error.value)


@pytest.mark.ranks(2, init=False, timeout=60)
def test_a_state_dict_on_one_rank_says_what_it_is(tmp_path):
    init_distributed(device="cpu", timeout=2.0)
    model = BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    if os.environ["RANK"] == "1":
        elsewhere(tmp_path / "over")
        return
    with pytest.raises(RuntimeError, match=r"0\.(weight|bias) of the small parameters of Sequential"):
        model.state_dict()
    (tmp_path / "over").touch()
