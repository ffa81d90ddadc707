import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# The ranks get this path, too; so tests can import what they have in common.
sys.path.append(str(Path(__file__).parent))

# The nox sessions "frameworks" and "optimizers" run these.
BESIDE = {"lightning": "lightning", "torchtitan": "torchtitan", "bitsandbytes": "bitsandbytes", "float8": "torchao"}
collect_ignore = [f"test_{name}.py" for name, library in BESIDE.items() if find_spec(library) is None]


def pytest_configure(config: pytest.Config) -> None:
    for name in ("torch._dynamo", "bmtrain", "transformers.models.llama.modeling_llama"):
        config.addinivalue_line("bmt_preload", name)
