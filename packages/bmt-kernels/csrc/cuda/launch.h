// What the CUDA translation units offer to module.cpp. Every function returns a cudaError_t as an int, queues
// its work on the given stream of the current device and does not wait for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/adam.h"
#include "common/table.h"

namespace bmt {

// found_inf: null, or the address on the device of a float; nothing is written where it is not zero.
cudaError_t adam_rows_cuda(const AdamRow* rows, int64_t count, const AdamScalars& scalars, const float* found_inf,
                           cudaStream_t stream);

// out = max(out, 1) if any element is infinite or NaN.
cudaError_t overflow_check_cuda(const DataRow* rows, int64_t count, float* out, cudaStream_t stream);

// Whether the current device can run the kernels that were built.
bool device_is_supported();

}  // namespace bmt
