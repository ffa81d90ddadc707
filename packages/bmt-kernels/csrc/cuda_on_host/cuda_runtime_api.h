// As much of the CUDA runtime as the kernels use, for a C++ compiler and without a GPU. This folder stands in for the
// toolkit's headers, so that the sources in csrc/cuda/ are compiled as they are: see blocks.h for how they run.
//
// What is missing here is added when a kernel uses it. Device memory is host memory, a stream does its work at once.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "blocks.h"

#define CUDART_VERSION 13000

using cudaStream_t = struct CUstream_st*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorLaunchFailure = 719
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

struct cudaFuncAttributes {};

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

// Few blocks run at once, so that tests of moderate size give each of them several chunks.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }  // every launch has returned its error
inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "cudaErrorInvalidConfiguration" : "cudaErrorLaunchFailure";
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : cuda_on_host::what_failed();
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "kernel arguments hold 4 KB");
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "kernel arguments are copied byte by byte");
  const dim3& grid = config->gridDim;
  const dim3& block = config->blockDim;
  const bool one_dimension = grid.y == 1 && grid.z == 1 && block.y == 1 && block.z == 1;
  if (!one_dimension || grid.x == 0 || grid.x > 0x7fffffff || block.x == 0 || block.x > 1024 ||
      config->dynamicSmemBytes != 0) {
    return cudaErrorInvalidConfiguration;  // or not needed so far
  }
  const std::tuple<Parameters...> given(std::forward<Arguments>(arguments)...);
  const auto thread = [&] { std::apply(kernel, given); };
  return cuda_on_host::run_grid(grid.x, block.x, thread) ? cudaSuccess : cudaErrorLaunchFailure;
}
