#include "cpu/pack.h"

#include <algorithm>
#include <vector>

#include "common/table.h"
#include "cpu/dlpack_abi.h"

namespace py = pybind11;

namespace bmt {
namespace {

PyTypeObject* tensor_type_object = nullptr;
const dlpack::ExchangeApi* exchange = nullptr;

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

struct View {
  int64_t data;
  int64_t numel;
  int64_t dtype;
  int32_t ndim;
  const int64_t* shape;

  int64_t bytes() const { return numel * (dtype == static_cast<int64_t>(DType::kFloat32) ? 4 : 2); }
  bool same_shape(const View& other) const {
    return ndim == other.ndim && std::equal(shape, shape + ndim, other.shape);
  }
};

bool on_device(const dlpack::Tensor& t, int device_type, int device_index) {
  if (device_type == dlpack::kCpu) return t.device.type == dlpack::kCpu || t.device.type == dlpack::kCudaHost;
  return t.device.type == device_type && t.device.id == device_index;
}

// Fills in a view of a contiguous floating-point tensor on the device; false if it is anything else.
bool view_of(PyObject* object, int device_type, int device_index, View& view) {
  if (!PyObject_TypeCheck(object, tensor_type_object)) return false;
  dlpack::Tensor t;
  if (exchange->tensor_from_py_object_no_sync(object, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!on_device(t, device_type, device_index) || t.dtype.lanes != 1) return false;
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
  }
  if (view.numel != 0 && t.data == nullptr) return false;  // a wrapper without storage of its own
  view.data = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data) + t.byte_offset);
  view.ndim = t.ndim;
  view.shape = t.shape;
  return true;
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

bool set_tensor_type(py::object tensor_type) {
  if (exchange != nullptr) return true;
  if (!PyType_Check(tensor_type.ptr()) || !py::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return false;
  const py::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)) return false;
  auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  while (api != nullptr && api->version.major != dlpack::kMajorVersion) api = api->previous;
  if (api == nullptr || api->tensor_from_py_object_no_sync == nullptr) return false;
  tensor_type_object = reinterpret_cast<PyTypeObject*>(tensor_type.release().ptr());  // kept for ever
  exchange = api;
  return true;
}

py::object pack_adam(py::handle params, py::handle grads, py::handle exp_avgs, py::handle exp_avg_sqs,
                     py::handle masters, int device_type, int device_index) {
  if (exchange == nullptr) return py::none();
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
    if (!view_of(p[i], device_type, device_index, param) || !view_of(g[i], device_type, device_index, grad) ||
        !view_of(m[i], device_type, device_index, exp_avg) || !view_of(v[i], device_type, device_index, exp_avg_sq)) {
      return py::none();
    }
    if (exp_avg.dtype != kFp32 || exp_avg_sq.dtype != kFp32) return py::none();
    if (!grad.same_shape(param) || !exp_avg.same_shape(param) || !exp_avg_sq.same_shape(param)) return py::none();
    const bool has_master = with_masters && w[i] != Py_None;
    if (has_master) {
      if (!view_of(w[i], device_type, device_index, master)) return py::none();
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

py::object pack_data(py::handle tensors, int device_type, int device_index) {
  if (exchange == nullptr) return py::none();
  const Items items(tensors);
  if (items.size() < 0) return py::none();
  std::vector<DataRow> rows;
  rows.reserve(static_cast<size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    View view;
    if (!view_of(items[i], device_type, device_index, view)) return py::none();
    if (view.numel != 0) rows.push_back({view.data, view.numel, view.dtype});
  }
  return to_bytes(rows);
}

}  // namespace bmt
