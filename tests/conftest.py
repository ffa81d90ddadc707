import sys
from pathlib import Path

import pytest

# The ranks get this path, too; so tests can import what they have in common.
sys.path.append(str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    for name in ("torch._dynamo", "bmtrain", "transformers.models.llama.modeling_llama"):
        config.addinivalue_line("bmt_preload", name)
