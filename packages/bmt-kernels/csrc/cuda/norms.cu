// Sums of powers on CUDA, and whether there is an infinity or a NaN among the elements.
#include "cuda/norms.h"

#include "common/half.h"
#include "cuda/batch.cuh"
#include "cuda/reduce.cuh"

namespace bmt {
namespace {

using DataBatch = Batch<DataRow>;
static_assert(sizeof(DataBatch) + 3 * sizeof(void*) <= kArgumentBytes);

struct F32 {
  using Storage = float;
  static __device__ __forceinline__ float load(float x) { return x; }
};
struct BF16 {
  using Storage = uint16_t;
  static __device__ __forceinline__ float load(uint16_t x) { return bf16_to_float(x); }
};
struct F16 {
  using Storage = uint16_t;
  static __device__ __forceinline__ float load(uint16_t x) { return half_to_float(x); }
};

template <int kKind, class Type>
__device__ __forceinline__ double sum_of_chunk(const DataRow& row, int64_t begin, int n, bool aligned, double p,
                                               bool& nonfinite) {
  using Storage = typename Type::Storage;
  constexpr int kPack = 16 / sizeof(Storage);
  const auto* data = address<const Storage>(row.data) + begin;
  double sum = 0.0;
  const auto take = [&](Storage stored) {
    const float x = Type::load(stored);
    nonfinite |= (float_bits(x) & 0x7f800000u) == 0x7f800000u;
    if (kKind == kSquares) {
      sum = fma(static_cast<double>(x), static_cast<double>(x), sum);  // the product is exact: the bits of x * x + sum
    } else {
      sum = norm_combine<kKind>(sum, norm_term<kKind>(x, p));
    }
  };
  int done = 0;
  if (aligned) {
    done = n / kPack * kPack;
    for (int i = threadIdx.x * kPack; i < done; i += kThreads * kPack) {
      const auto pack = load_pack<Storage, kPack>(data + i);
#pragma unroll
      for (int j = 0; j < kPack; ++j) take(pack.at[j]);
    }
  }
  for (int i = done + threadIdx.x; i < n; i += kThreads) take(data[i]);
  return sum;
}

template <int kKind>
__global__ void __launch_bounds__(kThreads)
    power_sum_kernel(const __grid_constant__ DataBatch batch, double p, float* found_inf, double* partials) {
  const int row_index = row_of_block(batch);
  const DataRow& row = batch.rows[row_index];
  int64_t begin;
  int n;
  chunk_of_block(batch, row_index, begin, n);
  const bool aligned = batch.aligned[row_index];
  bool nonfinite = false;
  double sum;
  if (static_cast<DType>(row.dtype) == DType::kFloat32) {
    sum = sum_of_chunk<kKind, F32>(row, begin, n, aligned, p, nonfinite);
  } else if (static_cast<DType>(row.dtype) == DType::kBFloat16) {
    sum = sum_of_chunk<kKind, BF16>(row, begin, n, aligned, p, nonfinite);
  } else {
    sum = sum_of_chunk<kKind, F16>(row, begin, n, aligned, p, nonfinite);
  }
  // Whoever writes, writes the same value, so the race is harmless. A NaN in found_inf stays.
  if (nonfinite && *found_inf < 1.0f) *found_inf = 1.0f;
  sum = combine_block<kKind>(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <int kKind>
cudaError_t launch_kind(const DataRow* rows, int64_t count, double p, float* found_inf, double* total, double* partials,
                        cudaStream_t stream) {
  int64_t done = 0;  // blocks of the batches before
  const auto launch = [&](const DataBatch& batch, unsigned blocks) {
    double* const to = partials + done;
    done += blocks;
    return launch_kernel(power_sum_kernel<kKind>, blocks, kThreads, stream, batch, p, found_inf, to);
  };
  Batcher<DataRow, decltype(launch)> batcher(launch);
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t error = batcher.add(rows[i], aligned16(rows[i].data));
    if (error != cudaSuccess) return error;
  }
  const cudaError_t error = batcher.flush();
  if (error != cudaSuccess) return error;
  if (const int64_t parts = combined_partials(done)) {
    const cudaError_t failure =
        launch_kernel(combine_parts<kKind>, parts, kThreads, stream, partials, done, partials + done);
    if (failure != cudaSuccess) return failure;
    partials += done;
    done = parts;
  }
  return launch_kernel(combine_partials<kKind>, 1, kThreads, stream, partials, done, total, nullptr);
}

}  // namespace

int64_t power_sum_blocks(const DataRow* rows, int64_t count) {
  const int64_t chunks = chunks_of_rows(rows, count);
  return chunks + combined_partials(chunks);
}

cudaError_t power_sum_cuda(const DataRow* rows, int64_t count, double p, float* found_inf, double* total,
                           double* partials, cudaStream_t stream) {
  constexpr decltype(&launch_kind<kSquares>) kLaunch[kNormKinds] = {
      launch_kind<kMagnitudes>, launch_kind<kSquares>, launch_kind<kPowers>, launch_kind<kMaximum>};
  return kLaunch[norm_kind(p)](rows, count, p, found_inf, total, partials, stream);
}

}  // namespace bmt
