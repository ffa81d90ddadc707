#include "cuda/quantize.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

void quantize(int device, int64_t stream, int64_t values, int64_t dtype, int64_t codes, int64_t absmax, int64_t numel,
              bool is_signed, int64_t block_offset) {
  const DeviceGuard guard(device);
  check(quantize_cuda({values, static_cast<DType>(dtype), codes, absmax, numel, block_offset}, is_signed,
                      address<CUstream_st>(stream)),
        "launching the quantisation");
}

void dequantize(int device, int64_t stream, int64_t values, int64_t dtype, int64_t codes, int64_t absmax,
                int64_t numel, bool is_signed, int64_t block_offset) {
  const DeviceGuard guard(device);
  check(dequantize_cuda({values, static_cast<DType>(dtype), codes, absmax, numel, block_offset}, is_signed,
                        address<CUstream_st>(stream)),
        "launching the dequantisation");
}

}  // namespace

void bind_quantize(py::module_& m) {
  m.def("quantize", &quantize);
  m.def("dequantize", &dequantize);
}

}  // namespace bmt
