"""Tests that run on several processes, without starting several processes for each test.

- With pytest: mark a test with ``@pytest.mark.ranks(2)`` (see :mod:`bmt_comm.testing.plugin`).
- Without pytest: :class:`RankPool`.
- On CPU by NCCL's rules: ``@pytest.mark.ranks(2, nccl_rules="lazy")``, or :func:`nccl_rules` with a :class:`Referee`.
- :class:`MemoryGrowth`: how much host memory a block of code takes.
"""

from bmt_comm.testing.in_order import WaitCycleError, nccl_rules
from bmt_comm.testing.memory import MemoryGrowth
from bmt_comm.testing.pool import RankPool
from bmt_comm.testing.referee import Referee
from bmt_comm.testing.report import Outcome, RankError, RankReport

__all__ = ["MemoryGrowth", "Outcome", "RankError", "RankPool", "RankReport", "Referee", "WaitCycleError", "nccl_rules"]
