// What nvcc puts before every .cu file: the runtime, and the words of the language.
#pragma once

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads)
#define __grid_constant__
// One block runs at a time, so that its shared memory may be a static variable. Those of all kernels lie together (see
// shared_memory.ld) and are filled with garbage before each block.
#define __shared__ static

#define threadIdx (cuda_on_host::here.thread)
#define blockIdx (cuda_on_host::here.block)

#define __syncthreads() cuda_on_host::sync_block({__FILE__, __LINE__})

// A warp's intrinsics. Each lane tells its value and gets those of all lanes that the mask names.
template <class T>
cuda_on_host::OfLanes<T> of_lanes(unsigned mask, T value, cuda_on_host::Site site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t), "a lane exchanges 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return {cuda_on_host::exchange_in_warp(mask, bits, site)};
}

// A lane beyond the warp gives the lane its own value.
template <class T>
T shuffled(unsigned mask, T value, unsigned from, cuda_on_host::Site site) {
  const auto values = of_lanes(mask, value, site);
  return from < 32 ? values.at(from, mask, site) : value;
}

#define __shfl_down_sync(mask, value, delta) \
  shuffled(mask, value, threadIdx.x % 32 + (delta), {__FILE__, __LINE__})
#define __shfl_xor_sync(mask, value, lanes) \
  shuffled(mask, value, (threadIdx.x % 32) ^ (lanes), {__FILE__, __LINE__})
#define __reduce_max_sync(mask, value) reduced_max(mask, value, {__FILE__, __LINE__})

template <class T>
T reduced_max(unsigned mask, T value, cuda_on_host::Site site) {
  const auto values = of_lanes(mask, value, site);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1 && values.at(lane, mask, site) > value) value = values.at(lane, mask, site);
  }
  return value;
}
