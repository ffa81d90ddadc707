// Block-wise 8-bit numbers on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "common/quantize.h"
#include "common/table.h"

namespace bmt {

// numel elements, the first of them at place block_offset of its block; absmax has a float for each block.
struct QuantizeArrays {
  int64_t values;
  DType dtype;
  int64_t codes;
  int64_t absmax;
  int64_t numel;
  int64_t block_offset;
};

cudaError_t quantize_cuda(const QuantizeArrays& arrays, bool is_signed, cudaStream_t stream);
cudaError_t dequantize_cuda(const QuantizeArrays& arrays, bool is_signed, cudaStream_t stream);

}  // namespace bmt
