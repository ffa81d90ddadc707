// The fused Adam step with 8-bit moments on CUDA, over many tensors in one launch. The moments of a block live in
// the registers of its warp between the step and their requantisation.
#include "cuda/adam8bit.h"

#include "cuda/quantize.cuh"
#include "cuda/quotients.cuh"
#include "cuda/storage.cuh"

namespace bmt {
namespace {

using Adam8bitBatch = Batch<Adam8bitRow>;
static_assert(sizeof(Adam8bitBatch) + sizeof(AdamScalars) + sizeof(void*) + sizeof(unsigned) <= kArgumentBytes);

struct Tables {
  const float* signed_map;
  const float* unsigned_map;
  const uint32_t* signed_buckets;
  const uint32_t* unsigned_buckets;
};

template <class Weight, class Copy, class Grad, bool kPacked>
__device__ __forceinline__ void adam8bit_span(const Adam8bitRow& row, const Span& span, const Tables& tables,
                                              const AdamFactors<float>& factors, bool decoupled, bool update) {
  auto* weight = address<typename Weight::Storage>(row.weight);
  auto* codes_avg = address<uint8_t>(row.exp_avg);
  auto* codes_avg_sq = address<uint8_t>(row.exp_avg_sq);
  auto* absmax_avg = address<float>(row.absmax_avg);
  auto* absmax_avg_sq = address<float>(row.absmax_avg_sq);
  auto w = load_lane<kPacked>(weight, span);
  const auto grad = load_lane<kPacked>(address<const typename Grad::Storage>(row.grad), span);
  const auto old_avg = load_lane<kPacked>(codes_avg, span);
  const auto old_avg_sq = load_lane<kPacked>(codes_avg_sq, span);
  const float scale_avg = absmax_avg[span.block / kQuantBlock];
  const float scale_avg_sq = absmax_avg_sq[span.block / kQuantBlock];
  float x[kLane];
  float g[kLane];
  float exp_avg[kLane];
  float exp_avg_sq[kLane];
  float quotients[kLane];
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    x[j] = Weight::load(w.at[j]);
    g[j] = Grad::load(grad.at[j]);
    exp_avg[j] = tables.signed_map[old_avg.at[j]] * scale_avg;
    exp_avg_sq[j] = tables.unsigned_map[old_avg_sq.at[j]] * scale_avg_sq;
  }
  adam_elements(x, exp_avg, exp_avg_sq, g, factors, decoupled, update, quotients);
  if (update) {
    Pack<typename Copy::Storage, kLane> copy;
#pragma unroll
    for (int j = 0; j < kLane; ++j) {
      w.at[j] = Weight::store(x[j]);
      copy.at[j] = Copy::store(x[j]);
    }
    store_lane<kPacked>(weight, span, w);
    if (!kSame<Copy, NoCopy>) store_lane<kPacked>(address<typename Copy::Storage>(row.copy), span, copy);
  }
  if constexpr (!kPacked) {
#pragma unroll
    for (int j = 0; j < kLane; ++j) {
      if (span.has(j)) continue;
      exp_avg[j] = 0.0f;
      exp_avg_sq[j] = 0.0f;
    }
  }
  quantize_lane<true, kPacked>(exp_avg, span, tables.signed_buckets, codes_avg, absmax_avg);
  quantize_lane<false, kPacked>(exp_avg_sq, span, tables.unsigned_buckets, codes_avg_sq, absmax_avg_sq);
}

// A thread block takes every `stride`th chunk, so that it fills its tables once.
template <class Weight, class Copy, class Grad>
__global__ void __launch_bounds__(kThreads)
    adam8bit_kernel(const __grid_constant__ Adam8bitBatch batch, const __grid_constant__ AdamScalars scalars,
                    const float* found_inf, unsigned stride) {
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

  const Tables tables{signed_map, unsigned_map, signed_table, unsigned_table};
  const auto factors = spread_factors<float>(scalars, [](float x) { return x; });
  const unsigned chunks = batch.first_block[batch.count];
  for (unsigned number = blockIdx.x; number < chunks; number += stride) {
    const int row_index = row_of_block(batch, number);
    const Adam8bitRow& row = batch.rows[row_index];
    int64_t chunk;
    int n;
    chunk_of_block(batch, row_index, chunk, n, number);
    const bool aligned = batch.aligned[row_index];
    for (int64_t block = chunk + threadIdx.x / 32 * kQuantBlock; block < chunk + n;
         block += kThreads / 32 * kQuantBlock) {
      const Span span(block, row.begin, row.numel, aligned);
      if (span.packed) {
        adam8bit_span<Weight, Copy, Grad, true>(row, span, tables, factors, scalars.decoupled, scalars.update);
      } else {
        adam8bit_span<Weight, Copy, Grad, false>(row, span, tables, factors, scalars.decoupled, scalars.update);
      }
    }
  }
}

template <class Weight, class Copy, class Grad>
cudaError_t launch_kind(const Adam8bitRow* rows, int64_t count, int kind, const AdamScalars& scalars,
                        const float* found_inf, cudaStream_t stream) {
  const auto launch = [&](const Adam8bitBatch& batch, unsigned chunks) {
    const auto kernel = adam8bit_kernel<Weight, Copy, Grad>;
    unsigned blocks = 0;
    const cudaError_t error = resident_blocks(kernel, kThreads, blocks);
    if (error != cudaSuccess) return error;
    if (blocks > chunks) blocks = chunks;
    return launch_kernel(kernel, blocks, kThreads, stream, batch, scalars, found_inf, blocks);
  };
  Batcher<Adam8bitRow, decltype(launch)> batcher(launch);
  for (int64_t i = 0; i < count; ++i) {
    const Adam8bitRow& row = rows[i];
    if (weight_kind(row) * kDTypes + grad_kind(row) != kind) continue;
    const bool aligned = aligned16(row.weight) && aligned16(row.copy) && aligned16(row.grad) &&
                         row.exp_avg % kNeighbours == 0 && row.exp_avg_sq % kNeighbours == 0;
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
