"""Text to batches of token ids.

Files → documents → a byte-level BPE tokenizer trained on them → one long row of ids in a file → sequences of
``seq_len + 1`` ids (inputs and, shifted by one, targets) → batches, different on every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

import bmtrain as bmt
from errors import UsageError

END_OF_TEXT = "<|endoftext|>"
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
SKIPPED_IN_LIBRARY = {"test", "tests", "idle_test", "encodings", "pydoc_data"}  # much of it tables
FORMAT = 2  # of the cache; another number makes it be built anew


# --- documents ------------------------------------------------------------------------------------


def find_documents(source: Path | None, max_bytes: int) -> list[Path]:
    """The text files to learn from, in an order that is mixed but always the same.

    Args:
        source: a file, or a folder of which all files count; ``None``: Python's standard library.
        max_bytes: stop when so many bytes have been found; 0: take everything.

    Raises:
        UsageError: there is nothing.
    """
    root = Path(sysconfig.get_path("stdlib")) if source is None else source
    skipped = SKIPPED_FOLDERS | SKIPPED_IN_LIBRARY if source is None else SKIPPED_FOLDERS
    if not root.exists():
        raise UsageError(f"--data {root}: there is no such file or folder")
    if root.is_file():
        return [root]
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            wanted = path.suffix == ".py" if source is None else not name.startswith(".")
            if wanted and path.is_file() and path.stat().st_size > 0:
                found[path.relative_to(root).as_posix()] = path
    if not found:
        raise UsageError(f"--data {root}: the folder holds no files to learn from")
    chosen, size = [], 0
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        chosen.append(found[name])
        size += found[name].stat().st_size
        if 0 < max_bytes <= size:
            break
    return chosen


def read_documents(paths: list[Path], max_bytes: int) -> Iterator[str]:
    """The text of each file that holds text, of the last one only as much as ``max_bytes`` allows."""
    left = max_bytes or sum(path.stat().st_size for path in paths)
    for path in paths:
        with path.open("rb") as file:
            content = file.read(left)
        left -= len(content)
        if b"\0" not in content:
            yield content.decode("utf-8", errors="replace")


def fingerprint(paths: list[Path], max_bytes: int, vocab_size: int) -> str:
    """A short name for what these files, as they are now, become."""
    digest = hashlib.sha256(f"{FORMAT} {max_bytes} {vocab_size}".encode())
    for path in paths:
        stat = path.stat()
        digest.update(f"\n{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


# --- tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Encoded text: the ids, what turns text into ids and back, and a name for both."""

    key: str
    ids: np.ndarray
    tokenizer: Tokenizer


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909) with at most ``vocab_size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(texts: Iterator[str], tokenizer: Tokenizer, path: Path) -> None:
    """Write the ids of all texts to ``path``, each text followed by the end-of-text token."""
    dtype = id_dtype(tokenizer)
    end = tokenizer.token_to_id(END_OF_TEXT)
    with path.open("wb") as file:
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            np.array([*ids, end], dtype=dtype).tofile(file)


def id_dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """The smallest type that holds every id."""
    return np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32


def build(paths: list[Path], max_bytes: int, vocab_size: int, folder: Path) -> None:
    """Write tokenizer and ids to ``folder``, which appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        tokenizer = train_tokenizer(read_documents(paths, max_bytes), vocab_size)
        tokenizer.save(str(unfinished / "tokenizer.json"))
        encode(read_documents(paths, max_bytes), tokenizer, unfinished / "ids.bin")
        (unfinished / "files.json").write_text(json.dumps([str(path) for path in paths], indent=0))
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # if it does, another job built the same meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_corpus(source: Path | None, max_bytes: int, vocab_size: int, cache: Path) -> Corpus:
    """Encode the data, or find it encoded in ``cache``. Rank 0 works, the others wait; all must call this.

    Raises:
        UsageError: on every rank, if there is no data.
    """
    key, problem = "", ""
    if bmt.rank() == 0:
        try:
            if vocab_size <= 256:
                raise UsageError(f"--vocab-size {vocab_size}: a byte-level vocabulary has at least 257 tokens")
            paths = find_documents(source, max_bytes)
            key = fingerprint(paths, max_bytes, vocab_size)
            if not (cache / key).exists():
                print(f"Training a tokenizer on {len(paths)} files, and encoding them ...", flush=True)
                build(paths, max_bytes, vocab_size, cache / key)
        except (UsageError, OSError) as error:
            problem = str(error)
    key, problem = bmt.store.broadcast_object((key, problem))
    if problem:
        raise UsageError(problem)
    folder = cache / key
    if not folder.exists():
        raise UsageError(f"--cache {cache}: rank {bmt.rank()} does not see what rank 0 wrote there; share the folder")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.memmap(folder / "ids.bin", dtype=id_dtype(tokenizer), mode="r")
    return Corpus(key, ids, tokenizer)


# --- sequences and batches ------------------------------------------------------------------------


class Sequences(Dataset[Tensor]):
    """Ids cut into pieces of ``seq_len + 1``, which share nothing; what is left at the end is dropped."""

    def __init__(self, ids: np.ndarray, seq_len: int):
        self.length = seq_len + 1
        self.ids = ids[: len(ids) // self.length * self.length]

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, index: int) -> Tensor:
        piece = self.ids[index * self.length : (index + 1) * self.length]
        return torch.from_numpy(piece.astype(np.int64))


def split(ids: np.ndarray, seq_len: int, held_out: float) -> tuple[Sequences, Sequences]:
    """Sequences to train on, and from the end of the data a share ``held_out`` to measure on.

    Raises:
        UsageError: there is too little data.
    """
    count = len(ids) // (seq_len + 1)
    if count < 2:
        raise UsageError(
            f"the data has {len(ids)} tokens: too few for --seq-len {seq_len}, which needs {2 * (seq_len + 1)}; "
            f"use more data or shorter sequences"
        )
    count_held_out = min(max(round(count * held_out), 1), count - 1)
    cut = (count - count_held_out) * (seq_len + 1)
    return Sequences(ids[:cut], seq_len), Sequences(ids[cut:], seq_len)


class Batches:
    """An endless row of training batches, of which each rank gets its own part.

    The row of sequences is one shuffle of all of them after the other, a new one each epoch. Each step takes
    the next ``batch_size`` for each rank. So an epoch sees every sequence exactly once, all ranks take equally
    many steps, and ``position``, the number of sequences taken by all ranks together, says where to go on.
    """

    def __init__(self, dataset: Sequences, batch_size: int, seed: int, rank: int, world_size: int):
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.position = 0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def next(self) -> Tensor:
        """This rank's next batch: (batch_size, seq_len + 1)."""
        first = self.position + self.rank * self.batch_size
        self.position += self.world_size * self.batch_size
        return torch.stack([self.dataset[self._index(p)] for p in range(first, first + self.batch_size)])

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.dataset))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset)))
        return int(self._order[1][place])
