// Sums over many elements that come out the same every time: each thread block leaves one partial sum in a
// workspace, and a second launch of one block per result adds these up in a fixed order. No atomics.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/norms.h"
#include "cuda/batch.cuh"

namespace bmt {

// Combines one value of each thread of the block; thread 0 gets the result. All threads must call it.
template <int kKind>
__device__ __forceinline__ double combine_block(double value) {
  constexpr int kWarps = kThreads / 32;
  __shared__ double of_warp[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) {
    value = norm_combine<kKind>(value, __shfl_down_sync(0xffffffffu, value, distance));
  }
  __syncthreads();  // an earlier call has been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) value = norm_combine<kKind>(value, of_warp[warp]);
  }
  return value;
}

// One thread block would take long for the partials of a large model. Where there are more than this many, a launch of
// many blocks combines each so many into one first.
constexpr int64_t kPartialsPerBlock = 4096;

// How many doubles that takes behind `count` partials.
inline int64_t combined_partials(int64_t count) {
  return count <= kPartialsPerBlock ? 0 : (count + kPartialsPerBlock - 1) / kPartialsPerBlock;
}

// For each block b: combined[b] = its part of the `count` partials.
template <int kKind>
__global__ void __launch_bounds__(kThreads) combine_parts(const double* partials, int64_t count, double* combined) {
  const int64_t begin = blockIdx.x * kPartialsPerBlock;
  const int64_t end = begin + kPartialsPerBlock < count ? begin + kPartialsPerBlock : count;
  double value = 0.0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) value = norm_combine<kKind>(value, partials[i]);
  value = combine_block<kKind>(value);
  if (threadIdx.x == 0) combined[blockIdx.x] = value;
}

// For each result r: totals[r] = totals[r] combined with the `count` partials from r * count on.
// skip: null, or the address of a float; nothing is done where it is not zero.
template <int kKind>
__global__ void __launch_bounds__(kThreads)
    combine_partials(const double* partials, int64_t count, double* totals, const float* skip) {
  if (skip != nullptr && *skip != 0.0f) return;
  partials += blockIdx.x * count;
  double value = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) value = norm_combine<kKind>(value, partials[i]);
  value = combine_block<kKind>(value);
  if (threadIdx.x == 0) totals[blockIdx.x] = norm_combine<kKind>(totals[blockIdx.x], value);
}

}  // namespace bmt
