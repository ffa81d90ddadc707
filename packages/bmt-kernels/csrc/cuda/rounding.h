// Stochastic rounding on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "common/rounding.h"

namespace bmt {

cudaError_t round_stochastically_cuda(const RoundingRow& row, bool to_half, cudaStream_t stream);

}  // namespace bmt
