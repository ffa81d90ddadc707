// Cross entropy on CUDA. The functions queue their work on the given stream of the current device and do not wait for
// it. What they read and write is as in cpu/cross_entropy.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cross_entropy.h"

namespace bmt {

cudaError_t cross_entropy_statistics_cuda(const CrossEntropyRows& rows, bool smooth, float* out, cudaStream_t stream);

cudaError_t cross_entropy_losses_cuda(const CrossEntropyRows& rows, const CrossEntropyFactors& factors,
                                      const float* statistics, int64_t ranks, float* losses, float* normalizers,
                                      cudaStream_t stream);

cudaError_t cross_entropy_gradient_cuda(const CrossEntropyRows& rows, const CrossEntropyFactors& factors,
                                        const float* normalizers, const float* scale, int64_t scale_stride,
                                        const float* denominator, void* out, int64_t out_stride, cudaStream_t stream);

}  // namespace bmt
