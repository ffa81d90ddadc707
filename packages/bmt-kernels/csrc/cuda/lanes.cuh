// Blocks of 256 elements that have a scale in common: a warp has a block, and a lane eight of its elements.
#pragma once

#include "common/quantize.h"
#include "cuda/batch.cuh"

namespace bmt {
namespace {

constexpr int kLane = kQuantBlock / 32;  // elements of a lane
static_assert(kChunk % kQuantBlock == 0, "a thread block's chunk consists of whole blocks");

__device__ __forceinline__ int32_t warp_max(int32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
#endif
}

// The part of a block that exists, and which of its elements a lane has: eight neighbours of a complete block whose
// arrays are aligned, else every 32nd.
struct Span {
  int64_t block;
  int64_t begin;
  int64_t end;
  bool packed;

  __device__ __forceinline__ Span(int64_t block, int64_t row_begin, int64_t row_end, bool aligned)
      : block(block),
        begin(block < row_begin ? row_begin : block),
        end(block + kQuantBlock < row_end ? block + kQuantBlock : row_end),
        packed(aligned && end - begin == kQuantBlock) {}

  __device__ __forceinline__ int64_t packed_place() const { return block + threadIdx.x % 32 * kLane; }
  __device__ __forceinline__ int64_t place(int j) const { return block + threadIdx.x % 32 + 32 * j; }
  __device__ __forceinline__ bool has(int j) const { return place(j) >= begin && place(j) < end; }
};

template <class Storage>
__device__ __forceinline__ Pack<Storage, kLane> load_span(const Storage* array, const Span& span) {
  if (span.packed) return load_pack<Storage, kLane>(array + span.packed_place());
  Pack<Storage, kLane> pack;
#pragma unroll
  for (int j = 0; j < kLane; ++j) pack.at[j] = span.has(j) ? array[span.place(j)] : Storage(0);
  return pack;
}

template <class Storage>
__device__ __forceinline__ void store_span(Storage* array, const Span& span, const Pack<Storage, kLane>& pack) {
  if (span.packed) {
    store_pack(array + span.packed_place(), pack);
    return;
  }
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    if (span.has(j)) array[span.place(j)] = pack.at[j];
  }
}

}  // namespace
}  // namespace bmt
