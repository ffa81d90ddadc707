// Block-wise 8-bit numbers of one tensor on CUDA: blocks of values to codes and back.
#include "cuda/quantize.h"

#include "cuda/quantize.cuh"
#include "cuda/storage.cuh"

namespace bmt {
namespace {

// Elements are counted from the beginning of the first block; those before `begin` do not exist.
struct Row {
  int64_t values;
  int64_t codes;
  int64_t absmax;
  int64_t begin;
  int64_t end;
  bool aligned;
};

template <class Value, bool kSigned>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const Row row) {
  __shared__ uint32_t buckets[kSigned ? kSignedBuckets : kUnsignedBuckets];
  share(buckets, kSigned ? kSignedTable.at : kUnsignedTable.at, kSigned ? kSignedBuckets : kUnsignedBuckets);
  __syncthreads();
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kChunk;
  for (int64_t block = chunk + threadIdx.x / 32 * kQuantBlock; block < chunk + kChunk && block < row.end;
       block += kThreads / 32 * kQuantBlock) {
    const Span span(block, row.begin, row.end, row.aligned);
    const auto values = load_span(address<const typename Value::Storage>(row.values), span);
    float x[kLane];
#pragma unroll
    for (int j = 0; j < kLane; ++j) x[j] = Value::load(values.at[j]);
    auto* codes = address<uint8_t>(row.codes);
    auto* absmax = address<float>(row.absmax);
    if (span.packed) {
      quantize_lane<kSigned, true>(x, span, buckets, codes, absmax);
    } else {
      quantize_lane<kSigned, false>(x, span, buckets, codes, absmax);
    }
  }
}

template <class Value, bool kSigned>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const Row row) {
  __shared__ float map[256];
  share(map, kSigned ? kSignedMap.at : kUnsignedMap.at, 256);
  __syncthreads();
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kChunk;
  for (int64_t block = chunk + threadIdx.x / 32 * kQuantBlock; block < chunk + kChunk && block < row.end;
       block += kThreads / 32 * kQuantBlock) {
    const Span span(block, row.begin, row.end, row.aligned);
    const auto codes = load_span(address<const uint8_t>(row.codes), span);
    const float absmax = address<const float>(row.absmax)[block / kQuantBlock];
    Pack<typename Value::Storage, kLane> values;
#pragma unroll
    for (int j = 0; j < kLane; ++j) values.at[j] = Value::store(map[codes.at[j]] * absmax);
    store_span(address<typename Value::Storage>(row.values), span, values);
  }
}

using Kernel = void (*)(Row);

cudaError_t launch(const Kernel (&kernels)[kDTypes][2], const QuantizeArrays& arrays, bool is_signed,
                   cudaStream_t stream) {
  Row row{arrays.values - arrays.block_offset * item_size(arrays.dtype),
          arrays.codes - arrays.block_offset,
          arrays.absmax,
          arrays.block_offset,
          arrays.block_offset + arrays.numel,
          false};
  row.aligned = aligned16(row.values) && row.codes % kNeighbours == 0;
  const int64_t blocks = (row.end + kChunk - 1) / kChunk;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  if (arrays.numel == 0) return cudaSuccess;
  return launch_kernel(kernels[static_cast<int>(arrays.dtype)][is_signed], blocks, kThreads, stream, row);
}

#define BMT_KERNELS_OF(kernel) \
  {{kernel<F32, false>, kernel<F32, true>}, {kernel<BF16, false>, kernel<BF16, true>}, {kernel<F16, false>, kernel<F16, true>}}
constexpr Kernel kQuantize[kDTypes][2] = BMT_KERNELS_OF(quantize_kernel);
constexpr Kernel kDequantize[kDTypes][2] = BMT_KERNELS_OF(dequantize_kernel);

}  // namespace

cudaError_t quantize_cuda(const QuantizeArrays& arrays, bool is_signed, cudaStream_t stream) {
  return launch(kQuantize, arrays, is_signed, stream);
}

cudaError_t dequantize_cuda(const QuantizeArrays& arrays, bool is_signed, cudaStream_t stream) {
  return launch(kDequantize, arrays, is_signed, stream);
}

}  // namespace bmt
