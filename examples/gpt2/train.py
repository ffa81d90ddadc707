"""Train a GPT-2 on text.

python train.py                                   one process
torchrun --nproc-per-node 2 train.py              two, which share out the model
torchrun --nproc-per-node 2 train.py --tp 2       two, which compute every layer together
torchrun --nproc-per-node 2 train.py --pipe 2     two, each of which computes half of the layers
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import signal
import sys
import time

import torch
from torch import Tensor

import bmtrain as bmt
from checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from data import Batches, Corpus, Sequences, load_corpus, split
from errors import UsageError
from flags import check_output, parse_flags
from generate import generate
from metrics import Metrics, peak_memory, plot
from models import GPT
from optimizers import make_optimizers

SCHEDULES = {
    "cosine": bmt.lr_scheduler.Cosine,
    "linear": bmt.lr_scheduler.Linear,
    "noam": bmt.lr_scheduler.Noam,
    "constant": bmt.lr_scheduler.NoDecay,
}


class Trainer:
    """Everything that a run holds, from the flags to the step it has come to."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device: torch.device = bmt.config["device"]
        self.corpus: Corpus = load_corpus(args.data, args.max_bytes, args.config.vocab_size, args.cache)
        self.train_set, self.eval_set = split(self.corpus.ids, args.config.seq_len, args.held_out)
        # Tensor-parallel ranks are one replica of the model, and see the same data. The stages of a pipeline run
        # what is outside of it each with data of its own, so they count.
        self.replicas: int = bmt.config["topology"].replicas
        self.replica: int = bmt.rank() // args.tp
        self.batches = Batches(self.train_set, args.batch_size, args.seed, self.replica, self.replicas)
        self.sequences_per_step = args.batch_size * args.accumulation * self.replicas
        self.steps: int = args.steps
        if args.epochs is not None:
            self.steps = math.ceil(args.epochs * len(self.train_set) / self.sequences_per_step)
        self.step = 0
        self.interrupted = False  # Ctrl-C was pressed; ranks agree to stop where they measure

        tail_schedule = None if args.pipe_schedule == "recompute" else args.pipe_schedule
        self.model = GPT(args.config, args.checkpointing, args.interleave, tail_schedule)
        bmt.init_parameters(self.model)
        self.optimizers = make_optimizers(self.model, args)
        schedule = SCHEDULES[args.schedule]
        self.schedulers = [schedule(optimizer, args.lr, args.warmup, self.steps) for optimizer in self.optimizers]
        self.manager = bmt.optim.OptimManager(loss_scale=args.loss_scale if args.dtype == "fp16" else None)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers):
            self.manager.add_optimizer(optimizer, scheduler)
        torch.manual_seed(args.seed + 1 + self.replica)  # every replica drops other activations

    def resume(self) -> None:
        """Go on from the newest checkpoint; the learning rate follows this run's flags."""
        schedules = [scheduler.state_dict() for scheduler in self.schedulers]
        self.step = load_checkpoint(find_checkpoint(self.args.out), self.model, self.manager, self.batches, self.corpus)
        for scheduler, schedule in zip(self.schedulers, schedules):
            scheduler.load_state_dict({**schedule, "num_iter": scheduler.num_iter})

    def save(self) -> None:
        save_checkpoint(
            self.args.out / "checkpoints",
            self.step, self.model, self.manager, self.batches, self.corpus, self.args.keep,
        )  # fmt: skip

    def loss(self, sequences: Tensor) -> Tensor:
        """The mean loss of predicting every next token: sequences (B, S + 1) to a scalar."""
        return self.model.loss(sequences[:, :-1], sequences[:, 1:])

    def train_step(self) -> tuple[Tensor, Tensor]:
        """Take one step; returns this rank's mean loss and the norm of the gradient, without waiting for them."""
        self.manager.zero_grad()
        total = torch.zeros((), device=self.device)
        for micro_batch in range(self.args.accumulation):
            is_last = micro_batch == self.args.accumulation - 1
            with contextlib.nullcontext() if is_last else bmt.no_sync(self.model):
                loss = self.loss(self.batches.next().to(self.device)) / self.args.accumulation
                self.manager.backward(loss)
            total += loss.detach()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        norm = self.manager.clip_grad_norm(groups, self.args.clip)
        self.manager.step()
        self.step += 1
        return total, norm

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss over some of the sequences that are not trained on, shared out over the ranks."""
        self.model.eval()
        count = min(self.args.eval_sequences, len(self.eval_set))
        batch_size, replicas = self.args.batch_size, self.replicas
        total = torch.zeros((), device=self.device)
        for start in range(0, count, batch_size * replicas):
            # All replicas call the model equally often; one for which nothing is left does so for nothing.
            mine = range(start + self.replica, min(start + batch_size * replicas, count), replicas)
            spread = [i * len(self.eval_set) // count for i in mine]
            total += self.loss(take(self.eval_set, spread or [0]).to(self.device)) * len(mine)
        self.model.train()
        return bmt.sum_loss(total).item() * replicas / count

    def run(self, metrics: Metrics) -> bool:
        """Take all steps that are left; or, after Ctrl-C, stop and return False."""
        args = self.args
        if self.step == 0:
            metrics.write({"step": 0, "eval_loss": self.held_out_loss()})
        clock, clock_step = time.perf_counter(), self.step
        while self.step < self.steps:
            lr = self.schedulers[0].current_lr
            loss, norm = self.train_step()
            metrics.advance()
            is_last = self.step == self.steps
            if self.step % args.log_interval == 0 or is_last:
                mean_loss, interrupted = bmt.sum_loss(torch.stack([loss, torch.full_like(loss, self.interrupted)]))
                record = {"step": self.step, "loss": mean_loss.item(), "lr": lr, "grad_norm": norm.item()}
                tokens = (self.step - clock_step) * self.sequences_per_step * args.config.seq_len
                record["tokens_per_second"] = tokens / (time.perf_counter() - clock)
                record["memory"] = peak_memory(self.device)
                metrics.write(record)
                clock, clock_step = time.perf_counter(), self.step
                if interrupted > 0 and not is_last:
                    self.save()
                    return False
            pause = time.perf_counter()
            if (args.eval_interval and self.step % args.eval_interval == 0) or is_last:
                metrics.write({"step": self.step, "eval_loss": self.held_out_loss()})
            if (args.save_interval and self.step % args.save_interval == 0) or is_last:
                self.save()
            clock += time.perf_counter() - pause
        return True

    def interrupt(self, *_: object) -> None:
        """Ask to stop: ranks that leave one by one would leave the others waiting."""
        self.interrupted = True

    def sample(self) -> str:
        """A text that the model writes."""
        args = self.args
        return generate(
            self.model, self.corpus.tokenizer, args.prompt, args.sample_tokens, args.top_k, args.temperature, args.seed
        )


def take(sequences: Sequences, indices: list[int]) -> Tensor:
    """Some sequences as a batch."""
    return torch.stack([sequences[i] for i in indices])


def prepare_output(args: argparse.Namespace) -> None:
    """Make ``--out`` an empty folder, or leave an earlier run there to go on from."""
    problem = ""
    if bmt.rank() == 0:
        try:
            check_output(args)
            if args.resume:
                find_checkpoint(args.out)
            if args.overwrite:
                shutil.rmtree(args.out / "checkpoints", ignore_errors=True)
                (args.out / "metrics.jsonl").unlink(missing_ok=True)
            args.out.mkdir(parents=True, exist_ok=True)
        except (UsageError, OSError) as error:
            problem = str(error)
    problem = bmt.store.broadcast_object(problem)
    if problem:
        raise UsageError(problem)


def train(args: argparse.Namespace) -> None:
    """The whole run."""
    bmt.init_distributed(
        seed=args.seed, pipe_size=args.pipe, num_micro_batches=args.micro_batches, tp_size=args.tp,
        zero_level=args.zero_level, device=args.device,
    )  # fmt: skip
    prepare_output(args)
    trainer = Trainer(args)
    if args.resume:
        trainer.resume()
    bmt.print_rank(
        f"{args.config.num_parameters / 1e6:.1f} million parameters, {bmt.world_size()} rank(s) on "
        f"{trainer.device.type}; {len(trainer.train_set):,} sequences to train on, {len(trainer.eval_set):,} held out",
        flush=True,
    )
    metrics = Metrics(args.out / "metrics.jsonl", trainer.step, trainer.steps)
    default = signal.signal(signal.SIGINT, trainer.interrupt)
    finished = trainer.run(metrics)
    signal.signal(signal.SIGINT, default if finished else signal.SIG_IGN)
    metrics.close()
    if not finished:
        bmt.print_rank(f"Interrupted and saved after step {trainer.step}; go on with --resume.", flush=True)
        return
    text = trainer.sample() if args.sample_tokens else ""
    if bmt.rank() == 0:
        plot(metrics.records, args.out / "loss.png")
        if text:
            (args.out / "sample.txt").write_text(text + "\n")
            print(f"--- a sample ---\n{text}\n----------------")
        print(f"Wrote metrics.jsonl, loss.png, checkpoints/{' and sample.txt' if text else ''} to {args.out}")


def main() -> None:
    args = parse_flags()
    try:
        train(args)
    except UsageError as error:
        bmt.print_rank(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
