"""Messages between ranks over ``torch.distributed``'s store, and a separate gloo process group for large tensors."""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_PART = 1 << 22  # bytes of a value in the store, which takes less than 8 MiB


class RendezvousError(RuntimeError):
    """Ranks did not join a call in time, or the store is lost."""


class StoreCommunicator:
    """Collectives on bytes between all ranks of the job, over the store. One thread at a time may use it.

    All ranks must construct it at the same time and call the same methods in the same order.

    Args:
        timeout: seconds to wait for the other ranks.

    Attributes:
        rank, size: this rank and the number of ranks; 0 and 1 without ``torch.distributed``.
        group: a gloo process group for tensors in host memory; ``None`` if there is one rank.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.rank, self.size = 0, 1
        self.group: dist.ProcessGroup | None = None
        self._calls = 0
        self._old: list[str] = []
        self._contents: list[str] = []  # keys of this rank's message of the last all_gather
        self._known: dict[str, bytes] = {}  # messages of the last exchanges, by digest
        self._used: deque[set[str]] = deque(maxlen=4)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        times = store.add(f"bmt_checkpoints/made/{self.rank}", 1)
        self._store: Any = dist.PrefixStore(f"bmt_checkpoints/{times}", store)
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))

    def close(self) -> None:
        """Close the connections to the other ranks."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def all_gather(self, mine: bytes) -> list[bytes]:
        """The messages of all ranks, in rank order. Equal messages and messages of recent calls are sent once.

        Raises:
            RendezvousError: a rank did not join the call in time.
        """
        if self.size == 1:
            return [mine]
        digest = hashlib.sha256(mine).hexdigest()
        read, self._contents = self._contents, []
        if digest not in self._known:
            self._contents = self._put(f"content/{digest}", mine)
            self._known[digest] = mine
        everyone = self.gather(digest.encode())
        listed = self.broadcast(b"".join(everyone) if everyone is not None else None)
        for key in read:  # every rank is in this call, so it has read the messages of the last one
            self._store.delete_key(key)
        digests = [listed[at : at + 64].decode() for at in range(0, len(listed), 64)]
        for digest in digests:
            if digest not in self._known:
                self._known[digest] = self._get(f"content/{digest}")
        messages = [self._known[digest] for digest in digests]
        self._used.append(set(digests))
        self._known = {digest: content for digest, content in self._known.items() if digest in set().union(*self._used)}
        return messages

    def all_gather_json(self, mine: Any) -> list[Any]:
        """As :meth:`all_gather`, for JSON values."""
        return [json.loads(each) for each in self.all_gather(json.dumps(mine, sort_keys=True).encode())]

    def gather(self, mine: bytes) -> list[bytes] | None:
        """The messages of all ranks, on rank 0. Other ranks return ``None`` without waiting."""
        if self.size == 1:
            return [mine]
        key = self._next_key()
        self._set(f"{key}/{self.rank}", mine)
        if self.rank != 0:
            return None
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._wait(keys)
        messages = [self._get(each) for each in keys]
        self._forget()  # every rank is in this call, so it has read all earlier broadcasts
        return messages

    def broadcast(self, value: bytes | None = None) -> bytes:
        """Rank 0's ``value`` on every rank."""
        if self.size == 1:
            assert value is not None
            return value
        key = self._next_key()
        if self.rank == 0:
            assert value is not None
            self._set(key, value)
            return value
        self._wait([key])
        value = self._get(key)
        self._forget()  # rank 0 is in this call, so it has read all earlier gathered messages
        return value

    def _next_key(self) -> str:
        self._calls += 1
        return f"call/{self._calls}"

    def _set(self, key: str, value: bytes) -> None:
        self._old += self._put(key, value)

    def _put(self, key: str, value: bytes) -> list[str]:
        """Put a value into the store in parts, and return their keys.

        The first part is written last, because other ranks wait for its key.
        """
        parts = {f"{key}/part/{at}": value[at : at + _PART] for at in range(_PART, len(value), _PART)}
        parts[key] = len(value).to_bytes(8, "little") + value[:_PART]
        for name, part in parts.items():
            self._store.set(name, part)
        return list(parts)

    def _get(self, key: str) -> bytes:
        first = bytes(self._store.get(key))
        more = range(_PART, int.from_bytes(first[:8], "little"), _PART)
        return first[8:] + b"".join(bytes(self._store.get(f"{key}/part/{at}")) for at in more)

    def _forget(self) -> None:
        """Delete the keys that this rank set. All ranks must have read them."""
        while self._old:
            self._store.delete_key(self._old.pop())

    def _wait(self, keys: Sequence[str]) -> None:
        """Poll until the keys exist, so that other threads can use the store."""
        deadline, pause = time.monotonic() + self.timeout, 0.0005
        missing = list(keys)
        while True:
            try:
                while missing and self._store.check(missing[:1]):
                    missing.pop(0)
            except RuntimeError as error:
                raise RendezvousError(f"rank {self.rank} has lost the store where ranks meet: {error}") from error
            if not missing:
                return
            if time.monotonic() > deadline:
                absent = [key for key in missing if not self._store.check([key])]
                ranks = ", ".join(key.rpartition("/")[2] for key in absent[:8]) if len(keys) > 1 else "0"
                raise RendezvousError(
                    f"after {self.timeout:g} s, rank(s) {ranks} have not come to the call that rank {self.rank} is in; "
                    "every rank must call save, wait and load alike"
                )
            time.sleep(pause)
            pause = min(pause * 2, 0.02)
