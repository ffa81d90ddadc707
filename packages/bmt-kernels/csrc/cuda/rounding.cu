// Stochastic rounding of one tensor on CUDA.
#include "cuda/rounding.h"

#include "cuda/batch.cuh"

namespace bmt {
namespace {

template <bool kToHalf>
__global__ void __launch_bounds__(kThreads) rounding_kernel(const __grid_constant__ RoundingRow row) {
  const bool adjacent = row.width >= row.numel;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kChunk;
  const int64_t end = begin + kChunk < row.numel ? begin + kChunk : row.numel;
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) round_element<kToHalf>(row, adjacent, i);
}

}  // namespace

cudaError_t round_stochastically_cuda(const RoundingRow& row, bool to_half, cudaStream_t stream) {
  const int64_t blocks = (row.numel + kChunk - 1) / kChunk;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  return launch_kernel(to_half ? rounding_kernel<true> : rounding_kernel<false>, blocks, kThreads, stream, row);
}

}  // namespace bmt
