// The averages of factored second moments on CUDA. The functions queue their work on the given stream of the current
// device and do not wait for it.
#pragma once

#include <cuda_runtime_api.h>

#include "common/averages.h"

namespace bmt {

cudaError_t factored_totals_cuda(const AverageRow* rows, int64_t count, cudaStream_t stream);

cudaError_t factored_averages_cuda(const AverageRow* rows, int64_t count, double decay, cudaStream_t stream);

}  // namespace bmt
