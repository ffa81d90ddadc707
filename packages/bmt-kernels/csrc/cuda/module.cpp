// The Python module _cuda. It imports on machines without a driver; a launch there raises RuntimeError.
#include "cuda/adam.h"
#include "cuda/bindings.h"

namespace {

using namespace bmt;

bool supports(int device) {
  // A driver may be new enough for PyTorch's CUDA and too old for the one of this module.
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    return false;
  }
  const DeviceGuard guard(device);
  return device_is_supported();
}

}  // namespace

PYBIND11_MODULE(BMT_CUDA_MODULE, m) {
  m.doc() = "CUDA kernels on raw addresses; use the functions of bmt_kernels, which check their arguments.";
  m.attr("ARCHITECTURES") = BMT_CUDA_ARCHS;
  m.attr("CUDA_VERSION") = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  m.def("supports", &supports, pybind11::arg("device"));
  bind_adam(m);
  bind_adam8bit(m);
  bind_cross_entropy(m);
  bind_factored(m);
  bind_factored_averages(m);
  bind_lamb(m);
  bind_norms(m);
  bind_overflow(m);
  bind_packing(m);
  bind_quantize(m);
  bind_rounding(m);
}
