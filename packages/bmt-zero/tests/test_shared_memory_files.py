"""Files of torch.save whose tensors share memory are read in memory of about their size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import Doubling
from torch import nn

import bmt_zero
from bmt_comm.testing import MemoryGrowth
from bmt_zero.checkpoints.pt_files import read_state_dict
from bmt_zero.checkpoints.tools import convert

MIB = 1 << 20


PARAMETERS = [("weight", (3, 5)), ("bias", (3,))]


def memory_of(call: Any) -> int:
    with MemoryGrowth() as memory:
        call()
    return memory.peak


def test_views_of_one_buffer_are_read_as_one_buffer(tmp_path: Path) -> None:
    flat = torch.arange(8 * MIB, dtype=torch.float32)  # 32 MiB
    parts = flat.view(32, -1)
    torch.save({"state": {n: {"exp_avg": parts[n]} for n in range(32)}, "all": flat}, tmp_path / "m.pt")
    del flat, parts
    found: dict[str, Any] = {}
    assert memory_of(lambda: found.update(read_state_dict(tmp_path / "m.pt"))) < 56 * MIB
    assert found["state"][3]["exp_avg"][5].item() == 3 * (MIB // 4) + 5
    assert found["all"].data_ptr() == found["state"][0]["exp_avg"].data_ptr()  # as torch.load has it


def test_views_that_are_not_contiguous_are_converted_in_little_memory(tmp_path: Path) -> None:
    flat = torch.randn(24, 1024, 1024)  # 96 MiB
    state = {f"w{n}": flat[n].t() for n in range(24)}
    torch.save(state, tmp_path / "m.pt")
    assert memory_of(lambda: convert(tmp_path / "m.pt", tmp_path / "m.safetensors")) < 48 * MIB
    found = pytest.importorskip("safetensors.torch").load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("mapped", [False, True])
def test_many_tensors_in_one_small_memory_are_not_all_built(ctx: Any, tmp_path: Path, mapped: bool) -> None:
    """For a model whose own code loads it, and so gets the whole state dict."""
    base = torch.zeros(MIB // 4)
    tied = {f"{n}.{name}": base[: math.prod(shape)].view(shape) for n in (0, 1) for name, shape in PARAMETERS}
    same = {**tied, **{f"x{n}": base for n in range(5000)}}
    views = {**tied, **{f"x{n}": base[n : n + MIB // 8] for n in range(5000)}}  # 2.5 GB
    if ctx.rank == 0:
        for name, state in (("same", same), ("views", views), ("tied", tied)):
            torch.save(state, tmp_path / f"{name}.pt")
    ctx.world.barrier()
    key_map = str if mapped else None  # with one, each rank reads

    def refused(name: str, message: str) -> None:
        model = nn.Sequential(Doubling(5, 3), Doubling(5, 3))
        with pytest.raises((ValueError, RuntimeError), match=message):
            bmt_zero.load(model, tmp_path / f"{name}.pt", key_map=key_map)

    message = "the file has 1[0-9]{6} bytes, and its 5004 tensors, .* have 2[0-9]{9}"
    assert memory_of(lambda: refused("views", message)) < 64 * MIB
    assert memory_of(lambda: refused("same", r"does not have|not wanted|Unexpected")) < 64 * MIB
    model = nn.Sequential(Doubling(5, 3), Doubling(5, 3))
    bmt_zero.load(model, tmp_path / "tied.pt", key_map=key_map)
    assert not model[1].weight.any()
