// The Python module _cuda. It imports on machines without a driver; a launch there raises RuntimeError.
#include <pybind11/pybind11.h>

#include <string>

#include "common/arguments.h"
#include "cuda/launch.h"

namespace py = pybind11;

namespace {

using namespace bmt;

void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a later, unrelated call must not find it
  throw std::runtime_error(std::string("bmt_kernels: ") + doing + " failed: " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")");
}

// Makes a device current and puts the previous one back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "asking for the current CUDA device");
    if (previous_ != device) {
      check(cudaSetDevice(device), "selecting the CUDA device");
      changed_ = true;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

void adam_step(int device, int64_t stream, const py::bytes& table, double grad_factor, double beta1,
               double one_minus_beta1, double beta2, double one_minus_beta2, double decay_factor, double l2,
               double denom_factor, double eps, double step_size, bool decoupled, bool update, int64_t found_inf) {
  const auto rows = unpack_rows<AdamRow>(table);
  const auto scalars = adam_scalars(grad_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, l2,
                                    denom_factor, eps, step_size, decoupled, update);
  const DeviceGuard guard(device);
  check(adam_rows_cuda(rows.data(), static_cast<int64_t>(rows.size()), scalars, pointer<const float>(found_inf),
                       pointer<CUstream_st>(stream)),
        "launching the Adam step");
}

void overflow_check(int device, int64_t stream, const py::bytes& table, int64_t out) {
  const auto rows = unpack_rows<DataRow>(table);
  const DeviceGuard guard(device);
  check(overflow_check_cuda(rows.data(), static_cast<int64_t>(rows.size()), pointer<float>(out),
                            pointer<CUstream_st>(stream)),
        "launching the overflow check");
}

bool supports(int device) {
  const DeviceGuard guard(device);
  return device_is_supported();
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels on raw addresses; use the functions of bmt_kernels, which check their arguments.";
  m.attr("ARCHITECTURES") = BMT_CUDA_ARCHS;
  m.attr("CUDA_VERSION") = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  m.def("supports", &supports, py::arg("device"));
  m.def("adam_step", &adam_step);
  m.def("overflow_check", &overflow_check);
}
