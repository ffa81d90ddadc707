// Factored second moments on CUDA: tiles of many matrices in one launch, and a second launch that adds up the
// partial sums of the tiles. No atomics: sums come out the same every time.
#include "cuda/factored.h"

#include "common/adam.h"
#include "cuda/batch.cuh"
#include "cuda/storage.cuh"

namespace bmt {
namespace {

constexpr int kTileRows = 128;
constexpr int kTileCols = 128;  // a warp's width, four columns to a thread
constexpr int kWarps = kThreads / 32;

struct TiledRow {
  FactoredRow row;
  int64_t partials;  // where its partial sums begin in the workspace
};
using TiledRows = Batch<TiledRow>;  // aligned: whether four neighbouring columns can be moved at once
static_assert(sizeof(TiledRows) + sizeof(FactoredScalars) + sizeof(void*) <= kArgumentBytes);

// out[b][i] = sum over t of partials[b][t][i]; one thread for each result.
struct Combination {
  const float* partials;
  float* out;
  int64_t terms;
  int64_t length;
  int64_t numel;
};
constexpr int kCombinationThreads = 128;

// *out = sum of partials[0 .. terms); one thread block.
struct Total {
  const float* partials;
  float* out;
  int64_t terms;
};

__host__ __device__ FactoredTiles cuda_tiles(const FactoredRow& row) { return tiles_of(row, kTileRows, kTileCols); }

struct Tile {
  int64_t number;  // among the tiles of its tensor
  int64_t batch;
  int64_t row, col;      // the first
  int rows, cols;        // how many
  int64_t along, first;  // tiles in a row; the offset of the first element
};

__device__ Tile tile_of_block(const TiledRows& batch, int row_index) {
  const FactoredRow& row = batch.rows[row_index].row;
  const FactoredTiles tiles = cuda_tiles(row);
  Tile tile;
  tile.number = blockIdx.x - batch.first_block[row_index];
  const int64_t strip = tile.number / tiles.along;
  tile.batch = strip / tiles.down;
  tile.row = strip % tiles.down * kTileRows;
  tile.col = tile.number % tiles.along * kTileCols;
  tile.rows = static_cast<int>(row.rows - tile.row < kTileRows ? row.rows - tile.row : kTileRows);
  tile.cols = static_cast<int>(row.cols - tile.col < kTileCols ? row.cols - tile.col : kTileCols);
  tile.along = tiles.along;
  tile.first = (tile.batch * row.rows + tile.row) * row.cols + tile.col;
  return tile;
}

// The four columns of the tile that are this thread's: neighbours if they can be moved at once, else apart, so that
// a warp reads neighbouring elements.
template <bool kAligned>
struct Columns {
  int count;  // columns of the tile

  __device__ int at(int k) const {
    const int lane = threadIdx.x % 32;
    return kAligned ? lane * 4 + k : lane + k * 32;
  }
  __device__ bool here(int k) const { return at(k) < count; }

  template <class T>
  __device__ Pack<T, 4> load(const T* p) const {
    Pack<T, 4> pack = {};
    if (kAligned) {
      if (here(0)) pack = load_pack<T, 4>(p + at(0));
    } else {
      for (int k = 0; k < 4; ++k) {
        if (here(k)) pack.at[k] = p[at(k)];
      }
    }
    return pack;
  }

  template <class T>
  __device__ void store(T* p, const Pack<T, 4>& pack) const {
    if (kAligned) {
      if (here(0)) store_pack(p + at(0), pack);
    } else {
      for (int k = 0; k < 4; ++k) {
        if (here(k)) p[at(k)] = pack.at[k];
      }
    }
  }
};

template <class T>
__device__ __forceinline__ T sum_of_warp(T value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
  return value;
}

// Thread 0 gets the sum over the block. All threads must call it, once in a kernel.
__device__ __forceinline__ double sum_of_block(double value) {
  __shared__ double of_warp[kWarps];
  value = sum_of_warp(value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) value += of_warp[warp];
  }
  return value;
}

// Each warp takes every kWarps-th row of the tile.
template <class Grad, bool kResidual, bool kAligned>
__device__ __forceinline__ void tile_sums(const FactoredRow& row, const Tile& tile, const FactoredScalars& s,
                                          float* __restrict__ row_partials, float* __restrict__ col_partials) {
  __shared__ float of_warp[kWarps][kTileCols];
  const int warp = threadIdx.x / 32;
  const Columns<kAligned> columns{tile.cols};
  const auto* __restrict__ grad = address<const typename Grad::Storage>(row.grad) + tile.first;
  auto* __restrict__ exp_avg = element<float>(row.exp_avg, tile.first);
  const float* row_factors = element<const float>(row.row_factors, tile.batch * row.rows + tile.row);
  const float scale = grad_scale(s);
  Pack<float, 4> factors = {};
  if (kResidual) factors = columns.load(address<const float>(row.col_factors) + tile.batch * row.cols + tile.col);
  float col_sums[4] = {};
#pragma unroll 4
  for (int i = warp; i < tile.rows; i += kWarps) {
    const auto g = columns.load(grad + i * row.cols);
    Pack<float, 4> m = {};
    float multiplier = 0.0f;
    if (kResidual) {
      m = columns.load(exp_avg + i * row.cols);
      multiplier = row_multiplier(s, row, scale, row_factors[i]);
    }
    float sum = 0.0f;
    for (int k = 0; k < 4; ++k) {
      if (!columns.here(k)) continue;
      float x;
      if (kResidual) {
        const float u = factored_direction(Grad::load(g.at[k]), multiplier, factors.at[k]);
        m.at[k] = factored_momentum(m.at[k], u, s.beta1, s.one_minus_beta1);
        x = factored_residual(m.at[k], u, s.eps);
      } else {
        x = factored_square(Grad::load(g.at[k]), scale, s.eps);
      }
      sum += x;
      col_sums[k] += x;
    }
    if (kResidual) columns.store(exp_avg + i * row.cols, m);
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) row_partials[i] = sum;
  }
  for (int k = 0; k < 4; ++k) of_warp[warp][columns.at(k)] = col_sums[k];
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < tile.cols) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += of_warp[w][threadIdx.x];
    col_partials[threadIdx.x] = sum;
  }
}

template <class Grad, bool kResidual>
__global__ void __launch_bounds__(kThreads) sums_kernel(const __grid_constant__ TiledRows batch,
                                                        const __grid_constant__ FactoredScalars scalars,
                                                        float* workspace) {
  if (skipped(scalars)) return;
  const int row_index = row_of_block(batch);
  const FactoredRow& row = batch.rows[row_index].row;
  const Tile tile = tile_of_block(batch, row_index);
  float* row_partials = workspace + batch.rows[row_index].partials;
  float* col_partials = row_partials + row.batch * tile.along * row.rows;
  row_partials += (tile.batch * tile.along + tile.number % tile.along) * row.rows + tile.row;
  col_partials += tile.number / tile.along * row.cols + tile.col;
  if (batch.aligned[row_index]) {
    tile_sums<Grad, kResidual, true>(row, tile, scalars, row_partials, col_partials);
  } else {
    tile_sums<Grad, kResidual, false>(row, tile, scalars, row_partials, col_partials);
  }
}

__global__ void __launch_bounds__(kCombinationThreads)
    combine_kernel(const __grid_constant__ Batch<Combination> batch, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const int index = row_of_block(batch);
  const Combination& c = batch.rows[index];
  const int64_t result =
      static_cast<int64_t>(blockIdx.x - batch.first_block[index]) * kCombinationThreads + threadIdx.x;
  if (result >= c.numel) return;
  const float* partials = c.partials + result / c.length * c.terms * c.length + result % c.length;
  double sum = 0.0;
  for (int64_t t = 0; t < c.terms; ++t) sum += static_cast<double>(partials[t * c.length]);
  c.out[result] = static_cast<float>(sum);
}

template <class Grad, bool kAligned>
__device__ __forceinline__ double tile_update_square_sum(const FactoredRow& row, const Tile& tile,
                                                         const FactoredScalars& s) {
  const Columns<kAligned> columns{tile.cols};
  const auto* grad = address<const typename Grad::Storage>(row.grad) + tile.first;
  const float* row_factors = address<const float>(row.row_factors) + tile.batch * row.rows + tile.row;
  const float scale = grad_scale(s);
  const auto factors = columns.load(address<const float>(row.col_factors) + tile.batch * row.cols + tile.col);
  float sums[4] = {};
#pragma unroll 4
  for (int i = threadIdx.x / 32; i < tile.rows; i += kWarps) {
    const auto g = columns.load(grad + i * row.cols);
    const float multiplier = row_multiplier(s, row, scale, row_factors[i]);
    for (int k = 0; k < 4; ++k) {
      if (!columns.here(k)) continue;
      const float u = factored_direction(Grad::load(g.at[k]), multiplier, factors.at[k]);
      sums[k] += u * u;
    }
  }
  return (static_cast<double>(sums[0]) + sums[1]) + (static_cast<double>(sums[2]) + sums[3]);
}

template <class Grad>
__global__ void __launch_bounds__(kThreads) update_square_sum_kernel(const __grid_constant__ TiledRows batch,
                                                                     const __grid_constant__ FactoredScalars scalars,
                                                                     float* workspace) {
  const int row_index = row_of_block(batch);
  const FactoredRow& row = batch.rows[row_index].row;
  const Tile tile = tile_of_block(batch, row_index);
  const double sum = sum_of_block(batch.aligned[row_index]
                                      ? tile_update_square_sum<Grad, true>(row, tile, scalars)
                                      : tile_update_square_sum<Grad, false>(row, tile, scalars));
  if (threadIdx.x == 0) workspace[batch.rows[row_index].partials + tile.number] = static_cast<float>(sum);
}

__global__ void __launch_bounds__(kThreads) total_kernel(const __grid_constant__ Batch<Total> batch) {
  const Total& total = batch.rows[blockIdx.x];
  double sum = 0.0;
  for (int64_t t = threadIdx.x; t < total.terms; t += kThreads) sum += static_cast<double>(total.partials[t]);
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) *total.out = static_cast<float>(sum);
}

template <class Weight, class Copy, class Grad, bool kAligned>
__device__ __forceinline__ void tile_update(const FactoredRow& row, const Tile& tile, const FactoredScalars& s) {
  const Columns<kAligned> columns{tile.cols};
  auto* __restrict__ weight = address<typename Weight::Storage>(row.weight) + tile.first;
  auto* __restrict__ copy = address<typename Copy::Storage>(copy_or_weight(row)) + tile.first;
  const auto* __restrict__ grad = address<const typename Grad::Storage>(row.grad) + tile.first;
  auto* __restrict__ exp_avg = element<float>(row.exp_avg, tile.first);
  const bool momentum = row.exp_avg != 0;
  const float* row_factors = address<const float>(row.row_factors) + tile.batch * row.rows + tile.row;
  const float scale = grad_scale(s);
  const float decay = decay_factor(s, row);
  const auto factors = columns.load(address<const float>(row.col_factors) + tile.batch * row.cols + tile.col);
#pragma unroll 4
  for (int i = threadIdx.x / 32; i < tile.rows; i += kWarps) {
    const int64_t offset = i * row.cols;
    const auto g = columns.load(grad + offset);
    auto w = columns.load(weight + offset);
    Pack<float, 4> m = {};
    if (momentum) m = columns.load(exp_avg + offset);
    const float multiplier = row_multiplier(s, row, scale, row_factors[i]);
    Pack<typename Copy::Storage, 4> rounded;
    for (int k = 0; k < 4; ++k) {
      float change = factored_direction(Grad::load(g.at[k]), multiplier, factors.at[k]);
      if (momentum) m.at[k] = change = factored_momentum(m.at[k], change, s.beta1, s.one_minus_beta1);
      const float x = Weight::load(w.at[k]) * decay - change;
      w.at[k] = Weight::store(x);
      rounded.at[k] = Copy::store(x);
    }
    if (momentum) columns.store(exp_avg + offset, m);
    columns.store(weight + offset, w);
    if (!kSame<Copy, NoCopy>) columns.store(copy + offset, rounded);
  }
}

template <class Weight, class Copy, class Grad>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ TiledRows batch,
                                                          const __grid_constant__ FactoredScalars scalars) {
  if (skipped(scalars)) return;
  const int row_index = row_of_block(batch);
  const FactoredRow& row = batch.rows[row_index].row;
  const Tile tile = tile_of_block(batch, row_index);
  if (batch.aligned[row_index]) {
    tile_update<Weight, Copy, Grad, true>(row, tile, scalars);
  } else {
    tile_update<Weight, Copy, Grad, false>(row, tile, scalars);
  }
}

bool columns_are_aligned(const FactoredRow& row) {
  return row.cols % 4 == 0 && aligned16(row.weight) && aligned16(row.copy) && aligned16(row.grad) &&
         aligned16(row.exp_avg) && aligned16(row.col_factors);
}

// Floats of workspace for the partial sums of a row, by row and column or, fewer, one for each tile.
int64_t partials_of(const FactoredRow& row) {
  const FactoredTiles tiles = cuda_tiles(row);
  const int64_t sums = row.batch * (tiles.along * row.rows + tiles.down * row.cols);
  return sums > tiles.count ? sums : tiles.count;
}

// Launches over the tiles of all rows that are of one kind; kind_of(row) tells which that is.
template <class KindOf, class Launch>
cudaError_t launch_tiles(const FactoredRow* rows, int64_t count, int kind, KindOf kind_of, Launch launch) {
  Batcher<TiledRow, Launch> batcher(launch);
  int64_t partials = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (kind_of(rows[i]) == kind) {
      const cudaError_t error =
          batcher.add({rows[i], partials}, columns_are_aligned(rows[i]), cuda_tiles(rows[i]).count);
      if (error != cudaSuccess) return error;
    }
    partials += partials_of(rows[i]);
  }
  return batcher.flush();
}

template <class Grad>
cudaError_t launch_sums(const FactoredRow* rows, int64_t count, int kind, const FactoredScalars& scalars,
                        float* workspace, cudaStream_t stream) {
  return launch_tiles(rows, count, kind, grad_kind<FactoredRow>, [&](const TiledRows& batch, unsigned blocks) {
    const auto kernel = batch.rows[0].row.exp_avg != 0 ? sums_kernel<Grad, true> : sums_kernel<Grad, false>;
    return launch_kernel(kernel, blocks, kThreads, stream, batch, scalars, workspace);
  });
}

template <class Grad>
cudaError_t launch_update_square_sum(const FactoredRow* rows, int64_t count, int kind, const FactoredScalars& scalars,
                                     float* workspace, cudaStream_t stream) {
  return launch_tiles(rows, count, kind, grad_kind<FactoredRow>, [&](const TiledRows& batch, unsigned blocks) {
    return launch_kernel(update_square_sum_kernel<Grad>, blocks, kThreads, stream, batch, scalars, workspace);
  });
}

int update_kind(const FactoredRow& row) { return weight_kind(row) * kDTypes + grad_kind(row); }

template <class Weight, class Copy, class Grad>
cudaError_t launch_update(const FactoredRow* rows, int64_t count, int kind, const FactoredScalars& scalars, float*,
                          cudaStream_t stream) {
  return launch_tiles(rows, count, kind, update_kind, [&](const TiledRows& batch, unsigned blocks) {
    return launch_kernel(update_kernel<Weight, Copy, Grad>, blocks, kThreads, stream, batch, scalars);
  });
}

using Launch = cudaError_t (*)(const FactoredRow*, int64_t, int, const FactoredScalars&, float*, cudaStream_t);

constexpr Launch kSums[kDTypes] = {launch_sums<F32>, launch_sums<BF16>, launch_sums<F16>};
constexpr Launch kUpdateSquareSum[kDTypes] = {launch_update_square_sum<F32>, launch_update_square_sum<BF16>,
                                              launch_update_square_sum<F16>};
#define BMT_UPDATE_ROW(weight, copy) \
  launch_update<weight, copy, F32>, launch_update<weight, copy, BF16>, launch_update<weight, copy, F16>
constexpr Launch kUpdate[kWeightKinds * kDTypes] = {
    BMT_UPDATE_ROW(F32, NoCopy), BMT_UPDATE_ROW(BF16, NoCopy), BMT_UPDATE_ROW(F16, NoCopy),
    BMT_UPDATE_ROW(F32, BF16),   BMT_UPDATE_ROW(F32, F16),
};

// Goes through the kinds that are there.
template <int kKinds, class KindOf>
cudaError_t launch_kinds(const Launch (&launches)[kKinds], KindOf kind_of, const FactoredRow* rows, int64_t count,
                         const FactoredScalars& scalars, float* workspace, cudaStream_t stream) {
  bool present[kKinds] = {};
  for (int64_t i = 0; i < count; ++i) present[kind_of(rows[i])] = true;
  for (int kind = 0; kind < kKinds; ++kind) {
    if (!present[kind]) continue;
    const cudaError_t error = launches[kind](rows, count, kind, scalars, workspace, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

int64_t factored_workspace(const FactoredRow* rows, int64_t count) {
  int64_t floats = 0;
  for (int64_t i = 0; i < count; ++i) floats += partials_of(rows[i]);
  return floats;
}

cudaError_t factored_sums_cuda(const FactoredRow* rows, int64_t count, const FactoredScalars& scalars,
                               float* workspace, cudaStream_t stream) {
  cudaError_t error =
      launch_kinds(kSums, grad_kind<FactoredRow>, rows, count, scalars, workspace, stream);
  if (error != cudaSuccess) return error;
  const auto launch = [&](const Batch<Combination>& batch, unsigned blocks) {
    return launch_kernel(combine_kernel, blocks, kCombinationThreads, stream, batch, scalars.found_inf);
  };
  Batcher<Combination, decltype(launch)> batcher(launch);
  const float* partials = workspace;
  for (int64_t i = 0; i < count; ++i) {
    const FactoredRow& row = rows[i];
    const FactoredTiles tiles = cuda_tiles(row);
    const Combination combinations[] = {
        {partials, address<float>(row.row_sums), tiles.along, row.rows, row.batch * row.rows},
        {partials + row.batch * tiles.along * row.rows, address<float>(row.col_sums), tiles.down, row.cols,
         row.batch * row.cols}};
    for (const Combination& c : combinations) {
      error = batcher.add(c, false, (c.numel + kCombinationThreads - 1) / kCombinationThreads);
      if (error != cudaSuccess) return error;
    }
    partials += partials_of(row);
  }
  return batcher.flush();
}

cudaError_t factored_update_square_sum_cuda(const FactoredRow* rows, int64_t count, const FactoredScalars& scalars,
                                            float* workspace, float* out, cudaStream_t stream) {
  cudaError_t error =
      launch_kinds(kUpdateSquareSum, grad_kind<FactoredRow>, rows, count, scalars, workspace, stream);
  if (error != cudaSuccess) return error;
  const auto launch = [&](const Batch<Total>& batch, unsigned blocks) {
    return launch_kernel(total_kernel, blocks, kThreads, stream, batch);
  };
  Batcher<Total, decltype(launch)> batcher(launch);
  const float* partials = workspace;
  for (int64_t i = 0; i < count; ++i) {
    error = batcher.add({partials, out + rows[i].index, cuda_tiles(rows[i]).count}, false, 1);
    if (error != cudaSuccess) return error;
    partials += partials_of(rows[i]);
  }
  return batcher.flush();
}

cudaError_t factored_update_cuda(const FactoredRow* rows, int64_t count, const FactoredScalars& scalars,
                                 cudaStream_t stream) {
  return launch_kinds(kUpdate, update_kind, rows, count, scalars, nullptr, stream);
}

}  // namespace bmt
