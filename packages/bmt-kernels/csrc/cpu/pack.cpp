#include "cpu/pack.h"

#include <algorithm>
#include <vector>

#include "common/table.h"
#include "cpu/dlpack_abi.h"

namespace py = pybind11;

namespace bmt {
namespace {

// Set once by set_tensor_type, and kept for ever.
PyTypeObject* tensor_type_object = nullptr;
PyObject* dtype_objects[kDTypes] = {};
const dlpack::ExchangeApi* exchange = nullptr;  // null: read Python attributes

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

struct View {
  int64_t data;
  int64_t numel;
  int64_t dtype;
  int32_t ndim;
  int64_t shape[kMaxDims];

  int64_t bytes() const { return numel * (dtype == static_cast<int64_t>(DType::kFloat32) ? 4 : 2); }
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

bool on_device(const dlpack::Tensor& t, const Target& target) {
  if (target.type == dlpack::kCpu) return t.device.type == dlpack::kCpu || t.device.type == dlpack::kCudaHost;
  return t.device.type == target.type && t.device.id == target.index;
}

bool read_exchange(PyObject* object, const Target& target, View& view) {
  dlpack::Tensor t;
  if (exchange->tensor_from_py_object_no_sync(object, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!on_device(t, target) || t.dtype.lanes != 1 || t.ndim > kMaxDims) return false;
  if (t.dtype.code == dlpack::kFloat && t.dtype.bits == 32) {
    view.dtype = static_cast<int64_t>(DType::kFloat32);
  } else if (t.dtype.code == dlpack::kBfloat && t.dtype.bits == 16) {
    view.dtype = static_cast<int64_t>(DType::kBFloat16);
  } else if (t.dtype.code == dlpack::kFloat && t.dtype.bits == 16) {
    view.dtype = static_cast<int64_t>(DType::kFloat16);
  } else {
    return false;
  }
  view.numel = 1;
  for (int32_t d = t.ndim - 1; d >= 0; --d) {
    if (t.strides != nullptr && t.shape[d] != 1 && t.strides[d] != view.numel) return false;
    view.numel *= t.shape[d];
    view.shape[d] = t.shape[d];
  }
  view.data = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data) + t.byte_offset);
  view.ndim = t.ndim;
  return true;
}

// The same for a PyTorch without the exchange functions, about five times as slow.
bool read_attributes(PyObject* object, const Target& target, View& view) {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("dtype"), PyUnicode_InternFromString("device"), PyUnicode_InternFromString("shape"),
      PyUnicode_InternFromString("is_contiguous"), PyUnicode_InternFromString("data_ptr")};
  const auto attribute = [&](int i) { return py::reinterpret_steal<py::object>(PyObject_GetAttr(object, names[i])); };
  const auto call = [&](int i) {
    return py::reinterpret_steal<py::object>(PyObject_CallMethodObjArgs(object, names[i], nullptr));
  };
  const py::object dtype = attribute(0), device = attribute(1), shape = attribute(2), contiguous = call(3);
  const py::object pointer = contiguous.ptr() == Py_True ? call(4) : py::object();
  if (!dtype || !device || !shape || !pointer || !PyTuple_Check(shape.ptr())) {
    PyErr_Clear();
    return false;
  }
  view.dtype = -1;
  for (int i = 0; i < kDTypes; ++i) {
    if (dtype.ptr() == dtype_objects[i]) view.dtype = i;
  }
  view.ndim = static_cast<int32_t>(PyTuple_GET_SIZE(shape.ptr()));
  if (view.dtype < 0 || view.ndim > kMaxDims) return false;
  if (PyObject_RichCompareBool(device.ptr(), target.device.ptr(), Py_EQ) != 1) {
    PyErr_Clear();
    return false;
  }
  view.numel = 1;
  for (int32_t d = 0; d < view.ndim; ++d) {
    view.shape[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), d));
    view.numel *= view.shape[d];
  }
  view.data = static_cast<int64_t>(PyLong_AsUnsignedLongLong(pointer.ptr()));
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return false;
  }
  return true;
}

// Fills in a view of a contiguous floating-point tensor on the device; false if it is anything else.
bool view_of(PyObject* object, const Target& target, View& view) {
  if (!PyObject_TypeCheck(object, tensor_type_object)) return false;
  if (!(exchange != nullptr ? read_exchange : read_attributes)(object, target, view)) return false;
  return view.numel == 0 || view.data != 0;  // otherwise a wrapper without storage of its own
}

struct Interval {
  int64_t begin;
  int64_t end;
  bool operator<(const Interval& other) const { return begin < other.begin; }
  bool operator==(const Interval& other) const { return begin == other.begin && end == other.end; }
};

// Whether the outputs overlap each other or any of the inputs.
bool overlapping(const std::vector<Interval>& unsorted_outputs, const std::vector<Interval>& inputs) {
  // Sorting is most of the work, and an optimizer comes back with the same outputs step after step: those last
  // found disjoint are kept. The interpreter lock guards them.
  static std::vector<Interval> last_outputs, outputs;
  if (unsorted_outputs != last_outputs) {
    last_outputs.clear();
    outputs = unsorted_outputs;
    std::sort(outputs.begin(), outputs.end());
    for (size_t i = 1; i < outputs.size(); ++i) {
      if (outputs[i].begin < outputs[i - 1].end) return true;
    }
    last_outputs = unsorted_outputs;
  }
  for (const Interval& input : inputs) {
    // Outputs are disjoint, hence sorted by their ends too: only the first that ends beyond the input's
    // beginning can be the leftmost to overlap it.
    const auto it = std::upper_bound(outputs.begin(), outputs.end(), input.begin,
                                     [](int64_t begin, const Interval& output) { return begin < output.end; });
    if (it != outputs.end() && it->begin < input.end) return true;
  }
  return false;
}

template <class Row>
py::object to_bytes(const std::vector<Row>& rows) {
  return py::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row));
}

}  // namespace

bool set_tensor_type(py::object tensor_type, py::tuple dtypes, bool allow_exchange) {
  if (!PyType_Check(tensor_type.ptr()) || dtypes.size() != kDTypes) throw py::type_error("torch.Tensor and 3 dtypes");
  exchange = nullptr;
  if (allow_exchange && py::hasattr(tensor_type, "__dlpack_c_exchange_api__")) {
    const py::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
    const char* name = dlpack::kCapsuleName;
    const dlpack::ExchangeApi* api = nullptr;
    if (PyCapsule_IsValid(capsule.ptr(), name)) {
      api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), name));
    }
    while (api != nullptr && api->version.major != dlpack::kMajorVersion) api = api->previous;
    if (api != nullptr && api->tensor_from_py_object_no_sync != nullptr) exchange = api;
  }
  for (int i = 0; i < kDTypes; ++i) dtype_objects[i] = py::object(dtypes[static_cast<size_t>(i)]).release().ptr();
  tensor_type_object = reinterpret_cast<PyTypeObject*>(tensor_type.release().ptr());
  return exchange != nullptr;
}

py::object pack_adam(py::handle params, py::handle grads, py::handle exp_avgs, py::handle exp_avg_sqs,
                     py::handle masters, py::handle device, int device_type, int device_index) {
  if (tensor_type_object == nullptr) return py::none();
  const Target target{device, device_type, device_index};
  const Items p(params), g(grads), m(exp_avgs), v(exp_avg_sqs);
  const bool with_masters = !masters.is_none();
  const Items w(with_masters ? masters : params);
  const Py_ssize_t count = p.size();
  if (count < 0 || g.size() != count || m.size() != count || v.size() != count || w.size() != count) return py::none();

  constexpr int64_t kFp32 = static_cast<int64_t>(DType::kFloat32);
  std::vector<AdamRow> rows;
  rows.reserve(static_cast<size_t>(count));
  std::vector<Interval> outputs, inputs;
  outputs.reserve(static_cast<size_t>(count) * (with_masters ? 4 : 3));
  inputs.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    View param, grad, exp_avg, exp_avg_sq, master;
    if (!view_of(p[i], target, param) || !view_of(g[i], target, grad) ||
        !view_of(m[i], target, exp_avg) || !view_of(v[i], target, exp_avg_sq)) {
      return py::none();
    }
    if (exp_avg.dtype != kFp32 || exp_avg_sq.dtype != kFp32) return py::none();
    if (!grad.same_shape(param) || !exp_avg.same_shape(param) || !exp_avg_sq.same_shape(param)) return py::none();
    const bool has_master = with_masters && w[i] != Py_None;
    if (has_master) {
      if (!view_of(w[i], target, master)) return py::none();
      if (master.dtype != kFp32 || param.dtype == kFp32 || !master.same_shape(param)) return py::none();
    }
    if (param.numel == 0) continue;
    const View& weight = has_master ? master : param;
    rows.push_back({weight.data, has_master ? param.data : 0, grad.data, exp_avg.data, exp_avg_sq.data, param.numel,
                    weight.dtype | (has_master ? param.dtype << 8 : 0) | grad.dtype << 16});
    outputs.push_back({param.data, param.data + param.bytes()});
    outputs.push_back({exp_avg.data, exp_avg.data + exp_avg.bytes()});
    outputs.push_back({exp_avg_sq.data, exp_avg_sq.data + exp_avg_sq.bytes()});
    if (has_master) outputs.push_back({master.data, master.data + master.bytes()});
    inputs.push_back({grad.data, grad.data + grad.bytes()});
  }
  if (overlapping(outputs, inputs)) return py::none();
  return to_bytes(rows);
}

py::object pack_data(py::handle tensors, py::handle device, int device_type, int device_index) {
  if (tensor_type_object == nullptr) return py::none();
  const Target target{device, device_type, device_index};
  const Items items(tensors);
  if (items.size() < 0) return py::none();
  std::vector<DataRow> rows;
  rows.reserve(static_cast<size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    View view;
    if (!view_of(items[i], target, view)) return py::none();
    if (view.numel != 0) rows.push_back({view.data, view.numel, view.dtype});
  }
  return to_bytes(rows);
}

}  // namespace bmt
