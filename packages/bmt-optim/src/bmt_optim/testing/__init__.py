"""Is an optimizer over shards the optimizer of its author? Generated cases, compared with the author's own code.

A :class:`Subject` is an optimizer, ours or anybody's, with its author's single-device code beside it. A
:class:`Framework` shards a model. Each of :data:`CASES` trains a small model of ragged shapes over the framework's
ranks. It trains the same parameters on one device with the author's code and the mean of the gradients::

    from bmt_optim.testing import CASES, FRAMEWORKS, Subject, check

    LION = Subject("Lion", my_package.Lion, lion_pytorch.Lion, {"lr": 0.01, "weight_decay": 0.1})

    @pytest.mark.parametrize("framework", FRAMEWORKS)
    @pytest.mark.parametrize("case", CASES)
    def test_lion(framework, case):
        check(LION, framework, case)

A case passes if the update of every parameter, last minus first value, has a relative error of at most 1e-5.
``python -m bmt_optim.testing`` prints a table for the optimizers of this package and for those of others that are
installed. Ranks are processes on the CPU (:class:`bmt_comm.testing.RankPool`).
"""

from .cases import CASES, Case
from .frameworks import FRAMEWORKS, Framework
from .kit import Subject, check, outcomes

__all__ = ["CASES", "FRAMEWORKS", "Case", "Framework", "Subject", "check", "outcomes"]
