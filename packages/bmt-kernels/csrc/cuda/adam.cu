// The fused Adam step on CUDA: adam_element of common/adam.h over many tensors in one launch.
#include "cuda/adam.h"

#include "cuda/batch.cuh"
#include "cuda/storage.cuh"

namespace bmt {
namespace {

using AdamBatch = Batch<AdamRow>;
static_assert(sizeof(AdamBatch) + sizeof(AdamScalars) + sizeof(void*) <= 4096, "kernel arguments hold 4 KB");

template <class Weight, class Copy, class Grad, int N>
__device__ __forceinline__ void adam_pack(const AdamRow& row, int64_t i, const AdamFactors<float>& factors,
                                          bool decoupled, bool update) {
  auto* weight = address<typename Weight::Storage>(row.weight) + i;
  auto* exp_avg = address<float>(row.exp_avg) + i;
  auto* exp_avg_sq = address<float>(row.exp_avg_sq) + i;
  const auto grad = load_pack<typename Grad::Storage, N>(address<const typename Grad::Storage>(row.grad) + i);
  auto w = load_pack<typename Weight::Storage, N>(weight);
  auto m = load_pack<float, N>(exp_avg);
  auto v = load_pack<float, N>(exp_avg_sq);
  Pack<typename Copy::Storage, N> copy;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float x = Weight::load(w.at[j]);
    adam_element(x, m.at[j], v.at[j], Grad::load(grad.at[j]), factors, decoupled, update);
    w.at[j] = Weight::store(x);
    copy.at[j] = Copy::store(x);
  }
  store_pack(exp_avg, m);
  store_pack(exp_avg_sq, v);
  if (update) {
    store_pack(weight, w);
    if (!kSame<Copy, NoCopy>) store_pack(address<typename Copy::Storage>(row.copy) + i, copy);
  }
}

template <class Weight, class Copy, class Grad>
__global__ void __launch_bounds__(kThreads)
    adam_kernel(const __grid_constant__ AdamBatch batch, const __grid_constant__ AdamScalars scalars,
                const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const int row_index = row_of_block(batch);
  const AdamRow& row = batch.rows[row_index];
  int64_t begin;
  int n;
  chunk_of_block(batch, row_index, begin, n);
  const auto factors = spread_factors<float>(scalars, [](float x) { return x; });
  // Four fp32 values fill a 128-bit access; half-precision arrays take eight for it.
  constexpr int kPack = kSame<Weight, F32> && kSame<Copy, NoCopy> && kSame<Grad, F32> ? 4 : 8;
  int done = 0;
  if (batch.aligned >> row_index & 1) {
    done = n / kPack * kPack;
    for (int i = threadIdx.x * kPack; i < done; i += kThreads * kPack) {
      adam_pack<Weight, Copy, Grad, kPack>(row, begin + i, factors, scalars.decoupled, scalars.update);
    }
  }
  for (int i = done + threadIdx.x; i < n; i += kThreads) {
    adam_pack<Weight, Copy, Grad, 1>(row, begin + i, factors, scalars.decoupled, scalars.update);
  }
}

template <class Weight, class Copy, class Grad>
cudaError_t launch_kind(const AdamRow* rows, int64_t count, int kind, const AdamScalars& scalars,
                        const float* found_inf, cudaStream_t stream) {
  const auto launch = [&](const AdamBatch& batch, unsigned blocks) {
    adam_kernel<Weight, Copy, Grad><<<blocks, kThreads, 0, stream>>>(batch, scalars, found_inf);
  };
  Batcher<AdamRow, decltype(launch)> batcher(launch);
  for (int64_t i = 0; i < count; ++i) {
    const AdamRow& row = rows[i];
    if (weight_kind(row) * kDTypes + grad_kind(row) != kind) continue;
    const bool aligned = aligned16(row.weight) && aligned16(row.copy) && aligned16(row.grad) &&
                         aligned16(row.exp_avg) && aligned16(row.exp_avg_sq);
    const cudaError_t error = batcher.add(row, aligned);
    if (error != cudaSuccess) return error;
  }
  return batcher.flush();
}

using LaunchKind = cudaError_t (*)(const AdamRow*, int64_t, int, const AdamScalars&, const float*, cudaStream_t);

#define BMT_LAUNCH_ROW(weight, copy) \
  launch_kind<weight, copy, F32>, launch_kind<weight, copy, BF16>, launch_kind<weight, copy, F16>
constexpr LaunchKind kLaunch[kWeightKinds * kDTypes] = {
    BMT_LAUNCH_ROW(F32, NoCopy), BMT_LAUNCH_ROW(BF16, NoCopy), BMT_LAUNCH_ROW(F16, NoCopy),
    BMT_LAUNCH_ROW(F32, BF16),   BMT_LAUNCH_ROW(F32, F16),
};

}  // namespace

cudaError_t adam_rows_cuda(const AdamRow* rows, int64_t count, const AdamScalars& scalars, const float* found_inf,
                           cudaStream_t stream) {
  bool present[kWeightKinds * kDTypes] = {};
  for (int64_t i = 0; i < count; ++i) present[weight_kind(rows[i]) * kDTypes + grad_kind(rows[i])] = true;
  for (int kind = 0; kind < kWeightKinds * kDTypes; ++kind) {
    if (!present[kind]) continue;
    const cudaError_t error = kLaunch[kind](rows, count, kind, scalars, found_inf, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

bool device_is_supported() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, adam_kernel<F32, NoCopy, F32>);
  if (error != cudaSuccess) cudaGetLastError();  // the question is answered; leave no error behind
  return error == cudaSuccess;
}

}  // namespace bmt
