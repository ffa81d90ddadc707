"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest
import torch

from bmt_comm import current_context


def example(index):
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    names = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[index], names)
    return names


@pytest.mark.ranks(1, 2, 3, init=False)
def test_layers():
    names = example(0)
    loss = names["loss"].detach()
    assert loss < 1  # from log(96) = 4.6: the model learns to repeat its input
    assert all(torch.equal(loss, other) for other in current_context().tp.all_gather_object(loss))


@pytest.mark.ranks(1, 2, 3, init=False)
def test_plain_models():
    names = example(1)
    assert [tuple(value.shape) for value in names["state"].values()] == [(48, 12), (48,), (12, 48), (12,)]
