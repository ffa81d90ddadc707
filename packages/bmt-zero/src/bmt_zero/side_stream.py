"""The CUDA stream beside the compute stream, for collectives that overlap with computation; None on CPU.

Each Block makes it current, lets it wait, and waits for it, several times in a step. ``torch.cuda.stream``,
``current_stream`` and ``Stream.wait_stream`` look up devices and make objects for that, and take 5 to 12 µs each. This
module keeps the objects and takes 1 to 4 µs.
"""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch

_NOTHING = contextlib.nullcontext()
_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # those that were current, by what torch knows them by


def _current_stream(device: int) -> torch.cuda.Stream:
    """``torch.cuda.current_stream(device)``."""
    key = torch._C._cuda_getCurrentStream(device)
    stream = _streams.get(key)
    if stream is None:
        number, index, kind = key
        stream = _streams[key] = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
    return stream


class SideStream:
    """``stream``, for one flat parameter. As a context, it is the current stream.

    Attributes:
        arrived, reduced: events after the last all-gather and the last reduction, recorded again and again.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._key = (stream.stream_id, stream.device_index, stream.device_type)
        self._before: list[tuple[int, tuple[int, int, int]]] = []  # devices and streams that were current
        self._computed = torch.cuda.Event()
        self.arrived = torch.cuda.Event()
        self.reduced = torch.cuda.Event()

    def __enter__(self) -> None:
        self._before.append((torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(self._key[1])))
        torch._C._cuda_setStream(*self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        device, before = self._before.pop()
        torch._C._cuda_setStream(*before)
        if device != self._key[1]:
            torch.cuda.set_device(device)

    def follow(self) -> None:
        """Wait for the work that the compute stream has so far."""
        self._computed.record(_current_stream(self._key[1]))
        self._stream.wait_event(self._computed)

    def record(self, event: torch.cuda.Event) -> torch.cuda.Event:
        """The event, recorded after the work that this stream has so far."""
        event.record(self._stream)
        return event

    def let_compute_wait(self, event: torch.cuda.Event) -> None:
        """Let the compute stream wait for an event of this stream."""
        event.wait(_current_stream(self._key[1]))


def follow_compute(stream: SideStream | None) -> None:
    """Let ``stream`` wait for the work that the compute stream has so far; on CPU there is nothing to do."""
    if stream is not None:
        stream.follow()


def record_event(stream: SideStream | None) -> torch.cuda.Event | None:
    """A new event after the work that ``stream`` has so far, for which the host can wait; None on CPU."""
    return None if stream is None else stream.record(torch.cuda.Event())


def on_stream(stream: SideStream | None) -> contextlib.AbstractContextManager[object]:
    """Issue work to ``stream``; on CPU just run it."""
    return _NOTHING if stream is None else stream
