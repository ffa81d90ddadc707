// The passes of factored optimizers over a table of rows, on several threads.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "common/arguments.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bmt {

struct TileSize {
  int64_t rows;
  int64_t cols;
};
constexpr TileSize kSumTile{kFactoredTileRows, kFactoredTileCols};
constexpr TileSize kUpdateTile{kFactoredUpdateRows, kFactoredUpdateCols};

inline FactoredTiles sum_tiles(const FactoredRow& row) { return tiles_of(row, kSumTile.rows, kSumTile.cols); }

// All tiles of all rows, end to end, are split into `parts` ranges with nearly the same number of elements;
// visit(row_number, tile_number, tile) is called for the tiles of range `part`.
template <class Visit>
void visit_tiles(const std::vector<FactoredRow>& rows, TileSize size, int64_t total, int part, int parts,
                 const Visit& visit) {
  const auto cut = [&](int p) {
    return p == parts ? total : static_cast<int64_t>(static_cast<double>(total) * p / parts);
  };
  const int64_t first = cut(part), last = cut(part + 1);
  int64_t start = 0;
  for (size_t i = 0; i < rows.size() && start < last; ++i) {
    const FactoredRow& row = rows[i];
    const int64_t numel = elements(row);
    const FactoredTiles tiles = tiles_of(row, size.rows, size.cols);
    const auto within = [&](int64_t position) {
      if (position <= start) return int64_t{0};
      if (position >= start + numel) return tiles.count;
      return static_cast<int64_t>(static_cast<double>(position - start) / static_cast<double>(numel) *
                                  static_cast<double>(tiles.count));
    };
    const int64_t end = within(last);
    for (int64_t number = within(first); number < end; ++number) {
      const int64_t strip = number / tiles.along;
      const int64_t top = strip % tiles.down * size.rows;
      const int64_t left = number % tiles.along * size.cols;
      const FactoredTile tile{strip / tiles.down, top, left, std::min(size.rows, row.rows - top),
                              std::min(size.cols, row.cols - left)};
      visit(i, number, tile);
    }
    start += numel;
  }
}

// Runs visit(row_number, tile_number, tile) over all tiles on several threads.
template <class Visit>
void run_tiles(const std::vector<FactoredRow>& rows, TileSize size, int threads, const Visit& visit) {
  struct Context {
    const std::vector<FactoredRow>& rows;
    TileSize size;
    int64_t total;
    const Visit& visit;
  } context{rows, size, 0, visit};
  for (const FactoredRow& row : rows) context.total += elements(row);
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        visit_tiles(c.rows, c.size, c.total, part, parts, c.visit);
      },
      &context);
}

// out[b][i] = sum over t of partial[b][t][i], in that order and in double precision; numel counts b and i.
struct Combination {
  const float* partial;
  float* out;
  int64_t terms;
  int64_t length;
  int64_t numel;
};

inline void combine(const Combination& c, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 256;
  double sums[kBlock];
  for (int64_t at = begin; at < end;) {
    const int64_t batch = at / c.length, i = at % c.length;
    const int64_t n = std::min({kBlock, c.length - i, end - at});
    const float* partial = c.partial + batch * c.terms * c.length + i;
    std::fill(sums, sums + n, 0.0);
    for (int64_t t = 0; t < c.terms; ++t, partial += c.length) {
      for (int64_t k = 0; k < n; ++k) sums[k] += static_cast<double>(partial[k]);
    }
    for (int64_t k = 0; k < n; ++k) c.out[at + k] = static_cast<float>(sums[k]);
    at += n;
  }
}

using SumsKernel = void (*)(const FactoredRow&, const FactoredTile&, const FactoredScalars&, float*, float*);

inline void sum_rows_and_columns(const SumsKernel* kernels, const std::vector<FactoredRow>& rows,
                          const FactoredScalars& scalars, int threads) {
  std::vector<int64_t> offsets;  // of a row's partial row sums; its partial column sums follow them
  int64_t partials = 0;
  for (const FactoredRow& row : rows) {
    const FactoredTiles tiles = sum_tiles(row);
    offsets.push_back(partials);
    partials += row.batch * (tiles.along * row.rows + tiles.down * row.cols);
  }
  const std::unique_ptr<float[]> workspace(new float[static_cast<size_t>(partials)]);
  std::vector<Combination> combinations;
  for (size_t i = 0; i < rows.size(); ++i) {
    const FactoredRow& row = rows[i];
    const FactoredTiles tiles = sum_tiles(row);
    const float* partial = workspace.get() + offsets[i];
    combinations.push_back({partial, address<float>(row.row_sums), tiles.along, row.rows, row.batch * row.rows});
    partial += row.batch * tiles.along * row.rows;
    combinations.push_back({partial, address<float>(row.col_sums), tiles.down, row.cols, row.batch * row.cols});
  }

  run_tiles(rows, kSumTile, threads, [&](size_t i, int64_t number, const FactoredTile& tile) {
    const FactoredRow& row = rows[i];
    const FactoredTiles tiles = sum_tiles(row);
    float* row_partials = workspace.get() + offsets[i];
    float* col_partials = row_partials + row.batch * tiles.along * row.rows;
    row_partials += (tile.batch * tiles.along + number % tiles.along) * row.rows + tile.row;
    col_partials += number / tiles.along * row.cols + tile.col;
    kernels[grad_kind(row)](row, tile, scalars, row_partials, col_partials);
  });

  struct Context {
    const std::vector<Combination>& combinations;
    int64_t total;
  } context{combinations, total_elements(combinations.data(), static_cast<int64_t>(combinations.size()))};
  run_parts(
      useful_threads(partials, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        visit_part(c.combinations.data(), static_cast<int64_t>(c.combinations.size()), c.total, part, parts, combine);
      },
      &context);
}

// Of each row's tensor.
inline std::vector<double> sum_squared_updates(const FactoredKernels& kernels, const std::vector<FactoredRow>& rows,
                                               const FactoredScalars& scalars, int threads) {
  std::vector<std::vector<double>> partials;
  for (const FactoredRow& row : rows) partials.emplace_back(static_cast<size_t>(sum_tiles(row).count));
  run_tiles(rows, kSumTile, threads, [&](size_t i, int64_t number, const FactoredTile& tile) {
    const FactoredRow& row = rows[i];
    partials[i][static_cast<size_t>(number)] = kernels.update_square_sum[grad_kind(row)](row, tile, scalars);
  });
  std::vector<double> sums;
  for (const std::vector<double>& of_tensor : partials) {
    double sum = 0.0;
    for (const double partial : of_tensor) sum += partial;
    sums.push_back(sum);
  }
  return sums;
}

inline void update_weights(const FactoredKernels& kernels, const std::vector<FactoredRow>& rows,
                           const FactoredScalars& scalars, int threads) {
  run_tiles(rows, kUpdateTile, threads, [&](size_t i, int64_t, const FactoredTile& tile) {
    const FactoredRow& row = rows[i];
    kernels.update[weight_kind(row)][grad_kind(row)](row, tile, scalars);
  });
}

}  // namespace bmt
