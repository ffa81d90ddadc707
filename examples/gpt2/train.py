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
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import bmtrain as bmt
from bits import baselines, bits_per_byte, token_bytes
from checkpoint import Conditions, ModelFiles
from data import Batches, Corpus, Sequences, load_corpus
from errors import UsageError
from flags import check_output, parse_flags
from generate import generate
from interruption import Interruption, note_signals
from metrics import Metrics, peak_memory, plot
from models import GPT
from optimizers import make_optimizers

SCHEDULES: dict[str, Callable[..., bmt.lr_scheduler.WarmupLRScheduler]] = {
    "cosine": bmt.lr_scheduler.Cosine,
    "linear": bmt.lr_scheduler.Linear,
    "noam": bmt.lr_scheduler.Noam,
    "constant": bmt.lr_scheduler.NoDecay,
}

MAX_SKIPPED = 20  # steps in a row
MEMORY = "/dev/shm"  # where Linux has a file system in memory


class Trainer:
    """Everything that a run holds, from the flags to the step it has come to."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device: torch.device = bmt.config["device"]
        self.corpus: Corpus = load_corpus(args.data, args.max_bytes, args.held_out, args.config.vocab_size, args.cache)
        self.token_bytes = token_bytes(self.corpus.tokenizer)
        self.train_set = Sequences(self.corpus.train, args.config.seq_len)
        held_out = Sequences(self.corpus.held_out, args.config.seq_len)
        count = min(args.eval_sequences, len(held_out))
        self.eval_set = torch.stack([held_out[i * len(held_out) // count] for i in range(count)])
        # Tensor-parallel ranks are one replica of the model, and see the same data. The stages of a pipeline run
        # what is outside of it each with data of its own, so they count.
        topology = bmt.config["topology"]
        self.replicas: int = topology.replicas
        self.replica: int = topology.replica_rank
        self.batches = Batches(self.train_set, args.batch_size, args.seed, self.replica, self.replicas)
        self.sequences_per_step = args.batch_size * args.accumulation * self.replicas
        self.steps: int = args.steps
        if args.epochs is not None:
            self.steps = math.ceil(args.epochs * len(self.train_set) / self.sequences_per_step)
        self.step = 0
        self.sequences: list[int] = []  # which ones of the training set the last step has taken, on this replica
        self.interruption = Interruption()
        self.snapshots = bmt.MemorySnapshots(MEMORY) if args.snapshot_every else None

        bmt.print_rank("Building the model and its optimizer, a few seconds ...", flush=True)
        tail_schedule = None if args.pipe_schedule == "recompute" else args.pipe_schedule
        self.model = GPT(
            args.config,
            args.checkpointing,
            args.interleave,
            tail_schedule,
            args.context_parallel,
            args.float8,
            args.compress,
        )
        bmt.init_parameters(self.model)
        self.optimizers = make_optimizers(self.model, args)
        schedule = SCHEDULES[args.schedule]
        self.schedulers = [schedule(optimizer, args.lr, args.warmup, self.steps) for optimizer in self.optimizers]
        loss_scale = args.loss_scale if args.dtype == "fp16" else None
        self.manager = bmt.optim.OptimManager(loss_scale, skip_non_finite=True)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers):
            self.manager.add_optimizer(optimizer, scheduler)
        torch.manual_seed(args.seed + 1 + self.replica)  # every replica drops other activations

    @property
    def saved_objects(self) -> dict[str, Any]:
        """Everything that is saved and loaded."""
        conditions = Conditions(self.args.config, self.manager, self.corpus.key, self.args.seed)
        return {"model": self.model, "manager": self.manager, "data": self.batches, "conditions": conditions}

    def resume(self, checkpointer: bmt.Checkpointer) -> None:
        """Go on from the newest snapshot or checkpoint, if there is one; the learning rate follows this run's flags.

        A checkpoint may be of another number of ranks, and of other flags for how they share the work.

        Raises:
            UsageError: the checkpoint is of another model, another optimizer or other data, or cannot be read.
        """
        schedules = [scheduler.state_dict() for scheduler in self.schedulers]
        try:
            step = None if self.snapshots is None else self.snapshots.restore(**self.saved_objects)
            if step is None:
                saved = self.saved_objects
                checkpointer.load_latest(conditions=saved["conditions"])  # which flags differ, before what states do
                step = checkpointer.load_latest(**saved)
            self.step = step
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"cannot go on: {error}") from error
        if self.step > 0:
            for scheduler, schedule in zip(self.schedulers, schedules):
                scheduler.load_state_dict({**schedule, "num_iter": scheduler.num_iter})

    def save(self, checkpointer: bmt.Checkpointer) -> None:
        """Save in the background."""
        files = ModelFiles(self.args.config, self.corpus.tokenizer)
        checkpointer.save(self.step, **self.saved_objects, files=files)

    def loss(self, sequences: Tensor) -> Tensor:
        """The mean loss of predicting every next token: sequences (B, S + 1) to a scalar."""
        return self.model.loss(sequences[:, :-1], sequences[:, 1:])

    def count_bytes(self, sequences: Tensor) -> int:
        """The length of the text that is predicted in sequences (B, S + 1)."""
        return int(self.token_bytes[sequences[:, 1:]].sum())

    def train_step(self) -> tuple[Tensor, int, Tensor, bool | None]:
        """Take one step; or skip it, if a gradient on any rank is not finite.

        Returns:
            The losses of this rank's micro-batches, the bytes that it predicted, the norm of the gradient, and whether
            the step was taken.
        """
        self.manager.zero_grad()
        self.sequences = []
        losses, num_bytes = [], 0
        for micro_batch in range(self.args.accumulation):
            is_last = micro_batch == self.args.accumulation - 1
            with contextlib.nullcontext() if is_last else bmt.no_sync(self.model):
                if self.args.deterministic:  # what is dropped depends on the sequences, not on the rank
                    torch.manual_seed(self.args.seed + self.batches.first)
                sequences = self.batches.next()
                self.sequences += self.batches.latest
                loss = self.loss(sequences.to(self.device))
                self.manager.backward(loss / self.args.accumulation)
            losses.append(loss.detach())
            num_bytes += self.count_bytes(sequences)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        norm = self.manager.clip_grad_norm(groups, self.args.clip)
        taken = self.manager.step()
        self.step += 1
        return torch.stack(losses), num_bytes, norm, taken

    def roll_back(self) -> None:
        """Take the weights and the optimizers' states of the last snapshot; steps, learning rate and data go on."""
        assert self.snapshots is not None
        iterations = [scheduler.num_iter for scheduler in self.schedulers]
        self.snapshots.restore(model=self.model, manager=self.manager)
        for scheduler, iteration in zip(self.schedulers, iterations):
            scheduler.step(iteration)

    def skipped(self, losses: Tensor) -> dict[str, Any]:
        """The record of a step that was skipped, with the sequences that it had and those whose loss was not finite.

        Raises:
            UsageError: so many steps in a row were skipped that training has diverged.
        """
        if self.manager.skipped_steps >= MAX_SKIPPED:
            raise UsageError(
                f"{MAX_SKIPPED} steps in a row had gradients that are not finite, up to step {self.step}; go on from "
                f"the newest checkpoint with --resume and a lower --lr than {self.args.lr:g}"
            )
        answers = bmt.store.allgather_objects((self.sequences, bool(losses.isfinite().all())))
        by_replica = {tuple(sequences): finite for sequences, finite in answers}  # tensor-parallel ranks have the same
        record: dict[str, Any] = {"step": self.step, "skipped": [i for sequences in by_replica for i in sequences]}
        record["bad"] = [i for sequences, finite in by_replica.items() if not finite for i in sequences]
        return record

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any] | None:
        """Measure the held-out loss. The ranks share out the sequences. ``None`` if the run is to stop."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for sequences in self.eval_set.split(self.args.batch_size * self.replicas):
            if self.interruption.agreed():
                self.model.train()
                return None
            mine = sequences[self.replica :: self.replicas]
            # All replicas must call the model equally often. One without a sequence takes another's, for nothing.
            total += self.loss((mine if len(mine) else sequences[:1]).to(self.device)) * len(mine)
        self.model.train()
        loss = bmt.sum_loss(total).item() * self.replicas / len(self.eval_set)
        bits = bits_per_byte(loss, self.eval_set[:, 1:].numel(), self.count_bytes(self.eval_set))
        return {"step": self.step, "eval_loss": loss, "eval_bits_per_byte": bits}

    def run(self, metrics: Metrics, checkpointer: bmt.Checkpointer) -> bool:
        """Take all steps that are left; or, after a signal, save and return False."""
        args = self.args
        if self.step == 0:
            record = self.evaluate()
            if record is None:
                self.save(checkpointer)
                return False
            if bmt.rank() == 0:
                held_out = self.eval_set.flatten().numpy()
                record["baselines"] = baselines(self.corpus.train, held_out, self.corpus.tokenizer)
            metrics.write(record)
        clock, clock_step = time.perf_counter(), self.step
        while self.step < self.steps:
            lr = self.schedulers[0].current_lr
            losses, num_bytes, norm, taken = self.train_step()
            metrics.advance()
            is_last = self.step == self.steps
            if not taken:
                metrics.write(self.skipped(losses))
                if args.roll_back:
                    self.roll_back()
            elif self.step % args.log_interval == 0 or is_last:
                *means, last = bmt.sum_loss(torch.cat([losses, losses.new_tensor([num_bytes])])).unbind()
                mean_loss, mean_bytes = bmt.tree_sum(means).item() / args.accumulation, last.item()
                tokens = self.sequences_per_step * args.config.seq_len
                metrics.write({
                    "step": self.step,
                    "loss": mean_loss,
                    "bits_per_byte": bits_per_byte(mean_loss, tokens / self.replicas, mean_bytes),
                    "lr": lr,
                    "grad_norm": norm.item(),
                    "tokens_per_second": (self.step - clock_step) * tokens / (time.perf_counter() - clock),
                    "memory": peak_memory(self.device),
                })  # fmt: skip
                clock, clock_step = time.perf_counter(), self.step
            if self.snapshots is not None and taken and self.step % args.snapshot_every == 0:
                self.snapshots.take(self.step, **self.saved_objects)
            pause = time.perf_counter()
            is_saved = bool(args.save_interval and self.step % args.save_interval == 0) or is_last
            if is_saved:
                self.save(checkpointer)
            stops = self.interruption.agreed()
            if not stops and ((args.eval_interval and self.step % args.eval_interval == 0) or is_last):
                record = self.evaluate()
                stops = record is None
                if record is not None:
                    metrics.write(record)
            if stops and not is_last:
                if not is_saved:
                    self.save(checkpointer)
                return False
            clock += time.perf_counter() - pause
        return True

    def sample(self) -> str:
        """A text that the model writes."""
        args = self.args
        return generate(
            self.model, self.corpus.tokenizer, args.prompt, args.sample_tokens, args.top_k, args.temperature, args.seed
        )


def prepare_output(args: argparse.Namespace) -> bmt.Checkpointer:
    """Make ``--out`` an empty folder, or leave an earlier run there to go on from; no other run may use it."""

    def check() -> None:
        check_output(args)
        args.out.mkdir(parents=True, exist_ok=True)

    def remove_run() -> None:
        for checkpoint in (args.out / "checkpoints").glob("step-*"):
            shutil.rmtree(checkpoint)
        (args.out / "metrics.jsonl").unlink(missing_ok=True)

    on_rank_0(check)
    try:
        checkpointer = bmt.Checkpointer(args.out / "checkpoints", keep=args.keep)
    except RuntimeError as error:
        raise UsageError(f"--out {args.out}: {error}") from error
    if args.overwrite:  # only now is it known that no run is under way there
        try:
            on_rank_0(remove_run)
        except UsageError:
            checkpointer.close()
            raise
    return checkpointer


def on_rank_0(call: Callable[[], None]) -> None:
    """Call on rank 0; what goes wrong is a UsageError on every rank."""
    problem = ""
    if bmt.rank() == 0:
        try:
            call()
        except (UsageError, OSError) as error:
            problem = str(error)
    problem = bmt.store.broadcast_object(problem)
    if problem:
        raise UsageError(problem)


def train(args: argparse.Namespace) -> None:
    """The whole run, in the folder that ``--out`` names."""
    try:
        bmt.init_distributed(
            seed=args.seed, pipe_size=args.pipe, num_micro_batches=args.micro_batches, tp_size=args.tp,
            zero_level=args.zero_level, device=args.device, timeout=args.timeout, deterministic=args.deterministic,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from error
    checkpointer = prepare_output(args)
    try:
        run(args, checkpointer)
    finally:
        checkpointer.close()


def run(args: argparse.Namespace, checkpointer: bmt.Checkpointer) -> None:
    """Train, and write what comes of it."""
    trainer = Trainer(args)
    if args.resume:
        trainer.resume(checkpointer)
    bmt.print_rank(
        f"{args.config.num_parameters / 1e6:.1f} million parameters, {bmt.world_size()} rank(s) on "
        f"{trainer.device.type}; sequences of {args.config.seq_len} tokens: {len(trainer.train_set):,} to train on, "
        f"{len(trainer.eval_set):,} held out; {trainer.steps:,} steps of {trainer.sequences_per_step} sequences",
        flush=True,
    )
    metrics = Metrics(args.out / "metrics.jsonl", trainer.step, trainer.steps)
    with trainer.interruption:
        finished = trainer.run(metrics, checkpointer)
        checkpointer.wait()
    metrics.close()
    if trainer.snapshots is not None:
        trainer.snapshots.close()
    if not finished:
        bmt.print_rank(f"Interrupted and saved after step {trainer.step}; go on with --resume.", flush=True)
        return
    sample = f", and writing a sample of {args.sample_tokens} tokens" if args.sample_tokens else ""
    bmt.print_rank(f"Drawing the loss{sample} ...", flush=True)
    text = ""
    try:
        if args.sample_tokens:
            text = trainer.sample()
    finally:
        if bmt.rank() == 0:
            plot(metrics.records, args.out / "loss.png")
    if bmt.rank() == 0:
        if text:
            (args.out / "sample.txt").write_text(text + "\n")
            print(f"--- a sample ---\n{text}\n----------------")
        print(f"Wrote metrics.jsonl, loss.png, checkpoints/{' and sample.txt' if text else ''} to {args.out}")


def main() -> None:
    args = parse_flags()
    note_signals()
    try:
        train(args)
    except (UsageError, bmt.SaveError) as error:
        bmt.print_rank(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
