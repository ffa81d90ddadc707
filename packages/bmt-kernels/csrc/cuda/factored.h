// Factored second moments on CUDA. The functions queue their work on the given stream of the current device and do
// not wait for it.
#pragma once

#include <cuda_runtime_api.h>

#include "common/factored.h"

namespace bmt {

// How many floats of workspace the sums over these rows take.
int64_t factored_workspace(const FactoredRow* rows, int64_t count);

// Row and column sums of the squared gradients, or, if the rows have first moments, of CAME's residuals.
cudaError_t factored_sums_cuda(const FactoredRow* rows, int64_t count, const FactoredScalars& scalars,
                               float* workspace, cudaStream_t stream);

cudaError_t factored_update_square_sum_cuda(const FactoredRow* rows, int64_t count, const FactoredScalars& scalars,
                                            float* workspace, float* out, cudaStream_t stream);

cudaError_t factored_update_cuda(const FactoredRow* rows, int64_t count, const FactoredScalars& scalars,
                                 cudaStream_t stream);

}  // namespace bmt
