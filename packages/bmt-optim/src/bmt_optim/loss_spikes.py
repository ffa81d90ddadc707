"""Detection of losses that are far above those before them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

LEAST_DEVIATION = 1e-3  # of the mean: losses that hardly change, as rounded ones do, make no spike of the next change


class LossSpikes:
    """Tells whether a loss is a spike: not finite, or far above the mean of the losses before it.

    ::

        spikes = LossSpikes()
        ...
        if spikes.found(loss.item()):
            manager.reject_step(f"the loss is {loss.item():.3g}")

    Args:
        deviations: a loss is a spike if it is more than so many standard deviations above the mean of the last ones.
        window: how many losses before it count. The first ``window`` losses are spikes only if they are not finite.

    Raises:
        ValueError: ``deviations`` is not above 0, or ``window`` is below 2.
    """

    def __init__(self, deviations: float = 6.0, window: int = 100) -> None:
        if not deviations > 0:
            raise ValueError(f"deviations={deviations!r} must be above 0")
        if window < 2:
            raise ValueError(f"window={window!r} must be at least 2")
        self.deviations = deviations
        self.losses: deque[float] = deque(maxlen=window)

    def found(self, loss: float) -> bool:
        """Whether ``loss`` is a spike. A loss that is none counts for those that follow."""
        if not math.isfinite(loss):
            return True
        if len(self.losses) == self.losses.maxlen:
            mean = statistics.fmean(self.losses)
            if loss > mean + self.deviations * max(statistics.stdev(self.losses), LEAST_DEVIATION * abs(mean)):
                return True
        self.losses.append(loss)
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses.clear()
        self.losses.extend(state["losses"])
