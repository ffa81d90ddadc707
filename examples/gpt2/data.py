"""Text to batches of token ids.

Files → documents → documents to train on and held-out documents → a byte-level BPE tokenizer trained on the former →
two files of ids → sequences of ``seq_len + 1`` ids (inputs and, shifted by one, targets) → batches, different on
every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

import bmtrain as bmt
from errors import UsageError

END_OF_TEXT = "<|endoftext|>"
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
# Tables and tests, and packages that some distributions of Python do not install.
SKIPPED_IN_LIBRARY = {
    *("encodings", "pydoc_data", "test", "tests", "idle_test"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
}
FORMAT = 3  # of the cache; a new number invalidates older caches


# --- documents ------------------------------------------------------------------------------------


class Document(NamedTuple):
    """The bytes from ``start`` to ``stop`` of a file."""

    path: Path
    start: int
    stop: int

    def text(self) -> str:
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start).decode("utf-8", errors="replace")


def find_files(source: Path | None, max_bytes: int) -> list[Path]:
    """The files to read, in an order that is mixed but always the same.

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
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            wanted = not name.startswith(".")
            if source is None:  # the other file differs between builds of the same version
                wanted = path.suffix == ".py" and not name.startswith("_sysconfigdata")
            if wanted and path.is_file() and path.stat().st_size > 0:
                files[path.relative_to(root).as_posix()] = path
    if not files:
        raise UsageError(f"--data {root}: the folder holds no files to learn from")
    chosen, size = [], 0
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        chosen.append(files[name])
        size += files[name].stat().st_size
        if 0 < max_bytes <= size:
            break
    return chosen


def list_documents(paths: list[Path], max_bytes: int) -> list[Document]:
    """A document for each file that holds text; a copy of an earlier file is left out.

    Without the copies, no held-out document is one that the model was trained on.
    """
    left = max_bytes or sum(path.stat().st_size for path in paths)
    documents, seen = [], set()
    for path in paths:
        with path.open("rb") as file:
            content = file.read(left)
        left -= len(content)
        digest = hashlib.sha256(content).digest()
        if content and b"\0" not in content and digest not in seen:
            seen.add(digest)
            documents.append(Document(path, 0, len(content)))
    return documents


def split(documents: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    """The documents to train on, and those that are held out: the last ones, ``share`` of all bytes at most.

    If the last document alone is larger than that, only the end of it is held out.
    """
    train = list(documents)
    left = round(share * sum(document.stop - document.start for document in documents))
    held_out: list[Document] = []
    while train and train[-1].stop - train[-1].start <= left:
        left -= train[-1].stop - train[-1].start
        held_out.insert(0, train.pop())
    if train and not held_out:
        path, start, stop = train.pop()
        train.append(Document(path, start, stop - left))
        held_out.append(Document(path, stop - left, stop))
    return train, held_out


def fingerprint(paths: list[Path], max_bytes: int, held_out: float, vocab_size: int) -> str:
    """A short name for what these files, as they are now, become."""
    digest = hashlib.sha256(f"{FORMAT} {max_bytes} {held_out} {vocab_size}".encode())
    for path in paths:
        stat = path.stat()
        digest.update(f"\n{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


# --- tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Encoded text.

    Attributes:
        key: a name for the text and how it is encoded.
        train: the ids of the documents to train on, one after the other.
        held_out: the ids of the documents that are not trained on.
        tokenizer: turns text into ids and back.
    """

    key: str
    train: np.ndarray
    held_out: np.ndarray
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


def build(documents: list[Document], held_out: float, vocab_size: int, folder: Path) -> None:
    """Write a tokenizer and the ids of all documents to ``folder``, which appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    train, rest = split(documents, held_out)
    try:
        megabytes = sum(document.stop - document.start for document in train) / 1e6
        with step(f"Training a tokenizer of {vocab_size} tokens on {megabytes:.1f} MB", seconds=megabytes / 2):
            tokenizer = train_tokenizer((document.text() for document in train), vocab_size)
        tokenizer.save(str(unfinished / "tokenizer.json"))
        with step("Encoding the text", seconds=megabytes):
            encode((document.text() for document in train), tokenizer, unfinished / "train.bin")
            encode((document.text() for document in rest), tokenizer, unfinished / "held_out.bin")
        names = {
            "train": [str(document.path) for document in train],
            "held_out": [str(document.path) for document in rest],
        }
        (unfinished / "files.json").write_text(json.dumps(names, indent=0))
        sizes = {path.name: path.stat().st_size for path in unfinished.iterdir()}
        (unfinished / "sizes.json").write_text(json.dumps(sizes))
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # if it does, another job built the same meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Whether all files that :func:`build` wrote are there in their sizes."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def step(what: str, seconds: float) -> Iterator[None]:
    """Print what is done here and the ``seconds`` that it takes, roughly and then exactly."""
    print(f"{what}, about {max(round(seconds), 1)} s ...", end=" ", flush=True)
    start = time.perf_counter()
    yield
    print(f"took {time.perf_counter() - start:.1f} s", flush=True)


def load_corpus(source: Path | None, max_bytes: int, held_out: float, vocab_size: int, cache: Path) -> Corpus:
    """Encode the data, or find it encoded in ``cache``. Rank 0 works, the others wait; all must call this.

    Raises:
        UsageError: on every rank, if there is no data.
    """
    key, problem = "", ""
    if bmt.rank() == 0:
        try:
            paths = find_files(source, max_bytes)
            key = fingerprint(paths, max_bytes, held_out, vocab_size)
            if (cache / key).exists() and not is_complete(cache / key):
                print(f"{cache / key} is damaged, and is made anew", flush=True)
                shutil.rmtree(cache / key)
            if (cache / key).exists():
                print(f"Reading {cache / key}, where an earlier run left the encoded text", flush=True)
            else:
                print(f"Reading {len(paths)} files of {source or sysconfig.get_path('stdlib')}", flush=True)
                documents = list_documents(paths, max_bytes)
                if not documents:
                    raise UsageError(
                        f"--data {source}: no file there is text in UTF-8; all are empty or have NUL bytes"
                    )
                build(documents, held_out, vocab_size, cache / key)
        except (UsageError, OSError) as error:
            problem = str(error)
    key, problem = bmt.store.broadcast_object((key, problem))
    if problem:
        raise UsageError(problem)
    folder = cache / key
    if not folder.exists():
        raise UsageError(f"--cache {cache}: rank {bmt.rank()} does not see what rank 0 wrote there; share the folder")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    train, rest = (read_ids(folder / name, tokenizer) for name in ("train.bin", "held_out.bin"))
    return Corpus(key, train, rest, tokenizer)


def read_ids(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """The ids in a file, which stay on disk until they are used. A file may be empty."""
    dtype = id_dtype(tokenizer)
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


# --- sequences and batches ------------------------------------------------------------------------


class Sequences(Dataset[Tensor]):
    """Ids cut into pieces of ``seq_len + 1``, which share nothing; what is left at the end is dropped.

    Raises:
        UsageError: there is too little data for one.
    """

    def __init__(self, ids: np.ndarray, seq_len: int):
        self.length = seq_len + 1
        if len(ids) < self.length:
            raise UsageError(
                f"{len(ids)} tokens are too few for --seq-len {seq_len}, which needs {self.length} to train on and "
                f"{self.length} held out; use more data, shorter sequences or another --held-out"
            )
        self.ids = ids[: len(ids) // self.length * self.length]

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, index: int) -> Tensor:
        piece = self.ids[index * self.length : (index + 1) * self.length]
        return torch.from_numpy(piece.astype(np.int64))


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
        self.latest: list[int] = []  # the places in the data set of this rank's last batch
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def state_dict(self) -> dict[str, int]:
        """The place in the row, which is the same for all ranks, and for any number of them."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a place."""
        self.position = state["position"]

    @property
    def first(self) -> int:
        """The place in the row where this rank's next batch begins."""
        return self.position + self.rank * self.batch_size

    def next(self) -> Tensor:
        """This rank's next batch: (batch_size, seq_len + 1)."""
        first = self.first
        self.position += self.world_size * self.batch_size
        self.latest = [self._index(p) for p in range(first, first + self.batch_size)]
        return torch.stack([self.dataset[index] for index in self.latest])

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.dataset))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset)))
        return int(self._order[1][place])
