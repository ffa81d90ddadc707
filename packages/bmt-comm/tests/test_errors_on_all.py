"""Errors of one rank, raised on all."""

from __future__ import annotations

import pytest
import torch

from bmt_comm import ParallelContext, errors_on_all


class _OfNoKind(Exception):
    pass


def _run(ctx: ParallelContext, error: Exception | None) -> None:
    with errors_on_all(ctx.world):
        if error is not None:
            raise error


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PermissionError(13, "not allowed", "file"), OSError, r"\[Errno 13\] not allowed: 'file'"),
        (FileNotFoundError("no file"), FileNotFoundError, "no file"),
        (ModuleNotFoundError("no module"), ImportError, "no module"),
        (TypeError("wrong type"), TypeError, "wrong type"),
        (UnicodeEncodeError("ascii", "é", 0, 1, "no"), ValueError, "can't encode character"),
        (torch.OutOfMemoryError("no memory"), RuntimeError, "no memory"),
        (_OfNoKind("one line\nanother"), RuntimeError, "^_OfNoKind: one line$"),
    ],
)
def test_the_error_of_one_rank(ctx: ParallelContext, error: Exception, kind: type[Exception], text: str) -> None:
    """All raise an error of the kind, and the rank that has it raises that one, with its traceback."""
    last = ctx.rank == ctx.world_size - 1
    with pytest.raises(kind, match=text) as caught:
        _run(ctx, error if last else None)
    if last and not isinstance(error, _OfNoKind):
        assert caught.value is error
    if isinstance(error, _OfNoKind):
        assert caught.value.__cause__ is (error if last else None)


@pytest.mark.ranks(2, 3)
def test_several_errors(ctx: ParallelContext) -> None:
    """All ranks raise that of the first one."""
    mine = None, ValueError("of rank 1"), RuntimeError("of rank 2")
    with pytest.raises(ValueError, match=r"^of rank 1$") as caught:
        _run(ctx, mine[ctx.rank])
    assert (caught.value.__cause__ is not None) == (ctx.rank == 2)


@pytest.mark.ranks(2)
def test_no_error(ctx: ParallelContext) -> None:
    with errors_on_all(ctx.world):
        result = 3
    assert result == 3
