// The averages of factored second moments on CUDA: those of many matrices in one launch.
#include "cuda/factored_averages.h"

#include "cuda/batch.cuh"
#include "cuda/reduce.cuh"

namespace bmt {
namespace {

// A thread block adds up one vector. first_block counts vectors.
__global__ void __launch_bounds__(kThreads) totals_kernel(const __grid_constant__ Batch<AverageRow> batch) {
  const int index = row_of_block(batch);
  const AverageRow& row = batch.rows[index];
  const int64_t vector = blockIdx.x - batch.first_block[index];
  const float* sums = address<const float>(row.sums) + vector * row.length;
  const float* averages = address<const float>(row.average) + vector * row.length;
  double total = 0.0, before = 0.0;
  for (int64_t i = threadIdx.x; i < row.length; i += kThreads) {
    total += static_cast<double>(sums[i]);
    before += static_cast<double>(averages[i]);
  }
  total = combine_block<kPowers>(total);
  before = combine_block<kPowers>(before);
  if (threadIdx.x != 0) return;
  address<float>(row.totals)[vector] = static_cast<float>(total);
  address<float>(row.before)[vector] = static_cast<float>(before);
}

__global__ void __launch_bounds__(kThreads)
    averages_kernel(const __grid_constant__ Batch<AverageRow> batch, double decay) {
  const int index = row_of_block(batch);
  const AverageRow& row = batch.rows[index];
  int64_t begin;
  int n;
  chunk_of_block(batch, index, begin, n);
  float* factors = address<float>(row.factors);
  if (row.average == 0) {
    for (int64_t i = begin + threadIdx.x; i < begin + n; i += kThreads) factors[i] = 1.0f;
    return;
  }
  float* averages = address<float>(row.average);
  const float* sums = address<const float>(row.sums);
  const AverageWeights weights = average_weights(row, decay);
  for (int64_t i = begin + threadIdx.x; i < begin + n; i += kThreads) {
    const float average = moved_average(weights, averages[i], sums[i]);  // before its factor may take the sum's place
    averages[i] = average;
    factors[i] = average_factor(average, average_unit(row, i / row.length, decay));
  }
}

}  // namespace

cudaError_t factored_totals_cuda(const AverageRow* rows, int64_t count, cudaStream_t stream) {
  const auto launch = [&](const Batch<AverageRow>& batch, unsigned blocks) {
    return launch_kernel(totals_kernel, blocks, kThreads, stream, batch);
  };
  Batcher<AverageRow, decltype(launch)> batcher(launch);
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t error = batcher.add(rows[i], false, rows[i].vectors);
    if (error != cudaSuccess) return error;
  }
  return batcher.flush();
}

cudaError_t factored_averages_cuda(const AverageRow* rows, int64_t count, double decay, cudaStream_t stream) {
  const auto launch = [&](const Batch<AverageRow>& batch, unsigned blocks) {
    return launch_kernel(averages_kernel, blocks, kThreads, stream, batch, decay);
  };
  Batcher<AverageRow, decltype(launch)> batcher(launch);
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t error = batcher.add(rows[i], false);
    if (error != cudaSuccess) return error;
  }
  return batcher.flush();
}

}  // namespace bmt
