"""The example that newcomers copy."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.ranks(1, init=False)
def test_the_example_of_the_readme_runs_and_learns():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(example, names)
    assert names["norm"] < 1
    assert names["manager"].loss_scale == 2.0**10
    x = names["x"]
    assert names["loss_fn"](names["model"](x), x[:, :4].argmax(dim=1)) < 1.2  # log 4 = 1.39 knows nothing
