// The Adam step on CUDA. The functions queue their work on the given stream of the current device and do not
// wait for it.
#pragma once

#include <cuda_runtime_api.h>

#include "common/adam.h"

namespace bmt {

// found_inf: null, or the address on the device of a float; nothing is written where it is not zero.
cudaError_t adam_rows_cuda(const AdamRow* rows, int64_t count, const AdamScalars& scalars, const float* found_inf,
                           cudaStream_t stream);

// Whether the current device can run the kernels that were built.
bool device_is_supported();

}  // namespace bmt
