#include "cuda/packing.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

void pack_blocks(int device, int64_t stream, int64_t values, int64_t dtype, int64_t numbers, int64_t scales,
                 int64_t block, int64_t numel, bool float8) {
  const DeviceGuard guard(device);
  const PackRow row{values, numbers, scales, block, numel};
  check(pack_blocks_cuda(row, static_cast<DType>(dtype), float8, address<CUstream_st>(stream)),
        "launching the packing of blocks");
}

void unpack_blocks(int device, int64_t stream, int64_t values, int64_t dtype, int64_t numbers, int64_t scales,
                   int64_t block, int64_t numel, bool float8, bool add) {
  const DeviceGuard guard(device);
  const PackRow row{values, numbers, scales, block, numel};
  check(unpack_blocks_cuda(row, static_cast<DType>(dtype), float8, add, address<CUstream_st>(stream)),
        "launching the unpacking of blocks");
}

}  // namespace

void bind_packing(py::module_& m) {
  m.def("pack_blocks", &pack_blocks);
  m.def("unpack_blocks", &unpack_blocks);
}

}  // namespace bmt
