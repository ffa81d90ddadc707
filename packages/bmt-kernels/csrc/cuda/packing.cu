// Numbers that travel between ranks in 8 bits, on CUDA: one launch reads values and writes numbers and scales.
#include "cuda/packing.h"

#include "cuda/lanes.cuh"
#include "cuda/storage.cuh"

namespace bmt {
namespace {

// The threads for a block: a warp that keeps 256 values in registers; or a warp, or an entire thread block, that reads
// any number of values twice, the second time from the caches.
enum Group { kLanes, kWarp, kThreadBlock, kGroups };

constexpr int64_t kWarpBlock = 2048;  // longer blocks take an entire thread block

template <int kGroup>
constexpr int kGroupThreads = kGroup == kThreadBlock ? kThreads : 32;

template <int kGroup>
__device__ __forceinline__ int64_t block_of_group() {
  constexpr int kTogether = kThreads / kGroupThreads<kGroup>;
  return static_cast<int64_t>(blockIdx.x) * kTogether + threadIdx.x / kGroupThreads<kGroup>;
}

// The largest of all threads' numbers. All threads of the group call it, and once.
template <int kGroup>
__device__ __forceinline__ int32_t group_max(int32_t x) {
  x = warp_max(x);
  if constexpr (kGroup == kThreadBlock) {
    __shared__ int32_t of_warp[kThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; ++warp) x = larger(x, of_warp[warp]);
  }
  return x;
}

__device__ __forceinline__ int32_t magnitude_of(float x) { return static_cast<int32_t>(float_bits(x) & 0x7fffffffu); }

template <class Value, bool kFloat8, int kGroup>
__global__ void __launch_bounds__(kThreads) pack_kernel(const PackRow row, bool aligned) {
  const int64_t block = block_of_group<kGroup>();
  const int64_t begin = block * row.block;
  if (begin >= row.numel) return;
  const auto* values = address<const typename Value::Storage>(row.values);
  auto* numbers = address<uint8_t>(row.numbers);
  PackScale scale;
  if constexpr (kGroup == kLanes) {
    const Span span(begin, 0, row.numel, aligned);
    const auto pack = load_span(values, span);
    int32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kLane; ++j) largest = larger(largest, magnitude_of(Value::load(pack.at[j])));
    scale = pack_scale<kFloat8>(group_max<kGroup>(largest));
    Pack<uint8_t, kLane> bytes;
#pragma unroll
    for (int j = 0; j < kLane; ++j) {
      bytes.at[j] = scale.inverse == 0.0f ? 0 : pack_number<kFloat8>(Value::load(pack.at[j]), scale.inverse);
    }
    store_span(numbers, span, bytes);
  } else {
    const int64_t end = begin + row.block < row.numel ? begin + row.block : row.numel;
    const int64_t first = begin + threadIdx.x % kGroupThreads<kGroup>;
    int32_t largest = 0;
    for (int64_t i = first; i < end; i += kGroupThreads<kGroup>) {
      largest = larger(largest, magnitude_of(Value::load(values[i])));
    }
    scale = pack_scale<kFloat8>(group_max<kGroup>(largest));
    for (int64_t i = first; i < end; i += kGroupThreads<kGroup>) {
      numbers[i] = scale.inverse == 0.0f ? 0 : pack_number<kFloat8>(Value::load(values[i]), scale.inverse);
    }
  }
  if (threadIdx.x % kGroupThreads<kGroup> == 0) address<float>(row.scales)[block] = scale.scale;
}

template <class Value, bool kFloat8, bool kAdd>
__device__ __forceinline__ typename Value::Storage unpacked(int8_t byte, float scale, typename Value::Storage before) {
  const float x = unpack_number<kFloat8>(byte, scale);
  return Value::store(kAdd ? Value::load(before) + x : x);
}

template <class Value, bool kFloat8, bool kAdd, int kGroup>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const PackRow row, bool aligned) {
  const int64_t block = block_of_group<kGroup>();
  const int64_t begin = block * row.block;
  if (begin >= row.numel) return;
  auto* values = address<typename Value::Storage>(row.values);
  const auto* numbers = address<const int8_t>(row.numbers);
  const float scale = address<const float>(row.scales)[block];
  if constexpr (kGroup == kLanes) {
    const Span span(begin, 0, row.numel, aligned);
    const auto bytes = load_span(numbers, span);
    Pack<typename Value::Storage, kLane> pack{};
    if constexpr (kAdd) pack = load_span(values, span);
#pragma unroll
    for (int j = 0; j < kLane; ++j) pack.at[j] = unpacked<Value, kFloat8, kAdd>(bytes.at[j], scale, pack.at[j]);
    store_span(values, span, pack);
  } else {
    const int64_t end = begin + row.block < row.numel ? begin + row.block : row.numel;
    for (int64_t i = begin + threadIdx.x % kGroupThreads<kGroup>; i < end; i += kGroupThreads<kGroup>) {
      values[i] = unpacked<Value, kFloat8, kAdd>(numbers[i], scale, kAdd ? values[i] : typename Value::Storage(0));
    }
  }
}

using Kernel = void (*)(PackRow, bool);

cudaError_t launch(const Kernel (&kernels)[kGroups], const PackRow& row, cudaStream_t stream) {
  if (row.numel == 0) return cudaSuccess;
  const Group group = row.block == kQuantBlock ? kLanes : row.block <= kWarpBlock ? kWarp : kThreadBlock;
  const int64_t together = group == kThreadBlock ? 1 : kThreads / 32;  // blocks of one thread block
  const int64_t count = (row.numel - 1) / row.block + 1;
  const int64_t blocks = (count - 1) / together + 1;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const bool aligned = aligned16(row.values) && row.numbers % kNeighbours == 0;
  return launch_kernel(kernels[group], blocks, kThreads, stream, row, aligned);
}

#define BMT_GROUPS(kernel, ...) \
  { kernel<__VA_ARGS__, kLanes>, kernel<__VA_ARGS__, kWarp>, kernel<__VA_ARGS__, kThreadBlock> }
#define BMT_PACK(value) {BMT_GROUPS(pack_kernel, value, false), BMT_GROUPS(pack_kernel, value, true)}
#define BMT_UNPACK(value)                                                                           \
  {{BMT_GROUPS(unpack_kernel, value, false, false), BMT_GROUPS(unpack_kernel, value, false, true)}, \
   {BMT_GROUPS(unpack_kernel, value, true, false), BMT_GROUPS(unpack_kernel, value, true, true)}}
// [dtype of the values][in float8][who has a block], and [added to the values] before the last.
constexpr Kernel kPack[kDTypes][2][kGroups] = {BMT_PACK(F32), BMT_PACK(BF16), BMT_PACK(F16)};
constexpr Kernel kUnpack[kDTypes][2][2][kGroups] = {BMT_UNPACK(F32), BMT_UNPACK(BF16), BMT_UNPACK(F16)};

}  // namespace

cudaError_t pack_blocks_cuda(const PackRow& row, DType dtype, bool float8, cudaStream_t stream) {
  return launch(kPack[static_cast<int>(dtype)][float8], row, stream);
}

cudaError_t unpack_blocks_cuda(const PackRow& row, DType dtype, bool float8, bool add, cudaStream_t stream) {
  return launch(kUnpack[static_cast<int>(dtype)][float8][add], row, stream);
}

}  // namespace bmt
