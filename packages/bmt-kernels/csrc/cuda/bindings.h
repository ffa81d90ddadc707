// What the operations add to the Python module _cuda, and what their bindings share.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "common/arguments.h"

namespace bmt {

inline void check(cudaError_t error, const char* doing) {
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

void bind_adam(pybind11::module_& m);
void bind_adam8bit(pybind11::module_& m);
void bind_cross_entropy(pybind11::module_& m);
void bind_factored(pybind11::module_& m);
void bind_factored_averages(pybind11::module_& m);
void bind_lamb(pybind11::module_& m);
void bind_norms(pybind11::module_& m);
void bind_overflow(pybind11::module_& m);
void bind_packing(pybind11::module_& m);
void bind_quantize(pybind11::module_& m);
void bind_rounding(pybind11::module_& m);

}  // namespace bmt
