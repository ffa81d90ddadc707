// Blocks of 256 elements that have a scale in common: a warp has a block, and a lane eight of its elements.
#pragma once

#include "common/quantize.h"
#include "cuda/batch.cuh"

namespace bmt {
namespace {

constexpr int kLane = kQuantBlock / 32;  // elements of a lane
static_assert(kLane == 2 * kNeighbours);
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

// The part of a block that exists, and which of its elements a lane has: twice four neighbours of a complete block
// whose arrays are aligned, so that a warp's accesses have no gaps, else every 32nd.
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

  __device__ __forceinline__ int64_t packed_place(int half) const {
    return block + half * (kQuantBlock / 2) + threadIdx.x % 32 * kNeighbours;
  }
  __device__ __forceinline__ int64_t place(int j) const { return block + threadIdx.x % 32 + 32 * j; }
  __device__ __forceinline__ bool has(int j) const { return place(j) >= begin && place(j) < end; }
};

// kPacked is span.packed, where the compiler shall make code of its own for either.
template <bool kPacked, class Storage>
__device__ __forceinline__ Pack<Storage, kLane> load_lane(const Storage* array, const Span& span) {
  Pack<Storage, kLane> pack;
  if constexpr (kPacked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto part = load_pack<Storage, kNeighbours>(array + span.packed_place(half));
#pragma unroll
      for (int j = 0; j < kNeighbours; ++j) pack.at[half * kNeighbours + j] = part.at[j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < kLane; ++j) pack.at[j] = span.has(j) ? array[span.place(j)] : Storage(0);
  }
  return pack;
}

template <bool kPacked, class Storage>
__device__ __forceinline__ void store_lane(Storage* array, const Span& span, const Pack<Storage, kLane>& pack) {
  if constexpr (kPacked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Pack<Storage, kNeighbours> part;
#pragma unroll
      for (int j = 0; j < kNeighbours; ++j) part.at[j] = pack.at[half * kNeighbours + j];
      store_pack(array + span.packed_place(half), part);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kLane; ++j) {
      if (span.has(j)) array[span.place(j)] = pack.at[j];
    }
  }
}

template <class Storage>
__device__ __forceinline__ Pack<Storage, kLane> load_span(const Storage* array, const Span& span) {
  return span.packed ? load_lane<true>(array, span) : load_lane<false>(array, span);
}

template <class Storage>
__device__ __forceinline__ void store_span(Storage* array, const Span& span, const Pack<Storage, kLane>& pack) {
  span.packed ? store_lane<true>(array, span, pack) : store_lane<false>(array, span, pack);
}

}  // namespace
}  // namespace bmt
