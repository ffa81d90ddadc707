// Sums of powers on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "common/norms.h"

namespace bmt {

// How many doubles the workspace of power_sum_cuda holds.
int64_t power_sum_blocks(const DataRow* rows, int64_t count);

// *total += the sum of |x|^p over all elements, or *total = max(*total, |x|) for an infinite p.
// *found_inf = max(*found_inf, 1) if any element is infinite or NaN.
cudaError_t power_sum_cuda(const DataRow* rows, int64_t count, double p, float* found_inf, double* total,
                           double* partials, cudaStream_t stream);

}  // namespace bmt
