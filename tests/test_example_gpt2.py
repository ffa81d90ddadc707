"""The GPT-2 example: its model, its data, its checkpoints, and a whole run."""

import contextlib
import dataclasses
import gzip
import json
import lzma
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bmtrain as bmt
from bmt_comm import shard_of
from bmt_comm.testing import RankPool

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402
from bits import baselines, bits_per_byte, token_bytes  # noqa: E402
from checkpoint import Conditions, ModelFiles, find_checkpoint, read_config  # noqa: E402
from errors import UsageError  # noqa: E402
from flags import check_output, parse_flags  # noqa: E402
from generate import generate  # noqa: E402
from metrics import Metrics, plot  # noqa: E402
from models import GPT, PRESETS, GPTConfig  # noqa: E402
from optimizers import LEARNING_RATES  # noqa: E402
from plot import main as plot_main  # noqa: E402
from plot import plot_runs  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from train import Trainer, train  # noqa: E402

QUICK = ("adam", "muon", "adafactor")  # the optimizers of a bare nox and of CI
TINY = GPTConfig(vocab_size=67, seq_len=12, num_layers=3, num_heads=2, hidden_size=14)


# --- the model ------------------------------------------------------------------------------------


class PlainExperts(nn.Module):
    """Each expert for each position; all weights but the two highest are 0."""

    def __init__(self, hidden, experts):
        super().__init__()
        self.router = nn.Linear(hidden, experts)
        self.up = nn.Parameter(torch.empty(experts, 4 * hidden, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, 4 * hidden))

    def forward(self, x):
        scores = self.router(x).exp()
        scores = scores * (scores >= scores.sort(-1).values[..., -2:-1])
        weights = scores / scores.sum(-1, keepdim=True)
        inner = F.gelu(torch.einsum("bsh,eih->bsei", x, self.up), approximate="tanh")
        return torch.einsum("bse,bsei,ehi->bsh", weights, inner, self.down)


class PlainLayer(nn.Module):
    def __init__(self, hidden, heads, experts=0):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = nn.ModuleDict(
            {"query_key_value": nn.Linear(hidden, 3 * hidden), "out": nn.Linear(hidden, hidden)}
        )
        self.feedforward_norm = nn.LayerNorm(hidden)
        if experts:
            self.feedforward = PlainExperts(hidden, experts)
            return
        self.feedforward = nn.ModuleDict({"up": nn.Linear(hidden, 4 * hidden), "down": nn.Linear(4 * hidden, hidden)})

    def attend(self, x):
        length, size = x.shape[1], x.shape[2] // self.heads
        query, key, value = self.attention["query_key_value"](x).chunk(3, dim=-1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs = []
        for head in range(self.heads):
            part = slice(head * size, (head + 1) * size)
            scores = query[..., part] @ key[..., part].transpose(1, 2) / size**0.5
            outputs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[..., part])
        return self.attention["out"](torch.cat(outputs, -1))

    def forward(self, x):
        x = x + self.attend(self.attention_norm(x))
        if isinstance(self.feedforward, PlainExperts):
            return x + self.feedforward(self.feedforward_norm(x))
        inner = self.feedforward["up"](self.feedforward_norm(x))
        inner = 0.5 * inner * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
        return x + self.feedforward["down"](inner)


class PlainGPT(nn.Module):
    """GPT-2 in plain PyTorch, with the same names."""

    def __init__(self, config):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.seq_len, config.hidden_size)
        sizes = config.hidden_size, config.num_heads, config.num_experts
        self.layers = nn.ModuleList(PlainLayer(*sizes) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        if not config.tied:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids):
        x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x) @ (self.head if hasattr(self, "head") else self.token_embedding).weight.T


def long(value):
    return pytest.param(value, marks=pytest.mark.long)


def loss_of(model, sequences):
    return F.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_model_equals_plain_gpt(ctx, tied, use_checkpoint):
    config = dataclasses.replace(TINY, tied=tied)
    model = GPT(config, use_checkpoint)
    bmt.init_parameters(model)
    plain = PlainGPT(config).to(ctx.device)
    plain.load_state_dict(model.state_dict())
    assert sum(p.numel() for p in plain.parameters()) == config.num_parameters

    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(0, config.vocab_size, (4, config.seq_len + 1), generator=generator).to(ctx.device)
    mine = sequences.chunk(ctx.world_size)[ctx.rank]
    torch.testing.assert_close(model(mine[:, :-1]), plain(mine[:, :-1]), rtol=1e-5, atol=1e-6)

    loss_of(plain, sequences).backward()
    bmt.optim.OptimManager().backward(loss_of(model, mine))
    wanted = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        rows = param.bmt_slice
        expected = wanted[name].grad[rows.row_start : rows.row_stop]
        torch.testing.assert_close(param.grad, expected, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize(
    ("tied", "context_parallel", "experts"),
    [(True, False, 0), (False, False, 0), (True, True, 0), (True, False, 6), (True, True, 4)],
)
def test_model_on_tensor_parallel_ranks_equals_plain_gpt(ctx, tied, context_parallel, experts):
    config = dataclasses.replace(TINY, vocab_size=68, tied=tied, num_experts=experts)
    model = GPT(config, context_parallel=context_parallel)
    bmt.init_parameters(model)
    plain = PlainGPT(config).to(ctx.device)
    plain.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(0, config.vocab_size, (4, config.seq_len + 1), generator=generator).to(ctx.device)
    mine = sequences.chunk(ctx.replicas)[ctx.data_rank]
    scores = model(mine[:, :-1])
    columns = slice(ctx.tp_rank * 34, (ctx.tp_rank + 1) * 34)
    torch.testing.assert_close(scores, plain(mine[:, :-1])[..., columns], rtol=1e-5, atol=1e-6)

    loss_of(plain, sequences).backward()
    loss = bmt.loss.FusedCrossEntropy(parallel=True)(scores.flatten(0, 1), mine[:, 1:].flatten())
    bmt.optim.OptimManager().backward(loss)
    assert sum(p.numel() for p in plain.parameters()) == config.num_parameters
    wanted = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        where = param.bmt_slice
        expected = shard_of(wanted[name].grad, where)
        torch.testing.assert_close(param.grad, expected, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.ranks(1)
def test_initial_values_are_those_of_gpt2():
    config = GPTConfig(vocab_size=500, seq_len=100, num_layers=2, num_heads=2, hidden_size=128)
    model = GPT(config)
    bmt.init_parameters(model)
    for name, value in model.state_dict().items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            std = 0.02
            if name == "position_embedding.weight":
                std = 0.01
            elif name.endswith(("out.weight", "down.weight")):
                std = 0.02 / 4**0.5
            assert value.std().item() == pytest.approx(std, rel=0.05), name


@pytest.mark.ranks(1)
def test_dropout_is_for_training_only(ctx):
    model = GPT(dataclasses.replace(TINY, dropout=0.5))
    bmt.init_parameters(model)
    ids = torch.arange(12, device=ctx.device)[None]
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("preset", "millions"), [("gpt2", 124), ("gpt2-medium", 355), ("gpt2-large", 774), ("gpt2-xl", 1558)]
)
def test_presets_have_the_published_sizes(preset, millions):
    assert round(PRESETS[preset].num_parameters / 1e6) == millions


# --- the data -------------------------------------------------------------------------------------


def documents_of(folder, texts):
    paths = [folder / f"{i}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts):
        path.write_bytes(text)
    return paths


def test_held_out_files_are_whole_and_the_rest_is_trained_on(tmp_path):
    documents = data.list_documents(documents_of(tmp_path, [b"%d" % i * 100 for i in range(10)]), 0)
    train, held_out = data.split(documents, 0.25)
    assert [document.text()[0] for document in train] == list("01234567")
    assert [document.text()[0] for document in held_out] == list("89")
    assert all(len(document.text()) == 100 for document in train + held_out)


def test_of_a_last_file_that_is_too_large_the_end_is_held_out(tmp_path):
    documents = data.list_documents(documents_of(tmp_path, [b"a" * 10, b"b" * 60 + b"c" * 30]), 0)
    train, held_out = data.split(documents, 0.3)
    assert [document.text() for document in train] == ["a" * 10, "b" * 60]
    assert [document.text() for document in held_out] == ["c" * 30]


def test_copies_and_files_that_hold_no_text_are_left_out(tmp_path):
    paths = documents_of(tmp_path, [b"one", b"two", b"one", b"\0\1", b"three", b"two"])
    assert [document.text() for document in data.list_documents(paths, 0)] == ["one", "two", "three"]
    assert [document.text() for document in data.list_documents(paths, 13)] == ["one", "two", "th"]


def test_sequences_share_no_token_and_cover_all():
    sequences = data.Sequences(np.arange(1003, dtype=np.uint16), seq_len=9)
    assert torch.cat([sequences[i] for i in range(len(sequences))]).tolist() == list(range(1000))


def test_too_little_data_is_an_error():
    with pytest.raises(UsageError, match="9 tokens are too few for --seq-len 9, which needs 10 to train on"):
        data.Sequences(np.zeros(9, np.uint16), 9)


def first_tokens(batches, steps):
    """Which sequences the next batches hold: (steps, batch_size)."""
    return torch.stack([batches.next()[:, 0] // 5 for _ in range(steps)])


def make_batches(rank=0, world_size=1, batch_size=2, seed=0):
    sequences = data.Sequences(np.arange(120, dtype=np.uint16), seq_len=4)  # 24 of them
    return data.Batches(sequences, batch_size, seed, rank, world_size)


def test_an_epoch_sees_each_sequence_once_whatever_the_number_of_ranks():
    orders = []
    for world_size, batch_size in ((1, 6), (2, 3), (3, 2)):
        parts = [first_tokens(make_batches(rank, world_size, batch_size), 8) for rank in range(world_size)]
        orders.append(torch.stack(parts, 1).flatten().tolist())  # steps, then ranks, then places in the batch
    assert orders[0] == orders[1] == orders[2]
    first, second = orders[0][:24], orders[0][24:]
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_order_depends_on_the_seed():
    assert not torch.equal(first_tokens(make_batches(seed=0), 12), first_tokens(make_batches(seed=1), 12))


def test_batches_go_on_from_a_position():
    whole = make_batches(rank=1, world_size=2)
    first_tokens(whole, 5)
    resumed = make_batches(rank=1, world_size=2)
    resumed.position = whole.position
    assert torch.equal(first_tokens(resumed, 10), first_tokens(whole, 10))


@pytest.mark.ranks(2)
def test_corpus_is_built_once_and_encodes_all_text(tmp_path):
    folder = tmp_path / "text"
    if bmt.rank() == 0:
        folder.mkdir()
        for i in range(4):
            (folder / f"{i}.txt").write_text(f"text number {i}: größer, 数\n" * 20)
        (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    bmt.synchronize()
    corpus = data.load_corpus(folder, 0, 0.25, 300, tmp_path / "cache")
    train, held_out = (
        corpus.tokenizer.decode(ids.tolist(), skip_special_tokens=False).split(data.END_OF_TEXT)
        for ids in (corpus.train, corpus.held_out)
    )
    assert len(held_out) == 2  # one text, and nothing after its end
    assert sorted(train + held_out) == ["", "", *(f"text number {i}: größer, 数\n" * 20 for i in range(4))]
    bmt.synchronize()
    built = [path.name for path in (tmp_path / "cache").iterdir()]
    assert built == [corpus.key]
    stamp = (tmp_path / "cache" / corpus.key / "train.bin").stat().st_mtime_ns
    assert data.load_corpus(folder, 0, 0.25, 300, tmp_path / "cache").key == corpus.key
    wanted, encoded = corpus.train.tolist(), tmp_path / "cache" / corpus.key / "train.bin"
    bmt.synchronize()
    if bmt.rank() == 0:  # made anew if it is damaged
        encoded.write_bytes(encoded.read_bytes()[:100])
    bmt.synchronize()
    assert data.load_corpus(folder, 0, 0.25, 300, tmp_path / "cache").train.tolist() == wanted
    bmt.synchronize()
    stamp = encoded.stat().st_mtime_ns
    assert data.load_corpus(folder, 0, 0.25, 301, tmp_path / "cache").key != corpus.key
    assert data.load_corpus(folder, 0, 0.5, 300, tmp_path / "cache").key != corpus.key
    assert (tmp_path / "cache" / corpus.key / "train.bin").stat().st_mtime_ns == stamp


@pytest.mark.ranks(2)
def test_bad_data_is_an_error_on_every_rank(ctx, tmp_path):
    with pytest.raises(UsageError, match="holds no files"):
        data.load_corpus(tmp_path, 0, 0.1, 300, tmp_path / "cache")
    with pytest.raises(UsageError, match="there is no such file or folder"):
        data.load_corpus(tmp_path / "nothing", 0, 0.1, 300, tmp_path / "cache")
    folder = tmp_path / f"binary-{ctx.rank}"  # one rank would read what another is writing
    ctx.world.barrier()
    folder.mkdir()
    (folder / "text.txt").write_text("no UTF-8", encoding="utf-16")
    with pytest.raises(UsageError, match="no file there is text in UTF-8"):
        data.load_corpus(folder, 0, 0.1, 300, tmp_path / "cache")
    (folder / "text.txt").write_bytes(bytes(10000))
    with pytest.raises(UsageError, match="no file there is text in UTF-8"):
        data.load_corpus(folder, 0, 0.1, 300, tmp_path / "cache")


# --- bits per byte --------------------------------------------------------------------------------


TEXT = "".join(f"def größer_{i}(数):\n    return {i} + 数\n\n" for i in range(200))


@pytest.fixture(params=[257, 300, 500])
def tokenizer(request) -> Tokenizer:
    return data.train_tokenizer(iter([TEXT]), request.param)


def test_tokens_stand_for_all_bytes_of_the_text(tokenizer):
    ids = tokenizer.encode(TEXT).ids
    lengths = token_bytes(tokenizer)
    assert lengths.shape == (tokenizer.get_vocab_size(),)
    assert lengths[ids].sum() == len(TEXT.encode())
    assert lengths[tokenizer.token_to_id(data.END_OF_TEXT)] == 0


def test_bits_per_byte_do_not_depend_on_the_vocabulary(tokenizer):
    lengths = token_bytes(tokenizer)[tokenizer.encode(TEXT).ids]
    nats = lengths * math.log(256)  # of a model to which all bytes are equally likely
    assert bits_per_byte(nats.mean().item(), len(lengths), int(lengths.sum())) == pytest.approx(8)


def test_baselines_are_those_of_the_text(tokenizer):
    cut = len(TEXT) * 3 // 4
    train, held_out = (tokenizer.encode(text).ids for text in (TEXT[:cut], TEXT[cut:]))
    end = tokenizer.token_to_id(data.END_OF_TEXT)
    found = baselines(np.array(train), np.array([*held_out, end]), tokenizer)
    text = TEXT[cut:].encode()
    assert found["gzip"] == 8 * len(gzip.compress(text)) / len(text)
    assert found["xz"] == 8 * len(lzma.compress(text, preset=9)) / len(text)
    total = len(train) + tokenizer.get_vocab_size()
    bits = -sum(math.log2((train.count(token) + 1) / total) for token in [*held_out, end])
    assert found["unigram"] == pytest.approx(bits / len(text))


@pytest.mark.ranks(1, 2, init=False, timeout=120)
def test_a_run_measures_the_bits_of_the_bytes_that_it_predicts(single):
    folder, _ = single
    os.chdir(folder)
    bmt.init_distributed(device="cpu")
    trainer = Trainer(parse_flags([*FLAGS, *SHORT, "--batch-size", "4"]))
    ids, size = trainer.corpus.held_out.astype(int), 33
    sequences = torch.tensor(ids[: len(ids) // size * size]).view(-1, size)
    nats = num_bytes = 0.0
    for sequence in sequences:
        nats += trainer.loss(sequence[None]).item() * 32
        num_bytes += sum(len(trainer.corpus.tokenizer.decode([token])) for token in sequence[1:].tolist())
    assert trainer.evaluate()["eval_bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    bmt.shutdown()


# --- checkpoints, samples, records ----------------------------------------------------------------


@pytest.mark.ranks(2)
def test_checkpoint_of_another_model_or_data_is_refused(tmp_path):
    tokenizer = data.train_tokenizer(iter(["a b"]), 257)

    def build(config):
        model = GPT(config)
        bmt.init_parameters(model)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
        return model, manager

    def conditions(config=TINY, key="key", seed=0):
        return Conditions(config, manager, key, seed)

    model, manager = build(TINY)
    checkpointer = bmt.Checkpointer(tmp_path / "checkpoints", keep=2)
    files = ModelFiles(TINY, tokenizer)
    for step in (1, 2, 3):
        checkpointer.save(step, model=model, manager=manager, data=make_batches(), conditions=conditions(), files=files)
    checkpointer.wait()
    folder = find_checkpoint(tmp_path)
    assert [path.name for path in sorted(folder.parent.glob("step-*"))] == ["step-00000002", "step-00000003"]
    assert read_config(folder) == TINY
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == tokenizer.get_vocab_size()
    assert checkpointer.load_latest(model=model, manager=manager, data=make_batches(), conditions=conditions()) == 3
    smaller, its_manager = build(dataclasses.replace(TINY, num_layers=2))
    with pytest.raises(ValueError, match=r"has 'layers.2"):
        checkpointer.load_latest(model=smaller, manager=its_manager)
    for other, message in (
        (conditions(config=dataclasses.replace(TINY, num_heads=7)), "different model: num_heads 2 there and 7 here"),
        (conditions(key="other"), "other data"),
        (conditions(seed=3), "with --seed 0"),
    ):
        with pytest.raises(UsageError, match=message):
            checkpointer.load_latest(model=model, conditions=other)
    with pytest.raises(UsageError, match="holds no checkpoint"):
        find_checkpoint(tmp_path / "checkpoints" / "nothing")


@pytest.mark.ranks(2)
def test_all_ranks_write_the_same_sample():
    tokenizer: Tokenizer = data.train_tokenizer(iter(["a b c " * 9]), 260)
    model = GPT(dataclasses.replace(TINY, vocab_size=300))
    bmt.init_parameters(model)
    texts = bmt.store.allgather_objects(generate(model, tokenizer, "a b", num_tokens=20, seed=3))
    assert texts[0] == texts[1]
    assert texts[0].startswith("a b")
    assert model.training
    greedy = [generate(model, tokenizer, "", 5, top_k=1, seed=seed) for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    model.final_norm.weight.to_local().fill_(math.nan)
    with pytest.raises(UsageError, match="its scores are not finite"):
        generate(model, tokenizer, "a b")


def evaluation(step, loss):
    return {"step": step, "eval_loss": loss, "eval_bits_per_byte": loss / 2}


@pytest.mark.ranks(1)
def test_records_of_steps_that_are_taken_again_are_replaced(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(evaluation(step, 1.0)) + "\n" for step in (0, 5, 10)))
    metrics = Metrics(path, step=5, steps=20)
    metrics.write(evaluation(10, 0.5))
    metrics.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["step"], record["eval_loss"]) for record in records] == [(0, 1.0), (5, 1.0), (10, 0.5)]
    path.write_text(path.read_text() + '{"step": 12, "lo')  # the power failed
    metrics = Metrics(path, step=10, steps=20)
    shutil.rmtree(folder)
    metrics.write(evaluation(15, 0.25))
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 5, 10, 15]
    plot(records, tmp_path / "loss.png")
    plot_runs({"one": records, "none": []}, tmp_path / "losses.png")
    for name in ("loss.png", "losses.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("records", [[], [{"step": 1, "loss": 2.0}], [{"step": 0, "eval_loss": 3.0}]])
def test_the_picture_of_a_run_that_has_only_some_losses(tmp_path, records):
    plot_runs({"run": records}, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_in_an_unknown_format_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "run"), "--out", str(tmp_path / "losses.foo")])
    with pytest.raises(SystemExit):
        plot_main()
    assert "losses.foo: Format 'foo' is not supported" in capsys.readouterr().err


def test_the_picture_leaves_out_a_line_that_was_cut(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 2.0}\n{"step": 2, "lo')
    picture = tmp_path / "losses.png"
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "run"), "--out", str(picture)])
    assert plot_main() == 0
    assert picture.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--lr", "nan"], "--lr nan must be finite"),
        (["--clip", "nan"], "--clip nan must be finite"),
        (["--epochs", "inf"], "--epochs inf must be finite"),
        (["--weight-decay", "-1"], "--weight-decay -1.0 must not be negative"),
        (["--loss-scale", "0"], "--loss-scale 0.0 must be at least 1"),
        (["--timeout", "0"], "--timeout 0.0 must be above 0"),
        (["--seed", str(2**70)], f"--seed {2**70} must be below 2**63"),
        (["--vocab-size", str(10**12)], f"--vocab-size {10**12} must be between 257"),
        (["--batch-size", "4", "--step-size", "6"], "--step-size 6 is no multiple of the 4 sequences"),
        (["--vocab-size", "256"], "--vocab-size 256 must be between 257"),
        (["--hidden", "30"], "hidden_size=30 is no multiple of num_heads=4"),
        (["--heads", "8", "--tp", "3"], "--heads 8 is no multiple of --tp 3"),
        (["--optimizer", "galore", "--galore-rank", "0"], "--galore-rank 0 must be at least 1"),
        (["--held-out", "1"], "--held-out 1.0 must be between 0 and 1"),
        (["--resume", "--overwrite"], "choose one"),
        (["--pipe", "2", "--tp", "2"], "--pipe 2 × --tp 2 = 4 does not divide the number of ranks, 1"),
        (["--tp", "2", "--step-size", "8"], "--pipe 1 × --tp 2 = 2 does not divide the number of ranks, 1"),
        (["--interleave", "2"], "--interleave 2 is for pipelines; pass --pipe"),
        (["--pipe", "2", "--interleave", "4"], "--layers 2 are too few for --pipe 2 × --interleave 4, which need 8"),
        (
            ["--pipe", "2", "--interleave", "2", "--pipe-schedule", "zero_bubble_h1"],
            "zero_bubble_h1 has one part of the layers",
        ),
        (["--pipe", "2", "--pipe-schedule", "zero_bubble_v"], "zero_bubble_v needs --interleave 2, and it is 1"),
        (["--pipe", "2", "--micro-batches", "3"], "--micro-batches 3 is no multiple of --pipe 2"),
        (["--pipe", "2", "--micro-batches", "16"], "more than the 8 sequences that --pipe 2 stages with"),
        (["--deterministic", "--pipe", "2"], "--deterministic is not for pipelines"),
        (
            ["--deterministic", "--optimizer", "lamb"],
            "--deterministic takes --optimizer muon, adam, adam_offload, and not",
        ),
        (["--roll-back"], "pass --snapshot-every, too"),
        (["--compress", "int8", "--zero-level", "0"], "choose --zero-level 1, 2 or 3"),
        (["--compress", "int8", "--deterministic"], "leave --deterministic out"),
        (["--experts", "1"], "num_experts=1 must be at least 2"),
        (["--experts", "6", "--tp", "4"], "--experts 6 is no multiple of --tp 4"),
        (["--clip", "0"], "--clip 0 would make all gradients 0"),
        (["--temperature", "1e-40"], "--temperature 1e-40 must be at least 1e-06; for no chance at all use --top-k 1"),
    ],
)
def test_bad_flags_are_errors(argv, message, capsys):
    with pytest.raises(SystemExit):
        parse_flags(argv)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error(capsys):
    with pytest.raises(SystemExit):
        parse_flags(["--device", "cuda"])
    assert "PyTorch finds no GPU here" in capsys.readouterr().err


# --- a whole run ----------------------------------------------------------------------------------


FLAGS = [
    *("--data", "text", "--vocab-size", "300", "--layers", "2", "--hidden", "32", "--heads", "2", "--seq-len", "32"),
    *("--optimizer", "adam", "--lr", "1e-2", "--warmup", "4", "--batch-size", "4", "--dropout", "0.1"),
    *("--steps", "24", "--save-interval", "16"),
    *("--accumulation", "2", "--log-interval", "1", "--eval-interval", "8", "--sample-tokens", "8", "--device", "cpu"),
]


def run_training(folder, *flags, ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(EXAMPLE / "train.py"), *FLAGS, *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=env, timeout=120, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def losses(folder, run="gpt2"):
    """(step, loss) of every record of a run in ``folder``."""
    records = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record.get("loss", record.get("eval_loss"))) for record in records]


def write_text(folder):
    (folder / "text").mkdir()
    for i in range(10):
        (folder / "text" / f"{i}.txt").write_text("".join(f"line {j} of file {i}\n" for j in range(200)))


def test_training_learns_and_resumes_exactly(tmp_path):
    write_text(tmp_path)
    code, output = run_training(tmp_path)
    assert code == 0, output
    out = tmp_path / "runs" / "gpt2"
    names = {path.name for path in out.iterdir()}
    assert names == {"checkpoints", "metrics.jsonl", "loss.png", "sample.txt"}
    assert (out / "sample.txt").read_text().startswith("class Reader")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert records[0].keys() == {"step", "eval_loss", "eval_bits_per_byte", "baselines"}
    assert records[0]["baselines"].keys() == {"unigram", "gzip", "xz"}
    keys = {"step", "loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_second", "memory"}
    assert records[1].keys() == keys
    assert records[-1].keys() == {"step", "eval_loss", "eval_bits_per_byte"}
    assert "bits/byte" in output
    assert "gzip" in output
    uninterrupted = losses(tmp_path)
    assert uninterrupted[0][1] == pytest.approx(np.log(300), abs=0.1)
    assert uninterrupted[-1][1] < 4

    # As if the run had been cut short after its first checkpoint.
    shutil.rmtree(out / "checkpoints" / "step-00000024")
    code, output = run_training(tmp_path, "--resume")
    assert code == 0, output
    assert "step 17/24" in output
    assert "step 16/24" not in output
    assert losses(tmp_path) == uninterrupted


@pytest.mark.long
def test_deterministic_runs_are_the_same_on_any_number_of_ranks(tmp_path):
    write_text(tmp_path)
    flags = ["--deterministic", "--step-size", "8", "--batch-size", "2", "--steps", "6", "--sample-tokens", "0"]
    for ranks in (1, 2):
        code, output = run_training(tmp_path, *flags, "--optimizer", "muon", "--out", f"runs/{ranks}", ranks=ranks)
        assert code == 0, output
    one, two = ([each for each in losses(tmp_path, run) if each[0] not in (0, 6)] for run in ("1", "2"))
    assert one == two
    weights = [next((tmp_path / "runs" / run).glob("checkpoints/*6/model-*.safetensors")) for run in ("1", "2")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("saving", "kills"),
    [
        (["--save-interval", "4"], [10, 30]),
        (["--save-interval", "0", "--snapshot-every", "1"], [10]),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, saving, kills):
    """First one rank is killed, and torchrun starts all again; then all are, and the same command is given again."""
    write_text(tmp_path)
    flags = ["--steps", "60", *saving, "--sample-tokens", "0"]
    expected, kills = ([-signal.SIGKILL, 0] if 30 in kills else [0]), list(kills)
    code, output = run_training(tmp_path, *flags, "--out", "runs/whole")
    assert code == 0, output
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1"]
    command += [str(EXAMPLE / "train.py"), *FLAGS, *flags, "--resume"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    output, codes = "", []
    for _ in expected:
        with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            killer = threading.Timer(150, lambda process=process, children=children: kill_all(process, children))
            killer.start()
            for line in process.stdout:
                output += line
                step = re.match(r"step (\d+)/60 ", line)
                if step is None or not kills or int(step[1]) < kills[0]:
                    continue
                if kills.pop(0) == 10:
                    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
                else:
                    kill_all(process, children)
            codes.append(process.wait())
            killer.cancel()
    assert codes == expected, output
    assert output.count("Building the model") == 1 + len(expected)
    if expected == [0]:
        assert "step 0/60" not in output.partition("Building the model")[2].partition("Building the model")[2]
    assert losses(tmp_path) == losses(tmp_path, "whole")


def kill_all(process, children):
    """A launcher and the ranks that it has started."""
    ranks = [int(pid) for pid in children.read_text().split()]
    process.kill()  # before it sees that ranks have died
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)


@pytest.mark.long  # CI sends a signal to one of two ranks: test_signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_leaves_at_any_moment(tmp_path, number):
    write_text(tmp_path)
    flags = ["--steps", "1000000", "--save-interval", "0", "--eval-interval", "3", "--schedule", "constant"]
    command = [sys.executable, "-u", str(EXAMPLE / "train.py"), *FLAGS, *flags, "--resume"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    steps = []
    for _ in range(2):  # the same command starts, and goes on
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=tmp_path, env=env, **pipes) as process:
            killer = threading.Timer(100, process.kill)
            killer.start()
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step ") and not line.startswith("step 0/"):
                    process.send_signal(number)
                    break
            rest = process.stdout.read()
            assert process.wait() == 0, "".join(lines) + rest
            killer.cancel()
        assert "Interrupted and saved after step" in rest
        checkpoints = sorted((tmp_path / "runs" / "gpt2" / "checkpoints").glob("step-*"))
        steps.append(int(checkpoints[-1].name.removeprefix("step-")))
    assert 0 < steps[0] < steps[1]
    records = [step for step, _ in losses(tmp_path)]
    assert records == sorted(records)
    assert records[-1] == steps[1]


@pytest.mark.long
def test_overwrite_leaves_a_run_alone_that_is_under_way(tmp_path):
    write_text(tmp_path)
    steps = ["--steps", "1000000", "--save-interval", "2", "--eval-interval", "0", "--schedule", "constant"]
    command = [sys.executable, "-u", str(EXAMPLE / "train.py"), *FLAGS, *steps]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = tmp_path / "runs" / "gpt2"
    with (
        open(tmp_path / "output", "w") as output,
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        killer = threading.Timer(100, process.kill)
        killer.start()
        try:
            while not list(out.glob("checkpoints/step-*")):
                assert process.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGSTOP)
            files = {path: path.stat().st_ino for path in out.rglob("*")}
            code, refused = run_training(tmp_path, "--overwrite", ranks=1)
            assert code != 0
            assert "another run writes checkpoints to" in refused
            assert {path: path.stat().st_ino for path in out.rglob("*")} == files
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0, (tmp_path / "output").read_text()
        finally:
            process.kill()
            killer.cancel()
    # When it has ended, its files go.
    left = set(out.glob("checkpoints/step-*"))
    assert left
    code, output = run_training(tmp_path, "--overwrite", "--steps", "1", ranks=1)
    assert code == 0, output
    assert [path.name for path in out.glob("checkpoints/step-*")] == ["step-00000001"]
    assert [step for step, _ in losses(tmp_path)] == [0, 1, 1]  # the second 1 is the evaluation


SHORT = ["--dropout", "0", "--steps", "8", "--lr", "3e-3", "--save-interval", "4"]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A folder with text and ``runs/single``, which one process took; and that run's losses."""
    folder = tmp_path_factory.mktemp("single")
    write_text(folder)
    code, output = run_training(folder, *SHORT, "--batch-size", "4", "--out", "runs/single", ranks=1)
    assert code == 0, output
    found = losses(folder, "single")
    assert found[-1][1] < found[0][1] - 0.3
    return folder, found


def assert_same_losses(found, expected, tolerance=1e-5):
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, loss), (_, wanted) in zip(found, expected):
        assert loss == pytest.approx(wanted, rel=tolerance)


def run_here(folder, run, *flags):
    """The same on the ranks of a test."""
    os.chdir(folder)
    train(parse_flags([*FLAGS, *SHORT, "--out", f"runs/{run}", *flags]))
    bmt.shutdown()


@pytest.mark.ranks(2, init=False, timeout=120)
@pytest.mark.parametrize("always", [False, True])
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(single, tmp_path, always):
    folder, _ = single
    whole = Trainer.loss

    def loss(trainer, sequences):
        bad = trainer.model.training and bmt.rank() == 1 and (always or trainer.step == 3)
        return whole(trainer, sequences) * (math.nan if bad else 1)

    Trainer.loss = loss
    try:
        flags = ["--steps", "30" if always else "8", "--out", str(tmp_path / "run"), "--batch-size", "2"]
        flags += [] if always else ["--snapshot-every", "1", "--roll-back"]
        if always:
            with pytest.raises(UsageError, match="20 steps in a row had gradients that are not finite, up to step 20"):
                run_here(folder, "", *flags)
            return
        run_here(folder, "", *flags)
    finally:
        Trainer.loss = whole
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (skipped,) = [json.loads(line) for line in lines if "skipped" in line]
    assert skipped["step"] == 4
    assert len(set(skipped["skipped"])) == 8
    assert skipped["bad"] == skipped["skipped"][4:]
    assert all(math.isfinite(loss) for _, loss in losses(tmp_path.parent, tmp_path / "run") if loss is not None)


@pytest.mark.ranks(2, init=False, timeout=120)
def test_weights_go_back_to_the_snapshot_and_the_run_goes_on(single, tmp_path):
    folder, _ = single
    whole_loss, whole_step = Trainer.loss, Trainer.train_step
    before = []  # each step: its number, the weights, the learning rate, and the position in the data

    def loss(trainer, sequences):
        bad = trainer.model.training and bmt.rank() == 1 and trainer.step == 4
        return whole_loss(trainer, sequences) * (math.nan if bad else 1)

    def train_step(trainer):
        weights = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
        before.append((trainer.step, weights, trainer.optimizers[0].param_groups[0]["lr"], trainer.batches.first))
        return whole_step(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "loss", loss)
        patch.setattr(Trainer, "train_step", train_step)
        flags = ["--out", str(tmp_path / "run"), "--batch-size", "2", "--snapshot-every", "3", "--roll-back"]
        run_here(folder, "", *flags)
    steps, weights, rates, positions = zip(*before)
    assert steps == tuple(range(8))
    assert torch.equal(weights[5], weights[3])  # after step 3 there was a snapshot, and step 5 was bad
    assert not torch.equal(weights[4], weights[3])
    assert rates[3] != rates[4] == rates[5] != rates[6]
    assert len(set(positions)) == 8


@pytest.mark.ranks(2, init=False, timeout=120)
def test_a_learning_rate_that_is_far_too_large_is_an_error_and_finite_weights_are_kept(single, tmp_path):
    folder, _ = single
    flags = ["--lr", "1e30", "--warmup", "0", "--steps", "40", "--keep", "1", "--out", str(tmp_path / "run")]
    with pytest.raises(UsageError, match="steps in a row had gradients that are not finite"):
        run_here(folder, "", *flags)
    (kept,) = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1:]
    for path in kept.glob("model*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())


@pytest.mark.ranks(2, 4, init=False, timeout=120)
def test_losses_do_not_depend_on_the_tensor_parallel_size(single, tmp_path):
    folder, expected = single
    run, ranks = tmp_path.name, int(os.environ["WORLD_SIZE"])
    run_here(folder, run, "--tp", "2", "--batch-size", str(8 // ranks))
    assert_same_losses(losses(folder, run), expected)


@pytest.mark.ranks(2, init=False, timeout=120)
@pytest.mark.parametrize("optimizer", [name if name in QUICK else long(name) for name in LEARNING_RATES])
def test_every_optimizer_learns_resumes_exactly_and_does_the_same_at_any_layout(single, optimizer):
    folder, _ = single
    rate = 3e-3 if optimizer == "muon" else 3 * LEARNING_RATES[optimizer]
    flags = ["--optimizer", optimizer, "--lr", str(rate), "--galore-gap", "3"]
    run_here(folder, optimizer, *flags, "--batch-size", "2")
    expected = losses(folder, optimizer)
    assert expected[-1][1] < expected[0][1] - 0.2

    # As if the run had been cut short after its first checkpoint.
    with meeting() as rank:
        if rank == 0:
            shutil.rmtree(folder / "runs" / optimizer / "checkpoints" / "step-00000008")
    run_here(folder, optimizer, *flags, "--batch-size", "2", "--resume")
    assert losses(folder, optimizer) == expected
    other = "lamb" if optimizer == "muon" else "muon"
    with pytest.raises(UsageError, match=r"the checkpoint was saved with .*, and this run has .*; pass the same"):
        run_here(folder, optimizer, "--optimizer", other, "--batch-size", "2", "--resume")
    bmt.shutdown()

    # Muon's matrix products are in bf16, and GaLore's moments in 8 bits.
    tolerance = 1e-3 if optimizer in ("muon", "galore") else 3e-5
    run_here(folder, f"{optimizer}-tp", *flags, "--tp", "2", "--batch-size", "4")
    assert_same_losses(losses(folder, f"{optimizer}-tp"), expected, tolerance)
    run_here(folder, f"{optimizer}-pipe", *flags, "--pipe", "2", "--batch-size", "2")
    assert_same_losses(losses(folder, f"{optimizer}-pipe"), expected, tolerance)


@pytest.mark.ranks(2, init=False, timeout=120)
@pytest.mark.parametrize("schedule", [long("1f1b"), "zero_bubble_h1"])
def test_losses_do_not_depend_on_the_schedule_of_a_pipeline(single, schedule):
    folder, expected = single
    flags = ["--pipe", "2", "--micro-batches", "4", "--pipe-schedule", schedule, "--batch-size", "2"]
    run_here(folder, schedule, *flags)
    assert_same_losses(losses(folder, schedule), expected)


@pytest.mark.ranks(4, init=False, timeout=120)
@pytest.mark.parametrize(
    "flags",
    [
        ["--tp", "2", "--batch-size", "2", "--micro-batches", "4"],
        ["--tp", "2", "--batch-size", "2", "--pipe-schedule", "zero_bubble_h1", "--checkpointing"],
        ["--batch-size", "1", "--zero-level", "2"],  # and two replicas of each stage
    ],
    ids=" ".join,
)
def test_losses_do_not_depend_on_what_a_pipeline_is_combined_with(single, tmp_path, flags):
    folder, expected = single
    run = tmp_path.name
    run_here(folder, run, "--pipe", "2", *flags)
    assert_same_losses(losses(folder, run), expected)


@pytest.mark.ranks(2, init=False, timeout=120)
def test_a_pipeline_resumes_exactly_and_its_model_loads_at_other_layouts(single):
    folder, expected = single
    flags = ["--batch-size", "2", "--dropout", "0.1"]
    run_here(folder, "pipeline", "--pipe", "2", *flags)
    uninterrupted = losses(folder, "pipeline")
    last = folder / "runs" / "pipeline" / "checkpoints" / "step-00000008"

    # As if the run had been cut short after its first checkpoint.
    with meeting() as rank:
        if rank == 0:
            shutil.rmtree(last)
    run_here(folder, "pipeline", "--pipe", "2", *flags, "--resume")
    assert losses(folder, "pipeline") == uninterrupted

    # The same run at other layouts: dropout draws other numbers there, so only what was saved is compared.
    for other in (["--batch-size", "4"], ["--tp", "2", "--batch-size", "8"]):
        args = parse_flags([*FLAGS, *SHORT, "--dropout", "0.1", *other])
        bmt.init_distributed(tp_size=args.tp, device="cpu")
        trainer = Trainer(args)
        trainer.resume(bmt.Checkpointer("runs/pipeline/checkpoints", readonly=True))
        assert trainer.step == 8
        assert trainer.batches.position == 64
        assert trainer.evaluate()["eval_loss"] == pytest.approx(uninterrupted[-1][1], rel=1e-5)
        bmt.load(trainer.model, last)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(uninterrupted[-1][1], rel=1e-5)
        bmt.shutdown()
    bmt.init_distributed(pipe_size=2, num_micro_batches=2, device="cpu")
    trainer = Trainer(parse_flags([*FLAGS, *SHORT, "--pipe", "2", "--batch-size", "2"]))
    bmt.load(trainer.model, "runs/single/checkpoints/step-00000008")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected[-1][1], rel=1e-5)
    bmt.shutdown()


@pytest.mark.ranks(2, init=False, timeout=120)
def test_a_run_goes_on_at_another_layout_as_if_it_had_not_stopped(single):
    folder, _ = single
    for number, layout in enumerate((["--tp", "2", "--batch-size", "4"], ["--pipe", "2", "--batch-size", "2"])):
        run = f"moved-{number}"
        run_here(folder, run, "--batch-size", "2", "--steps", "4", "--schedule", "constant")
        run_here(folder, run, *layout, "--schedule", "constant", "--resume")
        run_here(folder, f"still-{number}", "--batch-size", "2", "--schedule", "constant")
        moved = [record for record in losses(folder, run) if record[0] > 4]
        still = [record for record in losses(folder, f"still-{number}") if record[0] > 4]
        assert_same_losses(moved, still)


@contextlib.contextmanager
def meeting():
    """The rank, within; all ranks come in and go out together."""
    bmt.init_distributed(device="cpu")
    bmt.synchronize()
    yield bmt.rank()
    bmt.synchronize()
    bmt.shutdown()


@pytest.mark.long
def test_other_numbers_of_ranks_go_on_with_the_same_samples(single):
    folder, _ = single
    flags = ["--batch-size", "1", "--step-size", "24", "--save-interval", "2", "--keep", "9", "--resume"]
    checkpoints = folder / "runs" / "elastic" / "checkpoints"
    with RankPool() as pool:
        pool.run(run_here, 1, folder, "whole", *flags, timeout=120)
        for ranks, stop in ((4, 2), (3, 4), (2, 6), (4, 8)):
            pool.run(run_here, ranks, folder, "elastic", *flags, timeout=120)
            for later in checkpoints.glob("step-*"):  # as if the run had been cut short
                if int(later.name.removeprefix("step-")) > stop:
                    shutil.rmtree(later)
    assert_same_losses(losses(folder, "elastic"), losses(folder, "whole"))


def test_a_folder_in_which_no_run_has_begun_may_be_used(tmp_path):
    args = SimpleNamespace(out=tmp_path, resume=False, overwrite=False)
    (tmp_path / "checkpoints").mkdir()  # left by a run whose data was not there
    check_output(args)
    (tmp_path / "checkpoints" / "step-00000002").mkdir()
    with pytest.raises(UsageError, match="holds an earlier run"):
        check_output(args)
