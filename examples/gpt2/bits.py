"""Bits per byte: a loss that does not depend on the vocabulary, and what simpler models reach."""

from __future__ import annotations

import gzip
import lzma
import math

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from data import END_OF_TEXT


def token_bytes(tokenizer: Tokenizer) -> Tensor:
    """How many bytes of text each token id stands for: (V,). The end of a text stands for none."""
    # A byte-level vocabulary writes every byte as one character.
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return torch.tensor([0 if token is None or token == END_OF_TEXT else len(token) for token in tokens])


def bits_per_byte(loss: float, num_tokens: float, num_bytes: float) -> float:
    """The mean ``loss``, in nats per token, of ``num_tokens`` predicted tokens that stand for ``num_bytes`` bytes."""
    return loss * num_tokens / math.log(2) / num_bytes


def baselines(train: np.ndarray, held_out: np.ndarray, tokenizer: Tokenizer) -> dict[str, float]:
    """Bits per byte of models that look at no context, or only at the held-out text itself.

    Args:
        train: token ids to train on; the first ten million are used.
        held_out: token ids to measure on.
        tokenizer: turns ids back into text.

    Returns:
        ``unigram``: tokens drawn independently, with their frequencies in ``train`` (each counted once more than it
        occurs); ``gzip`` and ``xz``: the size of the text after ``gzip -9`` and ``xz -9``.
    """
    counts = np.bincount(train[:10_000_000], minlength=tokenizer.get_vocab_size()) + 1
    nats = -np.log(counts / counts.sum())[held_out]
    num_bytes = int(token_bytes(tokenizer)[held_out.astype(np.int64)].sum())
    text = tokenizer.decode(held_out.tolist()).encode()
    return {
        "unigram": bits_per_byte(nats.mean(), len(nats), num_bytes),
        "gzip": 8 * len(gzip.compress(text, compresslevel=9)) / len(text),
        "xz": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }
