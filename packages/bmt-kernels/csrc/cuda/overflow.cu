// The overflow check on CUDA: is any exponent all ones?
#include "cuda/overflow.h"

#include "cuda/batch.cuh"

namespace bmt {
namespace {

using DataBatch = Batch<DataRow>;
static_assert(sizeof(DataBatch) + sizeof(void*) <= kArgumentBytes);

template <class Word>
__device__ __forceinline__ bool chunk_has_nonfinite(const Word* data, int n, bool aligned, Word exponent) {
  constexpr int kPack = 16 / sizeof(Word);
  bool found = false;
  int done = 0;
  if (aligned) {
    done = n / kPack * kPack;
    for (int i = threadIdx.x * kPack; i < done; i += kThreads * kPack) {
      const auto pack = load_pack<Word, kPack>(data + i);
#pragma unroll
      for (int j = 0; j < kPack; ++j) found |= (pack.at[j] & exponent) == exponent;
    }
  }
  for (int i = done + threadIdx.x; i < n; i += kThreads) found |= (data[i] & exponent) == exponent;
  return found;
}

__global__ void __launch_bounds__(kThreads) overflow_kernel(const __grid_constant__ DataBatch batch, float* out) {
  const int row_index = row_of_block(batch);
  const DataRow& row = batch.rows[row_index];
  int64_t begin;
  int n;
  chunk_of_block(batch, row_index, begin, n);
  const bool aligned = batch.aligned[row_index];
  bool found;
  if (static_cast<DType>(row.dtype) == DType::kFloat32) {
    found = chunk_has_nonfinite<uint32_t>(address<const uint32_t>(row.data) + begin, n, aligned, 0x7f800000u);
  } else {
    const uint16_t exponent = static_cast<DType>(row.dtype) == DType::kBFloat16 ? 0x7f80 : 0x7c00;
    found = chunk_has_nonfinite<uint16_t>(address<const uint16_t>(row.data) + begin, n, aligned, exponent);
  }
  // Whoever writes, writes the same value, so the race is harmless. A NaN in out stays.
  if (found && *out < 1.0f) *out = 1.0f;
}

}  // namespace

cudaError_t overflow_check_cuda(const DataRow* rows, int64_t count, float* out, cudaStream_t stream) {
  const auto launch = [&](const DataBatch& batch, unsigned blocks) {
    return launch_kernel(overflow_kernel, blocks, kThreads, stream, batch, out);
  };
  Batcher<DataRow, decltype(launch)> batcher(launch);
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t error = batcher.add(rows[i], aligned16(rows[i].data));
    if (error != cudaSuccess) return error;
  }
  return batcher.flush();
}

}  // namespace bmt
