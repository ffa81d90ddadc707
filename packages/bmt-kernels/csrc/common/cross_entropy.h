// Cross entropy of rows of logits against class indices: the arithmetic, written once.
//
// For a row x with target t, class weights w (1 if none are given) of sum W, smoothing e over V classes:
//   loss  = (1 - e) w_t (log-sum-exp(x) - x_t) + e / V sum_j w_j (log-sum-exp(x) - x_j)
//   dx_j  = ((1 - e) w_t + e / V W) softmax(x)_j - e / V w_j - [j = t] (1 - e) w_t
// which is what torch.nn.functional.cross_entropy computes. The columns may be a range of the V classes, other
// ranks holding the rest: each rank makes statistics of its columns, and those of all ranks give the loss.
#pragma once

#include "common/exponential.h"
#include "common/table.h"

namespace bmt {

struct CrossEntropyRows {
  int64_t logits;  // of DType dtype; neighbouring columns are adjacent
  int64_t dtype;
  int64_t stride;  // from row to row, in elements
  int64_t rows;
  int64_t columns;
  int64_t target;  // int64, a class or ignore_index for each row
  int64_t ignore_index;
  int64_t first_class;  // of column 0
  int64_t weight;  // float, for each of all classes; 0: all are 1
};
static_assert(sizeof(CrossEntropyRows) == 9 * sizeof(int64_t), "Python packs it");

struct CrossEntropyFactors {
  float hit;             // 1 - e
  float spread;          // e / V
  float classes;         // V
  int64_t total_weight;  // address of W, which the device may still be making; 0: it is V
  bool smooth;           // e > 0
};

inline CrossEntropyFactors cross_entropy_factors(double smoothing, int64_t classes, int64_t total_weight) {
  const double number = static_cast<double>(classes);
  return {static_cast<float>(1.0 - smoothing), static_cast<float>(smoothing / number), static_cast<float>(number),
          total_weight, smoothing > 0.0};
}

// What a rank knows of a row: kStatistics or, without smoothing, one less of them, each in an array over rows.
enum CrossEntropyStatistic { kLargest, kSum, kTargetLogit, kLogitSum, kStatistics };

// Whether the logits themselves are summed, and times what.
enum CrossEntropySums { kNoSum, kPlainSum, kWeightedSum, kCrossEntropySums };

struct RowStatistics {
  float largest;    // the largest logit
  float sum;        // of exp(x_j - shift_of(largest))
  float logit_sum;  // of w_j x_j
};

// Where all logits are -inf, subtracting the largest would give NaN.
BMT_INLINE float shift_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// A sum of exponentials shifted by one largest value, as if shifted by another.
BMT_INLINE float reshift(float sum, float from, float to) {
  return from == to ? sum : sum * exponential(from - shift_of(to));
}

BMT_INLINE float weight_of(const CrossEntropyRows& rows, int64_t label) {
  return rows.weight == 0 ? 1.0f : address<const float>(rows.weight)[label];
}

BMT_INLINE float total_weight(const CrossEntropyFactors& factors) {
  return factors.total_weight == 0 ? factors.classes : *address<const float>(factors.total_weight);
}

// The logit of the row's target, if it is among these columns, else 0.
BMT_INLINE float target_logit(const CrossEntropyRows& rows, int64_t row) {
  const int64_t column = address<const int64_t>(rows.target)[row] - rows.first_class;
  if (column < 0 || column >= rows.columns) return 0.0f;
  const int64_t i = row * rows.stride + column;
  if (rows.dtype == static_cast<int64_t>(DType::kFloat32)) return address<const float>(rows.logits)[i];
  const uint16_t bits = address<const uint16_t>(rows.logits)[i];
  return rows.dtype == static_cast<int64_t>(DType::kBFloat16) ? bf16_to_float(bits) : half_to_float(bits);
}

// The loss of a row from the statistics (ranks, kinds, rows) of all ranks, and, for the gradient, the largest logit of
// the whole row and the sum of exponentials shifted by it.
BMT_INLINE void cross_entropy_row_loss(const CrossEntropyRows& rows, const CrossEntropyFactors& factors,
                                       const float* statistics, int64_t ranks, int64_t row, float* loss, float* largest,
                                       float* sum) {
  const int64_t kinds = factors.smooth ? kStatistics : kStatistics - 1;
  const auto statistic = [&](int64_t rank, int64_t kind) { return statistics[(rank * kinds + kind) * rows.rows + row]; };
  float whole = statistic(0, kLargest);
  for (int64_t rank = 1; rank < ranks; ++rank) whole = maximum(whole, statistic(rank, kLargest));
  float exponentials = 0.0f, at_target = 0.0f, logit_sum = 0.0f;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    exponentials = exponentials + reshift(statistic(rank, kSum), statistic(rank, kLargest), whole);
    at_target = at_target + statistic(rank, kTargetLogit);
    if (factors.smooth) logit_sum = logit_sum + statistic(rank, kLogitSum);
  }
  *largest = whole;
  *sum = exponentials;
  const int64_t label = address<const int64_t>(rows.target)[row];
  if (label == rows.ignore_index) {
    *loss = 0.0f;
    return;
  }
  const float shift = shift_of(whole);
  const float log_sum = logf(exponentials);
  float result = (factors.hit * weight_of(rows, label)) * (log_sum + (shift - at_target));
  if (factors.smooth) result = result + factors.spread * (total_weight(factors) * (log_sum + shift) - logit_sum);
  *loss = result;
}

// The gradient of a row is factor * exp(x_j - shift) - spread * w_j, less hit where j is the target.
struct GradientRow {
  float shift;
  float factor;
  float spread;
  float hit;
  int64_t column;  // of the target; none of this rank's if it is out of range
  bool ignored;    // the gradient is zero, whatever the logits are
};

// scale: the derivative with respect to the row's loss.
BMT_INLINE GradientRow cross_entropy_gradient_row(const CrossEntropyRows& rows, const CrossEntropyFactors& factors,
                                                  float largest, float sum, float scale, int64_t row) {
  const int64_t label = address<const int64_t>(rows.target)[row];
  if (label == rows.ignore_index) return {0.0f, 0.0f, 0.0f, 0.0f, -1, true};
  const float hit = factors.hit * weight_of(rows, label);
  const float all = factors.smooth ? hit + factors.spread * total_weight(factors) : hit;
  return {shift_of(largest), (scale * all) / sum,      factors.smooth ? scale * factors.spread : 0.0f,
          scale * hit,       label - rows.first_class, false};
}

template <class V>
BMT_INLINE V cross_entropy_gradient(V x, V shift, V factor) {
  return exponential(x - shift) * factor;
}

}  // namespace bmt
