import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# The ranks get this path, too; so tests can import what they have in common.
sys.path.append(str(Path(__file__).parent))

collect_ignore = [] if find_spec("lightning") else ["test_lightning.py"]  # the nox session "frameworks" runs these


def pytest_configure(config: pytest.Config) -> None:
    for name in ("torch._dynamo", "bmtrain", "transformers.models.llama.modeling_llama"):
        config.addinivalue_line("bmt_preload", name)
