"""The kinds of torch's functions, by name, for tensors of rows of a logical tensor.

[Note: operations on sharded rows] in sharded_rows describes what each kind does.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch

from ._compat import constant_when_compiled


class Kind(enum.Enum):
    """Kinds of operations on rows."""

    LOCAL = enum.auto()
    """Metadata, new tensors of this rank's shape, torch's internal functions."""
    ELEMENTWISE = enum.auto()
    LISTS = enum.auto()
    """Element-wise, of lists of tensors."""
    LISTS_IN_PLACE = enum.auto()
    UNSCALE = enum.auto()
    """GradScaler's: it divides gradients in place and notes whether some are not finite."""
    COPY = enum.auto()
    RANDOM = enum.auto()
    """It fills a tensor, or makes one like it."""
    IN_PLACE = enum.auto()
    """Element-wise in place."""
    NORM = enum.auto()
    REDUCTION = enum.auto()
    COMPARISON = enum.auto()
    """Of two tensors, to one bool."""
    INDEX = enum.auto()
    RESHAPED = enum.auto()
    """Views that may hold the same elements in the same order."""
    REFUSED = enum.auto()
    """Views of some elements, and other operations in place."""
    GATHERED = enum.auto()
    """Everything else."""


KERNELS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""Functions that act on this rank's rows."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Metadata, new tensors of this rank's shape, and what Python asks of an object.
_LOCAL = _names(
    """
    __cuda_array_interface__ __delete__ __dir__ __dlpack__ __dlpack_device__ __format__ __hash__ __len__
    __reduce_ex__ __repr__ __set__ __str__ backward data_ptr dim dtype element_size get_device
    has_names is_complex is_conj is_contiguous is_distributed is_floating_point is_inference is_neg is_pinned
    is_same_size is_set_to is_shared is_signed layout ndimension nelement new_empty new_empty_strided new_full
    new_ones new_tensor new_zeros numel record_stream register_hook register_post_accumulate_grad_hook result_type
    retain_grad size storage storage_offset storage_type stride sym_size untyped_storage
    """
)
_OPERATORS = _names(
    """
    __abs__ __add__ __and__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lshift__ __lt__ __mod__ __mul__
    __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmod__ __rmul__
    __ror__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __sub__ __truediv__ __xor__
    """
)
# torch tags only the primitive operations.
_ELEMENTWISE = _OPERATORS | _names(
    "absolute arctan conj divide float_power greater isclose isreal less multiply negative not_equal real subtract"
)
_COPIES = _names(
    """
    bfloat16 bool clone contiguous cpu cuda detach double empty_like float full_like half int long ones_like pin_memory
    to type type_as zeros_like
    """
)
RANDOM = _names(
    """
    bernoulli_ cauchy_ exponential_ geometric_ kaiming_uniform_ log_normal_ normal_ random_ trunc_normal_ uniform_
    """
)
# Functions of torch.nn.init whose values depend on all dimensions of a matrix, or that leave out a rank without rows.
INITIALIZERS_OF_MATRICES = _names("dirac_ eye_ kaiming_normal_ orthogonal_ sparse_ xavier_normal_ xavier_uniform_")
_RANDOM_COPIES = _names("rand_like randint_like randn_like")
_RANDOM_RESULTS = _names("bernoulli binomial dropout normal poisson")  # all ranks draw the same numbers
# Private functions that compute with values. The others, such as _version, are metadata.
_KERNELS_OF_LOGICAL = _names("_grouped_mm _int_mm _log_softmax _scaled_mm _softmax _weight_norm _weight_norm_interface")
_RESHAPED = _names("flatten ravel reshape reshape_as squeeze unsqueeze view view_as")
_VIEWS = _names(
    """
    as_strided chunk diagonal expand expand_as hsplit mT movedim moveaxis narrow permute select split
    split_with_sizes swapaxes swapdims t tensor_split transpose unbind unflatten unfold vsplit
    """
)
NORMS = _names("_foreach_norm linalg_norm linalg_vector_norm norm vector_norm")
OF_ALL = _names("all amax amin any count_nonzero max mean min nansum sum")
ALONG_ROWS = _names("all amax amin any linalg_vector_norm logsumexp mean nansum norm prod std sum var vector_norm")
TRANSPOSED = _names("T mT H mH")
_IN_PLACE = _names("apply_ constant_ copy_ detach_ fill_ map_ ones_ requires_grad_ share_memory_ zero_ zeros_")
_IN_PLACE_OPERATORS = _names(
    "__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__"
)


@functools.cache
def _is_elementwise(name: str) -> bool:
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    return name in _ELEMENTWISE or any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS


_KINDS = (
    (Kind.LOCAL, _LOCAL),
    (Kind.NORM, NORMS),
    (Kind.REDUCTION, OF_ALL | ALONG_ROWS),
    (Kind.UNSCALE, frozenset(["_amp_foreach_non_finite_check_and_unscale_"])),
    (Kind.COPY, _COPIES),
    (Kind.RANDOM, RANDOM | _RANDOM_COPIES),
    (Kind.GATHERED, _RANDOM_RESULTS | _KERNELS_OF_LOGICAL),
    (Kind.COMPARISON, _names("allclose equal")),
    (Kind.INDEX, _names("__getitem__ __setitem__")),
    (Kind.RESHAPED, _RESHAPED),
    (Kind.REFUSED, _VIEWS),
)


@constant_when_compiled
def kind_of(name: str) -> Kind:
    """The kind of the function of this name."""
    return _kind_of(name)


@functools.cache
def _kind_of(name: str) -> Kind:
    for kind, members in _KINDS:
        if name in members:
            return kind
    if name.startswith("_foreach"):
        return Kind.LISTS_IN_PLACE if name.endswith("_") else Kind.LISTS
    if name.startswith("_") and not name.startswith("__"):
        return Kind.LOCAL
    if is_in_place(name):
        is_elementwise = name in _IN_PLACE_OPERATORS or name in _IN_PLACE or _is_elementwise(name[:-1])
        return Kind.IN_PLACE if is_elementwise else Kind.REFUSED
    return Kind.ELEMENTWISE if _is_elementwise(name) else Kind.GATHERED
