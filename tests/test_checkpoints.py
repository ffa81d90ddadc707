"""Checkpoints of models and optimizers at every layout: what one layout writes, any other one reads, bit by bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import shutil
import weakref
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmt_kernels
import bmt_zero
import bmtrain as bmt
from bmt_comm import shard_of, slice_of
from bmt_zero import Checkpointer, SaveError
from bmt_zero.checkpoints.manifest import parse_manifest, record_of
from bmt_zero.checkpoints.memory import Snapshot
from bmt_zero.options import Options


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a model; ``shapes`` are those of parameters that each layer and the model have beside."""

    vocab: int = 17
    hidden: int = 13
    inner: int = 24
    layers: int = 5
    shapes: tuple[tuple[int, ...], ...] = ()


SIZES = Sizes()


def add_parameters(module: nn.Module, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    for number, shape in enumerate(shapes):
        module.register_parameter(f"more_{number}", bmt.DistributedParameter(torch.ones(shape, dtype=dtype)))


class Layer(bmt.DistributedModule):
    def __init__(self, dtype: torch.dtype, sizes: Sizes) -> None:
        super().__init__()
        self.norm = bmt.DistributedParameter(torch.ones(sizes.hidden, dtype=dtype))
        self.up = bmt.nn.ColumnParallelLinear(sizes.hidden, sizes.inner, dtype=dtype)
        self.down = bmt.nn.RowParallelLinear(sizes.inner, sizes.hidden, dtype=dtype)
        add_parameters(self, sizes.shapes, dtype)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x * self.norm)))


class Model(bmt.DistributedModule):
    def __init__(self, level: int, dtype: torch.dtype, interleave: int, sizes: Sizes = SIZES) -> None:
        super().__init__()
        self.embed = bmt.DistributedParameter(torch.ones(sizes.vocab, sizes.hidden, dtype=dtype))
        blocks = [bmt.Block(Layer(dtype, sizes), zero_level=level) for _ in range(sizes.layers)]
        if bmt.config["pipe_size"] > 1:
            self.layers: nn.Module = bmt.PipelineTransformerBlockList(blocks, interleave=interleave)
        else:
            self.layers = bmt.TransformerBlockList(blocks)
        self.head = bmt.nn.Linear(sizes.hidden, 1, dtype=dtype)
        self.scale = bmt.DistributedParameter(torch.ones((), dtype=dtype))
        add_parameters(self, sizes.shapes, dtype)


def matrices(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    params = list(model.parameters())
    return [p for p in params if len(slice_of(p).shape) == 2], [p for p in params if len(slice_of(p).shape) != 2]


KINDS: dict[str, Any] = {
    "adam": bmt.optim.AdamOptimizer,
    "adam_offload": bmt.optim.AdamOffloadOptimizer,
    "lamb": bmt.optim.Lamb,
    "adafactor": functools.partial(bmt.optim.Adafactor, beta1=0.9),
    "torch_adafactor": bmt.optim.TorchAdafactor,
    "came": functools.partial(bmt.optim.CAME, lr=1e-3),
    "muon": bmt.optim.Muon,
    "torch": torch.optim.AdamW,
}


def make_optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """By the name of one, or of one for the matrices and one for the rest: "muon+adam"."""
    first, rest = matrices(model)
    if "+" in name:
        kinds = [KINDS[kind] for kind in name.split("+")]
        return [kinds[0](first), kinds[1](rest)]
    if name in KINDS:
        return [KINDS[name](model.parameters())]
    kind, bits = name.split("-")
    assert kind == "galore"
    groups = [
        {"params": first[::2], "rank": 3, "proj_type": "full"},
        {"params": first[1::2], "rank": 3},
        {"params": rest},
    ]
    return [bmt.optim.GaLoreAdamW(groups, nbits=int(bits), min_8bit_size=16, percentile_clipping=90)]


OPTIMIZERS = [
    "adam",
    "adam_offload",
    "lamb",
    "adafactor",
    "torch_adafactor",
    "came",
    "muon+adam",
    "galore-32",
    "galore-8",
]


def values(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Whole tensors, by name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def parts(model: nn.Module, optimizers: list[Any]) -> dict[str, tuple[Any, Tensor]]:
    """Of every tensor that a checkpoint should have on this rank: which part, and the part."""
    names = {param: name for name, param in model.named_parameters()}
    found = {name: (slice_of(param), param.detach()) for param, name in names.items()}
    found.update({name: (slice_of(buffer), buffer) for name, buffer in model.named_buffers()})
    for optimizer in optimizers:
        for record in optimizer.state_records():
            if record.key != "step":
                found[f"{names[record.param]}.{record.key}"] = (record.where, record.tensor)
    return found


@torch.no_grad()
def fill(model: nn.Module, optimizers: list[Any], seed: int) -> None:
    for name, (where, tensor) in parts(model, optimizers).items():
        tensor.copy_(shard_of(values(name, where.shape, tensor.dtype, seed), where))
    for optimizer in optimizers:
        records = [record for record in optimizer.state_records() if record.key == "step"]
        for record in records:
            record.tensor.fill_(seed)
        optimizer.adopt_state_records(records)


def check(model: nn.Module, optimizers: list[Any], seed: int) -> None:
    for name, (where, tensor) in parts(model, optimizers).items():
        assert torch.equal(tensor, shard_of(values(name, where.shape, tensor.dtype, seed), where)), name
    for optimizer in optimizers:
        assert {int(r.tensor) for r in optimizer.state_records() if r.key == "step"} == {seed}


def build(
    name: str, level: int, dtype: torch.dtype, interleave: int, seed: int, sizes: Sizes = SIZES
) -> tuple[nn.Module, Any]:
    model = Model(level, dtype, interleave, sizes)
    manager = bmt.optim.OptimManager(loss_scale=4.0)
    for optimizer in make_optimizers(name, model):
        manager.add_optimizer(optimizer, bmt.lr_scheduler.Cosine(optimizer, 0.1 * seed, 3, 20, num_iter=seed))
    fill(model, manager.optimizers, seed)
    return model, manager


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name.startswith(("model", "optimizer"))}


LAYOUTS = {
    1: [(1, 1, 3, 1), (1, 1, 0, 1)],
    2: [(1, 1, 3, 1), (2, 1, 2, 1), (1, 2, 1, 2)],
    3: [(1, 1, 3, 1), (1, 3, 0, 1)],
    4: [(2, 2, 3, 1), (4, 1, 0, 1), (2, 1, 3, 1), (1, 2, 2, 2)],
}
"""By the number of ranks: tensor-parallel size, pipeline stages, ZeRO level, chunks of a stage."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the first layout leaves its checkpoint, by optimizer."""
    return str(tmp_path_factory.mktemp("written"))


def write_and_read(
    name: str,
    dtype: torch.dtype,
    layouts: list[tuple[int, int, int, int]],
    reference: Path,
    folder: Path,
    sizes: Sizes = SIZES,
    max_file_size: int = 3000,
) -> None:
    """Each layout writes the same files as the first one, of any number of ranks, and reads what that wrote."""
    for number, (tp, pipe, level, interleave) in enumerate(layouts):
        ctx = bmt.init_distributed(tp_size=tp, pipe_size=pipe, num_micro_batches=pipe * (number + 1), seed=1)
        model, manager = build(name, level, dtype, interleave, 5, sizes)
        checkpointer = Checkpointer(folder / f"{number}", max_file_size=max_file_size)
        checkpointer.save(1, model=model, manager=manager)
        checkpointer.wait()
        written = folder / f"{number}" / "step-00000001"
        if ctx.rank == 0 and not reference.exists():
            reference.mkdir()
            shutil.copytree(written, reference / "step-00000001")
        ctx.world.barrier()
        assert tensor_files(written) == tensor_files(reference / "step-00000001")
        model, manager = build(name, level, dtype, interleave, 6, sizes)
        reader = Checkpointer(reference, readonly=True)
        assert reader.load_latest(model=model, manager=manager) == 1
        check(model, manager.optimizers, 5)
        assert manager.lr_schedulers[0].num_iter == 5
        assert manager.optimizers[0].param_groups[0]["lr"] == manager.lr_schedulers[0].current_lr
        checkpointer.close()
        bmt.shutdown()


@pytest.mark.ranks(1, 2, 3, 4, init=False, timeout=120)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_layout_writes_the_same_and_reads_what_another_wrote(
    name: str, dtype: torch.dtype, written: str, tmp_path: Path
) -> None:
    write_and_read(name, dtype, LAYOUTS[int(os.environ["WORLD_SIZE"])], Path(written) / f"{name} {dtype}", tmp_path)


def generated_layouts(generator: random.Random, ranks: int, layers: int) -> list[tuple[int, int, int, int]]:
    """Two of the layouts that so many ranks may have."""
    sizes = [(tp, pipe) for tp in range(1, 5) for pipe in range(1, 5) if ranks % (tp * pipe) == 0]
    layouts = []
    for _ in range(2):
        tp, pipe = generator.choice(sizes)
        interleave = generator.randint(1, layers // pipe) if pipe > 1 else 1
        layouts.append((tp, pipe, generator.randrange(4), interleave))
    return layouts


@pytest.mark.ranks(1, 2, 3, 4, init=False, timeout=120)
@pytest.mark.parametrize("seed", range(int(os.environ.get("BMT_CASES", "6"))))
def test_generated_models_at_generated_layouts(seed: int, written: str, tmp_path: Path) -> None:
    """The session ``checkpoint_faults`` of nox generates more."""
    generator = random.Random(seed)
    sizes = Sizes(
        vocab=generator.randint(1, 40),
        hidden=generator.randint(1, 40),
        inner=12 * generator.randint(1, 5),  # which up to four ranks divide
        layers=generator.randint(4, 7),
        shapes=tuple(
            tuple(generator.randint(1, 9) for _ in range(generator.randrange(4))) for _ in range(generator.randrange(4))
        ),
    )
    kinds = [kind for kind in KINDS if kind != "torch"]
    name = f"{generator.choice(kinds)}+{generator.choice([kind for kind in kinds if kind != 'muon'])}"
    dtype, max_file_size = generator.choice([torch.float32, torch.bfloat16]), generator.choice([300, 5000, 1 << 30])
    ranks = int(os.environ["WORLD_SIZE"])
    layouts = generated_layouts(random.Random(f"{seed} {ranks}"), ranks, sizes.layers)
    write_and_read(name, dtype, layouts, Path(written) / f"{seed}", tmp_path, sizes, max_file_size)


def grads(step: int, params: list[Tensor]) -> None:
    for n, p in enumerate(params):
        where = slice_of(p)
        p.grad = shard_of(values(f"gradient {n}", where.shape, torch.float32, step), where).to(p.dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch"])
def test_a_continued_run_is_bit_equal_to_an_uninterrupted_one(
    ctx: Any, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    def fresh(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(9, 17), nn.Linear(17, 5)).to(dtype))
        manager = bmt.optim.OptimManager(loss_scale=2.0, loss_scale_steps=3)
        for optimizer in make_optimizers(name, model):
            manager.add_optimizer(optimizer, bmt.lr_scheduler.Noam(optimizer, 0.1, 3, 20))
        return model, manager

    def train(model: nn.Module, manager: Any, steps: range) -> None:
        for step in steps:
            grads(step, list(model.parameters()))
            manager.step()

    model, manager = fresh(1)
    checkpointer = Checkpointer(tmp_path / "c")
    train(model, manager, range(4))
    checkpointer.save(4, model=model, manager=manager)
    train(model, manager, range(4, 9))
    other, other_manager = fresh(2)
    train(other, other_manager, range(20, 21))
    assert checkpointer.load_latest(model=other, manager=other_manager) == 4
    train(other, other_manager, range(4, 9))
    for (key, a), b in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(a.detach(), b.detach()), key
    assert manager.loss_scale == other_manager.loss_scale
    assert manager.steps_since_last_scale == other_manager.steps_since_last_scale
    assert [s.state_dict() for s in manager.lr_schedulers] == [s.state_dict() for s in other_manager.lr_schedulers]


@pytest.mark.ranks(2)
def test_torch_s_optimizer_gets_its_state_before_its_first_step(ctx: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = bmt.BMTrainModelWrapper(nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    grads(1, list(model.parameters()))
    optimizer.step()
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=model, optimizer=optimizer)
    other = torch.optim.AdamW(model.parameters(), lr=7.0)
    checkpointer.load_latest(model=model, optimizer=other)
    assert other.param_groups[0]["lr"] == 1e-3
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            assert torch.equal(other.state[param][key], value)
            assert other.state[param][key].dtype == value.dtype


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_named(ctx: Any, tmp_path: Path) -> None:
    def make(name: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(9, 17), nn.Linear(17, 5)))
        manager = bmt.optim.OptimManager()
        for optimizer in make_optimizers(name, model):
            manager.add_optimizer(optimizer)
        return model, manager

    checkpointer = Checkpointer(tmp_path / "c")
    model, manager = make("adam")
    checkpointer.save(1, model=model, manager=manager)
    other, lamb = make("muon+adam")
    with pytest.raises(ValueError, match=r"checkpoint's optimizer lacks '0.weight.momentum_buffer'"):
        checkpointer.load_latest(model=other, manager=lamb)
    with pytest.raises(ValueError, match=r"has a parameter of shape \(17, 9\) that the model has not"):
        checkpointer.save(2, model=nn.Linear(2, 2), manager=manager)
    with pytest.raises(SaveError, match="the checkpoint of step 2 was not written"):
        checkpointer.wait()
    model, manager = make("adam")
    checkpointer.load_latest(model=model)  # the rest is left alone
    manager.add_optimizer(bmt.optim.AdamOptimizer([nn.Parameter(torch.zeros(1))]))
    with pytest.raises(ValueError, match=r"that the model has not"):
        checkpointer.load_latest(model=model, manager=manager)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [True, False])
def test_fsdp2_and_plain_models_go_through_the_same_checkpoints(ctx: Any, tmp_path: Path, sharded: bool) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def make(seed: int, ours: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(9, 17), nn.Linear(17, 5))
        if sharded:
            fully_shard(model)
        kind = bmt.optim.AdamOptimizer if ours else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.1)
        for step in (seed, seed + 1):
            model(values("x", (4, 9), torch.float32, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return model, optimizer

    checkpointer = Checkpointer(tmp_path / "c")
    for step, ours in enumerate((True, False), 1):
        model, optimizer = make(1, ours)
        checkpointer.save(step, model=model, optimizer=optimizer)
        other, other_optimizer = make(2, ours)
        assert checkpointer.load_latest(model=other, optimizer=other_optimizer) == step
        for a, b in zip(model.parameters(), other.parameters()):
            assert isinstance(a, DTensor) == sharded
            assert torch.equal(a.to_local() if sharded else a, b.to_local() if sharded else b)
            for key, value in optimizer.state[a].items():
                mine = other_optimizer.state[b][key]
                if isinstance(value, DTensor):
                    value, mine = value.to_local(), mine.to_local()
                assert mine == value if not isinstance(value, Tensor) else torch.equal(mine, value), key
        # A model of ours reads it, too.
        torch.manual_seed(3)
        third = bmt_zero.BMTrainModelWrapper(nn.Sequential(nn.Linear(9, 17), nn.Linear(17, 5)))
        checkpointer.load(step, model=third)
        full = {n: p.full_tensor() if sharded else p for n, p in model.named_parameters()}
        for key, value in third.state_dict().items():
            assert torch.equal(value, full[key].detach())


@pytest.mark.ranks(1, 2)
def test_transformers_reads_every_save(ctx: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=12, vocab_size=31, n_positions=16)
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config)
    model = bmt.BMTrainModelWrapper(transformers.GPT2LMHeadModel(config))
    checkpointer = Checkpointer(tmp_path / "c", max_file_size=4000)
    checkpointer.save(1, model=model)
    checkpointer.wait()
    folder = tmp_path / "c" / "step-00000001"
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    wanted = model.state_dict()
    for name, value in found.state_dict().items():
        assert torch.equal(value, wanted[name].cpu()), name
    assert found.lm_head.weight.data_ptr() == found.transformer.wte.weight.data_ptr()
    assert found.config.n_embd == plain.config.n_embd


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_directories_of_transformers_that_have_experts_one_by_one(ctx: Any, tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 31, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 4, "moe_intermediate_size": 12}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **experts)
    torch.manual_seed(0)
    plain = getattr(transformers, f"{kind}ForCausalLM")(config)
    if ctx.rank == 0:
        plain.save_pretrained(tmp_path / "hf")
    ctx.world.barrier()
    torch.manual_seed(1)
    model = bmt.BMTrainModelWrapper(type(plain)(config))
    bmt.load(model, tmp_path / "hf")
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name].cpu(), value), name


# --- settings that somebody has changed -----------------------------------------------------------


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) in a JSON value."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value) if isinstance(value, list) else ())
    )
    return [(value, key) for key, _ in items] + [node for _, each in items for node in nodes(each)]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("optimizer", ["adam", "adafactor", "muon+adam"])
def test_changed_settings_load_or_are_refused_by_name(ctx: Any, tmp_path: Path, optimizer: str) -> None:
    """With checksums that are right, so that nothing but the readers keeps them out."""
    model = Model(3, torch.float32, 1)
    bmt.init_parameters(model)
    manager = bmt.optim.OptimManager(loss_scale=64.0)
    for each in make_optimizers(optimizer, model):
        manager.add_optimizer(each, bmt.lr_scheduler.Cosine(each, 1e-2, 5, 40))
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=model, manager=manager)
    checkpointer.wait()
    folder, generator = tmp_path / "c" / "step-00000001", random.Random(0)
    original = (folder / "trainer.json").read_text()
    manifest = parse_manifest(folder / "manifest.json", (folder / "manifest.json").read_bytes())
    for _ in range(200):
        saved = json.loads(original)
        settings = {name: saved[name] for name in ("optimizers", "manager")}
        for _ in range(generator.choice([1, 1, 2])):
            container, key = generator.choice(nodes(settings))
            if isinstance(container, dict) and container is not settings and generator.random() < 0.1:
                container[generator.choice(["params", "param_names", "x"])] = container.pop(key)
            else:
                container[key] = generator.choice(
                    [None, True, -1, 1e308, 10**400, "x", [], [1], {}, {"dict": {}}, {"tuple": [1]}]
                )
        saved.update(settings)
        content = json.dumps(saved).encode()
        (folder / "trainer.json").write_bytes(content)
        files = {**manifest.files, "trainer.json": record_of(content)}
        (folder / "manifest.json").write_bytes(dataclasses.replace(manifest, files=files).to_json())
        params = [group["params"] for each in manager.optimizers for group in each.param_groups]
        with contextlib.suppress(ValueError):
            checkpointer.load(1, model=model, manager=manager)
        left = [group["params"] for each in manager.optimizers for group in each.param_groups]
        assert all(mine is theirs for mine, theirs in zip(params, left))


def test_page_locked_memory_is_as_large_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the next power of two, and the smaller one is given back first."""
    asked: list[tuple[int, int]] = []
    living: list[weakref.ref[Tensor]] = []

    def pinned_zeros(numel: int, dtype: torch.dtype) -> Tensor:
        asked.append((numel, sum(each() is not None for each in living)))
        living.append(weakref.ref(memory := torch.zeros(numel, dtype=dtype)))
        return memory

    monkeypatch.setattr(bmt_kernels, "pinned_zeros", pinned_zeros)
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: True)
    snapshot = Snapshot()
    for size in (1000, 900, 3000):
        assert snapshot.room(size, is_locked=True).numel() >= size
    assert asked == [(1000, 0), (3000, 0)]
    options = Options(3, offload=True)
    assert options.new_storage(5, torch.bfloat16, torch.device("cuda")).dtype == torch.bfloat16
    assert asked[-1][0] == 10


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [bmt.optim.AdamOptimizer, bmt.optim.ScheduleFreeAdamW, torch.optim.Adam])
def test_a_run_that_has_frozen_parameters_since(ctx, tmp_path, kind):
    """A new run that freezes them before it loads gets their states, and goes on if they are trained again."""

    def made(frozen: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 7))
        model[0].requires_grad_(not frozen)
        model = bmt.BMTrainModelWrapper(model)
        return model, kind(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.linspace(-1, 1, 21).view(3, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    checkpointer = bmt.Checkpointer(tmp_path / "c")
    runs = [made(frozen=False)]
    step(*runs[0])
    runs[0][0][0].requires_grad_(False)
    step(*runs[0])
    checkpointer.save(2, model=runs[0][0], optimizer=runs[0][1])
    runs.append(made(frozen=True))
    assert checkpointer.load_latest(model=runs[1][0], optimizer=runs[1][1]) == 2
    for model, optimizer in runs:
        model[0].requires_grad_(True)
        step(model, optimizer)
    for ours, theirs in zip(*(model.parameters() for model, _ in runs), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor(), rtol=1e-6, atol=0)
