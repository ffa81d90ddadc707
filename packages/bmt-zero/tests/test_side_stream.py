"""What a side stream is asked for, in which order: with a stand-in for it, since on the CPU there is none."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import pytest
from block_helpers import assert_same_gradients, pair, seeded
from torch import nn

from bmt_comm import ParallelContext
from bmt_zero.shard import group_of


class Stream(contextlib.AbstractContextManager[None]):
    """As ``SideStream``; notes what it is asked for."""

    arrived, reduced = "arrived", "reduced"

    def __init__(self) -> None:
        self.log: list[str] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.log.append("left")

    def follow(self) -> None:
        self.log.append("follows")

    def record(self, event: Any) -> Any:
        self.log.append(f"records {event}")
        return event

    def let_compute_wait(self, event: Any) -> None:
        self.log.append(f"compute waits for {event}")


@pytest.mark.ranks(1, 2, device="cpu")
def test_each_result_of_the_side_stream_is_waited_for(ctx: ParallelContext) -> None:
    plain, block = pair(lambda: nn.Linear(4, 6), zero_level=3, use_checkpoint=False)
    [flat] = group_of(block).flats
    stream: Any = Stream()
    flat.stream = stream
    batch = seeded(1, 2 * ctx.world_size, 4)
    plain(batch).sum().backward()
    for _ in range(2):  # the events are used again
        stream.log.clear()
        block.zero_grad()
        block(batch[ctx.rank :: ctx.world_size]).sum().backward()
        assert_same_gradients(block, plain)
        log = stream.log
        gathers = ["left", "records arrived", "compute waits for arrived"] if ctx.world_size > 1 else []
        reduces = ["records reduced", "left", "compute waits for reduced"]
        # Storage that was released after forward is filled again in backward.
        times = 1 + flat.releases
        assert [what for what in log if what != "follows"] == gathers * times + reduces
        # It reads what the compute stream has written. It may follow once more where storage is released.
        assert log[0] == "follows"
        assert log[log.index("records reduced") - 1] == "follows"
