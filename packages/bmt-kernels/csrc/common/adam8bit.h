// The Adam step with block-wise 8-bit moments: the row of a tensor.
#pragma once

#include "common/adam.h"
#include "common/quantize.h"

namespace bmt {

// weight and copy as in AdamRow. The moments are codes, signed and unsigned, with the absmax of their blocks.
struct Adam8bitRow {
  int64_t weight;
  int64_t copy;
  int64_t grad;
  int64_t exp_avg;
  int64_t exp_avg_sq;
  int64_t absmax_avg;
  int64_t absmax_avg_sq;
  int64_t begin;  // the place of the first element within its block
  int64_t numel;
  int64_t kinds;  // as in AdamRow
};
static_assert(sizeof(Adam8bitRow) == 10 * sizeof(int64_t), "rows are read from a packed table");

// Counts elements from the beginning of the first block from now on: element i is at address + i * size, those before
// `begin` do not exist, and `numel` is where they end.
inline void count_from_block(Adam8bitRow& row) {
  const auto size = [&](int place) { return item_size(static_cast<DType>((row.kinds >> place) & 0xff)); };
  row.weight -= row.begin * size(0);
  if (row.copy != 0) row.copy -= row.begin * size(8);
  row.grad -= row.begin * size(16);
  row.exp_avg -= row.begin;
  row.exp_avg_sq -= row.begin;
  row.numel += row.begin;
}

}  // namespace bmt
