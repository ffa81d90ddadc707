"""PyTorch's own tests of torch.distributed for gloo, over the backend "bmt": what passes over gloo must pass over it.

They come with torch (torch.testing._internal.distributed) and need expecttest. There each test starts processes of its
own; here the same processes run all of them. Those that need a GPU, or more ranks, skip themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

# Of GPUs, of what only gloo itself has, of the names of its events in profiles, and of starting the default group.
NOT_THESE = re.compile(
    "cuda|nccl|gpu|profil|monitored|timeout|full_group$|undefined_grad|coalescing_manager|Backend_enum|verify|dump_|"
    "by_enumeration|group_size_exceeds|3_level|logg"
)


def launched_main(backend: str, into: str) -> None:
    """Run all tests as one of the ranks, with "gloo" standing for ``backend``."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = tempfile.mkdtemp()
    os.environ.update(BACKEND="gloo", TEMP_DIR=folder, INIT_METHOD="")
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    import bmt_comm  # noqa: F401

    torch.set_num_threads(1)
    make = c10d._new_process_group_helper
    name_of = c10d.get_backend

    def make_ours(group_size: int, group_rank: int, ranks: Any, name: Any, *rest: Any, **named: Any) -> Any:
        return make(group_size, group_rank, ranks, backend if name == "gloo" else name, *rest, **named)

    def get_backend(group: Any = None) -> Any:
        return "gloo" if name_of(group) == backend else name_of(group)

    c10d._new_process_group_helper = make_ours
    c10d.get_backend = dist.get_backend = get_backend
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert backend == "gloo" or dist.group.WORLD.shares_memory  # type: ignore[union-attr]
    store: Any = c10d._get_default_store()

    from torch.testing._internal.distributed import distributed_test

    meetings = 0

    def meet(*_: object, **__: object) -> None:
        nonlocal meetings
        meetings += 1
        key = f"meeting {meetings}"
        store.add(key, 1)
        deadline = time.monotonic() + 60
        while store.add(key, 0) < size and time.monotonic() < deadline:
            time.sleep(1e-3)

    distributed_test.Barrier.sync = staticmethod(meet)

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def call_dist_op(self, *arguments: Any, **named: Any) -> Any:
            return super().call_dist_op(*arguments, **{**named, "expect_event": False})

    found = {}
    for number, name in enumerate(n for n in dir(Tests) if n.startswith("test_") and not NOT_THESE.search(n)):
        key = f"test {number}"
        store.add(key, 1)
        while store.add(key, 0) < size:
            time.sleep(1e-3)
        if not dist.is_initialized():
            arguments = {"store": dist.PrefixStore(key, store), "rank": rank, "world_size": size}
            dist.init_process_group("gloo", timeout=timedelta(seconds=60), **arguments)
        meetings = 1000 * number  # whatever the last test has left out
        case = Tests(name)
        case.rank, case.file_name = rank, os.path.join(folder, name)
        torch.manual_seed(0)
        try:
            getattr(case, name)()
            found[name] = "passed"
        except (unittest.SkipTest, SystemExit) as skipped:
            found[name] = f"skipped: {skipped}"
        except Exception as error:
            found[name] = f"failed: {type(error).__name__}: {error}"
    Path(into, f"{backend}-{rank}.json").write_text(json.dumps(found))
    store.add("end", 1)
    while store.add("end", 0) < size:  # rank 0 keeps the store
        time.sleep(1e-3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.backend:
        launched_main(arguments.backend, arguments.into)
        return 0
    found: dict[str, list[dict[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in ("gloo", "bmt"):
            command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={arguments.ranks}", __file__, "--backend", backend, "--into", folder]
            with Path(folder, "log").open("w+") as log:
                if subprocess.run(command, check=False, stdout=log, stderr=log, timeout=1200).returncode:
                    print(Path(folder, "log").read_text()[-5000:])
                    sys.exit(f"the processes of the backend {backend!r} failed")
            files = [Path(folder, f"{backend}-{rank}.json") for rank in range(arguments.ranks)]
            found[backend] = [json.loads(file.read_text()) for file in files]
    worse = 0
    for name in found["gloo"][0]:
        ours, theirs = ([each[name] for each in found[backend]] for backend in ("bmt", "gloo"))
        passes = [all(not each.startswith("failed") for each in results) for results in (ours, theirs)]
        if passes == [False, True]:
            worse += 1
            print(f"{name} passes over gloo and fails over bmt: {ours}")
    for backend, results in found.items():
        kinds = [result.partition(":")[0] for result in results[0].values()]
        print(backend, {kind: kinds.count(kind) for kind in sorted(set(kinds))})
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
