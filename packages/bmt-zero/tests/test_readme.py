"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bmt_comm


@pytest.mark.ranks(1, 2, init=False)
def test_example(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    match = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert match is not None
    code = match.group(1).replace('"model.pt"', repr(str(tmp_path / "model.pt")))
    names: dict[str, object] = {}
    exec(code, names)
    assert isinstance(names["loss"], torch.Tensor)
    assert names["loss"].isfinite()
    if bmt_comm.current_context().world_size > 1:
        dist.barrier()
    layers = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4) for _ in range(4)))
    plain = nn.Sequential(nn.Linear(8, 64), layers)
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    bmt_comm.shutdown()
