"""State dicts of any object as JSON. Plain values are kept, and tensors become bytes. Nothing is pickled."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor

from .headers import DTYPES, DamagedError, dtype_name
from .memory import view_of
from .regions import flat_bytes

_DEEPEST = 100
_COLLECTIONS = {"Size": torch.Size, "tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS = {"pairs": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def encode(value: Any, what: str, depth: int = 0) -> Any:
    """JSON for a state: None, booleans, numbers, strings, bytes, lists, tuples, sets, dicts, tensors, numpy's arrays.

    Args:
        what: names the value in messages.

    Raises:
        TypeError: it contains something else.
    """
    if depth > _DEEPEST:
        raise TypeError(f"{what} is nested more than {_DEEPEST} deep")
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, what)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"tensor": _encode_tensor(value, what)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode(item, f"{what}[{n}]", depth + 1) for n, item in enumerate(value)]
    kind = next((name for name, collection in _COLLECTIONS.items() if isinstance(value, collection)), None)
    if kind is not None:
        items = value if isinstance(value, tuple) else sorted(value, key=repr)
        return {kind: [encode(item, f"{what}[{n}]", depth + 1) for n, item in enumerate(items)]}
    if isinstance(value, dict):
        pairs = [
            [encode(k, f"a key of {what}", depth + 1), encode(v, f"{what}[{k!r}]", depth + 1)] for k, v in value.items()
        ]
        kind = next((name for name, cls in _DICTS.items() if type(value) is cls), "pairs")
        if kind == "pairs" and all(isinstance(k, str) for k in value):
            return {"dict": dict(zip(value, (v for _, v in pairs)))}
        return {kind: pairs}
    raise TypeError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; its "
        "state_dict must consist of plain values, lists, dicts, tensors and numpy arrays"
    )


def decode(value: Any, what: str, depth: int = 0) -> Any:
    """The inverse of :func:`encode`.

    Raises:
        DamagedError: the value is not a result of :func:`encode`.
    """
    if depth > 3 * _DEEPEST:
        raise DamagedError(f"{what} is nested too deep")
    if value is None or isinstance(value, (bool, str, int, float)):
        return value
    if isinstance(value, list):
        return [decode(item, what, depth + 1) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise DamagedError(f"{what} has something unknown in it: {str(value)[:100]}")
    ((kind, content),) = value.items()
    try:
        if kind == "float":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
        if kind == "bytes":
            return base64.b64decode(content, validate=True)
        if kind == "tensor":
            return _decode_tensor(content, what)
        if kind == "array":
            return _decode_tensor(content, what).numpy()
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](decode(item, what, depth + 1) for item in content)
        if kind == "dict":
            return {key: decode(item, what, depth + 1) for key, item in content.items()}
        if kind in _DICTS:
            return _DICTS[kind]({decode(k, what, depth + 1): decode(v, what, depth + 1) for k, v in content})
    except DamagedError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedError(f"{what} has a damaged {kind} in it: {error}") from None
    raise DamagedError(f"{what} has something of the unknown kind {kind[:40]!r} in it")


def _encode_tensor(value: Tensor, what: str) -> dict[str, Any]:
    if value.layout is not torch.strided:
        raise TypeError(f"{what} is a tensor of {value.layout}; a checkpoint holds dense ones")
    if hasattr(value, "placements"):
        raise TypeError(f"{what} is a DTensor, of which this rank has a part; let state_dict give its full_tensor()")
    tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = base64.b64encode(view_of(flat_bytes(tensor))).decode()
    return {"dtype": dtype_name(tensor.dtype, what), "shape": list(tensor.shape), "data": data}


def _decode_tensor(content: Any, what: str) -> Tensor:
    shape = content["shape"]
    data = bytearray(base64.b64decode(content["data"], validate=True))
    dtype = DTYPES[content["dtype"]]
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise DamagedError(f"{what}: a tensor of shape {str(shape)[:100]} does not have {len(data)} bytes")
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _encode_numpy(value: Any, what: str) -> Any:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encode(value.item(), what)
    try:
        tensor = torch.from_numpy(value.copy())
    except TypeError:
        raise TypeError(f"{what} is a numpy array of {value.dtype}; a checkpoint holds numbers") from None
    return {"array": _encode_tensor(tensor, what)}
