// What a variant offers for factored second moments.
#pragma once

#include "common/adam.h"
#include "common/factored.h"

namespace bmt {

// A tile's partial sums and column factors stay in the first-level cache; most matrices' rows fit in it.
constexpr int64_t kFactoredTileRows = 64;
constexpr int64_t kFactoredTileCols = 4096;
// Where nothing is summed, rows are followed to their end: memory is streamed through in its order.
constexpr int64_t kFactoredUpdateRows = 8;
constexpr int64_t kFactoredUpdateCols = 8192;

struct FactoredTile {
  int64_t batch;
  int64_t row;  // the first
  int64_t col;
  int64_t rows;  // how many
  int64_t cols;
};

struct FactoredKernels {
  // Sums over the tile, by row and by column, of the squared gradients and of CAME's residuals.
  void (*square_sums[kDTypes])(const FactoredRow& row, const FactoredTile& tile, const FactoredScalars& scalars,
                               float* row_sums, float* col_sums);
  void (*residual_sums[kDTypes])(const FactoredRow& row, const FactoredTile& tile, const FactoredScalars& scalars,
                                 float* row_sums, float* col_sums);
  // Sum of the squared updates.
  double (*update_square_sum[kDTypes])(const FactoredRow& row, const FactoredTile& tile,
                                       const FactoredScalars& scalars);
  void (*update[kWeightKinds][kDTypes])(const FactoredRow& row, const FactoredTile& tile,
                                        const FactoredScalars& scalars);
};

}  // namespace bmt
