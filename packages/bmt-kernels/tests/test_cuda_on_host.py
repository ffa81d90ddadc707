"""The CUDA kernels on the host: what breaks CUDA's rules is noticed, and what only a device can be asked for works.

What the kernels compute is tested where the other kernels are.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from bmt_kernels import _native, adam_step
from bmt_kernels._tables import adam_table

pytestmark = pytest.mark.skipif(_native.cuda_on_host_module is None, reason="BMT_CUDA_ON_HOST=ON builds them")

THREADS = 64
RULES = [
    "a thread waits at __syncthreads, and others have ended",
    "threads wait at different __syncthreads",
    "the mask names a lane that has ended",
    "lane",  # which lane is named depends on the order
    "a lane reads the value of another that the mask does not name",
]


def break_rule(which: int) -> tuple[str, list[int]]:
    """The message for a kernel of csrc/cuda_on_host/broken.cu, and what the kernel has written."""
    library = ctypes.CDLL(_native.cuda_on_host_module.__file__)
    library.bmt_break_rule.restype = ctypes.c_char_p
    out = (ctypes.c_int64 * THREADS)()
    return library.bmt_break_rule(which, out).decode(), list(out)


@pytest.mark.parametrize("which", range(len(RULES)))
def test_a_broken_rule_is_told_with_its_place(which):
    for _ in range(2):  # after a launch that has failed, another one works
        message, _ = break_rule(which)
        assert RULES[which] in message
        assert "broken.cu:" in message
        assert ", block 0, thread " in message


def test_a_missing_barrier_shows_in_the_result():
    message, numbers = break_rule(len(RULES))
    assert message == ""
    assert numbers != list(reversed(range(THREADS)))


def test_blocks_run_in_an_order_that_the_seed_determines(monkeypatch):
    orders = []
    for seed in ("1", "2", "1"):
        monkeypatch.setenv("BMT_CUDA_ON_HOST_ORDER", seed)
        count, *order = break_rule(len(RULES) + 1)[1][:33]
        assert count == 32
        assert sorted(order) == list(range(32))
        orders.append(order)
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize("step_dtype", [torch.float32, torch.float64, torch.int64])
def test_adam_reads_lr_and_step_on_the_device(step_dtype, use_variant):
    """From tensors on the CPU `adam_step` itself reads them."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(1000, generator=generator).abs() for _ in range(4)]
    ours, expected = [t.clone() for t in start], [t.clone() for t in start]
    settings = (1.0, 0.9, 0.99, 1e-8, 0.1, 1.0, 1.0, 0, True, False)
    lr, step = torch.tensor(0.01, dtype=torch.float64), torch.tensor(3, dtype=step_dtype)
    module = _native.cuda_on_host_module
    scalars = torch.empty(module.ADAM_SCALARS_BYTES, dtype=torch.uint8)
    numbers = (lr.data_ptr(), 1), (step.data_ptr(), [torch.float32, torch.float64, torch.int64].index(step_dtype))
    table = adam_table(*[[t] for t in ours], None)
    module.adam_step(0, 0, table.rows, settings, *numbers, scalars.data_ptr(), 0, 0, 0, 0)
    with use_variant("reference"):
        rest = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
        adam_step(*[[t] for t in expected], **rest)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected))
    assert not torch.equal(ours[0], start[0])
