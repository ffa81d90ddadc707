// The fused Adam step on CUDA: the arithmetic of common/adam.h over many tensors in one launch.
#include "cuda/adam.h"

#include "cuda/batch.cuh"
#include "cuda/quotients.cuh"
#include "cuda/reduce.cuh"
#include "cuda/storage.cuh"

namespace bmt {
namespace {

using AdamBatch = Batch<AdamRow>;

struct Sums {
  double sum;
  double squares;
};

// Where the blocks of a launch write the sums of their directions.
struct Partials {
  double* sums;
  double* squares;
};
static_assert(sizeof(AdamBatch) + sizeof(AdamScalars) + 5 * sizeof(void*) <= kArgumentBytes);

__device__ double read_number(const DeviceNumber& number, double otherwise) {
  if (number.address == nullptr) return otherwise;
  switch (number.type) {
    case NumberType::kFloat32:
      return *static_cast<const float*>(number.address);
    case NumberType::kFloat64:
      return *static_cast<const double*>(number.address);
    default:
      return static_cast<double>(*static_cast<const int64_t*>(number.address));
  }
}

__global__ void scalars_kernel(AdamSettings settings, DeviceNumber lr, DeviceNumber step, AdamScalars* out) {
  settings.lr = read_number(lr, settings.lr);
  settings.step = read_number(step, settings.step);
  *out = adam_scalars(settings);
}

template <class Weight, class Copy, class Grad, int N, bool kSums>
__device__ __forceinline__ void adam_pack(const AdamRow& row, int64_t i, const AdamFactors<float>& factors,
                                          bool decoupled, bool update, Sums& sums) {
  auto* weight = address<typename Weight::Storage>(row.weight) + i;
  auto* exp_avg = address<float>(row.exp_avg) + i;
  auto* exp_avg_sq = address<float>(row.exp_avg_sq) + i;
  const auto grad = load_pack<typename Grad::Storage, N>(address<const typename Grad::Storage>(row.grad) + i);
  auto w = load_pack<typename Weight::Storage, N>(weight);
  auto m = load_pack<float, N>(exp_avg);
  auto v = load_pack<float, N>(exp_avg_sq);
  Pack<typename Copy::Storage, N> copy;
  float x[N];
  float g[N];
  float quotients[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    x[j] = Weight::load(w.at[j]);
    g[j] = Grad::load(grad.at[j]);
  }
  adam_elements(x, m.at, v.at, g, factors, decoupled, update, quotients);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (kSums) {
      const double direction = quotients[j] * factors.direction_factor;
      sums.sum += direction;
      sums.squares = fma(direction, direction, sums.squares);
    }
    w.at[j] = Weight::store(x[j]);
    copy.at[j] = Copy::store(x[j]);
  }
  store_pack(exp_avg, m);
  store_pack(exp_avg_sq, v);
  if (update) {
    store_pack(weight, w);
    if (!kSame<Copy, NoCopy>) store_pack(address<typename Copy::Storage>(row.copy) + i, copy);
  }
}

template <class Weight, class Copy, class Grad, bool kSums>
__global__ void __launch_bounds__(kThreads)
    adam_kernel(const __grid_constant__ AdamBatch batch, const __grid_constant__ AdamScalars given,
                const AdamScalars* on_device, const float* grad_factor, const float* found_inf, double* block_sums,
                double* block_squares) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const int row_index = row_of_block(batch);
  const AdamRow& row = batch.rows[row_index];
  int64_t begin;
  int n;
  chunk_of_block(batch, row_index, begin, n);
  // Not a copy: nvcc 13.0 loses what is written to a copy of a __grid_constant__ argument.
  const AdamScalars& scalars = on_device == nullptr ? given : *on_device;
  auto factors = spread_factors<float>(scalars, [](float x) { return x; });
  if (grad_factor != nullptr) factors.grad_factor *= *grad_factor;
  Sums sums{0.0, 0.0};
  int done = 0;
  if (batch.aligned[row_index]) {
    done = n / kNeighbours * kNeighbours;
    for (int i = threadIdx.x * kNeighbours; i < done; i += kThreads * kNeighbours) {
      adam_pack<Weight, Copy, Grad, kNeighbours, kSums>(row, begin + i, factors, scalars.decoupled, scalars.update,
                                                        sums);
    }
  }
  for (int i = done + threadIdx.x; i < n; i += kThreads) {
    adam_pack<Weight, Copy, Grad, 1, kSums>(row, begin + i, factors, scalars.decoupled, scalars.update, sums);
  }
  if (kSums) {
    const double sum = combine_block<kMagnitudes>(sums.sum);
    const double squares = combine_block<kMagnitudes>(sums.squares);
    if (threadIdx.x == 0) {
      block_sums[blockIdx.x] = sum;
      block_squares[blockIdx.x] = squares;
    }
  }
}

template <class Weight, class Copy, class Grad, bool kSums>
cudaError_t launch_kind(const AdamRow* rows, int64_t count, int kind, const AdamScalars& scalars,
                        const AdamExtras& extras, Partials& partials, cudaStream_t stream) {
  const auto launch = [&](const AdamBatch& batch, unsigned blocks) {
    const cudaError_t error =
        launch_kernel(adam_kernel<Weight, Copy, Grad, kSums>, blocks, kThreads, stream, batch, scalars, extras.scalars,
                      extras.grad_factor, extras.found_inf, partials.sums, partials.squares);
    if (kSums) {
      partials.sums += blocks;
      partials.squares += blocks;
    }
    return error;
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

using LaunchKind = cudaError_t (*)(const AdamRow*, int64_t, int, const AdamScalars&, const AdamExtras&, Partials&,
                                   cudaStream_t);

#define BMT_LAUNCH_ROW(weight, copy, sums) \
  launch_kind<weight, copy, F32, sums>, launch_kind<weight, copy, BF16, sums>, launch_kind<weight, copy, F16, sums>
#define BMT_LAUNCH_TABLE(sums)                                                                          \
  {                                                                                                     \
    BMT_LAUNCH_ROW(F32, NoCopy, sums), BMT_LAUNCH_ROW(BF16, NoCopy, sums), BMT_LAUNCH_ROW(F16, NoCopy, sums), \
        BMT_LAUNCH_ROW(F32, BF16, sums), BMT_LAUNCH_ROW(F32, F16, sums)                                 \
  }
constexpr LaunchKind kLaunch[2][kWeightKinds * kDTypes] = {BMT_LAUNCH_TABLE(false), BMT_LAUNCH_TABLE(true)};

}  // namespace

int64_t adam_blocks(const AdamRow* rows, int64_t count) { return chunks_of_rows(rows, count); }

cudaError_t adam_rows_cuda(const AdamRow* rows, int64_t count, const AdamSettings& settings, const AdamExtras& extras,
                           cudaStream_t stream) {
  const bool sums = extras.delta_stats != nullptr;
  const int64_t blocks = adam_blocks(rows, count);
  Partials partials{extras.partials, sums ? extras.partials + blocks : nullptr};
  if (extras.scalars != nullptr) {
    const cudaError_t error =
        launch_kernel(scalars_kernel, 1, 1, stream, settings, extras.lr, extras.step, extras.scalars);
    if (error != cudaSuccess) return error;
  }
  const AdamScalars scalars = adam_scalars(settings);
  bool present[kWeightKinds * kDTypes] = {};
  for (int64_t i = 0; i < count; ++i) present[weight_kind(rows[i]) * kDTypes + grad_kind(rows[i])] = true;
  for (int kind = 0; kind < kWeightKinds * kDTypes; ++kind) {
    if (!present[kind]) continue;
    const cudaError_t error = kLaunch[sums][kind](rows, count, kind, scalars, extras, partials, stream);
    if (error != cudaSuccess) return error;
  }
  if (!sums) return cudaSuccess;
  return launch_kernel(combine_partials<kMagnitudes>, 2, kThreads, stream, extras.partials, blocks, extras.delta_stats,
                       extras.found_inf);
}

bool device_is_supported() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, adam_kernel<F32, NoCopy, F32, false>);
  if (error != cudaSuccess) cudaGetLastError();  // the question is answered; leave no error behind
  return error == cudaSuccess;
}

}  // namespace bmt
