// The two passes of a LAMB step on CUDA: the arithmetic of common/lamb.h over many tensors in one launch.
#include "cuda/lamb.h"

#include "cuda/batch.cuh"
#include "cuda/quotients.cuh"
#include "cuda/reduce.cuh"
#include "cuda/storage.cuh"

namespace bmt {
namespace {

// A row and the place of its first thread block's sums in the workspace.
struct Job : LambRow {
  int64_t partials;
};
using Jobs = Batch<Job>;
static_assert(sizeof(Jobs) + sizeof(LambScalars) + 3 * sizeof(void*) <= kArgumentBytes);

__device__ __forceinline__ LambFactors<float> factors_of(const LambScalars& scalars) {
  return spread_factors<float>(scalars, [](float x) { return x; });
}

// How many elements are taken at once, known to the compiler.
template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls visit(first, Constant<count>) for this thread's elements of the block's chunk: kNeighbours at once where all
// arrays are aligned, one at the end and otherwise.
template <class Visit>
__device__ __forceinline__ void visit_chunk(const Jobs& batch, int row_index, const Visit& visit) {
  int64_t begin;
  int n;
  chunk_of_block(batch, row_index, begin, n);
  int done = 0;
  if (batch.aligned[row_index]) {
    done = n / kNeighbours * kNeighbours;
    for (int i = threadIdx.x * kNeighbours; i < done; i += kThreads * kNeighbours) {
      visit(begin + i, Constant<kNeighbours>());
    }
  }
  for (int i = done + threadIdx.x; i < n; i += kThreads) visit(begin + i, Constant<1>());
}

template <class Weight, class Grad>
__global__ void __launch_bounds__(kThreads)
    moments_kernel(const __grid_constant__ Jobs batch, const __grid_constant__ LambScalars scalars,
                   const float* grad_factor, LambSums* partials) {
  const int row_index = row_of_block(batch);
  const Job& row = batch.rows[row_index];
  auto factors = factors_of(scalars);
  if (grad_factor != nullptr) factors.grad_factor *= *grad_factor;
  LambSums sums{0.0, 0.0};
  visit_chunk(batch, row_index, [&](int64_t i, auto together) {
    constexpr int N = decltype(together)::value;
    auto* exp_avg = address<float>(row.exp_avg) + i;
    auto* exp_avg_sq = address<float>(row.exp_avg_sq) + i;
    const auto grad = load_pack<typename Grad::Storage, N>(address<const typename Grad::Storage>(row.grad) + i);
    const auto weight = load_pack<typename Weight::Storage, N>(address<const typename Weight::Storage>(row.weight) + i);
    auto m = load_pack<float, N>(exp_avg);
    auto v = load_pack<float, N>(exp_avg_sq);
    float quotients[N];
#pragma unroll
    for (int j = 0; j < N; ++j) move_moments(m.at[j], v.at[j], Grad::load(grad.at[j]), factors);
    adam_quotients(m.at, v.at, factors, quotients);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float w = Weight::load(weight.at[j]);
      const double p = w;
      const double r = lamb_direction(w, quotients[j], factors);
      sums.weights = fma(p, p, sums.weights);  // the product is exact
      sums.directions = fma(r, r, sums.directions);
    }
    store_pack(exp_avg, m);
    store_pack(exp_avg_sq, v);
  });
  sums.weights = combine_block<kMagnitudes>(sums.weights);
  sums.directions = combine_block<kMagnitudes>(sums.directions);
  if (threadIdx.x == 0) partials[row.partials + (blockIdx.x - batch.first_block[row_index])] = sums;
}

// One thread block per row: the sums of its thread blocks, in a fixed order.
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Jobs batch, const LambSums* partials, LambSums* sums) {
  const Job& row = batch.rows[blockIdx.x];
  const int64_t count = batch.first_block[blockIdx.x + 1] - batch.first_block[blockIdx.x];
  LambSums total{0.0, 0.0};
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    total.weights += partials[row.partials + i].weights;
    total.directions += partials[row.partials + i].directions;
  }
  total.weights = combine_block<kMagnitudes>(total.weights);
  total.directions = combine_block<kMagnitudes>(total.directions);
  if (threadIdx.x == 0) sums[row.index] = total;
}

template <class Weight, class Copy>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Jobs batch, const __grid_constant__ LambScalars scalars,
                  const float* rates) {
  const int row_index = row_of_block(batch);
  const Job& row = batch.rows[row_index];
  const auto factors = factors_of(scalars);
  const float rate = rates[row.index];
  visit_chunk(batch, row_index, [&](int64_t i, auto together) {
    constexpr int N = decltype(together)::value;
    auto* weight = address<typename Weight::Storage>(row.weight) + i;
    const auto m = load_pack<float, N>(address<const float>(row.exp_avg) + i);
    const auto v = load_pack<float, N>(address<const float>(row.exp_avg_sq) + i);
    auto w = load_pack<typename Weight::Storage, N>(weight);
    Pack<typename Copy::Storage, N> copy;
    float quotients[N];
    adam_quotients(m.at, v.at, factors, quotients);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x = Weight::load(w.at[j]);
      x = x - lamb_direction(x, quotients[j], factors) * rate;
      w.at[j] = Weight::store(x);
      copy.at[j] = Copy::store(x);
    }
    store_pack(weight, w);
    if (!kSame<Copy, NoCopy>) store_pack(address<typename Copy::Storage>(row.copy) + i, copy);
  });
}

// Calls launch(batch, blocks) for the jobs for which fits(job) is true.
template <class Fits, class Launch>
cudaError_t launch_jobs(const LambRow* rows, int64_t count, const Fits& fits, const Launch& launch) {
  Batcher<Job, Launch> batcher(launch);
  int64_t partials = 0;
  for (int64_t i = 0; i < count; ++i) {
    const LambRow& row = rows[i];
    if (fits(row)) {
      const bool aligned = aligned16(row.weight) && aligned16(row.copy) && aligned16(row.grad) &&
                           aligned16(row.exp_avg) && aligned16(row.exp_avg_sq);
      const cudaError_t error = batcher.add(Job{row, partials}, aligned);
      if (error != cudaSuccess) return error;
    }
    partials += chunks_of_rows(&row, 1);
  }
  return batcher.flush();
}

struct Moments {
  LambScalars scalars;
  const float* grad_factor;
  LambSums* partials;
  cudaStream_t stream;
};

template <class Weight, class Grad>
cudaError_t launch_moments(const Moments& call, const Jobs& batch, unsigned blocks) {
  return launch_kernel(moments_kernel<Weight, Grad>, blocks, kThreads, call.stream, batch, call.scalars,
                       call.grad_factor, call.partials);
}

struct Update {
  LambScalars scalars;
  const float* rates;
  cudaStream_t stream;
};

template <class Weight, class Copy>
cudaError_t launch_update(const Update& call, const Jobs& batch, unsigned blocks) {
  return launch_kernel(update_kernel<Weight, Copy>, blocks, kThreads, call.stream, batch, call.scalars, call.rates);
}

using LaunchMoments = cudaError_t (*)(const Moments&, const Jobs&, unsigned);
using LaunchUpdate = cudaError_t (*)(const Update&, const Jobs&, unsigned);

#define BMT_LAUNCH_ROW(weight) launch_moments<weight, F32>, launch_moments<weight, BF16>, launch_moments<weight, F16>
constexpr LaunchMoments kLaunchMoments[kDTypes * kDTypes] = {BMT_LAUNCH_ROW(F32), BMT_LAUNCH_ROW(BF16),
                                                             BMT_LAUNCH_ROW(F16)};
constexpr LaunchUpdate kLaunchUpdate[kWeightKinds] = {launch_update<F32, NoCopy>, launch_update<BF16, NoCopy>,
                                                      launch_update<F16, NoCopy>, launch_update<F32, BF16>,
                                                      launch_update<F32, F16>};

// One launch after the other for each kind of row that there is; kinds of rows are places in `launches`.
template <int kKinds, class Launches, class Kind, class Call>
cudaError_t launch_kinds(const Launches& launches, const LambRow* rows, int64_t count, const Kind& kind_of,
                         const Call& call) {
  bool present[kKinds] = {};
  for (int64_t i = 0; i < count; ++i) present[kind_of(rows[i])] = true;
  for (int kind = 0; kind < kKinds; ++kind) {
    if (!present[kind]) continue;
    const cudaError_t error = launch_jobs(
        rows, count, [&](const LambRow& row) { return kind_of(row) == kind; },
        [&](const Jobs& batch, unsigned blocks) { return launches[kind](call, batch, blocks); });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

int64_t lamb_blocks(const LambRow* rows, int64_t count) { return chunks_of_rows(rows, count); }

cudaError_t lamb_moments_cuda(const LambRow* rows, int64_t count, const LambSettings& settings,
                              const float* grad_factor, LambSums* sums, LambSums* partials, cudaStream_t stream) {
  const Moments call{lamb_scalars(settings), grad_factor, partials, stream};
  const cudaError_t error = launch_kinds<kDTypes * kDTypes>(
      kLaunchMoments, rows, count, [](const LambRow& row) { return weight_dtype(row) * kDTypes + grad_kind(row); },
      call);
  if (error != cudaSuccess) return error;
  return launch_jobs(
      rows, count, [](const LambRow&) { return true; },
      [&](const Jobs& batch, unsigned) {
        return launch_kernel(combine_kernel, batch.count, kThreads, stream, batch, partials, sums);
      });
}

cudaError_t lamb_update_cuda(const LambRow* rows, int64_t count, const LambSettings& settings, const float* rates,
                             cudaStream_t stream) {
  return launch_kinds<kWeightKinds>(
      kLaunchUpdate, rows, count, [](const LambRow& row) { return weight_kind(row); },
      Update{lamb_scalars(settings), rates, stream});
}

}  // namespace bmt
