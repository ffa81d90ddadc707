// Block-wise 8-bit numbers on CUDA.
#pragma once

#include "common/quantize.h"
#include "cuda/lanes.cuh"

namespace bmt {
namespace {

__device__ const DynamicMap kSignedMap = dynamic_map(true);
__device__ const DynamicMap kUnsignedMap = dynamic_map(false);
__device__ const Buckets<kSignedBuckets> kSignedTable = signed_buckets();
__device__ const Buckets<kUnsignedBuckets> kUnsignedTable = unsigned_buckets();

// Tables in shared memory, where lanes may read different entries at once. To be followed by __syncthreads().
template <class T>
__device__ __forceinline__ void share(T* shared, const T* table, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) shared[i] = table[i];
}

// Writes the codes of a block's values, of which each lane has eight. Elements that do not exist count as 0.
template <bool kSigned, bool kPacked>
__device__ __forceinline__ void quantize_lane(float (&x)[kLane], const Span& span, const uint32_t* buckets,
                                              uint8_t* codes, float* absmax) {
  int32_t magnitude = 0;
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    magnitude = larger(magnitude, static_cast<int32_t>(float_bits(x[j]) & 0x7fffffffu));
  }
  const BlockScale scale = block_scale(warp_max(magnitude));
  Pack<uint8_t, kLane> pack;
  if (!scale.regular || scale.power != 1.0f) {  // seldom, and then in all lanes
#pragma unroll
    for (int j = 0; j < kLane; ++j) x[j] = scale.regular ? x[j] * scale.power : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    const auto pattern = static_cast<int32_t>(float_bits(x[j] * scale.inverse));
    pack.at[j] = static_cast<uint8_t>(kSigned ? nearest_signed(pattern, buckets) : nearest_unsigned(pattern, buckets));
  }
  store_lane<kPacked>(codes, span, pack);
  if (threadIdx.x % 32 == 0) absmax[span.block / kQuantBlock] = scale.absmax;
}

}  // namespace
}  // namespace bmt
