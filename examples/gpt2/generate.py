"""Continue a text with a trained model.

python generate.py runs/gpt2 --prompt "def main("
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

import bmtrain as bmt
from data import END_OF_TEXT
from errors import UsageError
from models import GPT

LEAST_TEMPERATURE = 1e-6  # scores that are divided by it are finite


@torch.no_grad()
def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int = 100,
    top_k: int = 40,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """``prompt`` and what the model writes after it. All ranks must call this, with the same arguments.

    Args:
        model: the model; each rank holds a part of it, so all of them compute the same.
        tokenizer: turns text into ids and back.
        prompt: how the text begins; if empty, with the start of a document.
        num_tokens: how many tokens to add.
        top_k: choose among so many of the most likely tokens; 1: always the most likely one.
        temperature: below 1 prefers the likely tokens more, above 1 less.
        seed: of the choices.

    Raises:
        UsageError: scores of the model are not finite.
    """
    was_training = model.training
    model.eval()
    context = bmt.config["topology"]
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids or [tokenizer.token_to_id(END_OF_TEXT) or 0]
    for _ in range(num_tokens):
        seen = ids[-model.config.seq_len :]
        # Tensor-parallel ranks share out the sequence evenly; what comes after a position does not matter to it.
        padded = seen + [0] * (-len(seen) % context.tp_size)
        scores = model(torch.tensor([padded], device=context.device))[0, len(seen) - 1]
        scores = bmt.nn.gather_along(scores, 0)[: tokenizer.get_vocab_size()].float()
        if not scores.isfinite().all():
            raise UsageError("the model writes no text: its scores are not finite, as after a training that diverged")
        best, candidates = scores.topk(min(top_k, len(scores)))
        chosen = torch.multinomial(torch.softmax(best.cpu() / temperature, dim=0), 1, generator=generator)
        token = candidates[chosen.to(context.device)]
        context.world.broadcast(token, 0)
        ids.append(int(token))
    model.train(was_training)
    return tokenizer.decode(ids)


def load_model(folder: Path) -> tuple[GPT, Tokenizer]:
    """The model and the tokenizer of a checkpoint."""
    from checkpoint import read_config

    model = GPT(read_config(folder))
    bmt.load(model, folder)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    from checkpoint import find_checkpoint

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or the --out folder of a run: its newest one")
    parser.add_argument("--prompt", default="import", help="how the text begins (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=100, help="how many tokens to add (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=40, help="choose among so many tokens; 1: the best")
    parser.add_argument("--temperature", type=float, default=0.8, help="below 1: bet on the likely (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="of the choices (default: %(default)s)")
    args = parser.parse_args()
    if not (args.tokens >= 0 and args.top_k > 0):
        parser.error("--tokens must not be negative, and --top-k must be above 0")
    if not LEAST_TEMPERATURE <= args.temperature < math.inf:
        least = f"must be a finite number, at least {LEAST_TEMPERATURE}; for no chance at all use --top-k 1"
        parser.error(f"--temperature {args.temperature} {least}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed} must not be negative, and must be below 2**63")
    bmt.init_distributed()
    try:
        model, tokenizer = load_model(find_checkpoint(args.checkpoint))
        text = generate(model, tokenizer, args.prompt, args.tokens, args.top_k, args.temperature, args.seed)
    except UsageError as error:
        sys.exit(f"error: {error}")
    bmt.print_rank(text)


if __name__ == "__main__":
    main()
