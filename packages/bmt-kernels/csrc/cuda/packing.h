// Numbers that travel between ranks in 8 bits, on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "common/packing.h"
#include "common/table.h"

namespace bmt {

cudaError_t pack_blocks_cuda(const PackRow& row, DType dtype, bool float8, cudaStream_t stream);
cudaError_t unpack_blocks_cuda(const PackRow& row, DType dtype, bool float8, bool add, cudaStream_t stream);

}  // namespace bmt
