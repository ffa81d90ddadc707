"""Collectives in flight."""

from __future__ import annotations

import pytest

from bmt_comm.work import Pending


def test_a_wait_whose_end_has_failed_fails_again() -> None:
    """The end is not run a second time."""
    calls = []

    def finish() -> None:
        calls.append("finish")
        raise MemoryError("no memory for the result")

    work = Pending([], finish, None)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory for the result"):
            work.wait()
    assert calls == ["finish"]
    assert not work.is_completed()
