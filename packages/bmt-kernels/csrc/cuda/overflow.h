// The overflow check on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "common/table.h"

namespace bmt {

// out = max(out, 1) if any element is infinite or NaN.
cudaError_t overflow_check_cuda(const DataRow* rows, int64_t count, float* out, cudaStream_t stream);

}  // namespace bmt
