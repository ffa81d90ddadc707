// What a variant offers for numbers that travel between ranks in 8 bits.
#pragma once

#include "common/packing.h"
#include "common/table.h"

namespace bmt {

struct PackKernels {
  // Blocks [first, last); [dtype of the values][in float8].
  void (*pack[kDTypes][2])(const PackRow& row, int64_t first, int64_t last);
  // The same; [dtype of the values][in float8][added to the values].
  void (*unpack[kDTypes][2][2])(const PackRow& row, int64_t first, int64_t last);
};

}  // namespace bmt
