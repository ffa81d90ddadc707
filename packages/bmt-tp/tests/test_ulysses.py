"""Attention over a sequence that is split over the ranks, against one process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bmt_tp import parallelize, ulysses_attention

B, S, HIDDEN, HEAD = 2, 12, 24, 3
PLAN = {
    "layers.0": "sequence_start",
    "layers.*.attention": "ulysses",
    **{f"layers.*.{name}": "sequence" for name in ("norm1", "norm2", "up", "down")},
    "norm": "sequence_end",
}


class Attention(nn.Module):
    def __init__(self, key_heads, causal):
        super().__init__()
        self.causal = causal
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        # A bias of keys has no gradient but for roundings: it adds the same to all scores of a query.
        self.k, self.v = nn.Linear(HIDDEN, key_heads * HEAD, bias=False), nn.Linear(HIDDEN, key_heads * HEAD)

    def forward(self, x):
        q, k, v = (f(x).unflatten(2, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=k.shape[1] != q.shape[1])
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, *attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(*attention)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, *attention):
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN)
        self.layers = nn.ModuleList(Layer(*attention) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def check_equals_one_process(model, plan, run):
    plain = copy.deepcopy(model)
    parallelize(model, plan)
    expected, y = run(plain), run(model)
    torch.testing.assert_close(y, expected)
    expected.square().mean().backward()
    y.square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad - other.grad).norm() <= 1e-5 * other.grad.norm() + 1e-9, name


def check_cases(keys):
    torch.manual_seed(0)
    ids = torch.randint(11, (B, S))
    for key_heads in keys:
        for causal in (False, True):
            check_equals_one_process(Model(key_heads, causal), PLAN, lambda model: model(ids))


@pytest.mark.ranks(2, tp_size=2)
def test_two_ranks_compute_what_one_process_does(ctx):
    check_cases((8, 4, 1))


@pytest.mark.ranks(4, tp_size=4)
def test_four_ranks_compute_what_one_process_does(ctx):
    check_cases((8, 4, 2))


@pytest.mark.ranks(2, tp_size=2)
def test_llama_computes_what_one_process_does(ctx):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, vocab_size=37))
    plan = {
        "model.layers.0": "sequence_start",
        "model.layers.*.self_attn": "ulysses",
        **{f"model.layers.*.{n}": "sequence" for n in ("input_layernorm", "post_attention_layernorm", "mlp")},
        "model.norm": "sequence_end",
    }
    ids = torch.randint(37, (B, S))
    mask = torch.ones(B, S, dtype=torch.long)
    mask[0, S - 3 :] = 0
    for given in (None, mask):
        check_equals_one_process(
            copy.deepcopy(model), plan, lambda each, given=given: each(input_ids=ids, attention_mask=given).logits
        )


@pytest.mark.ranks(2, tp_size=2)
def test_another_attention_and_heads_that_cannot_be_divided_are_refused(ctx):
    class ByHand(Attention):
        def forward(self, x):
            return self.o(F.softmax(self.q(x) @ self.q(x).transpose(1, 2), -1) @ x)

    model = Model(8, False)
    model.layers[1].attention = ByHand(8, False)
    parallelize(model, PLAN)
    with pytest.raises(RuntimeError, match=r"'layers.1.attention', which the plan has as 'ulysses', has not called"):
        model(torch.randint(11, (B, S)))
    model = parallelize(Model(8, False), PLAN)
    with pytest.raises(ValueError, match="got one position of the sequence on this rank"):
        model(torch.randint(11, (B, 2)))
    x = torch.zeros(B, 3, S, HEAD)
    with pytest.raises(ValueError, match="with heads that 2 ranks divide"):
        ulysses_attention(x, x, x)
    x = torch.zeros(B, 4, S, HEAD)
    for shape in ((B, 4, 2 * S, 2 * S), (4, 2 * S, 2 * S)):
        with pytest.raises(ValueError, match="the same for all heads"):
            ulysses_attention(x, x, x, attn_mask=torch.zeros(shape))
