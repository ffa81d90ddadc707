// The fused Adam step with 8-bit moments on CUDA, over many tensors in one launch. The moments of a block live in
// the registers of its warp between the step and their requantisation.
#include "cuda/adam8bit.h"

#include "cuda/quantize.cuh"
#include "cuda/storage.cuh"

namespace bmt {
namespace {

using Adam8bitBatch = Batch<Adam8bitRow>;
static_assert(sizeof(Adam8bitBatch) + sizeof(AdamScalars) + sizeof(void*) <= kArgumentBytes);

template <class Weight, class Copy, class Grad>
__global__ void __launch_bounds__(kThreads)
    adam8bit_kernel(const __grid_constant__ Adam8bitBatch batch, const __grid_constant__ AdamScalars scalars,
                    const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  __shared__ float signed_map[256];
  __shared__ float unsigned_map[256];
  __shared__ uint32_t signed_table[kSignedBuckets];
  __shared__ uint32_t unsigned_table[kUnsignedBuckets];
  share(signed_map, kSignedMap.at, 256);
  share(unsigned_map, kUnsignedMap.at, 256);
  share(signed_table, kSignedTable.at, kSignedBuckets);
  share(unsigned_table, kUnsignedTable.at, kUnsignedBuckets);
  __syncthreads();

  const int row_index = row_of_block(batch);
  const Adam8bitRow& row = batch.rows[row_index];
  int64_t chunk;
  int n;
  chunk_of_block(batch, row_index, chunk, n);
  const bool aligned = batch.aligned[row_index];
  const auto factors = spread_factors<float>(scalars, [](float x) { return x; });
  auto* weight = address<typename Weight::Storage>(row.weight);
  auto* codes_avg = address<uint8_t>(row.exp_avg);
  auto* codes_avg_sq = address<uint8_t>(row.exp_avg_sq);
  auto* absmax_avg = address<float>(row.absmax_avg);
  auto* absmax_avg_sq = address<float>(row.absmax_avg_sq);
  for (int64_t block = chunk + threadIdx.x / 32 * kQuantBlock; block < chunk + n;
       block += kThreads / 32 * kQuantBlock) {
    const Span span(block, row.begin, row.numel, aligned);
    auto w = load_span(weight, span);
    const auto grad = load_span(address<const typename Grad::Storage>(row.grad), span);
    const auto old_avg = load_span(codes_avg, span);
    const auto old_avg_sq = load_span(codes_avg_sq, span);
    const float scale_avg = absmax_avg[block / kQuantBlock];
    const float scale_avg_sq = absmax_avg_sq[block / kQuantBlock];
    Pack<typename Copy::Storage, kLane> copy;
    float exp_avg[kLane];
    float exp_avg_sq[kLane];
#pragma unroll
    for (int j = 0; j < kLane; ++j) {
      float x = Weight::load(w.at[j]);
      float m = signed_map[old_avg.at[j]] * scale_avg;
      float v = unsigned_map[old_avg_sq.at[j]] * scale_avg_sq;
      adam_element(x, m, v, Grad::load(grad.at[j]), factors, scalars.decoupled, scalars.update);
      const bool exists = span.packed || span.has(j);
      exp_avg[j] = exists ? m : 0.0f;
      exp_avg_sq[j] = exists ? v : 0.0f;
      w.at[j] = Weight::store(x);
      copy.at[j] = Copy::store(x);
    }
    if (scalars.update) {
      store_span(weight, span, w);
      if (!kSame<Copy, NoCopy>) store_span(address<typename Copy::Storage>(row.copy), span, copy);
    }
    quantize_span<true>(exp_avg, span, signed_table, codes_avg, absmax_avg);
    quantize_span<false>(exp_avg_sq, span, unsigned_table, codes_avg_sq, absmax_avg_sq);
  }
}

template <class Weight, class Copy, class Grad>
cudaError_t launch_kind(const Adam8bitRow* rows, int64_t count, int kind, const AdamScalars& scalars,
                        const float* found_inf, cudaStream_t stream) {
  const auto launch = [&](const Adam8bitBatch& batch, unsigned blocks) {
    return launch_kernel(adam8bit_kernel<Weight, Copy, Grad>, blocks, kThreads, stream, batch, scalars, found_inf);
  };
  Batcher<Adam8bitRow, decltype(launch)> batcher(launch);
  for (int64_t i = 0; i < count; ++i) {
    const Adam8bitRow& row = rows[i];
    if (weight_kind(row) * kDTypes + grad_kind(row) != kind) continue;
    const bool aligned = aligned16(row.weight) && aligned16(row.copy) && aligned16(row.grad) &&
                         row.exp_avg % kLane == 0 && row.exp_avg_sq % kLane == 0;
    const cudaError_t error = batcher.add(row, aligned);
    if (error != cudaSuccess) return error;
  }
  return batcher.flush();
}

using LaunchKind = cudaError_t (*)(const Adam8bitRow*, int64_t, int, const AdamScalars&, const float*, cudaStream_t);

#define BMT_LAUNCH_ROW(weight, copy) \
  launch_kind<weight, copy, F32>, launch_kind<weight, copy, BF16>, launch_kind<weight, copy, F16>
constexpr LaunchKind kLaunch[kWeightKinds * kDTypes] = {
    BMT_LAUNCH_ROW(F32, NoCopy), BMT_LAUNCH_ROW(BF16, NoCopy), BMT_LAUNCH_ROW(F16, NoCopy),
    BMT_LAUNCH_ROW(F32, BF16),   BMT_LAUNCH_ROW(F32, F16),
};

}  // namespace

cudaError_t adam8bit_rows_cuda(const Adam8bitRow* rows, int64_t count, const AdamScalars& scalars,
                               const float* found_inf, cudaStream_t stream) {
  bool present[kWeightKinds * kDTypes] = {};
  for (int64_t i = 0; i < count; ++i) present[weight_kind(rows[i]) * kDTypes + grad_kind(rows[i])] = true;
  for (int kind = 0; kind < kWeightKinds * kDTypes; ++kind) {
    if (!present[kind]) continue;
    const cudaError_t error = kLaunch[kind](rows, count, kind, scalars, found_inf, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace bmt
