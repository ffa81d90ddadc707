import sys
from pathlib import Path

import pytest

# The ranks get this path, too, so that tests can import common helpers.
sys.path.append(str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("bmt_preload", "torch._dynamo")
