import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The ranks get this path, too; so tests can import what they have in common.
sys.path.append(str(Path(__file__).parent))

settings.register_profile("no deadline", deadline=None)  # the machine may be busy
settings.load_profile("no deadline")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("bmt_preload", "torch._dynamo")
