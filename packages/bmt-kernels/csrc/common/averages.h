// The averages of factored second moments between the passes of an optimizer, written once; the formulas are in
// factored_averages.py.
#pragma once

#include <cmath>

#include "common/inline.h"
#include "common/table.h"

namespace bmt {

// The averages of rows, or of columns, of one matrix or of a batch of them: `vectors` times `length`, end to end.
struct AverageRow {
  int64_t average;  // 0 where there are factors only: they become 1
  int64_t sums;     // as many as averages
  int64_t factors;  // likewise; 0 in a table for totals
  int64_t totals;   // the sum of the sums of each vector, or 0: the averages are of columns
  int64_t before;   // the sum of the averages of each vector before they move, or 0
  int64_t vectors;
  int64_t length;
  int64_t numel;  // vectors * length
  double extent;  // the length of a vector on all ranks
  double count;   // of squares in each of the sums
};
static_assert(sizeof(AverageRow) == 10 * sizeof(int64_t), "rows are read from a packed table");

// How averages move: average <- average * kept + sum * added.
struct AverageWeights {
  float kept;
  float added;
};

BMT_INLINE AverageWeights average_weights(const AverageRow& row, double decay) {
  return {static_cast<float>(decay), static_cast<float>((1.0 - decay) / row.count)};
}

BMT_INLINE float moved_average(const AverageWeights& weights, float average, float sum) {
  return average * weights.kept + sum * weights.added;
}

// What the averages of one vector are divided by: the mean of those of all ranks, after they have moved.
BMT_INLINE float average_unit(const AverageRow& row, int64_t vector, double decay) {
  if (row.totals == 0) return 1.0f;
  return static_cast<float>(decay * static_cast<double>(address<const float>(row.before)[vector]) / row.extent +
                            (1.0 - decay) * static_cast<double>(address<const float>(row.totals)[vector]) /
                                (row.extent * row.count));
}

BMT_INLINE float average_factor(float average, float unit) { return 1.0f / std::sqrt(average / unit); }

}  // namespace bmt
