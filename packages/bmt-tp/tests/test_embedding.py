import os

import pytest
import torch
import torch.nn.functional as F

from bmt_comm import init_distributed
from bmt_tp import VPEmbedding, full_state_dict, load_full_state_dict, sequence_parallel

VOCAB, HIDDEN = 36, 7


def start():
    return init_distributed(tp_size=int(os.environ["WORLD_SIZE"]))


def part(x, dim, ctx):
    return x.chunk(ctx.tp_size, dim)[ctx.tp_rank]


def gradient(layer):
    param = layer._parameters["weight"]
    return param.grad


@pytest.mark.ranks(1, 2, 3, 4, init=False)
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_lookup_and_tied_projection_are_those_of_an_unsharded_table(sequence, index_dtype):
    ctx = start()
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB, HIDDEN, generator=generator)
    ids = torch.randint(0, VOCAB, (3, 12), generator=generator, dtype=index_dtype)
    factor = torch.randn(3, 12, HIDDEN, generator=generator)
    head = torch.randn(3, 12, VOCAB, generator=generator)

    reference = table.clone().requires_grad_()
    vectors = F.embedding(ids, reference)
    scores = torch.tanh(vectors) @ reference.T
    ((vectors * factor).sum() + (scores * head).sum()).backward()

    layer = VPEmbedding(VOCAB, HIDDEN, dtype=torch.float32, sequence_parallel=sequence)
    load_full_state_dict(layer, {"weight": table})
    mine = layer(ids)
    my_scores = layer(torch.tanh(mine), projection=True)
    if sequence:
        loss = (mine * part(factor, 1, ctx)).sum()
        expected_vectors = part(vectors, 1, ctx)
    else:
        loss = (mine * factor).sum()
        expected_vectors = vectors
    (loss + (my_scores * part(head, -1, ctx)).sum()).backward()
    torch.testing.assert_close(mine, expected_vectors)
    torch.testing.assert_close(my_scores, part(scores, -1, ctx))
    expected = part(reference.grad, 0, ctx)
    assert (gradient(layer) - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.ranks(2, tp_size=2)
def test_the_unsharded_table_is_never_on_one_rank(ctx):
    layer = VPEmbedding(VOCAB, HIDDEN, dtype=torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.is_floating_point():
                    largest = max(largest, t.numel())
            return out

    with Watch():
        layer(torch.tensor([[0, 35]])).sum().backward()
    assert largest <= VOCAB * HIDDEN // 2


@pytest.mark.ranks(2, tp_size=2)
def test_different_ids_are_refused_on_the_first_call(ctx):
    layer = VPEmbedding(VOCAB, HIDDEN)
    with pytest.raises(RuntimeError, match=r"must be given the same batch.*replica_rank"):
        layer(torch.tensor([[ctx.tp_rank]]))


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_ids_of_any_integer_type_serve_any_vocabulary(dtype):
    start()
    torch.manual_seed(0)
    layer = VPEmbedding(300, HIDDEN, torch.float32)
    ids = torch.tensor([[0, 3], [100, 127]])
    assert torch.equal(layer(ids.to(dtype)), layer(ids))
    with pytest.raises(TypeError, match=r"ids have dtype torch\.float32"):
        layer(ids.float())


@pytest.mark.ranks(2, tp_size=2)
def test_bad_arguments(ctx):
    with pytest.raises(ValueError, match="vocab_size=35 cannot be divided over 2"):
        VPEmbedding(35, 4)
    with pytest.raises(ValueError, match="embedding_size=0"):
        VPEmbedding(36, 0)
    layer = VPEmbedding(VOCAB, HIDDEN)
    assert layer._parameters["weight"].dtype == torch.half
    for bad in (-1, VOCAB):
        with pytest.raises(IndexError, match=rf"id {bad} is not in the vocabulary \(0 to 35\)"):
            layer(torch.tensor([3, bad]))
    with pytest.raises(ValueError, match="is sharded over the tensor-parallel ranks; sequence_parallel is for"):
        sequence_parallel(layer)


@pytest.mark.ranks(1, 2, init=False)
def test_initial_values_are_normal_and_do_not_depend_on_the_ranks():
    start()
    torch.manual_seed(1)
    expected = torch.empty(VOCAB, HIDDEN).normal_(0.5, 0.1)
    torch.manual_seed(1)
    state = full_state_dict(VPEmbedding(VOCAB, HIDDEN, torch.float32, 0.5, 0.1))
    assert torch.equal(state["weight"], expected)


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("sequence_dim", [1, -2])
def test_parts_of_a_sequence_are_gathered_if_asked(ctx, sequence_dim):
    torch.manual_seed(0)
    embed = VPEmbedding(12, 4, dtype=torch.float, gather_input=True, sequence_dim=sequence_dim)
    table = full_state_dict(embed)["weight"]
    ids = torch.randint(0, 12, (3, 4))
    mine = ids.chunk(2, 1)[ctx.tp_rank]
    vectors = embed(mine)
    assert torch.equal(vectors, table[mine])
    factor = torch.randn(3, 4, 4)
    scores = embed(vectors, projection=True)
    assert torch.allclose(scores, (table[ids] @ table.t()).chunk(2, -1)[ctx.tp_rank], rtol=1e-5, atol=1e-6)
    (vectors * factor.chunk(2, 1)[ctx.tp_rank]).sum().backward()
    expected = torch.zeros(12, 4).index_add_(0, ids.flatten(), factor.flatten(0, 1)).chunk(2)[ctx.tp_rank]
    assert torch.allclose(gradient(embed), expected)
    with pytest.raises(RuntimeError, match=r"If ranks pass parts of the sequence: VPEmbedding\(gather_input=True\)"):
        VPEmbedding(12, 5, dtype=torch.float)(torch.full((2, 2), ctx.rank))
    for wrong in (2, -1, -4):
        with pytest.raises(ValueError, match=rf"sequence_dim={wrong} is no dimension of ids of shape \(3, 4\)"):
            VPEmbedding(12, 4, dtype=torch.float, sequence_parallel=True, sequence_dim=wrong)(ids)
