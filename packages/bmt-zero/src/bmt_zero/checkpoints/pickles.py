"""A reader of the pickles in ``torch.save`` files that calls nothing from the file and makes no tensors.

``torch.load(weights_only=True)`` makes each tensor while it reads, and hashes every key, which practically never ends
for a tuple of tuples that are one object. This reader accepts the operations that torch writes (protocol 2), rejects
keys that are not plain values, and returns tensors as :class:`TensorRecord`.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
"""The dtypes of torch's storages, by the names of their classes."""


class PickleError(ValueError):
    """A pickle is damaged, or describes something that is not accepted."""


@dataclass(frozen=True, eq=False)
class StorageRecord:
    """The memory of tensors: its name in the file, and its length in bytes."""

    key: str
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """A strided tensor; ``offset`` and ``stride`` are in elements."""

    storage: StorageRecord
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, eq=False)
class OtherTensor:
    """A tensor that is not strided memory: a sparse or quantized one, or one without values."""

    kind: str


class Pickled(NamedTuple):
    """The content of a pickle."""

    value: Any
    end: int  # the first byte after the pickle
    storages: dict[str, StorageRecord]
    versions: Any  # of modules, if the value is a state dict with versions, else None


def read_pickle(data: bytes, at: int = 0) -> Pickled:
    """Read the pickle in ``data`` that begins at byte ``at``.

    Raises:
        PickleError: it is damaged, or contains something other than plain values and tensors.
    """
    reader = _Reader(data, at)
    memo = reader.memo
    try:
        while True:
            operation = data[reader.at]
            reader.at += 1
            # The most frequent operations are inlined: a pickle has 30 operations per tensor.
            if operation == _LONG_PUT:
                memo[_U32.unpack_from(data, reader.at)[0]] = reader.stack[-1]
                reader.at += 4
            elif operation == _GET:
                reader.stack.append(memo[data[reader.at]])
                reader.at += 1
            elif operation == _SMALL:
                reader.stack.append(data[reader.at])
                reader.at += 1
            elif operation == _MARK:
                reader.outer.append(reader.stack)
                reader.stack = []
            elif operation == _STOP:
                value = reader.stack.pop()
                return Pickled(value, reader.at, reader.storages, reader.versions.get(id(value)))
            else:
                step = _STEPS.get(operation)
                if step is None:
                    raise PickleError(f"the operation {bytes([operation])!r} is none of torch.save")
                step(reader)
    except PickleError:
        raise
    except (
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        struct.error,
        OverflowError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise PickleError(f"it is damaged at byte {reader.at}: {type(error).__name__}: {error}") from None


_STOP, _MARK, _LONG_PUT, _GET, _SMALL = b".(rhK"
_U32 = struct.Struct("<I")


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, StorageRecord] = {}
        self.versions: dict[int, Any] = {}  # by the identity of the state dict

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise PickleError("it is truncated")
        return self.data[self.at - count : self.at]

    def number(self, form: str, size: int) -> Any:
        return struct.unpack(form, self.take(size))[0]

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode("ascii")
        self.at = end + 1
        return text

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def to_tuple(self) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    def tuple_of(self, count: int) -> None:
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _DICTS:
            raise PickleError(f"it sets items of a {type(target).__name__}")
        for n in range(0, len(items), 2):
            target[_plain_key(items[n])] = items[n + 1]

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise PickleError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def find(self) -> None:
        module, name = self.line(), self.line()
        self.push(_find(module, name))

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Function) or type(arguments) is not tuple:
            raise PickleError(f"it calls a {type(function).__name__}")
        self.push(function.call(*arguments))

    def build(self) -> None:
        """Accept attributes that are set on an object: the metadata of a state dict, the attributes of a parameter."""
        attributes = self.stack.pop()
        if type(attributes) is dict and type(self.stack[-1]) in _DICTS:
            self.versions[id(self.stack[-1])] = attributes.get("_metadata")
        if type(self.stack[-1]) not in (*_DICTS, TensorRecord, OtherTensor):
            raise PickleError(f"it sets attributes of a {type(self.stack[-1]).__name__}")

    def storage(self) -> None:
        _, kind, key, _, count, *_ = self.stack.pop()
        dtype = kind.value if isinstance(kind, _StorageKind) else None
        if dtype is None or type(count) is not int or count < 0 or type(key) is not str:
            raise PickleError("it has a storage of an unknown kind")
        record = self.storages[key] = StorageRecord(key, count * dtype.itemsize, dtype)
        self.push(record)


def _plain_key(key: Any) -> Any:
    """The key, if its hash is quick to compute: a plain value, or a short tuple of these. Else raise PickleError."""
    parts = key if type(key) in (tuple, torch.Size) and len(key) <= 8 else (key,)
    if not all(part is None or type(part) in (str, int, float, bool, bytes, torch.device) for part in parts):
        raise PickleError("it has a key that is no plain value")
    return key


@dataclass(frozen=True)
class _Function:
    call: Callable[..., Any]


@dataclass(frozen=True)
class _StorageKind:
    value: torch.dtype


def _find(module: str, name: str) -> Any:
    if module in ("torch", "torch.storage"):
        if name in STORAGES:
            return _StorageKind(STORAGES[name])
        value = getattr(torch, name, None)
        if isinstance(value, torch.dtype):
            return value
    function = _FUNCTIONS.get(f"{module}.{name}")
    if function is None and module == "torch._utils" and name.startswith("_rebuild_"):
        return _Function(lambda *_: OtherTensor(name))
    if function is None:
        raise PickleError(f"its loading would run code: {module}.{name}")
    return _Function(function)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *others: Any, dtype: torch.dtype | None = None) -> Any:
    if others and type(others[-1]) is dict and (others[-1].get("conj") or others[-1].get("neg")):
        raise PickleError("it has a tensor to be conjugated or negated: save x.resolve_conj().resolve_neg()")
    if type(storage) is not StorageRecord or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise PickleError("it has a tensor without a storage, a shape or strides")
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or {*map(type, numbers)} != {int} or not 0 <= min(numbers) <= max(numbers) < 1 << 62:
        raise PickleError("it has a tensor whose shape or strides are no sizes")
    return TensorRecord(storage, offset, tuple(shape), tuple(stride), storage.dtype if dtype is None else dtype)


def _tensor_of_dtype(*arguments: Any) -> Any:
    storage, offset, shape, stride, _, _, dtype, *others = arguments
    if not isinstance(dtype, torch.dtype):
        raise PickleError("it has a tensor without a dtype")
    return _tensor(storage, offset, shape, stride, *others, dtype=dtype)


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise PickleError("it has text in an unknown encoding")
    return text.encode("latin1")


def _set(items: Any = ()) -> set[Any]:
    return {_plain_key(item) for item in items}


def _counter(counts: Any = ()) -> Counter[Any]:
    if counts and type(counts) is not dict:
        raise PickleError("it counts something else than the keys of a dict")
    return Counter(counts)


_DICTS = (dict, OrderedDict, Counter)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda pairs=(): OrderedDict((_plain_key(key), value) for key, value in pairs),
    "collections.Counter": _counter,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch.serialization._get_layout": lambda name: name,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    "_codecs.encode": _encoded,
    "__builtin__.set": _set,
    "__builtin__.complex": complex,
    "__builtin__.bytearray": lambda content=b"": bytearray(memoryview(content)),  # rejects a number, a length
}

_STEPS: dict[int, Callable[[_Reader], None]] = {
    ord(operation): step
    for operation, step in {
        "\x80": lambda r: r.take(1) and None,  # the protocol
        "c": _Reader.find,
        "R": _Reader.call,
        "b": _Reader.build,
        "Q": _Reader.storage,
        "t": _Reader.to_tuple,
        "\x85": lambda r: r.tuple_of(1),
        "\x86": lambda r: r.tuple_of(2),
        "\x87": lambda r: r.tuple_of(3),
        ")": lambda r: r.push(()),
        "]": lambda r: r.push([]),
        "}": lambda r: r.push({}),
        "\x8f": lambda r: r.push(set()),
        "a": lambda r: r.append([r.stack.pop()]),
        "e": lambda r: r.append(r.since_mark()),
        "s": lambda r: r.set_items([r.stack.pop(-2), r.stack.pop()]),
        "u": lambda r: r.set_items(r.since_mark()),
        "N": lambda r: r.push(None),
        "\x88": lambda r: r.push(True),
        "\x89": lambda r: r.push(False),
        "J": lambda r: r.push(r.number("<i", 4)),
        "M": lambda r: r.push(r.number("<H", 2)),
        "G": lambda r: r.push(r.number(">d", 8)),
        "\x8a": lambda r: r.push(int.from_bytes(r.take(r.number("<B", 1)), "little", signed=True)),
        "X": lambda r: r.push(r.take(r.number("<I", 4)).decode("utf-8", "surrogatepass")),
        "U": lambda r: r.push(r.take(r.number("<B", 1)).decode("ascii")),
        "j": lambda r: r.push(r.memo[r.number("<I", 4)]),
        "q": lambda r: r.memo.__setitem__(r.number("<B", 1), r.stack[-1]),
    }.items()
}
