"""Tests that run on several processes, without starting several processes for each test.

- With pytest: mark a test with ``@pytest.mark.ranks(2)`` (see :mod:`bmt_comm.testing.plugin`).
- Without pytest: :class:`RankPool`.
"""

from bmt_comm.testing.pool import RankPool
from bmt_comm.testing.report import Outcome, RankError, RankReport

__all__ = ["Outcome", "RankError", "RankPool", "RankReport"]
