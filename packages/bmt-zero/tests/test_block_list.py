"""TransformerBlockList: its outputs, and how often it communicates."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from block_helpers import assert_same_gradients, own_memory, rows_of, seeded, space
from torch import nn

from bmt_comm import Communicator
from bmt_zero import Block, TransformerBlockList, no_sync


class Two(nn.Module):
    """(hidden, hidden, a common argument) → two hidden states."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)

    def forward(self, x, y, scale, *, shift=0.0):
        return torch.tanh(self.a(x) + y) * scale, torch.tanh(self.b(y)) + shift


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 2, 3])
def test_hidden_states_go_from_layer_to_layer_and_other_arguments_to_each(ctx, level):
    torch.manual_seed(0)
    plain = [Two() for _ in range(3)]
    blocks = TransformerBlockList([Block(copy.deepcopy(m), zero_level=level) for m in plain], num_hidden=2)
    scale = torch.tensor(1.5, requires_grad=True)
    x, y = seeded(1, 3, 5), seeded(2, 3, 5)
    before = []
    a, b = x, y
    for layer in plain:
        before.append((a, b))
        a, b = layer(a, b, scale, shift=0.25)
    expected = (a, b, *(torch.stack(states) for states in zip(*before, strict=True)))

    outputs = blocks(x, y, scale, shift=0.25, return_hidden_states=True)
    assert [t.shape for t in outputs] == [(3, 5), (3, 5), (3, 3, 5), (3, 3, 5)]
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, want)
    last = blocks(x, y, scale, shift=0.25)
    assert isinstance(last, tuple)
    assert len(last) == 2

    weights = [seeded(20 + i, *t.shape) for i, t in enumerate(expected)]
    sum((t * w).sum() for t, w in zip(expected, weights, strict=True)).backward()
    scale_grad, scale.grad = scale.grad, None
    for layer in plain:
        for param in layer.parameters():
            param.grad *= ctx.world_size
    sum((t * w).sum() for t, w in zip(outputs, weights, strict=True)).backward()
    torch.testing.assert_close(scale.grad, scale_grad)
    assert_same_gradients(blocks, nn.ModuleList(plain))


@pytest.mark.ranks(2)
def test_one_hidden_state_is_returned_by_itself(ctx):
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    blocks = TransformerBlockList(copy.deepcopy(plain))
    x = seeded(0, 3, 5)
    torch.testing.assert_close(blocks(x), plain(x))
    output, states = blocks(x, return_hidden_states=True)
    torch.testing.assert_close(output, plain(x))
    torch.testing.assert_close(states, torch.stack([x, plain[0](x), plain[:2](x)]))


class OfDictionaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, state):
        return {"x": self.linear(state["x"]), "kept": [state["kept"][0] * 2, state["kept"][1]]}


@pytest.mark.ranks(2)
def test_hidden_states_in_containers_are_returned_in_containers(ctx):
    torch.manual_seed(0)
    plain = [OfDictionaries() for _ in range(3)]
    blocks = TransformerBlockList([copy.deepcopy(layer) for layer in plain])
    state = {"x": seeded(0, 3, 5), "kept": [seeded(1, 3), "name"]}
    output, states = blocks(state, return_hidden_states=True)
    before = [state]
    for layer in plain:
        before.append(layer(before[-1]))
    torch.testing.assert_close(output["x"], before.pop()["x"])
    torch.testing.assert_close(states["x"], torch.stack([each["x"] for each in before]))
    torch.testing.assert_close(states["kept"][0], torch.stack([each["kept"][0] for each in before]))
    assert states["kept"][1] == "name"

    class Changes(OfDictionaries):
        def forward(self, state):
            return super().forward({"kept": [torch.zeros(3), None], **state}) | {"more": 1}

    with pytest.raises(ValueError, match="layer 1 takes hidden states of the structure"):
        TransformerBlockList([Changes(), Changes()])(state, return_hidden_states=True)

    class Fills(OfDictionaries):
        def forward(self, state):
            state["kept"][1] = torch.zeros(3)
            return state

    with pytest.raises(ValueError, match="layer 1 takes a Tensor where layer 0 takes a str"):
        TransformerBlockList([Fills(), Fills()])(state, return_hidden_states=True)


class Writes(OfDictionaries):
    def forward(self, state):
        state["x"] = self.linear(state["x"])
        return state


@pytest.mark.ranks(2)
def test_layers_may_write_into_the_containers_of_hidden_states(ctx):
    torch.manual_seed(0)
    plain = [Writes() for _ in range(3)]
    blocks = TransformerBlockList([copy.deepcopy(layer) for layer in plain])
    _, states = blocks({"x": seeded(0, 3, 5)}, return_hidden_states=True)
    before = [seeded(0, 3, 5)]
    for layer in plain[:2]:
        before.append(layer.linear(before[-1]))
    torch.testing.assert_close(states["x"], torch.stack(before))


@pytest.mark.ranks(1)
def test_len_iter_getitem_and_names(ctx):
    first = Block(nn.Linear(2, 2))
    blocks = TransformerBlockList([first, nn.Linear(2, 2)])
    assert len(blocks) == 2
    assert blocks[0] is first
    assert isinstance(blocks[1], Block)
    assert blocks[-1] is blocks[1]
    assert list(blocks) == [blocks[0], blocks[1]]
    assert list(blocks.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(IndexError):
        blocks[2]


@pytest.mark.ranks(1)
def test_bad_arguments(ctx):
    with pytest.raises(ValueError, match="num_hidden=0"):
        TransformerBlockList([nn.Linear(2, 2)], num_hidden=0)
    with pytest.raises(TypeError, match="str"):
        TransformerBlockList(["layer"])
    with pytest.raises(ValueError, match="returned 1 hidden states, and num_hidden=2"):
        TransformerBlockList([nn.Bilinear(2, 2, 2)], num_hidden=2)(torch.ones(1, 2), torch.ones(1, 2))


class Counted:
    """Counts collectives of parameters and gradients: those of floating-point numbers."""

    def __enter__(self):
        self.calls = Counter()
        self.originals = {n: getattr(Communicator, n) for n in ("all_gather", "reduce_scatter", "all_reduce")}
        for name, original in self.originals.items():

            def counting(comm, *args, _name=name, _original=original, **kwargs):
                self.calls[_name] += args[0].is_floating_point()
                return _original(comm, *args, **kwargs)

            setattr(Communicator, name, counting)
        return self

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(Communicator, name, original)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@own_memory()
def test_collectives_per_step(ctx, checkpointing):
    expected = {
        3: {"all_gather": 4 * 2 - 1, "reduce_scatter": 4},  # the last one is kept from forward to backward
        2: {"all_gather": 4, "reduce_scatter": 4},
        1: {"all_gather": 4, "reduce_scatter": 4},
        0: {"all_reduce": 4},
    }
    for level, calls in expected.items():
        blocks = TransformerBlockList([Block(nn.Linear(5, 5), checkpointing, level) for _ in range(4)])
        optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
        for step in range(3):
            with Counted() as counted:
                blocks(seeded(ctx.rank, 3, 5)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            calls_seen = {name: n for name, n in counted.calls.items() if name in calls or n}
            if step:  # the first also checks that the ranks agree, and an all-reduce over one rank costs nothing
                assert {n: calls_seen.get(n, 0) for n in calls} == calls, f"level {level}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@own_memory()
def test_accumulation_at_level_1_unshards_once_and_reduces_once(ctx, checkpointing):
    blocks = TransformerBlockList([Block(nn.Linear(5, 5), checkpointing, 1) for _ in range(3)])
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    for step in range(3):
        with Counted() as counted:
            with no_sync(blocks):
                for micro in range(3):
                    blocks(seeded(micro, 3, 5)).sum().backward()
            blocks(seeded(9, 3, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step:
            assert counted.calls["all_gather"] == 3
            assert counted.calls["reduce_scatter"] == 3


@pytest.mark.ranks(2)
@own_memory()
def test_the_next_layer_is_unsharded_while_one_computes(ctx):
    blocks = TransformerBlockList([nn.Linear(5, 5) for _ in range(4)])
    held = []
    for block in blocks:
        block.register_forward_hook(lambda *_: held.append([space(b) > 0 for b in blocks]), prepend=True)
    with torch.no_grad():
        blocks(seeded(0, 3, 5))
    assert held == [
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
        [False, False, False, True],
    ]
    assert [space(b) for b in blocks] == [0, 0, 0, 0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_one_block_in_several_places(ctx, level):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    block = Block(copy.deepcopy(layer), zero_level=level)
    other = nn.Linear(5, 5)
    blocks = TransformerBlockList([block, Block(copy.deepcopy(other), zero_level=level), block])
    for rank in range(2):
        layer(other(layer(seeded(rank, 3, 5)))).square().sum().backward()
    blocks(seeded(ctx.rank, 3, 5)).square().sum().backward()
    for param, expected in zip(blocks.parameters(), [*layer.parameters(), *other.parameters()], strict=True):
        torch.testing.assert_close(param.grad, rows_of(expected.grad, param), rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(1)
def test_an_empty_list_returns_its_input(ctx):
    x = seeded(0, 3, 5)
    assert TransformerBlockList([])(x) is x
