// Reading the addresses, shapes and dtypes of many tensors in one call, and checking them.
//
// This is the fast way through _tables.py: a pack function accepts the plain case and builds the same table of
// rows. On anything unusual it declines by returning None, and the Python code decides what is wrong, or that
// nothing is.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/table.h"

namespace bmt {

namespace py = pybind11;

// To be called before the others with torch.Tensor, its dtypes in the order of DType, and uint8. Returns whether tensors
// are read through the DLPack exchange functions (torch >= 2.10) rather than through their Python attributes.
bool set_tensor_type(py::object tensor_type, py::tuple dtypes, bool allow_exchange);

// Whether set_tensor_type was called.
bool tensors_are_readable();

// A list or tuple, without copying; anything else is declined.
class Items {
 public:
  explicit Items(py::handle sequence) {
    if (PyList_Check(sequence.ptr()) || PyTuple_Check(sequence.ptr())) {
      items_ = PySequence_Fast_ITEMS(sequence.ptr());
      size_ = PySequence_Fast_GET_SIZE(sequence.ptr());
    }
  }
  Py_ssize_t size() const { return size_; }
  PyObject* operator[](Py_ssize_t i) const { return items_[i]; }

 private:
  PyObject** items_ = nullptr;
  Py_ssize_t size_ = -1;
};

constexpr int kMaxDims = 8;
constexpr int64_t kBytes = kDTypes;  // the dtype of a view that is not floating point

struct View {
  int64_t data;
  int64_t numel;
  int64_t dtype;
  int32_t ndim;
  int64_t shape[kMaxDims];

  int64_t bytes() const { return dtype == kBytes ? numel : numel * item_size(static_cast<DType>(dtype)); }
  bool same_shape(const View& other) const {
    return ndim == other.ndim && std::equal(shape, shape + ndim, other.shape);
  }
};

// The device that all tensors must be on, as Python and as DLPack name it.
struct Target {
  py::handle device;
  int32_t type;
  int32_t index;
};

// Fills in a view of a contiguous floating-point tensor on the device; false if it is anything else, or, unless
// or_negated, its elements are negated when they are read (torch.Tensor.is_neg).
bool view_of(PyObject* object, const Target& target, View& view, bool or_negated = false);

// The same of a contiguous uint8 tensor; its view's dtype is kBytes.
bool byte_view_of(PyObject* object, const Target& target, View& view);

struct Interval {
  int64_t begin;
  int64_t end;
  bool operator<(const Interval& other) const { return begin < other.begin; }
  bool operator==(const Interval& other) const { return begin == other.begin && end == other.end; }
};

// Whether the outputs overlap each other or any of the inputs.
bool overlapping(const std::vector<Interval>& outputs, const std::vector<Interval>& inputs);

template <class Row>
py::object to_bytes(const std::vector<Row>& rows) {
  return py::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row));
}

}  // namespace bmt
