#include "cpu/tensor_view.h"

#include "cpu/dlpack_abi.h"

namespace bmt {
namespace {

// Set once by set_tensor_type, and kept for ever.
PyTypeObject* tensor_type_object = nullptr;
constexpr int kReadable = kDTypes + 1;  // and kBytes
PyObject* dtype_objects[kReadable] = {};
const dlpack::ExchangeApi* exchange = nullptr;  // null: read Python attributes

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
  } else if (t.dtype.code == dlpack::kUnsigned && t.dtype.bits == 8) {
    view.dtype = kBytes;
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
  for (int i = 0; i < kReadable; ++i) {
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

}  // namespace

bool set_tensor_type(py::object tensor_type, py::tuple dtypes, bool allow_exchange) {
  if (!PyType_Check(tensor_type.ptr()) || dtypes.size() != kReadable) throw py::type_error("torch.Tensor and 4 dtypes");
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
  for (int i = 0; i < kReadable; ++i) dtype_objects[i] = py::object(dtypes[static_cast<size_t>(i)]).release().ptr();
  tensor_type_object = reinterpret_cast<PyTypeObject*>(tensor_type.release().ptr());
  return exchange != nullptr;
}

bool tensors_are_readable() { return tensor_type_object != nullptr; }

static bool any_view_of(PyObject* object, const Target& target, View& view) {
  if (!PyObject_TypeCheck(object, tensor_type_object)) return false;
  if (!(exchange != nullptr ? read_exchange : read_attributes)(object, target, view)) return false;
  return view.numel == 0 || view.data != 0;  // otherwise a wrapper without storage of its own
}

static bool is_negated(PyObject* object) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const auto result = py::reinterpret_steal<py::object>(PyObject_CallMethodObjArgs(object, name, nullptr));
  if (!result) PyErr_Clear();
  return result.ptr() != Py_False;
}

bool view_of(PyObject* object, const Target& target, View& view, bool or_negated) {
  if (!any_view_of(object, target, view) || view.dtype == kBytes) return false;
  // What PyTorch negates when it is read is imaginary parts, which are contiguous only if there is one of them.
  return or_negated || view.numel != 1 || !is_negated(object);
}

bool byte_view_of(PyObject* object, const Target& target, View& view) {
  return any_view_of(object, target, view) && view.dtype == kBytes;
}

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

}  // namespace bmt
