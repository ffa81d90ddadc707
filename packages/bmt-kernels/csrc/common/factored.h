// The arithmetic of optimizers with factored second moments on one element, written once.
//
// A matrix is stored by rows; a tensor of more dimensions is a batch of matrices. The second moment of element
// (i, j) is known only through a factor for row i and one for column j: the update is u = g * row[i] * col[j].
//
// Maths: Shazeer & Stern, "Adafactor", arXiv:1804.04235, algorithms 4 and 5; Luo et al., "CAME", arXiv:2307.02047,
// algorithm 2. V is float, or a SIMD vector with + - *.
#pragma once

#include "common/inline.h"
#include "common/table.h"

namespace bmt {

// Arrays that an operation does not use are 0.
struct FactoredRow {
  int64_t weight;       // the master weight if there is one, else the parameter
  int64_t copy;         // then the parameter, else 0
  int64_t grad;
  int64_t exp_avg;
  int64_t row_factors;  // (batch, rows)
  int64_t col_factors;  // (batch, cols)
  int64_t row_sums;     // (batch, rows)
  int64_t col_sums;     // (batch, cols)
  int64_t batch;
  int64_t rows;
  int64_t cols;
  int64_t index;        // place in the vectors of scalars, one element per tensor
  int64_t kinds;        // dtype of weight | dtype of copy << 8 | dtype of grad << 16
};
static_assert(sizeof(FactoredRow) == 13 * sizeof(int64_t), "rows are read from a packed table");

inline int64_t elements(const FactoredRow& row) { return row.batch * row.rows * row.cols; }

// Numbers of a call. The pointers are read where the tensors are, so that the host never waits for a GPU.
struct FactoredScalars {
  float inverse_grad_scale;
  float eps;
  float beta1;
  float one_minus_beta1;
  const float* grad_factor;    // one element, or null
  const float* step_sizes;     // what u is multiplied by, one element per tensor, or null
  const float* decay_factors;  // what weights are multiplied by, one element per tensor, or null
  const float* found_inf;      // one element, or null: if it is not zero, nothing is written
};

inline FactoredScalars factored_scalars(double inverse_grad_scale, int64_t grad_factor, double eps, double beta1,
                                        double one_minus_beta1, int64_t step_sizes, int64_t decay_factors,
                                        int64_t found_inf) {
  return {static_cast<float>(inverse_grad_scale), static_cast<float>(eps),       static_cast<float>(beta1),
          static_cast<float>(one_minus_beta1),    address<const float>(grad_factor),
          address<const float>(step_sizes),       address<const float>(decay_factors),
          address<const float>(found_inf)};
}

BMT_INLINE bool skipped(const FactoredScalars& s) { return s.found_inf != nullptr && *s.found_inf != 0.0f; }

BMT_INLINE float grad_scale(const FactoredScalars& s) {
  return s.grad_factor == nullptr ? s.inverse_grad_scale : *s.grad_factor * s.inverse_grad_scale;
}

BMT_INLINE float decay_factor(const FactoredScalars& s, const FactoredRow& row) {
  return s.decay_factors == nullptr ? 1.0f : s.decay_factors[row.index];
}

// What the elements of a row have in common: its factor, the gradients' scale and the step size.
BMT_INLINE float row_multiplier(const FactoredScalars& s, const FactoredRow& row, float scale, float row_factor) {
  const float multiplier = row_factor * scale;
  return s.step_sizes == nullptr ? multiplier : multiplier * s.step_sizes[row.index];
}

template <class V>
BMT_INLINE V factored_square(V grad, V scale, V eps) {
  grad = grad * scale;
  return grad * grad + eps;
}

template <class V>
BMT_INLINE V factored_direction(V grad, V row_multiplier, V col_factor) {
  return grad * row_multiplier * col_factor;
}

template <class V>
BMT_INLINE V factored_momentum(V exp_avg, V update, V beta1, V one_minus_beta1) {
  return exp_avg * beta1 + update * one_minus_beta1;
}

// CAME's instability: how far the update is from its average.
template <class V>
BMT_INLINE V factored_residual(V exp_avg, V update, V eps) {
  const V difference = update - exp_avg;
  return difference * difference + eps;
}

// Sums are made per tile of a matrix; a second pass adds the partial sums of the tiles, in their order.
struct FactoredTiles {
  int64_t down;   // tiles in a column
  int64_t along;  // tiles in a row
  int64_t count;  // tiles in the tensor
};

BMT_INLINE FactoredTiles tiles_of(const FactoredRow& row, int64_t tile_rows, int64_t tile_cols) {
  const int64_t down = (row.rows + tile_rows - 1) / tile_rows;
  const int64_t along = (row.cols + tile_cols - 1) / tile_cols;
  return {down, along, row.batch * down * along};
}

}  // namespace bmt
