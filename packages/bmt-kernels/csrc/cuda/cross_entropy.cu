// Cross entropy on CUDA: one thread block per row, one pass over the logits for the statistics, one for the gradient.
#include "cuda/cross_entropy.h"

#include "cuda/batch.cuh"
#include "cuda/storage.cuh"

namespace bmt {
namespace {

constexpr int kRowThreads = 512;
constexpr int kWarps = kRowThreads / 32;

template <class Storage>
constexpr int kPackSize = 16 / static_cast<int>(sizeof(Storage));

// How many elements precede the first 16-byte boundary; at most n.
template <class Storage>
__device__ __forceinline__ int64_t before_boundary(const Storage* p, int64_t n) {
  const int64_t count = static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(p) % 16) % 16 / sizeof(Storage));
  return count < n ? count : n;
}

// Statistics of N more elements. The sum is rescaled when a larger logit turns up, at most once per call.
template <class Type, int kSums, int N>
__device__ __forceinline__ void add_elements(RowStatistics& row, const Pack<typename Type::Storage, N>& pack,
                                             const float* weights) {
  float values[N];
  float largest = row.largest;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values[j] = Type::load(pack.at[j]);
    largest = maximum(values[j], largest);
    if (kSums == kPlainSum) row.logit_sum += values[j];
    if (kSums == kWeightedSum) row.logit_sum += weights[j] * values[j];
  }
  row.sum = reshift(row.sum, row.largest, largest);
  row.largest = largest;
  const float shift = shift_of(largest);
#pragma unroll
  for (int j = 0; j < N; ++j) row.sum += exponential(values[j] - shift);
}

__device__ __forceinline__ RowStatistics joined(const RowStatistics& a, const RowStatistics& b) {
  const float largest = maximum(a.largest, b.largest);
  return {largest, reshift(a.sum, a.largest, largest) + reshift(b.sum, b.largest, largest), a.logit_sum + b.logit_sum};
}

__device__ __forceinline__ RowStatistics joined_over_warp(RowStatistics row) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const RowStatistics other{__shfl_down_sync(0xffffffffu, row.largest, step),
                              __shfl_down_sync(0xffffffffu, row.sum, step),
                              __shfl_down_sync(0xffffffffu, row.logit_sum, step)};
    row = joined(row, other);
  }
  return row;
}

template <class Type, int kSums>
__global__ void __launch_bounds__(kRowThreads)
    statistics_kernel(const __grid_constant__ CrossEntropyRows rows, float* out) {
  using Storage = typename Type::Storage;
  constexpr int kPack = kPackSize<Storage>;
  const int64_t index = blockIdx.x;
  RowStatistics row{-INFINITY, 0.0f, 0.0f};
  const bool ignored = address<const int64_t>(rows.target)[index] == rows.ignore_index;
  if (!ignored) {
    const Storage* x = address<const Storage>(rows.logits) + index * rows.stride;
    const float* weights = kSums == kWeightedSum ? address<const float>(rows.weight) + rows.first_class : nullptr;
    const int64_t head = before_boundary(x, rows.columns);
    const int64_t packed_end = head + (rows.columns - head) / kPack * kPack;
    const auto one = [&](int64_t i) { add_elements<Type, kSums, 1>(row, load_pack<Storage, 1>(x + i), weights + i); };
    for (int64_t i = threadIdx.x; i < head; i += kRowThreads) one(i);
#pragma unroll 4
    for (int64_t i = head + threadIdx.x * kPack; i < packed_end; i += kRowThreads * kPack) {
      add_elements<Type, kSums, kPack>(row, load_pack<Storage, kPack>(x + i), weights + i);
    }
    for (int64_t i = packed_end + threadIdx.x; i < rows.columns; i += kRowThreads) one(i);
  }
  __shared__ RowStatistics of_warp[kWarps];
  row = joined_over_warp(row);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = row;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  row = joined_over_warp(threadIdx.x < kWarps ? of_warp[threadIdx.x] : RowStatistics{-INFINITY, 0.0f, 0.0f});
  if (threadIdx.x != 0) return;
  out[kLargest * rows.rows + index] = ignored ? 0.0f : row.largest;
  out[kSum * rows.rows + index] = row.sum;
  out[kTargetLogit * rows.rows + index] = ignored ? 0.0f : target_logit(rows, index);
  if (kSums != kNoSum) out[kLogitSum * rows.rows + index] = row.logit_sum;
}

__global__ void __launch_bounds__(kThreads)
    losses_kernel(const __grid_constant__ CrossEntropyRows rows, const __grid_constant__ CrossEntropyFactors factors,
                  const float* statistics, int64_t ranks, float* losses, float* normalizers) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows.rows) return;
  cross_entropy_row_loss(rows, factors, statistics, ranks, row, losses + row, normalizers + row,
                         normalizers + rows.rows + row);
}

// The logits and the gradient may be the same memory: a thread reads an element before it writes it, and no other
// thread reads it. Hence no __restrict__.
template <class Type, int kSums, int N>
__device__ __forceinline__ void gradient_elements(const typename Type::Storage* x, typename Type::Storage* to,
                                                  const float* weights, int64_t i, const GradientRow& row) {
  auto pack = load_pack<typename Type::Storage, N>(x + i);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float value = 0.0f;
    if (!row.ignored) {
      value = cross_entropy_gradient(Type::load(pack.at[j]), row.shift, row.factor);
      if (kSums == kPlainSum) value = value - row.spread;
      if (kSums == kWeightedSum) value = value - row.spread * weights[i + j];
      if (i + j == row.column) value = value - row.hit;
    }
    pack.at[j] = Type::store(value);
  }
  store_pack(to + i, pack);
}

template <class Type, int kSums>
__global__ void __launch_bounds__(kRowThreads)
    gradient_kernel(const __grid_constant__ CrossEntropyRows rows, const __grid_constant__ CrossEntropyFactors factors,
                    const float* normalizers, const float* scale, int64_t scale_stride, const float* denominator,
                    typename Type::Storage* out, int64_t out_stride) {
  using Storage = typename Type::Storage;
  constexpr int kPack = kPackSize<Storage>;
  const int64_t index = blockIdx.x;
  const Storage* x = address<const Storage>(rows.logits) + index * rows.stride;
  Storage* to = out + index * out_stride;
  const float* weights = kSums == kWeightedSum ? address<const float>(rows.weight) + rows.first_class : nullptr;
  const GradientRow row =
      cross_entropy_gradient_row(rows, factors, normalizers[index], normalizers[rows.rows + index],
                                 scale[index * scale_stride] / *denominator, index);
  const bool together = (reinterpret_cast<uintptr_t>(x) - reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  const int64_t head = together ? before_boundary(x, rows.columns) : rows.columns;
  const int64_t packed_end = head + (rows.columns - head) / kPack * kPack;
  for (int64_t i = threadIdx.x; i < head; i += kRowThreads) {
    gradient_elements<Type, kSums, 1>(x, to, weights, i, row);
  }
#pragma unroll 2
  for (int64_t i = head + threadIdx.x * kPack; i < packed_end; i += kRowThreads * kPack) {
    gradient_elements<Type, kSums, kPack>(x, to, weights, i, row);
  }
  for (int64_t i = packed_end + threadIdx.x; i < rows.columns; i += kRowThreads) {
    gradient_elements<Type, kSums, 1>(x, to, weights, i, row);
  }
}

// launch(type, sums) with the types that dtype and smoothing ask for.
template <int kSums>
struct SumsOf {
  static constexpr int value = kSums;
};

template <class Launch>
cudaError_t dispatch(const CrossEntropyRows& rows, bool smooth, Launch launch) {
  if (rows.rows == 0) return cudaSuccess;
  if (rows.rows > 0x7fffffffll) return cudaErrorInvalidConfiguration;
  const auto with_type = [&](auto type) {
    if (!smooth) return launch(type, SumsOf<kNoSum>());
    return rows.weight == 0 ? launch(type, SumsOf<kPlainSum>()) : launch(type, SumsOf<kWeightedSum>());
  };
  switch (static_cast<DType>(rows.dtype)) {
    case DType::kBFloat16: return with_type(BF16());
    case DType::kFloat16: return with_type(F16());
    default: return with_type(F32());
  }
}

}  // namespace

cudaError_t cross_entropy_statistics_cuda(const CrossEntropyRows& rows, bool smooth, float* out, cudaStream_t stream) {
  return dispatch(rows, smooth, [&](auto type, auto sums) {
    return launch_kernel(statistics_kernel<decltype(type), decltype(sums)::value>, rows.rows, kRowThreads, stream, rows,
                         out);
  });
}

cudaError_t cross_entropy_losses_cuda(const CrossEntropyRows& rows, const CrossEntropyFactors& factors,
                                      const float* statistics, int64_t ranks, float* losses, float* normalizers,
                                      cudaStream_t stream) {
  if (rows.rows == 0) return cudaSuccess;
  const int64_t blocks = (rows.rows + kThreads - 1) / kThreads;
  return launch_kernel(losses_kernel, blocks, kThreads, stream, rows, factors, statistics, ranks, losses, normalizers);
}

cudaError_t cross_entropy_gradient_cuda(const CrossEntropyRows& rows, const CrossEntropyFactors& factors,
                                        const float* normalizers, const float* scale, int64_t scale_stride,
                                        const float* denominator, void* out, int64_t out_stride, cudaStream_t stream) {
  if (rows.columns == 0) return cudaSuccess;
  return dispatch(rows, factors.smooth, [&](auto type, auto sums) {
    using Type = decltype(type);
    return launch_kernel(gradient_kernel<Type, decltype(sums)::value>, rows.rows, kRowThreads, stream, rows, factors,
                         normalizers, scale, scale_stride, denominator, static_cast<typename Type::Storage*>(out),
                         out_stride);
  });
}

}  // namespace bmt
