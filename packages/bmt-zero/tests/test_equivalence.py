"""The contract: whatever the ranks, ZeRO level, checkpointing and accumulation, training is that of one process.

In fp32, updates after 10 steps agree to 1e-5 with plain PyTorch on the whole batch in one go. In half precision the
reference computes gradients rank by rank and sums them in the same dtype; what remains is the order of that sum
(gloo's all-reduce has its own) and of accumulation, each worth a rounding of 2^-8 of bf16 here and there. One
rounding of a weight near 1 is a good part of its update, so the error is measured against the update of the whole
model, of which each parameter's must be within 2 %: far below what a lost rank (25 % and more), micro-step or
factor makes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from functools import partial

import plain_training as plain
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bmt_comm import slice_of
from bmt_zero import Block, MixedPrecision, TransformerBlockList, no_sync

ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5, foreach=False)
SGD = partial(torch.optim.SGD, lr=5e-2, momentum=0.9, foreach=False)


def shard(model: nn.ModuleDict, level: int, use_checkpoint: bool, precision: MixedPrecision | None) -> nn.ModuleDict:
    blocks = [Block(layer, use_checkpoint, level, precision=precision) for layer in model["layers"]]
    model["layers"] = TransformerBlockList(blocks)
    model["head"] = Block(model["head"], use_checkpoint, level, precision=precision)
    return model


def whole(rows: Tensor, param: Tensor) -> Tensor:
    """A whole tensor from every rank's rows, put together without the code under test."""
    found = slice_of(param)
    pieces: list[tuple[int, int, Tensor]] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(pieces, (found.row_start, found.row_stop, rows.reshape(-1)))
    out, covered = [], 0
    for start, stop, piece in sorted(pieces, key=lambda p: p[:2]):
        if start == covered and stop > start:
            out.append(piece)
            covered = stop
    assert covered == (found.shape[0] if found.shape else 1)
    return torch.cat(out).view(found.shape)


def train_sharded(ctx, model, make_optimizer, micro_steps, unsynced, tolerance, floor, reference, steps=10):
    """Train, comparing losses and this rank's rows of every gradient on the way; returns the updates' errors."""
    optimizer = make_optimizer(model.parameters())
    params = dict(model.named_parameters())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        xs, ys = (t.to(ctx.device) for t in plain.batch(step))
        loss = torch.zeros(1)
        for micro, mine in enumerate(torch.arange(ctx.rank, len(xs), ctx.world_size).tensor_split(micro_steps)):
            last = micro == micro_steps - 1
            with no_sync(model) if unsynced and not last else contextlib.nullcontext():
                hidden = xs[mine].to(next(iter(params.values())).dtype)
                piece = plain.loss_of(model["head"](model["layers"](hidden)), ys[mine])
                piece.backward()
            loss += piece.item()
        dist.all_reduce(loss)
        assert loss.item() == pytest.approx(reference.losses[step], rel=tolerance), f"loss of step {step}"
        # What happens to be next to zero has the rounding of what it is the sum of.
        least = floor * torch.stack([g.double().norm() for g in reference.gradients[step].values()]).norm()
        for name, param in params.items():
            found = slice_of(param)
            expected = reference.gradients[step][name]
            if found.row_stop > found.row_start:
                rows = (expected if found.shape else expected.reshape(1))[found.row_start : found.row_stop]
                difference = (param.grad.cpu().double() - rows.reshape(param.shape).double()).norm()
                error = difference / expected.double().norm().clamp_min(least)
                assert error <= 2 * tolerance, f"gradient of {name} in step {step}: {error:.1e}"
        optimizer.step()
    updates = {name: reference.update(name) for name in params}
    least = floor * torch.stack([u.norm() for u in updates.values()]).norm()
    errors = {}
    for name, param in params.items():
        found = whole(param.detach().cpu(), param).double() - reference.start[name].double()
        errors[name] = float((found - updates[name]).norm() / updates[name].norm().clamp_min(least))
    return errors


@functools.cache  # the ranks live through all tests
def reference_run(make_optimizer, dtype, **options) -> plain.Run:
    return plain.train(plain.build(dtype=dtype), make_optimizer, **options)


def check(ctx, level, use_checkpoint, micro_steps, unsynced, make_optimizer, dtype=torch.float32, **precision):
    half = dtype != torch.float32 or bool(precision)
    tolerance = 4e-2 if half else 1e-5
    pieces = {"parts": ctx.world_size, "micro_steps": micro_steps} if half else {}
    dtypes = {"compute": precision.get("param_dtype"), "reduce": precision.get("reduce_dtype")}
    reference = reference_run(make_optimizer, dtype, **pieces, **dtypes)
    model = shard(plain.build(dtype=dtype), level, use_checkpoint, MixedPrecision(**precision))
    errors = train_sharded(
        ctx, model, make_optimizer, micro_steps, unsynced, tolerance, 0.5 if half else 0.05, reference
    )
    assert all(error <= tolerance for error in errors.values()), errors  # none is NaN


CASES = [  # use_checkpoint, micro_steps, unsynced, optimizer
    (False, 1, False, ADAMW),
    (False, 3, False, ADAMW),
    (False, 3, True, SGD),
    (True, 1, False, SGD),
    (True, 3, False, ADAMW),
    (True, 3, True, ADAMW),
]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_training_in_fp32_is_that_of_one_process(ctx, level):
    for use_checkpoint, micro_steps, unsynced, make_optimizer in CASES:
        try:
            check(ctx, level, use_checkpoint, micro_steps, unsynced, make_optimizer)
        except AssertionError as error:
            raise AssertionError(
                f"use_checkpoint={use_checkpoint} micro_steps={micro_steps} no_sync={unsynced} "
                f"{make_optimizer.func.__name__}: {error}"
            ) from error


HALF = [
    (torch.bfloat16, {}),
    (torch.float16, {}),
    (torch.bfloat16, {"reduce_dtype": torch.float32}),
    (torch.float32, {"param_dtype": torch.bfloat16}),
    (torch.float32, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_training_in_half_precision_is_that_of_one_process_with_its_roundings(ctx, level):
    accumulations = itertools.cycle([(1, False), (3, False), (3, True)])
    for case, (dtype, precision) in enumerate(HALF):
        micro_steps, unsynced = next(accumulations)
        try:
            check(ctx, level, case % 2 == 0, micro_steps, unsynced, SGD, dtype, **precision)
        except AssertionError as error:
            case_name = f"{dtype} {precision} micro_steps={micro_steps} no_sync={unsynced}"
            raise AssertionError(f"{case_name}: {error}") from error
