// The two passes of a LAMB step on CUDA. The functions queue their work on the given stream of the current device and
// do not wait for it.
#pragma once

#include <cuda_runtime_api.h>

#include "common/lamb.h"

namespace bmt {

// How many LambSums the workspace of lamb_moments_cuda holds.
int64_t lamb_blocks(const LambRow* rows, int64_t count);

// grad_factor: one float, or null. sums: one for every tensor, of which those of the rows are written.
cudaError_t lamb_moments_cuda(const LambRow* rows, int64_t count, const LambSettings& settings,
                              const float* grad_factor, LambSums* sums, LambSums* partials, cudaStream_t stream);

// rates: one for every tensor.
cudaError_t lamb_update_cuda(const LambRow* rows, int64_t count, const LambSettings& settings, const float* rates,
                             cudaStream_t stream);

}  // namespace bmt
