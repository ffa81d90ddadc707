"""The planner that lays parameters out in flat buffers: pure arithmetic, checked for any shapes."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bmt_zero import FlatLayout, plan_layouts

sizes = st.one_of(st.integers(0, 9), st.sampled_from([13, 31, 64, 97, 127, 251, 1009]))
shapes = st.lists(st.lists(sizes, max_size=4).map(tuple), max_size=12)
worlds = st.one_of(st.integers(1, 9), st.integers(10, 64))


def flat_range(layout: FlatLayout, rank: int) -> tuple[int, int]:
    return rank * layout.shard_numel, (rank + 1) * layout.shard_numel


@settings(max_examples=150, deadline=None)
@given(shapes, worlds)
def test_every_shape_is_placed_once_and_nothing_overlaps(shapes, world):
    layouts = plan_layouts(shapes, world)
    placed = sorted(p.index for layout in layouts for p in layout.placements)
    assert placed == list(range(len(shapes)))
    for layout in layouts:
        assert layout.world_size == world
        cursor = 0
        for placement in sorted(layout.placements, key=lambda p: (p.offset, p.numel)):
            assert placement.shape == shapes[placement.index]
            assert placement.numel == math.prod(placement.shape)
            if placement.numel:
                assert placement.offset >= cursor
                cursor = placement.offset + placement.numel
        assert cursor <= layout.numel == world * layout.shard_numel


@settings(max_examples=150, deadline=None)
@given(shapes, worlds)
def test_borders_are_between_rows_and_ranks_hold_all_rows_once(shapes, world):
    for layout in plan_layouts(shapes, world):
        for placement in layout.placements:
            for border in range(0, layout.numel, layout.shard_numel or 1):
                inside = placement.offset < border < placement.offset + placement.numel
                assert not inside or (border - placement.offset) % placement.row_numel == 0
            ranges = [layout.rows_of(placement, rank) for rank in range(world)]
            held = [row for start, stop in ranges for row in range(start, stop)]
            assert held == list(range(placement.rows))
            for rank, (start, stop) in enumerate(ranges):
                offset = layout.offset_in_shard(placement, rank)
                assert offset >= 0
                assert offset + (stop - start) * placement.row_numel <= layout.shard_numel
                if start < stop and placement.numel:
                    begin = flat_range(layout, rank)[0] + offset
                    assert begin == placement.offset + start * placement.row_numel


@settings(max_examples=150, deadline=None)
@given(shapes, worlds)
def test_padding_is_at_most_one_longest_row_per_rank(shapes, world):
    for layout in plan_layouts(shapes, world):
        longest = max((p.row_numel for p in layout.placements if p.numel), default=0)
        assert 0 <= layout.padding <= world * longest


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 640), st.integers(1, 40).map(lambda n: 16 * n)), min_size=1, max_size=7), worlds
)
def test_rows_of_multiples_of_16_begin_at_multiples_of_16(shapes, world):
    for layout in plan_layouts(shapes, world):
        assert layout.shard_numel % 16 == 0
        assert all(placement.offset % 16 == 0 for placement in layout.placements)


@settings(max_examples=50, deadline=None)
@given(shapes, worlds)
def test_the_plan_depends_on_shapes_and_world_size_alone(shapes, world):
    assert plan_layouts(shapes, world) == plan_layouts([tuple(s) for s in shapes], world)


@settings(max_examples=50, deadline=None)
@given(shapes)
def test_one_rank_needs_no_padding(shapes):
    layouts = plan_layouts(shapes, 1)
    assert len(layouts) <= 1
    assert sum(layout.padding for layout in layouts) == 0


granular = st.lists(st.tuples(st.lists(sizes, max_size=3).map(tuple), st.sampled_from([1, 2, 7, 32, 128])), max_size=10)


@settings(max_examples=150, deadline=None)
@given(granular, st.one_of(st.integers(1, 9), st.integers(10, 64)))
@example([((127,), 7)] * 3, 4)  # the last granule has one row
def test_granules_are_never_divided_and_padding_is_at_most_the_largest_per_rank(items, world):
    shapes, granularity = [shape for shape, _ in items], [rows for _, rows in items]
    layouts = plan_layouts(shapes, world, granularity)
    assert sorted(p.index for layout in layouts for p in layout.placements) == list(range(len(shapes)))
    for layout in layouts:
        cursor = 0
        for placement in layout.placements:
            assert placement.offset >= cursor or not placement.numel
            cursor = max(cursor, placement.offset + placement.numel)
            held = [layout.rows_of(placement, rank) for rank in range(world)]
            assert [row for start, stop in held for row in range(start, stop)] == list(range(placement.rows))
            for start, stop in held:
                inside = [edge for edge in (start, stop) if start < stop and 0 < edge < placement.rows]
                assert all(edge % granularity[placement.index] == 0 for edge in inside)
        assert cursor <= layout.numel
        assert layout.padding <= world * max((p.granule for p in layout.placements if p.numel), default=0)


def transformer_shapes(hidden: int, inner: int, kv: int) -> list[tuple[int, ...]]:
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    feed_forward = [(inner, hidden), (inner, hidden), (hidden, inner)]
    return [(hidden,), *attention, (hidden,), *feed_forward]


@pytest.mark.parametrize("world", [2, 8, 64])
@pytest.mark.parametrize(
    ("hidden", "inner", "kv"), [(768, 3072, 768), (1024, 4096, 256), (4096, 11008, 4096), (4096, 14336, 1024)]
)
def test_transformer_layers_fit_in_one_buffer_with_next_to_no_padding(hidden, inner, kv, world):
    shapes = transformer_shapes(hidden, inner, kv)
    layouts = plan_layouts(shapes, world)
    total = sum(math.prod(s) for s in shapes)
    assert sum(layout.padding for layout in layouts) <= (0.01 if world < 64 else 0.025) * total
    assert len(layouts) == 1


def experts(hidden: int, inner: int, queries: int, kv: int, count: int) -> list[tuple[int, ...]]:
    attention = [(queries, hidden), (kv, hidden), (kv, hidden), (hidden, queries)]
    return [(hidden,), *attention, (hidden,), (count, hidden), (count, 2 * inner, hidden), (count, hidden, inner)]


GPT_OSS = [
    *[(4096, 2880), (4096,), (512, 2880), (512,), (512, 2880), (512,), (2880, 4096), (2880,), (64,), (2880,), (2880,)],
    *[(32, 2880), (32,), (32, 2880, 5760), (32, 5760), (32, 2880, 2880), (32, 2880)],
]
MODELS = {  # the shapes of a layer, the number of layers, and the shapes outside of them
    "Llama-8B": (transformer_shapes(4096, 14336, 1024), 32, (128256, 4096)),
    "Llama-70B": (transformer_shapes(8192, 28672, 1024), 80, (128256, 8192)),
    "Mixtral-8x7B": (experts(4096, 14336, 4096, 1024, 8), 32, (32000, 4096)),
    "Qwen3-30B-A3B": ([*experts(2048, 768, 4096, 512, 128), (128,), (128,)], 48, (151936, 2048)),
    "gpt-oss-20b": (GPT_OSS, 24, (201088, 2880)),
}


@pytest.mark.parametrize("world", [2, 3, 8, 24, 64, 100, 128, 256, 384, 500, 512])
@pytest.mark.parametrize("model", MODELS)
def test_no_rank_holds_more_than_a_twentieth_above_an_even_share(model, world):
    layer, count, embedding = MODELS[model]
    groups = [(layer, count), ([embedding], 2), ([embedding[1:]], 1)]
    held = sum(times * sum(layout.shard_numel for layout in plan_layouts(g, world)) for g, times in groups)
    total = sum(times * sum(math.prod(shape) for shape in g) for g, times in groups)
    assert held * world <= 1.05 * total


DEEPSEEK_V3 = [  # latent attention, 256 routed experts and a shared one
    *[(7168,), (7168,), (1536,), (512,), (1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)],
    *[(256, 7168), (256,), (2048, 7168), (2048, 7168), (7168, 2048)],
]
PACKED = [*DEEPSEEK_V3, (256, 4096, 7168), (256, 7168, 2048)]
APART = [*DEEPSEEK_V3, *[(2048, 7168), (2048, 7168), (7168, 2048)] * 256]
LLAMA_8B, LLAMA_70B = MODELS["Llama-8B"][0], MODELS["Llama-70B"][0]


@pytest.mark.parametrize(
    ("shapes", "rows", "most"),  # up to so many ranks
    [
        *[(LLAMA_8B, 1, 1024), (LLAMA_8B, 32, 64), (LLAMA_8B, 128, 16), (LLAMA_70B, 1, 512), (LLAMA_70B, 32, 64)],
        *[(LLAMA_70B, 128, 16), (PACKED, 1, 1024), (PACKED, 32, 256), (PACKED, 128, 128), (APART, 128, 128)],
    ],
)
def test_padding_for_granules_is_at_most_a_hundredth(shapes, rows, most):
    total = sum(math.prod(shape) for shape in shapes)
    for world in (8, 16, 32, 64, 128, 256, 512, 1024):
        if world <= most:
            layouts = plan_layouts(shapes, world, [rows if len(shape) > 1 else 1 for shape in shapes])
            assert sum(layout.padding for layout in layouts) <= 0.01 * total, world


def test_a_granularity_is_a_number_of_rows_for_each_shape():
    for wrong in ([0], [1, 1]):
        with pytest.raises(ValueError, match="granularity"):
            plan_layouts([(2, 2)], 2, wrong)


def test_packed_experts_are_divided_inside_of_an_expert():
    [layout] = plan_layouts([(3, 4, 5)], 2)
    [placement] = layout.placements
    assert (placement.rows, placement.row_numel) == (12, 5)
    assert [layout.rows_of(placement, rank) for rank in range(2)] == [(0, 6), (6, 12)]
    assert placement.local_shape(6) == (6, 5)
    [alone] = plan_layouts([(3, 4, 5)], 1)
    assert alone.placements[0].local_shape(3) == (3, 4, 5)


def test_fewer_rows_than_ranks_leave_some_ranks_without_any():
    [layout] = plan_layouts([(3, 5)], 4)
    held = [layout.rows_of(layout.placements[0], rank) for rank in range(4)]
    assert sorted(stop - start for start, stop in held) == [0, 1, 1, 1]


def test_a_number_is_one_row_on_one_rank():
    [layout] = plan_layouts([()], 3)
    assert layout.shard_numel == 1
    assert sum(stop - start for start, stop in (layout.rows_of(layout.placements[0], r) for r in range(3))) == 1


def test_no_shapes_need_no_buffer():
    assert plan_layouts([], 4) == []


@pytest.mark.parametrize("world", [0, -2])
def test_a_world_without_ranks_is_refused(world):
    with pytest.raises(ValueError, match=f"world_size={world}"):
        plan_layouts([(2, 2)], world)
