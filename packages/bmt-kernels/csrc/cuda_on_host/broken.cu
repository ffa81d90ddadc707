// Kernels that break CUDA's rules, to test that this is noticed, and one that tells in which order blocks run.
#include "cuda/batch.cuh"

namespace {

constexpr int kThreadsHere = 64;

__global__ void some_miss_the_barrier(int64_t*) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
}

__global__ void barriers_differ(int64_t*) {
  if (threadIdx.x >= 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void a_lane_has_ended(int64_t* out) {
  if (threadIdx.x == 5) return;
  out[threadIdx.x] = __shfl_down_sync(0xffffffffu, static_cast<int>(threadIdx.x), 1);
}

__global__ void a_lane_is_elsewhere(int64_t* out) {
  if (threadIdx.x == 5) __syncthreads();
  out[threadIdx.x] = __shfl_down_sync(0xffffffffu, static_cast<int>(threadIdx.x), 1);
  if (threadIdx.x != 5) __syncthreads();
}

__global__ void a_lane_is_not_named(int64_t* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_down_sync(0x0000ffffu, static_cast<int>(threadIdx.x), 1);
}

// out: the threads in reverse order, if it did wait before it reads.
__global__ void a_barrier_is_missing(int64_t* out) {
  __shared__ int64_t number[kThreadsHere];
  number[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = number[kThreadsHere - 1 - threadIdx.x];
}

// out[0] counts the blocks; out[1 ...] are their indices in the order in which they have run.
__global__ void order_of_blocks(int64_t* out) {
  if (threadIdx.x == 0) out[++out[0]] = blockIdx.x;
}

}  // namespace

// Empty, or what went wrong. out: 64 numbers.
extern "C" __attribute__((visibility("default"))) const char* bmt_break_rule(int which, int64_t* out) {
  using Kernel = void (*)(int64_t*);
  constexpr Kernel kKernels[] = {some_miss_the_barrier, barriers_differ,      a_lane_has_ended, a_lane_is_elsewhere,
                                 a_lane_is_not_named,   a_barrier_is_missing, order_of_blocks};
  const bool many = kKernels[which] == order_of_blocks;
  const cudaError_t error = bmt::launch_kernel(kKernels[which], many ? 32 : 1, kThreadsHere, nullptr, out);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}
