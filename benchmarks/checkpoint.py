"""Checkpoints: the stall of a save against a plain copy, the speed of the disk, and torch.distributed.checkpoint.

Planning is measured for one of 1,024 ranks with the names and shapes of Llama-70B. The rest saves and loads a model
of ``--gigabytes`` (a Llama of transformers, where that is installed) whose state is that of Adam, sharded by FSDP2 over
the ranks, so that ``dcp.save`` and ``dcp.async_save`` write the very same tensors. ``dd`` and ``cat``
move the same bytes to and from the same disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from launch import launched, machine, on_ranks
from safetensors import SafetensorError, safe_open
from torch import nn

import bmt_comm
from bmt_comm import Slice
from bmt_optim import AdamOptimizer
from bmt_zero import Checkpointer, plan_layouts
from bmt_zero.checkpoints.headers import Entry, lay_out
from bmt_zero.checkpoints.plan import AddressSpace, Holding, WritePlan, replicate_groups
from bmt_zero.checkpoints.regions import regions_of

try:
    import transformers
except ImportError:
    transformers = None

HIDDEN, MIDDLE, KEYS, VOCAB, LAYERS = 8192, 28672, 1024, 32000, 80


def llama_70b() -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes, by what is gathered together."""
    groups: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": (VOCAB, HIDDEN)}]
    for n in range(LAYERS):
        prefix = f"model.layers.{n}"
        groups.append({
            f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KEYS, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KEYS, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": (MIDDLE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (MIDDLE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, MIDDLE),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        })  # fmt: skip
    return [*groups, {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}]


def planning(ranks: int) -> float:
    """Seconds that one rank takes to know what it writes, given what all ranks hold."""
    groups = llama_70b()
    entries = [Entry(name, "BF16", shape) for group in groups for name, shape in group.items()]
    # What every rank holds; the ranks send each other this, once.
    space = AddressSpace(lay_out("model", entries))
    holdings: dict[int, list[Holding]] = {rank: [] for rank in range(ranks)}
    for group in groups:
        names = list(group)
        for layout in plan_layouts(list(group.values()), ranks):
            for placement in layout.placements:
                number = space.number["model", names[placement.index]]
                for rank in range(ranks):
                    start, stop = layout.rows_of(placement, rank)
                    if start < stop:
                        regions = regions_of(Slice(placement.shape, start, stop), 2)
                        holdings[rank].append(Holding(number, tuple(regions)))
    held = {rank: tuple(each) for rank, each in holdings.items()}
    start = time.perf_counter()
    space = AddressSpace(lay_out("model", entries))
    tasks = list(WritePlan(space, replicate_groups(held), frozenset(), ranks // 3).tasks())
    seconds = time.perf_counter() - start
    assert tasks
    return seconds


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2048, 2048, bias=True) for _ in range(count)])


def make_model(gigabytes: float) -> tuple[nn.Module, list[nn.Module]]:
    """A model with so much weights and state, and its layers: a Llama of transformers, where that is installed."""
    numbers = gigabytes * 1e9 / (3 * 4)
    if transformers is None:
        model = Layers(max(1, round(numbers / (2048 * 2049))))
        return model, list(model.layers)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 4096}
    count = max(1, round((numbers - 2 * 4096 * 1024) / (4 * 1024 * 1024 + 3 * 1024 * 2816)))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=count))
    return llama, list(llama.model.layers)


def resident() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def tried_as_hugging_face(folder: Path, model: nn.Module, names: set[str]) -> str:
    """Read a directory by ``AutoModel.from_pretrained``: "yes", or why not.

    Without transformers: by the index, and the files that it names.
    """
    if transformers is not None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model.config.save_pretrained(folder)  # what dcp does not write, so that only the weights matter
        try:
            _, facts = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
        except Exception as error:
            return f"no ({type(error).__name__}: {str(error).partition(', found in')[0][:120]})"
        return f"no (without {facts['missing_keys']})" if facts["missing_keys"] else "yes"
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        held: set[str] = set()
        for file in set(index["weight_map"].values()):
            with safe_open(folder / file, "pt") as opened:
                held.update(name for name in opened.keys() if opened.get_tensor(name).numel())  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"no ({type(error).__name__}: {error})"
    return "yes" if held == names else f"no ({len(held ^ names)} names differ)"


def drop_caches(folder: Path) -> None:
    """Let the next reader go to the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def commands(folder: Path, size: int) -> tuple[float, float]:
    """Seconds of ``dd`` to, and of ``cat`` from, the disk."""
    count = max(1, size >> 20)
    source, target = Path("/dev/shm") / f"bmt-{os.getpid()}", folder / "dd"
    with open(source, "wb") as file:
        for _ in range(count):
            file.write(os.urandom(1 << 20))
    start = time.perf_counter()
    subprocess.run(["dd", f"if={source}", f"of={target}", "bs=1M", "conv=fsync"], check=True, capture_output=True)
    write = time.perf_counter() - start
    source.unlink()
    drop_caches(folder)
    start = time.perf_counter()
    with open(target, "rb") as file:
        subprocess.run(["cat"], stdin=file, stdout=subprocess.DEVNULL, check=True)
    read = time.perf_counter() - start
    target.unlink()
    return write, read


def measure(gigabytes: float, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds and bytes, on rank 0."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    context = bmt_comm.init_distributed(device="cpu")
    model, layers = make_model(gigabytes)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = AdamOptimizer(model.parameters())
    records = optimizer.state_records()
    tensors = [p.to_local().detach() for p in model.parameters()] + [r.tensor for r in records]
    generator = torch.Generator().manual_seed(context.rank)
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    root = Path(folder)
    size = sum(t.numel() * t.element_size() for t in tensors)
    results: dict[str, Any] = {"bytes": size * context.world_size}

    def timed(call: Any) -> float:
        """Of the call itself, on the slowest rank."""
        context.world.barrier()
        start = time.perf_counter()
        call()
        return max(context.world.all_gather_object(time.perf_counter() - start))

    # A plain copy of the same tensors into memory that is used again.
    memory = torch.empty(size, dtype=torch.uint8)

    def copy() -> None:
        at = 0
        for tensor in tensors:
            count = tensor.numel() * tensor.element_size()
            memory[at : at + count].copy_(tensor.reshape(-1).view(torch.uint8))
            at += count

    copy()
    checkpointer = Checkpointer(root / "ours", keep=1)
    checkpointer.save(0, model=model, optimizer=optimizer)  # its memory is there from now on
    checkpointer.wait()
    stalls, copies, saves, loads, writes, reads = [], [], [], [], [], []
    base = forget_peak()
    for step in range(1, rounds + 1):
        copies.append(timed(copy))
        start = time.perf_counter()
        stalls.append(timed(lambda step=step: checkpointer.save(step, model=model, optimizer=optimizer)))
        checkpointer.wait()
        saves.append(time.perf_counter() - start)
        if context.rank == 0:
            write, read = commands(root, size * context.world_size)
            writes.append(write)
            reads.append(read)
            drop_caches(root / "ours")
        loads.append(timed(lambda: checkpointer.load_latest(model=model, optimizer=optimizer)))
    results["ours"] = {"stall": stalls, "save": saves, "load": loads, "extra memory": resident() - base}
    results["copy"], results["dd"], results["cat"] = copies, writes, reads
    checkpointer.close()
    names = set(model.state_dict())
    if context.rank == 0:
        results["ours"]["read"] = tried_as_hugging_face(root / "ours" / f"step-{rounds:08}", model, names)
    # torch's: of the same model, with torch's optimizer, whose state has the same size.
    theirs = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    theirs.step()
    theirs.zero_grad(set_to_none=True)
    for name in ("dcp.save", "dcp.async_save"):
        stalls, saves = [], []
        base = forget_peak()
        for step in range(rounds):
            where = root / f"{name}-{step}"
            weights, state = get_state_dict(model, theirs)
            context.world.barrier()
            start = time.perf_counter()
            if name == "dcp.save":
                dcp.save({"model": weights, "optimizer": state}, checkpoint_id=where)
                stalls.append(time.perf_counter() - start)
            else:
                future = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=where)
                stalls.append(time.perf_counter() - start)
                future.result()
            context.world.barrier()
            saves.append(time.perf_counter() - start)
            if context.rank == 0:
                read = tried_as_hugging_face(where, model, names)
                shutil.rmtree(where)
        results[name] = {"stall": stalls, "save": saves, "extra memory": resident() - base}
        if context.rank == 0:
            results[name]["read"] = read
    bmt_comm.shutdown()
    return results


def show(results: dict[str, Any]) -> None:
    """Print medians, and ratios within a round."""
    size = results["bytes"]
    reader = "safetensors" if transformers is None else "AutoModel.from_pretrained"

    def ratio(times: list[float], others: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(times, others))

    ours = results["ours"]
    print(f"{size / 1e9:.2f} GB of weights and state")
    stall = statistics.median(ours["stall"])
    print(f"  stall of save: {stall:.3f} s, {ratio(ours['stall'], results['copy']):.2f} × a copy")
    for what, times, others in (("write", ours["save"], results["dd"]), ("read", ours["load"], results["cat"])):
        speed, of = size / statistics.median(times) / 1e6, ratio(others, times)
        print(f"  {what}: {speed:.0f} MB/s, {of:.0%} of {'dd' if what == 'write' else 'cat'}")
    for name, result in results.items():
        if isinstance(result, dict):
            print(
                f"  {name:15} stall {statistics.median(result['stall']):6.3f} s, whole save "
                f"{statistics.median(result['save']):6.2f} s, memory beside the model and its copy "
                f"{result['extra memory'] / 1e6:7.0f} MB per rank; {reader} reads it: {result['read']}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="weights and state, over all ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    args = parser.parse_args()
    if launched():
        results = measure(args.gigabytes, args.rounds, str(args.folder))
        if os.environ["RANK"] == "0":
            (args.folder / "results.json").write_text(json.dumps(results))
        return 0
    print(machine())
    seconds = statistics.median(planning(1024) for _ in range(3))
    print(f"planning on one of 1,024 ranks, Llama-70B: {seconds:.2f} s")
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        code = on_ranks(__file__, args.ranks, [*sys.argv[1:], "--folder", str(folder)])
        if code == 0:
            show(json.loads((folder / "results.json").read_text()))
    finally:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
