"""GaLore's state: in 8 bits the same however it is sharded, exchanged with galore-torch, and resumed exactly."""

import copy
import math
import types

import pytest
import torch
import torch.distributed as dist
from galore_reference import needs_galore_torch, on_rank_0, reference_optimizer, step_reference
from layouts import layout, shard_slice, shards, tensors, train, update_error
from torch import nn

import bmt_kernels
from bmt_comm import shard_of, slice_of
from bmt_optim import DistGaloreAdamW, GaLoreAdamW, galore_step, get_galore_param_groups, save_optimizer
from bmt_optim.blockwise import BLOCK
from bmt_optim.engine import run
from bmt_optim.galore_projection import BASES, basis_shape
from bmt_optim.percentile_clipping import clip_factors
from bmt_optim.slices import unshard

OPTIONS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.1}
MATRICES = [(60, 24), (45, 40), (33, 24), (24, 50), (21, 70), (9, 80)]
# Blocks sharded by rows, by columns, and scattered; unsharded ones; and vectors.
PLAIN = [(35, 29), (13, 70), (31, 23), (9, 256), (4, 300), (700,), (900,), (6, 512), (5, 7, 8, 3), (12, 256), (3,)]
SHAPES = MATRICES * 3 + PLAIN


def gradients(step, shapes=SHAPES):
    """Of few bits, so that no sum of them is rounded."""
    return [(4 * t).round() / 4 for t in tensors(shapes, 100 + step)]


def unit_bases(gradient, rank, side, svd):
    """Rows and columns of the gradient, in the place of singular vectors."""
    bases = {}
    for key in BASES[side]:
        basis = torch.zeros(basis_shape(key, gradient.shape, rank))
        basis.fill_diagonal_(1)
        bases[key] = basis
    return bases


def groups(params):
    half = {"rank": 10, "update_proj_gap": 2}
    n = len(MATRICES)
    return [
        {"params": params[:n], **half},
        {"params": params[n : 2 * n], **half, "proj_type": "reverse_std"},
        {"params": params[2 * n : 3 * n], "rank": 20, "update_proj_gap": 2, "proj_type": "full"},
        {"params": params[3 * n :]},
    ]


def check_blocks(ctx, **options):
    options = {**OPTIONS, "min_8bit_size": 100, **options}
    start = [(64 * t).round() / 64 for t in tensors(SHAPES)]
    params, unsharded_params = shards(start, layout(ctx, SHAPES)), [nn.Parameter(t.clone()) for t in start]
    optimizer, single = DistGaloreAdamW(groups(params), **options), DistGaloreAdamW(groups(unsharded_params), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(galore_step, "leading_bases", unit_bases)
        for o, ps in ((optimizer, params), (single, unsharded_params)):
            train(o, ps, range(4), gradients)
    rounds = optimizer.communication.rounds
    gathered, expected = optimizer.state_dict(gather=True)["state"], single.state_dict()["state"]
    for i, entry in gathered.items():
        assert entry["exp_avg"].dtype is (torch.float32 if entry["exp_avg"].numel() < 100 else torch.uint8)
        for key in set(expected[i]) - {"ortho_left", "ortho_right"}:
            assert torch.equal(entry[key].cpu(), expected[i][key].cpu()), (i, key)
    for p, q in zip(params, unsharded_params):
        torch.testing.assert_close(p, shard_of(q, slice_of(p)), rtol=1e-5, atol=1e-6)
    return rounds


@pytest.mark.ranks(1, 3)
def test_in_8_bits_it_is_the_same_over_row_shards(ctx):
    assert check_blocks(ctx) == (0 if ctx.world_size == 1 else 2)


@pytest.mark.ranks(2, 4, tp_size=2)
def test_in_8_bits_it_is_the_same_over_tensor_parallel_shards(ctx):
    assert check_blocks(ctx, percentile_clipping=30) == 3


@pytest.mark.ranks(2)
def test_a_block_whose_ranks_do_not_agree_on_its_maximum_is_noticed(ctx):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bmt_optim.moments.Moments.agree", lambda *_: None)
        with pytest.raises(AssertionError):
            check_blocks(ctx)


@pytest.mark.ranks(1, 2)
def test_state_in_8_bits_takes_the_bytes_of_its_codes_absmax_and_bases(ctx):
    m, n, r = 64, 48, 16
    params = shards(tensors([(m, n), (n, m), (128, 40)]), layout(ctx, [(m, n), (n, m), (128, 40)]))
    optimizer = GaLoreAdamW([{"params": params[:2], "rank": r}, {"params": params[2:]}], min_8bit_size=m * r)
    train(optimizer, params, range(1), lambda step: tensors([(m, n), (n, m), (128, 40)]))

    def count(p):
        return sum(t.nbytes for key, t in optimizer.state[p].items() if key != "step")

    ranks = ctx.world_size
    # Two codes per element and two absmax per 256. The basis of the right side is replicated, that of the left side is
    # sharded by rows.
    assert count(params[0]) == 2 * (m // ranks) * r + 8 * (m // ranks) * r // BLOCK + 4 * r * n
    assert count(params[1]) == 2 * r * m + 8 * r * m // BLOCK + 4 * (n // ranks) * r
    assert count(params[2]) == (2 * 128 * 40 + 8 * 128 * 40 // BLOCK) // ranks
    assert all("absmax_avg" in optimizer.state[p] for p in params)
    fresh = GaLoreAdamW(params[:1], min_8bit_size=m * n).state_dict()["state"][0]
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        ones = torch.ones(fresh[key].numel() // BLOCK)
        assert not bmt_kernels.dequantize_blockwise(fresh[key].flatten(), ones, signed=signed).any()
    assert "absmax_avg" not in GaLoreAdamW(params[:1], min_8bit_size=m * n + 1).state_dict()["state"][0]


@pytest.mark.ranks(2)
def test_8_bits_are_near_fp32_and_resume_exactly(ctx):
    start = tensors(SHAPES)
    runs = []
    for options in ({"nbits": 32}, {}):
        params = shards(start, layout(ctx, SHAPES))
        optimizer = DistGaloreAdamW(groups(params), min_8bit_size=100, **options, **OPTIONS)
        train(optimizer, params, range(4), gradients)
        runs.append((optimizer, params))
    saved = [runs[1][0].state_dict(gather=True)]
    dist.broadcast_object_list(saved)
    resumed = []
    for state in (saved[0], copy.deepcopy(runs[1][0].state_dict())):
        params = shards([unshard(p.detach(), slice_of(p)) for p in runs[1][1]], layout(ctx, SHAPES))
        optimizer = DistGaloreAdamW(groups(params), min_8bit_size=100)
        optimizer.load_state_dict(state)
        resumed.append((optimizer, params))
    for optimizer, params in (*runs, *resumed):
        train(optimizer, params, range(4, 7), gradients)
    assert 1e-4 < update_error(runs[1][1], [unshard(p.detach(), slice_of(p)) for p in runs[0][1]], start) < 0.2
    for _, params in resumed:
        assert all(torch.equal(p, q) for p, q in zip(params, runs[1][1]))


PAIR = [(12, 5), (5, 12), (6, 6), (8, 3), (4,)]


def pair_groups(params):
    kinds = ("std", "reverse_std", "full", "left")
    options = [{"rank": 2, "update_proj_gap": 4, "scale": 0.3, "proj_type": kind} for kind in kinds]
    return [*({"params": [p], **o} for p, o in zip(params, options)), {"params": params[len(kinds) :]}]


@needs_galore_torch
@pytest.mark.ranks(2)
def test_state_goes_to_the_published_one_and_back_between_two_projections(ctx, tmp_path):
    start = tensors(PAIR)

    def grads(step):
        return gradients(step, PAIR)

    params = shards(start, layout(ctx, PAIR))
    optimizer = DistGaloreAdamW(pair_groups(params), nbits=32, **OPTIONS)
    train(optimizer, params, range(6), grads)
    file = [tmp_path / "optimizer.pt"]
    dist.broadcast_object_list(file)
    save_optimizer(optimizer, file[0])
    weights = [unshard(p.detach(), slice_of(p)) for p in params]

    def theirs():
        unsharded_params = [nn.Parameter(w.clone()) for w in weights]
        other = reference_optimizer(pair_groups(unsharded_params))
        other.load_state_dict(torch.load(file[0], weights_only=True))
        step_reference(other, unsharded_params, grads, range(6, 10))
        wholes_again = [nn.Parameter(t.clone()) for t in start]
        again = reference_optimizer(pair_groups(wholes_again), **OPTIONS)
        step_reference(again, wholes_again, grads, range(6))
        state = again.state_dict()
        for entry in state["state"].values():  # to be sent without galore-torch
            if "projector" in entry:
                entry["projector"] = types.SimpleNamespace(ortho_matrix=entry["projector"].ortho_matrix)
        return [w.detach() for w in unsharded_params], state, [w.detach() for w in wholes_again]

    expected, state, at = on_rank_0(theirs)
    resumed, local = (shards(w, layout(ctx, PAIR)) for w in (at, weights))
    back = DistGaloreAdamW(pair_groups(resumed), nbits=32)
    back.load_state_dict(state)
    again = DistGaloreAdamW(pair_groups(local), nbits=32)
    again.load_state_dict(torch.load(file[0], weights_only=True))
    for o, ps in ((optimizer, params), (back, resumed), (again, local)):
        train(o, ps, range(6, 10), grads)
    for ps in (params, resumed):
        assert update_error(ps, expected, start) <= 1e-5
    assert all(torch.equal(p, q) for p, q in zip(params, local))


def test_state_of_bitsandbytes_is_taken_and_what_does_not_fit_is_refused():
    p = nn.Parameter(torch.ones(64, 64))
    optimizer = DistGaloreAdamW([p])
    before = optimizer.state_dict()["state"][0]
    moments = [torch.randn(64, 64), torch.rand(64, 64)]
    entry = {"step": 3}
    for n, moment in enumerate(moments):
        entry[f"state{n + 1}"], entry[f"absmax{n + 1}"] = bmt_kernels.quantize_blockwise(moment, signed=n == 0)
    entry["qmap1"] = torch.zeros(256)
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {0: entry}})
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], entry["state2"])
    nested = {"step": 3, "__bnb_optimizer_quant_state__": {k: v for k, v in entry.items() if k != "step"}}
    again = DistGaloreAdamW([p])
    again.load_state_dict({**saved, "state": {0: nested}})  # as newer bitsandbytes
    assert torch.equal(again.state[p]["exp_avg_sq"], entry["state2"])
    assert torch.equal(optimizer.state[p]["absmax_avg"], entry["absmax1"])
    assert set(optimizer.state[p]) == set(before)
    with pytest.raises(ValueError, match=r"exp_avg is torch\.uint8 in the state dict, and with nbits=32"):
        DistGaloreAdamW([p], nbits=32).load_state_dict({"param_groups": [{"params": [0]}], "state": {0: entry}})
    entry["absmax2"] = torch.zeros(2)  # of blocks of 2048, as older versions had
    with pytest.raises(ValueError, match=r"absmax_avg_sq of parameter 0 has shape \(2,\)"):
        optimizer.load_state_dict({**saved, "state": {0: entry}})
    projected = DistGaloreAdamW([{"params": [p], "rank": 4}], min_8bit_size=1)
    with pytest.raises(ValueError, match="no tensor 'ortho_right'"):
        projected.load_state_dict({**saved, "param_groups": projected.state_dict()["param_groups"]})


def test_percentile_clipping_is_that_of_bitsandbytes():
    torch.manual_seed(0)
    history, past = torch.zeros(100), None
    for step in range(1, 250):
        norm = float(torch.rand(()) + step % 7)
        (factor,) = clip_factors([history], [torch.tensor(norm**2)], step, 20)
        if past is None:
            past = [norm**2] * 100
        past[step % 100] = norm**2
        largest = math.sqrt(sorted(past)[20])
        assert factor.item() == pytest.approx(min(1, largest / norm), rel=1e-5)


@pytest.mark.ranks(2, 4, tp_size=2)
def test_clipping_is_by_the_norm_of_the_unsharded_projected_gradient(ctx):
    shapes = [(12, 6), (6, 12), (8,)]
    params = shards(tensors(shapes), layout(ctx, shapes))
    optimizer = DistGaloreAdamW(
        [{"params": params[:2], "rank": 2}, {"params": params[2:]}], nbits=32, percentile_clipping=5, lr=0.1
    )
    unsharded = tensors(shapes, 3)
    sizes = torch.tensor([[1.0, 5.0, 0.5], [1.0, 3.0, 0.5], [1.0, 2.0, 0.5]])  # by gradient and step
    for step in range(3):
        train(optimizer, params, [step], lambda step: [n * g for n, g in zip(sizes[:, step], unsharded)], scale=4.0)
    for p, g, size in zip(params, unsharded, sizes):
        norms = torch.linalg.svdvals(g)[:2] if g.dim() == 2 else g
        squares = norms.square().sum() * size.square()
        history = optimizer.state[p]["gnorm_vec"]
        torch.testing.assert_close(history[1:4], squares)
        torch.testing.assert_close(history[[0, 4, 99]], squares[:1].expand(3))
    # Each is clipped to 1 by a factor of its own, and 0.5 is not: as if they had been that.
    plain = shards(tensors(shapes), layout(ctx, shapes))
    other = DistGaloreAdamW([{"params": plain[:2], "rank": 2}, {"params": plain[2:]}], nbits=32, lr=0.1)
    for step in range(3):
        train(other, plain, [step], lambda step: [sizes[:, step].clamp(max=1)[0] * g for g in unsharded])
    for p, q in zip(params, plain):
        torch.testing.assert_close(p, q)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stochastic", [False, True])
def test_in_half_precision_the_masters_follow_and_loss_scale_does_not_matter(ctx, stochastic):
    start = [t.bfloat16().float() for t in tensors(SHAPES)]
    half, full = (shards(start, layout(ctx, SHAPES), dtype) for dtype in (torch.bfloat16, torch.float32))
    options = {**OPTIONS, "min_8bit_size": 100}
    optimizer = DistGaloreAdamW(groups(half), stochastic_rounding=stochastic, **options)
    other = DistGaloreAdamW(groups(full), **options)
    train(optimizer, half, range(2), gradients, scale=8.0)
    train(other, full, range(2), gradients)
    for p, q in zip(half, full):
        if stochastic:
            assert "master" not in optimizer.state[p]
            torch.testing.assert_close(p.float(), q, rtol=0.03, atol=0.03)
        else:
            assert torch.equal(optimizer.state[p]["master"], q)
            assert torch.equal(p, q.bfloat16())


@pytest.mark.ranks(2)
def test_a_factor_of_gradients_and_paging_change_nothing_but_scale_and_place(ctx):
    start = tensors(SHAPES)
    runs = []
    for factor, options in ((None, {}), (0.25, {"is_paged": True})):
        params = shards(start, layout(ctx, SHAPES))
        optimizer = DistGaloreAdamW(groups(params), min_8bit_size=100, **OPTIONS, **options)
        for step in range(2):
            for p, g in zip(params, gradients(step)):
                p.grad = shard_of(g, slice_of(p)) * (1 if factor is None else 1 / factor)
            assert run([optimizer.begin_step(grad_factor=None if factor is None else torch.tensor(factor))])
        runs.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*runs))


@pytest.mark.parametrize("nbits", [8, 32])
def test_asked_to_page_moments_of_parameters_on_the_cpu_stay_and_change_as_ever(nbits):
    shapes = [(400, 300), (1000, 101)]  # more than are paged on CUDA
    start, runs = [t.bfloat16() for t in tensors(shapes)], []
    for is_paged in (False, True):
        params = [nn.Parameter(t.clone()) for t in start]
        optimizer = GaLoreAdamW([{"params": params[:1]}, {"params": params[1:], "rank": 101}], nbits=nbits)
        for group in optimizer.param_groups:
            group["is_paged"] = is_paged
        train(optimizer, params, [0], lambda step: tensors(shapes, step))
        held = [
            (tensor, tensor.clone())
            for p in params
            for tensor in optimizer.state[p].values()
            if torch.is_tensor(tensor)
        ]
        train(optimizer, params, [1, 2], lambda step: tensors(shapes, step))
        state = [tensor for p in params for tensor in optimizer.state[p].values() if torch.is_tensor(tensor)]
        assert all(now is before for now, (before, _) in zip(state, held))
        assert sum(not torch.equal(now, then) for now, (_, then) in zip(state, held)) == len(state) - 1  # not the basis
        runs.append([*params, *state])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("row", [0, 3])
def test_a_block_with_an_infinity_on_one_rank_is_nan_on_all(ctx, row):
    (start,), where = tensors([(6, 64)]), shard_slice((6, 64), ctx.world)  # the first of two blocks ends in row 3

    def grads(step):
        (grad,) = tensors([(6, 64)], 1)
        grad[row, 0] = torch.inf
        return [grad]

    (param,), unsharded = shards([start], [where]), nn.Parameter(start.clone())
    optimizer, single = (DistGaloreAdamW([p], min_8bit_size=1) for p in (param, unsharded))
    for o, p in ((optimizer, param), (single, unsharded)):
        train(o, [p], [0], grads)
    for key, blocks in (("absmax_avg", [True, False]), ("absmax_avg_sq", [True, False])):
        expected = single.state[unsharded][key]
        assert expected.isnan().tolist() == blocks
        part = expected[:1] if ctx.rank == 0 else expected  # rank 0 has none of the second block
        torch.testing.assert_close(optimizer.state[param][key], part, equal_nan=True)


def test_arguments_are_checked_and_args_count_instead():
    matrix = nn.Parameter(torch.ones(3, 3))
    wrong = {
        "nbits": 4,
        "percentile_clipping": 0,
        "block_wise": False,
        "min_8bit_size": -1,
        "betas": (0.9, 1.0),
        "lr": -1.0,
        "eps": math.inf,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            DistGaloreAdamW([matrix], **{name: value})
    for name, value in {"rank": 0, "update_proj_gap": 0, "proj_type": "both", "scale": math.nan}.items():
        with pytest.raises(ValueError, match=name):
            DistGaloreAdamW([{"params": [matrix], "rank": 2, name: value}])
    optimizer = DistGaloreAdamW([matrix])
    with pytest.raises(ValueError, match=r"rank=2 has shape \(3,\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "rank": 2})
    assert len(optimizer.param_groups) == 1
    args = types.SimpleNamespace(optim_bits=32, percentile_clipping=50, max_unorm=0.0)
    group = DistGaloreAdamW([{"params": [matrix], "rank": 2}], args=args).param_groups[0]
    assert (group["nbits"], group["percentile_clipping"], group["min_8bit_size"]) == (32, 50, 4096)
    assert (group["update_proj_gap"], group["scale"], group["proj_type"]) == (200, 0.25, "std")
    with pytest.raises(ValueError, match="max_unorm"):
        DistGaloreAdamW([matrix], args={"max_unorm": 0.5})


def test_groups_of_a_model_hold_each_parameter_once():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 3))
    groups = get_galore_param_groups(model, 0.1, 2, proj_type="full")
    assert [[tuple(p.shape) for p in group["params"]] for group in groups] == [
        [(9, 4), (4, 4)],
        [(4, 4, 3)],
        [(4,)] * 4,
    ]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    optimizer = DistGaloreAdamW(groups)
    assert sorted(optimizer.param_groups[0]) == sorted(
        {*optimizer.param_groups[1], "rank", "scale", "proj_type", "update_proj_gap"}
    )
