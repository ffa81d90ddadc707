"""One rank's part of a save: copies of its tensors, and the states of all other objects."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import torch

from . import trainer_state
from .contents import check_has_values, distinct_tensors, extra_states
from .job import HeldTensor, Job
from .memory import Snapshot
from .objects import Objects
from .trainer_state import replica_file, replica_of, rng_file, to_json
from .trees import encode

_LARGE = 32 << 20
_log = logging.getLogger("bmt_zero.checkpoints")


def prepare_job(job: Job, given: Objects, per_replica: Sequence[str], rank: int, size: int, snapshot: Snapshot) -> None:
    """Fill this rank's job with copies of its tensors and with the states of all other objects.

    Raises:
        TypeError, ValueError: something cannot be saved.
    """
    if isinstance(per_replica, str):
        raise TypeError(f"per_replica={per_replica!r} must be a list of names: [{per_replica!r}]")
    unknown = [name for name in per_replica if name not in given.others]
    if unknown:
        raise ValueError(f"per_replica names {unknown}, which the call does not save")
    with torch.no_grad():  # local tensors of DTensors are cheap to get without autograd
        sections = {"model": given.model_contents(), "optimizer": given.optimizer_contents()}
    contents = [(section, content) for section, held in sections.items() for content in held]
    for _, content in contents:
        check_has_values(content.entry.name, content.tensor)
    tensors, indices = distinct_tensors(content for _, content in contents)
    copies = snapshot.take([tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors])
    for (section, content), index in zip(contents, indices):
        where = content.where if content.is_current else None
        job.tensors.append(HeldTensor(section, content.entry, where, copies[index], content.is_single))
    if given.model is not None:
        job.extra = {name: encode(state, repr(name)) for name, state in extra_states(given.model).items()}
    replica, replicas, leads = replica_of(rank, size)
    trainer: dict[str, Any] = trainer_state.describe_run(job.step, size)
    settings = trainer_state.state_of_optimizers(given.optimizers, given.manager)
    trainer.update(settings, parameters=trainer_state.names_of_groups(given.optimizers, given.parameter_names()))
    stage = trainer_state.stage_file()
    if stage is not None and stage[1]:
        job.own_files[stage[0]] = to_json(settings)
    trainer["module_versions"] = given.versions
    trainer["objects"] = {}
    for name, each in given.others.items():
        if not hasattr(each, "state_dict"):
            continue
        state = encode(each.state_dict(), f"the state of {name!r}")
        text = json.dumps(state).encode()  # keeps the order of dicts
        if len(text) > _LARGE and rank == 0:
            _log.warning(
                "the state of %r is %.0f MiB of text, which every rank makes in each save: a model (an average of "
                "weights, say) is better given as model= to a checkpointer of its own",
                name,
                len(text) / (1 << 20),
            )
        digest = hashlib.sha256(to_json(state)).hexdigest()
        if name not in per_replica:
            job.states[name] = digest
            job.common_files[f"state-{name}.json"] = text
        else:
            job.replica_states[name] = [replica, digest]
            if leads:
                job.own_files[replica_file(name, replica, replicas)] = text
        trainer["objects"][name] = {"replicas": replicas if name in per_replica else None}
    rng = rng_file(rank, size)
    job.own_files[rng] = trainer_state.small_safetensors(rng, trainer_state.random_state())
    if rank == 0:
        job.common_files.update(given.pretrained_files())
    job.common_files[trainer_state.FILE] = json.dumps(trainer, indent=1).encode()
