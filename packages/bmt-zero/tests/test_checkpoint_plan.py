"""Planning of checkpoints, without processes: regions of slices, the write plan, and headers."""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bmt_comm import Slice, shard_of
from bmt_zero.checkpoints.headers import (
    DTYPES,
    DamagedError,
    Entry,
    dtype_name,
    lay_out,
    parse_head,
)
from bmt_zero.checkpoints.memory import view_of
from bmt_zero.checkpoints.plan import PIECE, AddressSpace, Holding, Task, WritePlan, replicate_groups
from bmt_zero.checkpoints.regions import (
    clip,
    flat_bytes,
    local_view,
    logical_view,
    pack,
    regions_of,
    unpack,
)
from bmt_zero.stage_entry import natural_key

# --- slices as bytes ------------------------------------------------------------------------------


def boundaries(length: int, parts: int, draw: Any) -> list[int]:
    inner = sorted(draw(st.integers(0, length)) for _ in range(parts - 1))
    return [0, *inner, length]


@st.composite
def slices(draw: Any) -> tuple[list[Slice], Tensor]:
    """The slices of all ranks, and the logical tensor. They are rows of tensor-parallel shards, rows along two
    dimensions, or blocks of fused weights."""
    dims = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 7)) for _ in range(dims))
    tp = draw(st.integers(1, 3)) if dims else 1
    tp_dim = draw(st.integers(0, dims - 1)) if dims and tp > 1 else None
    blocks: tuple[int, ...] = ()
    if tp_dim is not None and draw(st.booleans()):
        blocks = tuple(tp * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3))))
        shape = (*shape[:tp_dim], sum(blocks), *shape[tp_dim + 1 :])
    row_dims = draw(st.integers(1, 2)) if dims == 3 else 1
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64]))
    logical = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    result = []
    edges = boundaries(shape[tp_dim], tp, draw) if tp_dim is not None and not blocks else []
    row_ranks = draw(st.integers(1, 3))
    for number in range(tp if tp_dim is not None else 1):
        kind: dict[str, Any] = {}
        if tp_dim is not None:
            comm = SimpleNamespace(size=tp, rank=number)
            extent = sum(blocks) // tp if blocks else edges[number + 1] - edges[number]
            offset = sum(blocks) // tp * number if blocks else edges[number]
            kind = {"tp_dim": tp_dim, "tp_offset": offset, "tp_extent": extent, "tp_comm": comm, "tp_blocks": blocks}
        rows = Slice(shape, 0, 0, row_dims=row_dims, **kind).tp_shard_rows
        stops = boundaries(rows, row_ranks, draw)
        result += [Slice(shape, a, b, row_dims=row_dims, **kind) for a, b in pairwise(stops)]
    return result, logical


def local(logical: Tensor, where: Slice) -> Tensor:
    return shard_of(logical, where).contiguous()


@settings(max_examples=300, deadline=None)
@given(slices())
def test_regions_are_where_the_elements_lie(case: tuple[list[Slice], Tensor]) -> None:
    parts, logical = case
    copied = torch.full_like(flat_bytes(logical), 255)
    covered = torch.zeros_like(copied)
    for where in parts:
        mine = flat_bytes(local(logical, where))
        used = torch.zeros_like(mine)
        for region in regions_of(where, logical.element_size()):
            logical_view(copied, region, 0).copy_(local_view(mine, region))
            logical_view(covered, region, 0).add_(1)
            local_view(used, region).add_(1)
        assert (used == 1).all()
    assert (covered == 1).all()
    assert torch.equal(copied, flat_bytes(logical))


@settings(max_examples=300, deadline=None)
@given(slices(), st.data())
def test_clipped_regions_make_up_the_region(case: tuple[list[Slice], Tensor], data: Any) -> None:
    parts, logical = case
    edges = boundaries(logical.numel() * logical.element_size(), data.draw(st.integers(1, 5)), data.draw)
    copied = torch.full_like(flat_bytes(logical), 255)
    for where in parts:
        mine = flat_bytes(local(logical, where))
        for low, high in pairwise(edges):
            window = copied[low:high]
            for region in regions_of(where, logical.element_size()):
                clipped = clip(region, low, high)
                assert len(clipped) <= 3
                assert all(low <= part.start < part.stop <= high for part in clipped)
                packed = torch.empty(sum(part.nbytes for part in clipped), dtype=torch.uint8)
                pack(packed, mine, clipped)
                unpack(window, low, packed, clipped)
    assert torch.equal(copied, flat_bytes(logical))


# --- the write plan -------------------------------------------------------------------------------


def simulate(
    tensors: dict[str, Tensor], held: list[dict[str, Slice]], single: frozenset[str] = frozenset(), size: int = 10**12
) -> tuple[dict[str, bytes], list[list[Task]]]:
    """The files that ranks with these slices write, and the tasks of each rank. Messages are the senders' parts."""
    entries = [Entry(name, dtype_name(t.dtype, name), tuple(t.shape)) for name, t in tensors.items()]
    space = AddressSpace(lay_out("model", entries, size))
    numbers = {name: space.number["model", name] for name in tensors}
    holdings = {
        rank: tuple(
            Holding(numbers[name], tuple(regions_of(where, tensors[name].element_size())))
            for name, where in parts.items()
            if where.numel
        )
        for rank, parts in enumerate(held)
    }
    own = [{numbers[n]: flat_bytes(local(tensors[n], where)) for n, where in parts.items()} for parts in held]
    groups = replicate_groups(holdings)
    plans = [WritePlan(space, groups, frozenset(numbers[n] for n in single), rank) for rank in range(len(held))]
    tasks = [list(plan.tasks()) for plan in plans]
    sent = {(task.piece, rank): task.parts[0] for rank, mine in enumerate(tasks) for task in mine if task.owner != rank}
    memory = bytearray(space.end)
    written: set[int] = set()
    for rank, mine in enumerate(tasks):
        assert [task.piece for task in mine] == sorted(task.piece for task in mine)
        for task in mine:
            if task.owner != rank:
                continue
            assert task.piece not in written
            written.add(task.piece)
            low, high = space.piece_range(task.piece)
            window = torch.full((high - low,), 0xEE, dtype=torch.uint8)
            file = space.file_of(low)
            head, base = space.files[file].head, space.bases[file]
            if low - base < len(head):
                part = head[low - base : high - base]
                view_of(window)[: len(part)] = part
            for part in task.parts:
                if part.rank != rank:
                    assert sent.pop((task.piece, part.rank)).regions == part.regions
                for number, region in part.regions:
                    packed = torch.empty(region.nbytes, dtype=torch.uint8)
                    pack(packed, own[part.rank][number], [region])
                    unpack(window, low, packed, [region])
            memory[low:high] = view_of(window)
    assert not sent
    pieces = [-(-file.size // PIECE) for file in space.files]
    assert written == {base // PIECE + n for base, count in zip(space.bases, pieces) for n in range(count)}
    files = zip(space.files, space.bases)
    return {file.name: bytes(memory[base : base + file.size]) for file, base in files}, tasks


@st.composite
def models(draw: Any) -> tuple[dict[str, Tensor], list[dict[str, Slice]]]:
    """Tensors of several pieces or a few bytes, and the slices of ranks: rows, columns and replicas."""
    tp, rows, copies = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    tensors: dict[str, Tensor] = {}
    held: list[dict[str, Slice]] = [{} for _ in range(tp * rows * copies)]
    for number in range(draw(st.integers(1, 5))):
        width = draw(st.sampled_from([1, 3, 700, 1 << 10]))
        height = draw(st.integers(1, 9)) if draw(st.booleans()) else draw(st.integers(1, 3 << 20)) // width + 1
        dtype = draw(st.sampled_from([torch.uint8, torch.float32]))
        name = f"layers.{number}.weight"
        tensors[name] = torch.randint(0, 250, (height, width), generator=torch.Generator().manual_seed(number)).to(
            dtype
        )
        tp_dim = draw(st.sampled_from([None, 0, 1])) if tp > 1 else None
        for copy in range(copies):
            for t in range(tp):
                kind: dict[str, Any] = {}
                if tp_dim is not None:
                    length = (height, width)[tp_dim]
                    a, b = length * t // tp, length * (t + 1) // tp
                    kind = {"tp_dim": tp_dim, "tp_offset": a, "tp_extent": b - a}
                count = Slice((height, width), 0, 0, **kind).tp_shard_rows
                for row in range(rows):
                    a, b = count * row // rows, count * (row + 1) // rows
                    held[(copy * rows + row) * tp + t][name] = Slice((height, width), a, b, **kind)
    return tensors, held


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from([10**12, 1 << 20]))
def test_files_do_not_depend_on_the_sharding(case: tuple[dict[str, Tensor], list[dict[str, Slice]]], size: int) -> None:
    tensors, held = case
    files, tasks = simulate(tensors, held, size=size)
    alone, _ = simulate(tensors, [{n: Slice(tuple(t.shape), 0, t.shape[0]) for n, t in tensors.items()}], size=size)
    assert files == alone
    assert len(tasks) == len(held)


@settings(max_examples=20, deadline=None)
@given(models())
def test_what_is_planned_is_a_safetensors_file(case: tuple[dict[str, Tensor], list[dict[str, Slice]]]) -> None:
    load = pytest.importorskip("safetensors.torch").load
    tensors, held = case
    ((_, content),) = simulate(tensors, held)[0].items()
    loaded = load(content)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    layout = parse_head("x", content, len(content))
    for entry, offset in zip(layout.entries, layout.offsets):
        assert offset % entry.itemsize == 0  # so that it can be mapped into memory


def test_replicas_share_out_the_writing() -> None:
    tensors = {"w": torch.zeros(64 << 20, dtype=torch.uint8)}
    held = [{"w": Slice((64 << 20,), 0, 64 << 20)} for _ in range(4)]
    _, tasks = simulate(tensors, held)
    assert [15 <= len(mine) <= 18 for mine in tasks] == [True] * 4
    assert all(len(task.parts) == 1 for mine in tasks for task in mine)


def test_only_the_lowest_rank_s_values_of_a_buffer_count() -> None:
    tensors = {"buffer": torch.arange(3 << 20).to(torch.uint8), "w": torch.zeros(2, 1 << 20, dtype=torch.uint8)}
    held = [{"buffer": Slice((3 << 20,), 0, 3 << 20), "w": Slice((2, 1 << 20), r, r + 1)} for r in range(2)]
    _, tasks = simulate(tensors, held, frozenset(["buffer"]))
    own = [{(n, part.rank) for t in mine for part in t.parts for n, _ in part.regions} for mine in tasks]
    assert (0, 0) in own[0] | own[1]
    assert (0, 1) not in own[0] | own[1]  # "buffer" is the first entry


def test_rows_that_no_rank_holds_are_an_error() -> None:
    tensors = {"w": torch.zeros(4, 4)}
    with pytest.raises(ValueError, match=r"no rank holds all rows of 'w' of shape \(4, 4\)"):
        simulate(tensors, [{"w": Slice((4, 4), 0, 1)}, {"w": Slice((4, 4), 2, 4)}])


# --- headers --------------------------------------------------------------------------------------


def test_names_are_sorted_by_their_numbers() -> None:
    names = ["layers.10.w", "layers.2.w", "embed", "layers.2.b", "layers.02.w"]
    assert sorted(names, key=natural_key) == ["embed", "layers.02.w", "layers.2.b", "layers.2.w", "layers.10.w"] or (
        sorted(names, key=natural_key) == ["embed", "layers.2.b", "layers.02.w", "layers.2.w", "layers.10.w"]
    )
    assert len({str(natural_key(name)) for name in names}) == len(names)


def test_files_are_split_by_size() -> None:
    entries = [Entry(f"w{n}", "F32", (100,)) for n in range(12)]
    files = lay_out("model", entries, max_file_size=1000)
    assert [file.name for file in files] == [f"model-{n:05}-of-00006.safetensors" for n in range(1, 7)]
    assert [[entry.name for entry in file.entries] for file in files][:2] == [["w0", "w1"], ["w2", "w3"]]
    with pytest.raises(ValueError, match="there are two tensors 'a'"):
        lay_out("model", [Entry("a", "F32", (1,)), Entry("a", "F32", (2,))])
    with pytest.raises(ValueError, match="no tensors of the name '__metadata__'"):
        lay_out("model", [Entry("a", "F32", (1,)), Entry("__metadata__", "F32", (2,))])


def head(header: Any, data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changed}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, too few"),
        (b"1234567", "7 bytes, too few"),
        (struct.pack("<Q", 1 << 60) + b"{}", "does not fit into a file"),
        (struct.pack("<Q", 20) + b"{}", "does not fit into a file"),
        (head(b"\xff\xfe"), "is damaged"),
        (head(b"[" * 100_000), "is damaged"),
        (head(b"[1]"), "a list, not an object"),
        (head({"a": 1}), "nothing usable of 'a'"),
        (head({"a": entry(dtype="F33")}, 24), "has the dtype 'F33'"),
        (head({"a": entry(dtype=["F32"])}, 24), "has the dtype"),
        (head({"a": entry(shape=[-2, -3])}, 24), "has the shape"),
        (head({"a": entry(shape=[2.0, 3])}, 24), "has the shape"),
        (head({"a": entry(shape=[True, 6])}, 24), "has the shape"),
        (head({"a": entry(shape="23")}, 24), "has the shape"),
        (head({"a": entry(shape=[1 << 61, 1 << 61])}, 24), "and the header gives it 24"),
        (head({"a": entry(data_offsets=[0, 25])}, 25), "has 24 bytes"),
        (head({"a": entry(data_offsets=[24, 0])}, 24), "has 24 bytes"),
        (head({"a": entry(data_offsets=[8, 32])}, 32), "and 0 is the next one"),
        (head({"a": entry(), "b": entry(data_offsets=[12, 36])}, 36), "and 24 is the next one"),
        (head({"a": entry()}, 23), "it may be truncated"),
        (head({"a": entry()}, 25), "it may be truncated"),
        (head(b'{"a": {}, "a": {}}'), "a name comes twice"),
    ],
)
def test_damaged_headers_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        parse_head("file", content, len(content))


def test_all_dtypes_of_the_format_are_known() -> None:
    for name, dtype in DTYPES.items():
        assert dtype_name(dtype, "x") == name
    with pytest.raises(ValueError, match=r"'x' has dtype torch.complex128, which safetensors files cannot hold"):
        dtype_name(torch.complex128, "x")
