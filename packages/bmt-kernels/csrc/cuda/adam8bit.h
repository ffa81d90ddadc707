// The Adam step with 8-bit moments on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "common/adam8bit.h"

namespace bmt {

// Rows as they are after count_from_block. found_inf: null, or the address on the device of a float; nothing is
// written where it is not zero.
cudaError_t adam8bit_rows_cuda(const Adam8bitRow* rows, int64_t count, const AdamScalars& scalars,
                               const float* found_inf, cudaStream_t stream);

}  // namespace bmt
